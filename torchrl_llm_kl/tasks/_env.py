"""The env of a task: prompts in groups, the policy's answers, their rewards, then the KL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from tensordict import TensorDict, TensorDictBase, list_to_stack
from torch import Tensor
from torchrl.data import Categorical, Composite, NonTensor, Unbounded
from torchrl.data.llm import History
from torchrl.envs import Compose, EnvBase, Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm.policies import ChatHistory, Text

from torchrl_llm_kl._numerics import check_choice, check_range, read_device
from torchrl_llm_kl.masks import MissingChatTemplateError
from torchrl_llm_kl.tasks._calls import Call, Caller, Failure, check_takes
from torchrl_llm_kl.tasks._prompts import Prompt, PromptOrder, Prompts
from torchrl_llm_kl.tasks._rewards import FailureLog, FunctionReward, Reward
from torchrl_llm_kl.tasks._rows import read_rows_of, stack_rows
from torchrl_llm_kl.tasks._tools import Dialog, Parsed, ToolParser, Tools, as_unicode, strip_end

#: ``(messages, metadata) -> str | None``: the user's next message, or None at the end; sync or async.
Reply = Callable[[list[dict[str, Any]], dict[str, Any]], Any]
#: What the policy reads: rendered text, or torchrl's ``History``.
InputMode = Literal["text", "history"]

_NO_TEMPLATE = (
    "the tokenizer has no chat template: pass template_kwargs={'chat_template': ...}, or, for one turn, apply_template=False "
    "to pose texts as they are."
)


def make_env(
    prompts: Any,
    reward: Reward | FunctionReward,
    tokenizer: Any,
    *,
    group_size: int = 8,
    num_prompts: int = 1,
    system_prompt: str | None = None,
    tools: Sequence[Callable[..., Any]] | None = None,
    max_turns: int = 1,
    reply: Reply | None = None,
    tool_parser: ToolParser | None = None,
    kl_transform: Transform | Sequence[Transform] | None = None,
    timeout: float | None = 30.0,
    reward_workers: int | None = None,
    reward_weights: Mapping[str, float] | None = None,
    seed: int | None = 0,
    start: int = 0,
    rank: int = 0,
    world_size: int = 1,
    input_mode: InputMode = "text",
    apply_template: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
) -> EnvBase:
    r"""An env that poses prompts in groups and rewards the answers by Python functions.

    Each step poses ``num_prompts`` prompts ``group_size`` times each and ends with their answers. The env renders prompts
    with the tokenizer's own chat template; the policy is a torchrl wrapper with the same ``input_mode``. Run it with an
    ``LLMCollector``.

    With ``max_turns`` an answer that calls tools, or that ``reply`` answers, is followed by another one. Each turn is a step:
    its prompt is the text so far, with the policy's own answers as they were sampled, and its response is the new answer
    alone, so that a KL or a loss counts each token of the assistant once and none of a tool. The last step has the reward. A
    row that ends gets its next prompt at once; :func:`whole_groups` collects the rows of a group.

    Args:
        prompts: a list of texts or of rows; the path of a JSONL or Parquet file; a Hugging Face ``Dataset``. A row is a dict
            with ``prompt`` or ``question`` (text) or ``messages``; all its other columns are metadata, among them ``answer``.
        reward: a function ``(question, answer, metadata) -> number``, sync or async; named parts ``{name: function}`` or
            ``{name: (weight, function)}``; or a :class:`FunctionReward`. ``answer`` is what the policy wrote; the expected
            one of the row is ``metadata["answer"]``.
        tokenizer: of the policy, with its chat template.

    Keyword Args:
        group_size: answers to each prompt; they are neighbours.
        num_prompts: different prompts of a step.
        system_prompt: the first message of conversations that do not begin with one of their own.
        tools: functions that the policy may call, sync or async, with type hints and a docstring that describes each argument:
            the chat template shows their schemas. Results, and errors too, go back as messages of the role ``tool``.
        max_turns: answers of an episode at most.
        reply: ``(messages, metadata) -> str | None``, sync or async: the user's next message after an answer without calls;
            None ends the episode.
        tool_parser: reads the calls of an answer. Default: by the tokenizer's ``response_template``, or in the format in which
            the chat template itself writes calls (that of Hermes and Qwen, of Qwen 3.5 and GLM, of Mistral, or of Llama 3).
        kl_transform: appended after the reward, whose number it changes: ``make_algorithm(...).kl_transform``, a
            :class:`~torchrl_llm_kl.RetrieveKL`, or several transforms in their order.
        timeout: seconds for each call of a reward function or a tool; see :class:`FunctionReward`.
        reward_workers: threads for sync functions of the reward, and the most async calls at a time; also of tools.
        reward_weights: of the parts of one function that returns a dict.
        seed: the order of the prompts is a function of it alone, a new permutation each epoch; None: as they come.
        start: prompts that were posed already, by all ranks: a resumed run continues with the next ones.
        rank: of this env among several that share the prompts: all together pose each once in an epoch.
        world_size: how many there are.
        input_mode: ``"text"``: the policy gets rendered prompts. ``"history"``: it gets conversations and renders them
            itself, several times slower; for torchrl's transforms that read them.
        apply_template: False poses texts as they are, as a base model without chat template needs.
        template_kwargs: further variables of the chat template, such as ``{"enable_thinking": False}``; in text mode.
        device: of the env's tensors.

    Returns:
        A ``TransformedEnv`` of batch size ``[num_prompts * group_size]``. Beside the policy's entries its data has

        - ``"query"``, ``"metadata"``: the question and the other columns of the row;
        - ``"group"``: int64 ``[B, 1]``, the number of the prompt in the run (pass ``Advantage(group_key="group")``);
        - under ``"next"`` what :class:`FunctionReward` writes: ``"reward"``, ``("rewards", name)`` and
          ``"reward_failures"``; after a ``kl_transform`` that charges the KL, ``"reward"`` has one number per token.

        and with several turns ``"messages"``, the conversation; ``"run"``, the number of the episode, and ``"step"``, that of
        the turn, int64 ``[B, 1]``: pass ``Advantage("step_wise_grpo", keys={"run": "run", "step": "step"})``.

        A prompt that was posed but not answered is posed again after a reset.

    Raises:
        PromptError: for a row without a prompt, or no rows.
        ValueError: for numbers out of range, or a chat template that is missing.
        TypeError: for prompts, rewards, tokenizers or transforms of another type, or functions of other arguments.

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
        >>> env = make_env(rows, right, tokenizer, group_size=2, num_prompts=2, seed=None)
        >>> step = env.reset()
        >>> list(step["text", "prompt"])
        ['yes or no <end> <bot> ', 'yes or no <end> <bot> ', 'no or yes <end> <bot> ', 'no or yes <end> <bot> ']
        >>> step["text", "full"] = [prompt + "yes <end>" for prompt in step["text", "prompt"]]  # as a policy does
        >>> env.step(step)["next", "reward"].flatten()
        tensor([1., 1., 0., 0.])
    """
    if not list_to_stack():
        raise RuntimeError(
            "torchrl's LLM components store lists of strings as stacks: call `tensordict.set_list_to_stack(True).set()` at the "
            "beginning of the script, or set LIST_TO_STACK=1."
        )
    appended = _transforms(kl_transform)
    _check_tokenizer(tokenizer)
    dialog = _dialog(
        tokenizer,
        tools,
        max_turns,
        reply,
        tool_parser,
        input_mode,
        apply_template,
        template_kwargs,
        timeout,
        reward_workers,
    )
    base = TaskEnv(
        prompts if isinstance(prompts, Prompts) else Prompts(prompts),
        tokenizer,
        group_size=group_size,
        num_prompts=num_prompts,
        system_prompt=system_prompt,
        seed=seed,
        start=start,
        rank=rank,
        world_size=world_size,
        input_mode=input_mode,
        apply_template=apply_template,
        template_kwargs=template_kwargs,
        device=device,
        dialog=dialog,
        max_turns=max_turns,
        reply=reply,
        timeout=timeout,
        workers=reward_workers,
    )
    if not isinstance(reward, FunctionReward):
        reward = FunctionReward(
            reward, weights=reward_weights, timeout=timeout, workers=reward_workers, tokenizer=tokenizer
        )
    elif reward_weights is not None:
        raise ValueError("reward_weights= belong to a function, and reward is a FunctionReward: give them to that.")
    env = TransformedEnv(base, Compose(reward))
    for transform in appended:
        env = env.append_transform(transform)
    return env


def _dialog(
    tokenizer: Any,
    tools: Sequence[Callable[..., Any]] | None,
    max_turns: int,
    reply: Any,
    parser: ToolParser | None,
    input_mode: InputMode,
    apply_template: bool,
    template_kwargs: Mapping[str, Any] | None,
    timeout: float | None,
    workers: int | None,
) -> Dialog | None:
    """What continues a conversation after an answer; None for one turn."""
    check_range(1, max_turns=max_turns)
    if max_turns == 1:
        for name, value in (("tools", tools), ("reply", reply), ("tool_parser", parser)):
            if value:
                raise ValueError(f"{name}= has no effect with one answer per episode: pass max_turns= of 2 or more.")
        return None
    if not tools and reply is None:
        raise ValueError(f"nothing follows an answer: max_turns={max_turns} needs tools= or reply=.")
    if parser is not None and not tools:
        raise ValueError("tool_parser= has no effect without tools=.")
    if input_mode != "text" or not apply_template:
        raise ValueError(
            "several turns need the chat template and input_mode='text', which keeps the text that was sampled: leave out "
            "input_mode= and apply_template=."
        )
    if not getattr(tokenizer, "chat_template", None) and "chat_template" not in (template_kwargs or {}):
        raise MissingChatTemplateError(_NO_TEMPLATE)
    if reply is not None:
        check_takes(reply, "reply", "messages", "metadata")
    if parser is not None:
        check_takes(parser, "tool_parser", "text")
    own = Tools(tools, timeout=timeout, workers=workers) if tools else None
    return Dialog(tokenizer, own, template_kwargs or {}, parser)


def _check_tokenizer(tokenizer: Any) -> None:
    if not callable(getattr(tokenizer, "apply_chat_template", None)):
        found = repr(tokenizer)[:60] if isinstance(tokenizer, (str, type(None))) else type(tokenizer).__name__
        raise TypeError(
            f"tokenizer must be a tokenizer of transformers, got {found}: load it with AutoTokenizer.from_pretrained(...)."
        )


def _transforms(given: Any) -> list[Transform]:
    several = isinstance(given, Sequence) and not isinstance(given, Transform)
    transforms = [] if given is None else list(given) if several else [given]
    for transform in transforms:
        if not isinstance(transform, Transform):
            raise TypeError(
                f"kl_transform must be a transform, a list of them or None, got {type(transform).__name__}. An algorithm has "
                "one: make_algorithm(...).kl_transform."
            )
    return transforms


class TaskEnv(ChatEnv):
    """A ``ChatEnv`` that poses its own prompts, each to ``group_size`` neighbouring rows; built by :func:`make_env`.

    The prompt of a row is a function of the seed and of how many prompts the row has finished.
    """

    def __init__(
        self,
        prompts: Prompts,
        tokenizer: Any,
        *,
        group_size: int,
        num_prompts: int,
        system_prompt: str | None,
        seed: int | None,
        start: int,
        rank: int,
        world_size: int,
        input_mode: InputMode,
        apply_template: bool,
        template_kwargs: Mapping[str, Any] | None,
        device: torch.device | str | None,
        dialog: Dialog | None,
        max_turns: int,
        reply: Reply | None,
        timeout: float | None,
        workers: int | None,
    ) -> None:
        check_range(1, group_size=group_size, num_prompts=num_prompts, world_size=world_size)
        check_range(0, start=start)
        check_range(0, world_size - 1, rank=rank)
        check_choice(get_args(InputMode), input_mode=input_mode)
        if input_mode == "history" and not apply_template:
            raise ValueError("apply_template=False is for input_mode='text': a policy of 'history' renders by itself.")
        super().__init__(
            input_mode=input_mode,
            batch_size=(num_prompts * group_size,),
            system_prompt=system_prompt,
            tokenizer=tokenizer,
            template_kwargs=dict(template_kwargs or {}),
            device=None if device is None else read_device(device),
        )
        self.prompts, self.order = prompts, PromptOrder(len(prompts), seed)
        self.group_size, self.num_prompts, self.start = group_size, num_prompts, start
        self.rank, self.world_size, self.apply_template = rank, world_size, apply_template
        self.dialog, self.max_turns, self.reply = dialog, max_turns, reply
        self._call_all, self._log = Caller(timeout, workers), FailureLog()
        self._finished = torch.zeros(num_prompts * group_size, dtype=torch.int64)  # prompts of each row
        self._answered = torch.zeros(num_prompts * group_size, dtype=torch.bool)  # whether the row took a step
        self._declare()
        if input_mode == "text":
            self._render(prompts[0])  # errors of the template come at once

    def _declare(self) -> None:
        shape, device = self.batch_size, self.device
        self.full_state_spec = Composite(
            query=NonTensor(example_data="a question", shape=shape, device=device),
            metadata=NonTensor(example_data={}, shape=shape, device=device),
            group=Unbounded(shape=(*shape, 1), dtype=torch.int64, device=device),
            shape=shape,
            device=device,
        )
        if self.dialog is not None:
            env: Any = self  # torchrl's setters are untyped
            observations, states = env.full_observation_spec.clone(), env.full_state_spec.clone()
            number = Unbounded(shape=(*shape, 1), dtype=torch.int64, device=device)
            observations["messages"] = NonTensor(example_data=[], shape=shape, device=device)
            observations["step"], states["run"] = number, number.clone()
            env.full_observation_spec, env.full_state_spec = observations, states
        flag = Categorical(2, shape=(*shape, 1), dtype=torch.bool, device=device)
        self.full_done_spec = Composite(
            {name: flag.clone() for name in ("done", "terminated", "truncated")}, shape=shape, device=device
        )

    # ------------------------------------------------------------------ prompts

    def positions(self) -> Tensor:
        """The number in the run of each row's prompt; int64 ``[B]``."""
        slots = torch.arange(len(self._finished)) // self.group_size
        return self.start + (self._finished * self.world_size + self.rank) * self.num_prompts + slots

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        rows = None if tensordict is None else tensordict.get("_reset", None)
        chosen = (
            torch.ones_like(self._answered) if rows is None else rows.reshape(len(self._answered), -1).any(-1).cpu()
        )
        self._finished[chosen & self._answered] += 1
        self._answered[chosen] = False
        positions = self.positions()
        by_position = {p: self.prompts[self.order[p]] for p in positions.unique().tolist()}
        prompts = [by_position[p] for p in positions.tolist()]
        td = TensorDict(batch_size=self.batch_size, device=self.device)
        td.set("query", stack_rows(prompt.question for prompt in prompts))
        td.set("metadata", stack_rows(dict(prompt.metadata) for prompt in prompts))
        td.set("group", positions.unsqueeze(-1).to(self.device or "cpu"))
        if self.dialog is not None:
            members = torch.arange(len(positions)) % self.group_size
            td.set("run", (positions * self.group_size + members).unsqueeze(-1).to(self.device or "cpu"))
            td.set("step", torch.zeros((*self.batch_size, 1), dtype=torch.int64, device=self.device))
            td.set("messages", stack_rows(self._conversation(prompt) for prompt in prompts))
        if self.input_mode == "text":
            texts = {p: self._render(prompt) for p, prompt in by_position.items()}
            text = Text._from_tensordict(td.empty())
            text.prompt = [texts[p] for p in positions.tolist()]
            td.set("text", text)
        else:
            history = ChatHistory._from_tensordict(td.empty())
            conversations = [self._conversation(prompt) for prompt in prompts]
            lengths = sorted({len(messages) for messages in conversations})
            if len(lengths) > 1:
                raise ValueError(
                    f"torchrl's History needs as many messages in each conversation of a batch, found {lengths}: use "
                    "input_mode='text'."
                )
            history.prompt = History.from_chats(conversations)
            td.set("history", history)
        return td.to_lazystack(0)

    def _conversation(self, prompt: Prompt) -> list[dict[str, Any]]:
        if self.system_prompt is None or prompt.messages[0]["role"] == "system":
            return prompt.messages
        return [{"role": "system", "content": self.system_prompt}, *prompt.messages]

    def _render(self, prompt: Prompt) -> str:
        """The text that the policy continues."""
        messages, tokenizer = self._conversation(prompt), self.tokenizer
        if not self.apply_template:
            if len(messages) > 1:
                raise ValueError(
                    f"apply_template=False poses texts as they are, and a prompt has {len(messages)} messages: leave out "
                    "system_prompt=, give the text alone, or use a chat template."
                )
            return prompt.question
        if not getattr(tokenizer, "chat_template", None) and "chat_template" not in self.template_kwargs:
            raise MissingChatTemplateError(_NO_TEMPLATE)
        tools = {} if self.dialog is None or self.dialog.schemas is None else {"tools": self.dialog.schemas}
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **tools, **self.template_kwargs
        )
        return _without_bos(str(text), tokenizer)

    # ------------------------------------------------------------------ answers

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        next_td = super()._step(tensordict)
        self._answered[:] = True
        truncated = torch.zeros((*self.batch_size, 1), dtype=torch.bool, device=self.device)
        done = torch.ones_like(truncated)
        if self.dialog is not None:
            done, truncated = self._continue(tensordict, next_td)
        for name, flag in (("done", done), ("terminated", done & ~truncated), ("truncated", truncated)):
            next_td.set(name, flag)
        return next_td

    def _continue(self, td: TensorDictBase, next_td: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Write each row's next prompt and conversation; returns whether its episode ends, and by the limit of turns."""
        dialog = self.dialog
        assert dialog is not None
        prompts, texts = (read_rows_of(td, ("text", part)) or [] for part in ("prompt", "full"))
        answers = [text.removeprefix(prompt) for prompt, text in zip(prompts, texts, strict=True)]
        answers = [strip_end(answer, dialog.special) for answer in answers]
        parsed = [dialog.parse(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        messages = [
            [*before, dialog.assistant(answer, found)]
            for before, answer, found in zip(read_rows_of(td, "messages") or [], answers, parsed, strict=True)
        ]
        step = torch.stack([torch.as_tensor(row).reshape(1) for row in read_rows_of(td, "step") or []]) + 1
        last = (step >= self.max_turns).flatten().tolist()
        replies = self._replies(parsed, messages, read_rows_of(td, "metadata") or [], last)
        for row, after in enumerate(replies):
            if after:
                replies[row] = self._append(row, texts, messages, after)
        text = Text._from_tensordict(next_td.empty())
        text.prompt = texts
        next_td.set("text", text)
        next_td.set("messages", stack_rows(messages))
        next_td.set("step", step.to(self.device or "cpu"))
        flags = torch.tensor([[not after for after in replies], [after is None for after in replies]])
        done, truncated = flags.unsqueeze(-1).to(self.device or "cpu")
        return done, truncated

    def _append(
        self, row: int, texts: list[str], messages: list[list[Any]], after: list[dict[str, Any]]
    ) -> list[dict[str, Any]] | None:
        """Append to the text and the conversation of a row; returns what was appended, None if the template cannot."""
        assert self.dialog is not None
        try:
            texts[row] = self.dialog.next_prompt(texts[row], messages[row], after)
        except Exception as error:  # a template may raise anything
            self._log.add(
                f"the template cannot continue row {row}, whose episode ends: {type(error).__name__}: {error}"
            )
            return None
        messages[row] += after
        return after

    def _replies(
        self, parsed: list[Parsed], messages: list[Any], metadata: list[Any], last: list[bool]
    ) -> list[list[dict[str, Any]] | None]:
        """What follows each answer: messages; empty at the end of the episode, None if only the limit of turns ends it."""
        dialog = self.dialog
        assert dialog is not None
        calling = [bool(found.calls) for found in parsed]
        after: list[list[dict[str, Any]] | None] = [
            None if limit and call else [] for limit, call in zip(last, calling, strict=True)
        ]
        rows = [row for row, call in enumerate(calling) if call and not last[row]]
        if rows and dialog.tools is not None:
            for row, results in zip(rows, dialog.tools.run([parsed[row].calls for row in rows]), strict=True):
                after[row] = dialog.tool_messages(parsed[row], results)
        if self.reply is None:
            return after
        rows = [row for row, call in enumerate(calling) if not call]
        said = self._call_all([Call(self.reply, (list(messages[row]), dict(metadata[row]))) for row in rows])
        for row, text in zip(rows, said, strict=True):
            if isinstance(text, Failure) or not (text is None or isinstance(text, str)):
                error = (
                    f"{type(text.error).__name__}: {text.error}"
                    if isinstance(text, Failure)
                    else f"it returned {text!r:.60}"
                )
                self._log.add(f"reply= failed in row {row}, whose episode ends: {error}")
            elif text is not None:
                after[row] = None if last[row] else [{"role": "user", "content": as_unicode(text)}]
        return after


def _without_bos(text: str, tokenizer: Any) -> str:
    """A rendered prompt without the begin-of-sequence token if the tokenizer adds one by itself: a model expects one."""
    bos = getattr(tokenizer, "bos_token", None)
    if bos and text.startswith(bos):
        begin = tokenizer(bos).input_ids[:2]
        if begin == [tokenizer.bos_token_id] * 2:
            return text[len(bos) :]
    return text
