"""Runs whole episodes in an env, and joins the turns of a conversation into one row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from tensordict import NestedKey, TensorDictBase, lazy_stack
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torchrl.envs import EnvBase
from torchrl.modules.llm.policies import Masks, Text, Tokens

from torchrl_llm_kl.masks import Tokenizer
from torchrl_llm_kl.ragged import has_entry
from torchrl_llm_kl.tasks._rewards import read_rows_of
from torchrl_llm_kl.tasks._tools import TOOL_ERROR, called_tool

#: The entries of an answer's tokens that a policy writes, over prompt and answer.
_PER_TOKEN = (("tokens", "full"), ("masks", "all_attention_mask"), ("log_probs", "full"))


def whole_episodes(env: EnvBase, policy: TensorDictModuleBase) -> TensorDictBase:
    """Run one episode in each row of an env. A row that has ended waits until the others have ended too.

    A batch then depends only on the env's next prompts, so a run can be resumed exactly. A collector instead starts the next
    prompt of a row at once (:func:`whole_groups`).

    Args:
        env: an env of :func:`make_env`.
        policy: a policy such as :func:`~torchrl_llm_kl.training.make_sampler`, which leaves out the rows whose ``"_step"`` is
            False.

    Returns:
        All turns as rows ``[R]``. The turns of an episode are neighbours, and the episodes have the order of the env's rows.
        Tokens of turns are padded to one width, prompts on the left and answers on the right.

    Example:
        >>> whole_episodes(env, policy)["run"].flatten()  # doctest: +SKIP
        tensor([0, 0, 1, 2, 2, 2])
    """
    step = env.reset()
    active = torch.ones(env.batch_size, dtype=torch.bool)  # rows whose episode goes on
    episodes: list[list[TensorDictBase]] = [[] for _ in active]
    while True:
        if not active.all():
            step.set("_step", active.to(env.device or "cpu"))
        step = env.step(policy(step))
        step.pop("_step", None)  # it belongs to this turn only
        done = step["next", "done"].flatten().cpu()
        if not any(episodes) and done.all():
            return step  # all episodes have one turn
        for episode, row, runs in zip(episodes, step.unbind(0), active.tolist(), strict=True):
            if runs:
                episode.append(row)
        active &= ~done
        if not active.any():
            return lazy_stack(_to_one_width([row for episode in episodes for row in episode]))
        step = env.step_mdp(step)


def _to_one_width(rows: list[TensorDictBase]) -> list[TensorDictBase]:
    """Pad the tokens of rows to one width. Rows without padded tokens are not changed."""
    if not all(has_entry(row, ("tokens", "prompt")) and has_entry(row, ("tokens", "response")) for row in rows):
        return rows
    prompts, answers = ([row["tokens", part].shape[-1] for row in rows] for part in ("prompt", "response"))
    for row, prompt, answer in zip(rows, prompts, answers, strict=True):
        left, right = max(prompts) - prompt, max(answers) - answer
        sides = {("tokens", "prompt"): (left, 0), ("tokens", "response"): (0, right)}
        for key, pads in {**sides, **dict.fromkeys(_PER_TOKEN, (left, right))}.items():
            if has_entry(row, key):
                row.set(key, pad(row[key], pads))
    return rows


def join_turns(batch: TensorDictBase, tokenizer: Tokenizer) -> TensorDictBase:
    """Join the turns of each conversation into one row. Its tokens are forwarded once, and any algorithm can train on it.

    Args:
        batch: the result of :func:`whole_episodes`, ``[R]``. Each turn begins with the tokens of the turn before.
        tokenizer: the tokenizer of the policy.

    Returns:
        A row for each conversation, ``[E]``, in their order. The prompt is the first turn's, and the response everything
        after it. ``("masks", "all_assistant_mask")`` is True at the tokens that the policy sampled, and ``"expert_mask"`` at
        the response's other tokens, of tools and users. Rewards are summed. ``"turns"`` is the number of turns, int64
        ``[E, 1]``. The other entries are the last turn's.

    Raises:
        ValueError: if a turn does not begin with the tokens of the turn before, or the turns are scored already.

    Example:
        >>> batch = join_turns(whole_episodes(env, policy), tokenizer)  # doctest: +SKIP
    """
    if has_entry(batch, ("next", "log_probs", "full")):
        raise ValueError("the turns are scored already: join them first, then score the conversations.")
    _, counts = batch["run"].flatten().unique_consecutive(return_counts=True)
    episodes = [rows.unbind(0) for rows in batch.split(counts.tolist())]
    parts = [_Conversation.of(number, rows) for number, rows in enumerate(episodes)]
    last = lazy_stack([rows[-1] for rows in episodes])
    out = last.exclude("tokens", "masks", "text", "log_probs", "run", "step", "sampled")
    # A sampler writes them for all turns or for none.
    log_probs = [part.log_probs for part in parts if part.log_probs is not None]
    write_answers(
        out,
        tokenizer,
        [str(rows[0]["text", "prompt"]) for rows in episodes],
        [part.prompt for part in parts],
        [part.response for part in parts],
        log_probs=log_probs or None,
        assistant=[part.sampled for part in parts],
    )
    after = out["masks", "all_attention_mask"].clone()
    after[:, : out["tokens", "prompt"].shape[-1]] = False  # the first prompt was not sampled
    out.set("expert_mask", after & ~out["masks", "all_assistant_mask"])
    out.set("turns", counts.unsqueeze(-1))
    index = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    for key in _keys_of_rewards(batch["next"]):
        values = batch["next"].get(key)
        sums = values.new_zeros(len(counts), *values.shape[1:])
        out["next"].set(key, sums.index_add_(0, index.to(values.device), values))
    return out


def turn_figures(counts: Mapping[str, int]) -> dict[str, float]:
    """Means over conversations. Empty if the env has no turns.

    Args:
        counts: the result of :func:`turn_counts`, or the sum of several.

    Returns:
        ``turns``, the mean number of answers. ``tools/<name>``, the share of answers that call the tool, and
        ``tools/unknown`` for calls of a tool that does not exist or whose name cannot be read. ``tool_errors``, the share of
        calls whose result is an error.

    Example:
        >>> turn_figures({"conversations": 4, "answers": 6, "tools/add": 3, "calls": 5, "errors": 1})
        {'turns': 1.5, 'tools/add': 0.5, 'tool_errors': 0.2}
    """
    if not counts:
        return {}
    figures = {"turns": counts["answers"] / counts["conversations"]}
    tools = sorted(name for name in counts if name.startswith("tools/"))
    figures |= {name: counts[name] / counts["answers"] for name in tools}
    return figures | ({"tool_errors": counts.get("errors", 0) / counts["calls"]} if counts.get("calls") else {})


def turn_counts(batch: TensorDictBase) -> Counter[str]:
    """The numbers of conversations, answers, and calls of tools in a batch. Empty if the env has no turns.

    Args:
        batch: the result of :func:`whole_episodes` or :func:`join_turns`.

    Returns:
        ``conversations``, ``answers``, ``calls``, ``errors`` (calls whose result is an error), and ``tools/<name>``, the
        answers that call the tool.

    Example:
        >>> turn_figures(turn_counts(batch))  # doctest: +SKIP
        {'turns': 1.75, 'tools/add': 0.43, 'tool_errors': 0.0}
    """
    conversations = read_rows_of(batch["next"], "messages") if has_entry(batch, ("next", "messages")) else None
    counts = Counter[str]()
    if conversations is None:
        return counts
    if has_entry(batch, "turns"):
        turns = batch["turns"].flatten().tolist()
    else:
        turns = batch["run"].flatten().unique_consecutive(return_counts=True)[1].tolist()
        conversations = [conversations[last - 1] for last in accumulate(turns)]
    counts.update(conversations=len(turns), answers=sum(turns))
    for messages, count in zip(conversations, turns, strict=True):
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        for start, end in pairwise([*answers[-count:], len(messages)]):  # a prompt may hold earlier answers
            results = [message for message in messages[start:end] if message["role"] == "tool"]
            counts.update({f"tools/{called_tool(message)}" for message in results})
            errors = sum(str(message["content"]).startswith(TOOL_ERROR) for message in results)
            counts.update(calls=len(results), errors=errors)
    return counts


def _keys_of_rewards(after: TensorDictBase) -> list[NestedKey]:
    """The entries that are summed over the turns of an episode."""
    parts = after.get("rewards", None)
    names = [] if parts is None else [("rewards", name) for name in parts.keys()]  # noqa: SIM118
    return [key for key in ("reward", "reward_failures", *names) if has_entry(after, key)]


@dataclass(frozen=True)
class _Conversation:
    """The tokens of a conversation.

    Args:
        prompt: token ids up to the first answer, ``[P]``.
        response: token ids after it, ``[R]``.
        sampled: True at the tokens of the policy, bool ``[R]``.
        log_probs: the sampler's log-probs, 0 at other tokens, ``[R]``. None if the sampler wrote none.
    """

    prompt: Tensor
    response: Tensor
    sampled: Tensor
    log_probs: Tensor | None

    @classmethod
    def of(cls, number: int, turns: Sequence[TensorDictBase]) -> _Conversation:
        """Join the turns of a conversation."""
        ids = _real(turns[-1], ("tokens", "full"))  # the last turn holds all tokens before it
        sampled = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        written = [row for row in turns if has_entry(row, ("log_probs", "full"))]
        log_probs = torch.zeros(len(ids), device=ids.device) if written else None
        first = len(ids)
        for turn in turns:
            own, width = _real(turn, ("tokens", "full")), turn["tokens", "prompt"].shape[-1]
            start, end = int(turn["masks", "all_attention_mask"][:width].sum()), len(own)
            if not torch.equal(own, ids[:end]):
                raise ValueError(
                    f"conversation {number}: its last turn does not begin with the tokens of the turns before. Sample with "
                    "make_sampler, which keeps the tokens of earlier turns."
                )
            sampled[start:end], first = True, min(first, start)
            if log_probs is not None:
                log_probs[start:end] = _real(turn, ("log_probs", "full"))[start:]
        return cls(ids[:first], ids[first:], sampled[first:], None if log_probs is None else log_probs[first:])


def _real(row: TensorDictBase, key: NestedKey) -> Tensor:
    """The values of an entry at the tokens that are not padding."""
    return row[key][row["masks", "all_attention_mask"]]


def write_answers(
    tensordict: TensorDictBase,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    prompts: Sequence[Tensor],
    answers: Sequence[Tensor],
    *,
    log_probs: Sequence[Tensor] | None = None,
    assistant: Sequence[Tensor] | None = None,
) -> TensorDictBase:
    """Write text, tokens and masks of answers as torchrl's wrappers do, with prompts padded on the left.

    Args:
        tensordict: the batch, ``[B]``.
        tokenizer: decodes the answers.
        texts: the prompts.
        prompts: their token ids, int64 ``[P]`` each.
        answers: the token ids of each answer, int64 ``[R]`` each.

    Keyword Args:
        log_probs: the sampler's log-prob of each token of an answer, ``[R]`` each.
        assistant: True at the policy's own tokens of an answer, bool ``[R]`` each. None if all are its own.

    Example:
        >>> write_answers(step, tokenizer, ["2 + 2 = "], [torch.tensor([5, 6])], [torch.tensor([7])])  # doctest: +SKIP
    """
    padding = tokenizer.pad_token_id or 0
    device = answers[0].device
    prompt, response = _pad(prompts, padding, "left").to(device), _pad(answers, padding, "right")
    decoded = tokenizer.batch_decode([row.tolist() for row in answers], skip_special_tokens=False)
    text, tokens, masks = (each.from_tensordict(tensordict.empty()) for each in (Text, Tokens, Masks))
    text.prompt, text.response = list(texts), decoded
    text.full = [before + after for before, after in zip(texts, decoded, strict=True)]
    tokens.prompt, tokens.response, tokens.full = prompt, response, torch.cat([prompt, response], -1)

    def over_all(before: Sequence[Tensor], after: Sequence[Tensor]) -> Tensor:
        return torch.cat([_pad(before, 0, "left").to(device), _pad(after, 0, "right").to(device)], -1)

    masks.all_attention_mask = over_all(*([torch.ones_like(row) for row in rows] for rows in (prompts, answers))).bool()
    nothing = [torch.zeros(len(row)) for row in prompts]
    if assistant is not None:
        masks.all_assistant_mask = over_all(nothing, assistant).bool()
    for key, value in (("text", text), ("tokens", tokens), ("masks", masks)):
        tensordict.set(key, value)
    if log_probs is not None:
        tensordict.set(("log_probs", "full"), over_all(nothing, log_probs))
    return tensordict


def _pad(rows: Sequence[Tensor], value: float, side: str) -> Tensor:
    return pad_sequence(list(rows), batch_first=True, padding_value=value, padding_side=side)
