"""The env of a task. It groups prompts, takes the policy's answers, rewards them and charges the KL."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, get_args

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, list_to_stack
from torch import Tensor
from torchrl.data import Categorical, Composite, NonTensor, Unbounded
from torchrl.data.llm import History
from torchrl.envs import Compose, EnvBase, Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm.policies import ChatHistory, Text

from torchrl_llm_kl._numerics import check_choice, check_range
from torchrl_llm_kl.datasets import DataSource, row_variables
from torchrl_llm_kl.masks import (
    PLAIN_TEMPLATE,
    Message,
    Tokenizer,
    prepare_messages,
    render_conversation,
    template_variables,
)
from torchrl_llm_kl.tasks._calls import Call, Caller, Failure, check_takes
from torchrl_llm_kl.tasks._prompts import Prompt, PromptOrder, Prompts
from torchrl_llm_kl.tasks._rewards import FailureLog, FunctionReward, Metadata, Reward, active_rows, read_rows_of
from torchrl_llm_kl.tasks._tools import Dialog, Parsed, ToolParser, Tools, as_unicode, check_padding, strip_end

#: ``(messages, metadata) -> str | None``: the user's next message, or None at the end. Sync or async.
Reply = Callable[[list[Message], Metadata], object]
#: ``(messages, metadata) -> bool``: whether the episode ends after an answer. Sync or async.
Stop = Callable[[list[Message], Metadata], object]
#: The policy's input: rendered text, or torchrl's ``History``.
InputMode = Literal["text", "history"]


@dataclass(frozen=True)
class Turns:
    """Episodes of several answers. The results of tool calls, or a message of the user, follow an answer.

    Args:
        max_turns: the largest number of answers in an episode, at least 2.
        tools: functions that the policy may call, sync or async. The chat template shows their schemas, so they need type
            hints and a docstring that describes each argument. Results and errors go back as messages of the role ``tool``.
        reply: ``(messages, metadata) -> str | None``, sync or async. It returns the user's next message after an answer
            without calls, or None to end the episode.
        stop: ``(messages, metadata) -> bool``, sync or async. True after an answer ends the episode, before its calls run.
        tool_parser: parses the calls of an answer. By default the tokenizer's ``response_template`` does. Without one, calls
            are parsed in the chat template's own format, which may be Hermes' and Qwen's, Qwen 3.5's and GLM's, Mistral's or
            Llama 3's.
        workers: the number of concurrent sync calls of tools and replies (default one), and of async calls (default all).
        max_tokens: the longest prompt of a turn, in tokens. A conversation whose next prompt is longer ends as truncated.

    Raises:
        ValueError: if ``max_turns`` is less than 2, if nothing follows an answer, or if a parser has no tools.
        TypeError: if a function cannot be called with its arguments.

    Example:
        >>> Turns(3, reply=lambda messages, metadata: "Are you sure?").max_turns
        3
    """

    max_turns: int
    tools: Sequence[Callable[..., object]] = ()
    reply: Reply | None = None
    stop: Stop | None = None
    tool_parser: ToolParser | None = None
    workers: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        check_range(2, max_turns=self.max_turns)
        check_range(1, workers=self.workers, max_tokens=self.max_tokens)
        if not self.tools and (self.reply is None or self.tool_parser is not None):
            raise ValueError("several turns need tools= or reply=, and tool_parser= needs tools=.")
        if self.reply is not None:
            check_takes(self.reply, "reply", "messages", "metadata")
        if self.stop is not None:
            check_takes(self.stop, "stop", "messages", "metadata")
        if self.tool_parser is not None:
            check_takes(self.tool_parser, "tool_parser", "text")


def make_env(
    prompts: DataSource | Prompts,
    reward: Reward | FunctionReward | None,
    tokenizer: Tokenizer,
    *,
    group_size: int = 8,
    num_prompts: int = 1,
    order: PromptOrder | None = None,
    system_prompt: str | None = None,
    turns: Turns | None = None,
    kl_transform: Transform | Sequence[Transform] | None = None,
    timeout: float | None = 30.0,
    input_mode: InputMode = "text",
    template_kwargs: Mapping[str, object] | None = None,
) -> EnvBase:
    r"""An env that groups prompts and rewards the answers with Python functions.

    A step takes ``group_size`` answers to each of ``num_prompts`` prompts. The env renders prompts with the tokenizer's own
    chat template. The policy is a torchrl wrapper with the same ``input_mode``, such as
    :func:`~torchrl_llm_kl.training.make_sampler`, which forwards each prompt once for all its answers. Run the env with an
    ``LLMCollector``.

    With ``turns`` an episode has several answers, and each turn is a step. The prompt of a step is the text so far, with the
    policy's answers exactly as sampled, and the response is only the new answer. A KL or a loss therefore counts each token of
    the assistant once, and no token of a tool. The last step has the reward. A finished row starts its next prompt at once,
    so use :func:`whole_groups` to collect the rows of a group.

    Args:
        prompts: a list of texts or of rows, the path of a JSONL or Parquet file, or a Hugging Face ``Dataset``. A row is a dict
            with ``prompt`` or ``question`` (text) or ``messages``. All its other columns are metadata, such as ``answer``.
        reward: a function ``(question, answer, metadata) -> number``, sync or async, named parts ``{name: function}`` or
            ``{name: (weight, function)}``, or a :class:`FunctionReward`. ``answer`` is the policy's answer, and
            ``metadata["answer"]`` the expected one. None if a teacher judges the answers: the data then has no rewards.
        tokenizer: the policy's tokenizer, with its chat template.

    Keyword Args:
        group_size: the number of answers to each prompt, in consecutive rows.
        num_prompts: the number of different prompts in a step.
        order: the order of the prompts, the position where a resumed run continues, and the split among ranks. By default
            each epoch has a new permutation, from the first prompt on.
        system_prompt: the first message of conversations that have no system message.
        turns: the settings of episodes with several answers. None for one answer.
        kl_transform: appended after the reward, which it changes: ``make_algorithm(...).kl_transform``, a
            :class:`~torchrl_llm_kl.RetrieveKL`, or several transforms in their order.
        timeout: seconds for each call of a reward function, a tool or a reply. A ``FunctionReward`` has its own.
        input_mode: with ``"text"`` the policy gets rendered prompts. With ``"history"`` it gets conversations and renders
            them itself, which is several times slower. Some transforms of torchrl need it.
        template_kwargs: further variables of the chat template in text mode, such as ``{"enable_thinking": False}``.
            ``{"chat_template": PLAIN_TEMPLATE}`` (of :mod:`torchrl_llm_kl.masks`) writes plain text, for a base model.

    Returns:
        A ``TransformedEnv`` of batch size ``[num_prompts * group_size]``. ``env.to(device)`` moves its tensors. Besides the
        policy's entries its data has

        - ``"query"`` and ``"metadata"``, the question and the other columns of the row
        - ``"group"``, the number of the prompt in the run, int64 ``[B, 1]`` (pass ``Advantage(group_key="group")``)
        - the entries of :class:`FunctionReward` under ``"next"``. After a ``kl_transform`` that charges the KL, ``"reward"``
          has one number per token.
        - with several turns ``"messages"``, the conversation, and ``"sampled"``, the number of characters and the token ids of
          earlier turns. ``"run"`` and ``"step"`` number the episodes and their turns, and ``"state"`` is equal for equal
          texts before an answer, int64 ``[B, 1]`` (pass ``Advantage("step_wise_grpo", keys={"run": "run", "step": "step"})``)

        After a reset, prompts without an answer are used again.

    Raises:
        PromptError: if a row has no prompt, or the source has no rows.
        ValueError: if a number is out of range, the chat template is missing, or torchrl cannot read the template's text back
            in history mode.
        TypeError: if the prompts have another type, or a function cannot be called with its arguments.

    Example:
        >>> import tensordict
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> _ = tensordict.set_list_to_stack(True).set()
        >>> words = Tokenizer(models.WordLevel({"yes": 0, "no": 1, "or": 2, "<bot>": 3, "<end>": 4}))
        >>> words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
        >>> tokenizer.chat_template = "{{ messages[0].content }} <end> <bot> "
        >>> def right(question, answer, metadata):
        ...     return answer.strip() == metadata["answer"]
        >>> rows = [{"question": "yes or no", "answer": "yes"}, {"question": "no or yes", "answer": "no"}]
        >>> env = make_env(rows, right, tokenizer, group_size=2, num_prompts=2, order=PromptOrder(seed=None))
        >>> step = env.reset()
        >>> list(step["text", "prompt"])
        ['yes or no <end> <bot> ', 'yes or no <end> <bot> ', 'no or yes <end> <bot> ', 'no or yes <end> <bot> ']
        >>> step["text", "full"] = [prompt + "yes <end>" for prompt in step["text", "prompt"]]  # as a policy does
        >>> env.step(step)["next", "reward"].flatten()
        tensor([1., 1., 0., 0.])
    """
    # Without it torchrl stores the list of all prompts in each row.
    if not list_to_stack():
        raise RuntimeError("torchrl's LLM envs need `tensordict.set_list_to_stack(True).set()`, or LIST_TO_STACK=1.")
    base = TaskEnv(
        prompts if isinstance(prompts, Prompts) else Prompts(prompts),
        tokenizer,
        group_size=group_size,
        num_prompts=num_prompts,
        order=PromptOrder() if order is None else order,
        system_prompt=system_prompt,
        turns=turns,
        timeout=timeout,
        input_mode=input_mode,
        template_kwargs=template_kwargs or {},
    )
    if reward is not None and not isinstance(reward, FunctionReward):
        reward = FunctionReward(reward, timeout=timeout, tokenizer=tokenizer)
    env = TransformedEnv(base, Compose(*[] if reward is None else [reward]))
    for transform in kl_transform if isinstance(kl_transform, Sequence) else [kl_transform]:
        if transform is not None:
            env = env.append_transform(transform)
    return env


def stack_rows(values: Iterable[object]) -> NonTensorStack:
    """Stack one value of any type for each row, including lists and dicts.

    Example:
        >>> stack_rows([[1, 2], {"a": 3}]).tolist()
        [[1, 2], {'a': 3}]
    """
    return NonTensorStack(*(NonTensorData(value) for value in values))


class _Answered(NamedTuple):
    """A row after an answer.

    Args:
        parsed: the answer's text and calls.
        messages: the conversation, including the answer.
        metadata: the other columns of the prompt's row.
        last: whether the episode has reached its limit of turns.
        active: whether the row answered. False for a row that has ended and waits for the others.
    """

    parsed: Parsed
    messages: list[Message]
    metadata: Metadata
    last: bool
    active: bool


class TaskEnv(ChatEnv):
    """A ``ChatEnv`` with its own prompts, which :func:`make_env` builds. Each prompt fills ``group_size`` consecutive rows.

    The prompt of a row depends only on the seed and on the number of prompts that the row has finished.
    """

    def __init__(
        self,
        prompts: Prompts,
        tokenizer: Tokenizer,
        *,
        group_size: int,
        num_prompts: int,
        order: PromptOrder,
        system_prompt: str | None,
        turns: Turns | None,
        timeout: float | None,
        input_mode: InputMode,
        template_kwargs: Mapping[str, object],
    ) -> None:
        check_range(1, group_size=group_size, num_prompts=num_prompts)
        check_choice(get_args(InputMode), input_mode=input_mode)
        check_padding(tokenizer)
        template = template_kwargs.get("chat_template", tokenizer.chat_template)
        if input_mode == "history" and template == PLAIN_TEMPLATE:
            raise ValueError("torchrl cannot read messages back from plain text: pass input_mode='text'.")
        super().__init__(
            input_mode=input_mode,
            batch_size=(num_prompts * group_size,),
            system_prompt=system_prompt,
            tokenizer=tokenizer,
            template_kwargs=dict(template_kwargs),
        )
        self.prompts, self.order, self.group_size, self.num_prompts = prompts, order, group_size, num_prompts
        self.turns, self.dialog = turns, None
        if turns is not None:
            if input_mode != "text":
                raise ValueError("several turns need input_mode='text', which keeps the text that was sampled.")
            tools = Tools(turns.tools, timeout=timeout, workers=turns.workers) if turns.tools else None
            self.dialog = Dialog(tokenizer, tools, template_kwargs, turns.tool_parser)
        self._call_all, self._log = Caller(timeout, None if turns is None else turns.workers), FailureLog()
        # The number of finished prompts of each row, and whether the row has answered its prompt.
        self._finished = torch.zeros(num_prompts * group_size, dtype=torch.int64)
        self._answered = torch.zeros(num_prompts * group_size, dtype=torch.bool)
        self._declare()
        if input_mode == "text":
            self._render(prompts[0])  # so that an error of the template is raised here, not in the collector

    def _declare(self) -> None:
        env: Any = self  # torchrl's setters are untyped
        own = {"shape": self.batch_size, "device": self.device}
        number = Unbounded(shape=(*self.batch_size, 1), dtype=torch.int64, device=self.device)
        question, metadata = NonTensor(example_data="a question", **own), NonTensor(example_data={}, **own)
        states = {"query": question, "metadata": metadata, "group": number}
        if self.dialog is not None:
            states["run"] = number.clone()
            observations = env.full_observation_spec.clone()
            observations["messages"], observations["step"] = NonTensor(example_data=[], **own), number.clone()
            observations["state"] = number.clone()
            observations["sampled"] = NonTensor(example_data=(0, []), **own)
            env.full_observation_spec = observations
        env.full_state_spec = Composite(states, **own)
        flag = Categorical(2, shape=(*self.batch_size, 1), dtype=torch.bool, device=self.device)
        env.full_done_spec = Composite({name: flag.clone() for name in ("done", "terminated", "truncated")}, **own)

    # ------------------------------------------------------------------ prompts

    def positions(self) -> Tensor:
        """The position of each row's prompt in the run, int64 ``[B]``."""
        slots = torch.arange(len(self._finished)) // self.group_size
        order = self.order
        return order.start + (self._finished * order.world_size + order.rank) * self.num_prompts + slots

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        rows = None if tensordict is None else tensordict.get("_reset", None)
        chosen = (
            torch.ones_like(self._answered) if rows is None else rows.reshape(len(self._answered), -1).any(-1).cpu()
        )
        # A collector may reset a row twice without a step between: the prompt changes only after an answer.
        self._finished[chosen & self._answered] += 1
        self._answered[chosen] = False
        positions = self.positions()
        by_position = {p: self.prompts[self.order.at(p, len(self.prompts))] for p in positions.unique().tolist()}
        prompts = [by_position[p] for p in positions.tolist()]
        td = TensorDict(batch_size=self.batch_size, device=self.device)
        td.set("query", stack_rows(prompt.question for prompt in prompts))
        td.set("metadata", stack_rows(dict(prompt.metadata) for prompt in prompts))
        td.set("group", positions.unsqueeze(-1).to(self.device or "cpu"))
        if self.dialog is not None:
            # Numbers of episodes, which are unique over the run and all ranks because the positions are.
            members = torch.arange(len(positions)) % self.group_size
            td.set("run", (positions * self.group_size + members).unsqueeze(-1).to(self.device or "cpu"))
            td.set("step", torch.zeros((*self.batch_size, 1), dtype=torch.int64, device=self.device))
            td.set("messages", stack_rows(self._conversation(prompt) for prompt in prompts))
            td.set("sampled", stack_rows((0, []) for _ in prompts))
        if self.input_mode == "text":
            texts = {p: self._render(prompt) for p, prompt in by_position.items()}
            text = Text.from_tensordict(td.empty())
            text.prompt = [texts[p] for p in positions.tolist()]
            td.set("text", text)
            if self.dialog is not None:
                td.set("state", self._states(text.prompt))
        else:
            history = ChatHistory.from_tensordict(td.empty())
            conversations = [self._conversation(prompt) for prompt in prompts]
            lengths = sorted({len(messages) for messages in conversations})
            if len(lengths) > 1:
                raise ValueError(f"conversations of {lengths} messages need input_mode='text'.")
            history.prompt = History.from_chats(conversations)
            td.set("history", history)
        return td.to_lazystack(0)  # its rows may differ in length after the policy's step

    def _conversation(self, prompt: Prompt) -> list[Message]:
        messages = prompt.messages
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        return prepare_messages(self.tokenizer, messages, **self.template_kwargs)

    def _render(self, prompt: Prompt) -> str:
        """The text that the policy continues."""
        # A column with the name of a variable of the template is passed on, such as `enable_thinking`.
        names = template_variables(self.tokenizer, self.template_kwargs.get("chat_template"))
        rendered = render_conversation(
            self.tokenizer,
            self._conversation(prompt),
            tools=None if self.dialog is None else self.dialog.schemas,
            add_generation_prompt=True,
            assistant_mask=False,
            **{**self.template_kwargs, **row_variables(prompt.metadata, names)},
        )
        return _without_bos(rendered.text, self.tokenizer)

    # ------------------------------------------------------------------ answers

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        next_td = super()._step(tensordict)
        self._answered[:] = True
        truncated = torch.zeros((*self.batch_size, 1), dtype=torch.bool, device=self.device)
        done = torch.ones_like(truncated)
        if self.dialog is not None and self.turns is not None:
            done, truncated = self._continue(self.dialog, self.turns, tensordict, next_td)
        for name, flag in (("done", done), ("terminated", done & ~truncated), ("truncated", truncated)):
            next_td.set(name, flag)
        return next_td

    def _continue(
        self, dialog: Dialog, turns: Turns, td: TensorDictBase, next_td: TensorDictBase
    ) -> tuple[Tensor, Tensor]:
        """Write each row's next prompt and conversation.

        Returns:
            Whether each episode ends, and whether the limit of turns ended it.
        """
        keys = (("text", "prompt"), ("text", "full"), "messages", "metadata", "step")
        prompts, texts, before, metadata, steps = (read_rows_of(td, key) or [] for key in keys)
        step = torch.stack([torch.as_tensor(row).reshape(1) for row in steps]) + 1
        active, rows = active_rows(td), []
        for row, prompt in enumerate(prompts):
            answer = strip_end(texts[row].removeprefix(prompt), dialog.special)
            parsed = dialog.parse(prompt, answer) if active[row] else Parsed("", [])
            messages = [*before[row], dialog.assistant(answer, parsed)] if active[row] else before[row]
            rows.append(_Answered(parsed, messages, metadata[row], int(step[row]) >= turns.max_turns, active[row]))
        sampled = [(len(text), ids) for text, ids in zip(texts, _sampled_ids(td), strict=True)]
        replies = self._replies(dialog, turns, rows)
        for row, after in enumerate(replies):
            if not after:
                continue
            try:
                text = dialog.next_prompt(texts[row], rows[row].messages, after)
                if turns.max_tokens is not None:
                    length, ids = sampled[row]
                    own = (length, ids) if ids else (0, [])  # a policy without tokens
                    if len(own[1]) + len(dialog.tokenizer(text[own[0] :]).input_ids) > turns.max_tokens:
                        replies[row] = None
                        continue
                texts[row] = text
                rows[row].messages.extend(after)
            except Exception as error:  # a template may raise anything
                replies[row] = None
                reason = f"{type(error).__name__}: {error}"
                self._log.add(f"the template cannot continue row {row}, whose episode ends: {reason}")
        prompts_of_turn = Text.from_tensordict(next_td.empty())
        prompts_of_turn.prompt = texts
        next_td.set("text", prompts_of_turn)
        next_td.set("state", self._states(texts))
        next_td.set("messages", stack_rows(row.messages for row in rows))
        next_td.set("sampled", stack_rows(sampled))
        next_td.set("step", step.to(self.device or "cpu"))
        flags = torch.tensor([[not after for after in replies], [after is None for after in replies]])
        done, truncated = flags.unsqueeze(-1).to(self.device or "cpu")
        return done, truncated

    def _states(self, texts: Sequence[str]) -> Tensor:
        """A number of each prompt's text, ``[B, 1]``: rows in the same state have the same text before them."""
        digests = (blake2b(text.encode("utf-8", "replace"), digest_size=7).digest() for text in texts)
        states = torch.tensor([[int.from_bytes(digest, "big")] for digest in digests])
        return states.to(self.device or "cpu")

    def _replies(self, dialog: Dialog, turns: Turns, rows: list[_Answered]) -> list[list[Message] | None]:
        """The messages after each answer. Empty at the end of an episode, None if the limit of turns ends it."""
        # Calls at the limit of turns are not run, since no answer follows their results.
        after: list[list[Message] | None] = [None if row.last and row.parsed.calls else [] for row in rows]
        stopped = self._stopped(turns.stop, rows)
        calling = [i for i, row in enumerate(rows) if row.parsed.calls and not row.last and not stopped[i]]
        if calling and dialog.tools is not None:
            results = dialog.tools.run([rows[i].parsed.calls for i in calling])
            for i, texts in zip(calling, results, strict=True):
                after[i] = dialog.tool_messages(rows[i].parsed, texts)
        if turns.reply is None:
            return after
        answered = [i for i, row in enumerate(rows) if row.active and not row.parsed.calls and not stopped[i]]
        said = self._call_all([Call(turns.reply, (list(rows[i].messages), dict(rows[i].metadata))) for i in answered])
        for i, text in zip(answered, said, strict=True):
            if isinstance(text, str):
                after[i] = None if rows[i].last else [{"role": "user", "content": as_unicode(text)}]
            elif text is not None:
                error = f"it returned {text!r:.60}"
                if isinstance(text, Failure):
                    error = f"{type(text.error).__name__}: {text.error}"
                self._log.add(f"reply= failed in row {i}, whose episode ends: {error}")
        return after

    def _stopped(self, stop: Stop | None, rows: list[_Answered]) -> list[bool]:
        """Whether the user's function ends each episode. An error of the function ends it too."""
        if stop is None:
            return [False] * len(rows)
        active = [i for i, row in enumerate(rows) if row.active]
        results = self._call_all([Call(stop, (list(rows[i].messages), dict(rows[i].metadata))) for i in active])
        ended = [not row.active for row in rows]
        for i, result in zip(active, results, strict=True):
            ended[i] = bool(result)
            if isinstance(result, Failure):
                reason = f"{type(result.error).__name__}: {result.error}"
                self._log.add(f"stop= failed in row {i}, whose episode ends: {reason}")
        return ended


def _sampled_ids(td: TensorDictBase) -> list[list[int]]:
    """The token ids of each row's prompt and answer. Empty if the policy writes no tokens."""
    tokens, masks = (read_rows_of(td, key) for key in (("tokens", "full"), ("masks", "all_attention_mask")))
    if tokens is None or masks is None:
        return [[] for _ in range(td.batch_size.numel())]
    return [ids[mask.bool()].tolist() for ids, mask in zip(tokens, masks, strict=True)]


def _without_bos(text: str, tokenizer: Tokenizer) -> str:
    """Remove the begin-of-sequence token of a rendered prompt if the tokenizer adds one: a model expects exactly one."""
    bos = tokenizer.bos_token
    if bos and text.startswith(bos) and tokenizer(bos).input_ids[:2] == [tokenizer.bos_token_id] * 2:
        return text[len(bos) :]
    return text
