"""Rewards that Python functions compute from a question, an answer and the row's other columns."""

from __future__ import annotations

import logging
import math
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase, is_non_tensor
from torch import Tensor
from torchrl.data import Composite, Unbounded
from torchrl.envs import Transform

from torchrl_llm_kl._numerics import check_range
from torchrl_llm_kl.masks import Tokenizer
from torchrl_llm_kl.ragged import Node, read_column
from torchrl_llm_kl.rollouts import MissingEntryError, describe_entries, read_conversations
from torchrl_llm_kl.tasks._calls import Call, Caller, Failure, check_takes
from torchrl_llm_kl.tasks._tools import special_tokens, strip_end

logger = logging.getLogger("torchrl_llm_kl.tasks")

#: The other columns of a prompt's row by name, and the conversation as ``messages``.
Metadata = dict[str, Any]
#: ``(question, answer, metadata) -> number``, or a dict of numbers. Sync or async.
RewardFunction = Callable[[str, str, Metadata], object]
#: One function, or named parts, each a function or a pair of its weight and the function.
Reward = RewardFunction | Mapping[str, RewardFunction | tuple[float, RewardFunction]]

#: The largest reward: rewards are stored as float32.
_LARGEST = torch.finfo(torch.float32).max
#: Seconds between two log lines about failures. The next line counts the failures in between.
_LOG_EVERY = 10.0


class AnsweredRow(NamedTuple):
    """The arguments of a reward function, and the index of their row in the batch."""

    row: int
    question: str
    answer: str
    metadata: Metadata

    def __str__(self) -> str:
        return f"row {self.row} (question {self.question[:60]!r}, answer {self.answer[:60]!r})"


class RewardError(RuntimeError):
    """A reward function failed for every answer of its first batch. The cause is its first error."""


class FunctionReward(Transform):
    r"""Writes the reward of each answer, computed by Python functions.

    A function takes the question, the answer as text (without end-of-turn and padding tokens) and the row's other columns. It
    returns a finite number, and may be ``async``. If it raises, takes too long or returns anything else, its part of the
    reward is 0, the failure is counted and logged (logger ``torchrl_llm_kl.tasks``), and training continues. If it fails for
    all answers of its first batch, an error is raised.

    In an env of several turns the last answer is rewarded, and earlier steps have reward 0, unless ``each_turn`` is set.
    Append transforms that charge a KL after this one, as :func:`make_env` does.

    Args:
        reward: a function ``(question, answer, metadata) -> number``, or named parts: ``{name: function}`` or
            ``{name: (weight, function)}``.

    Keyword Args:
        weights: the weights of the parts of a single function that returns a dict ``{name: number}`` with these names.
        timeout: seconds for each call. With None there is no limit, and sync functions run in the caller's thread. A function
            that uses signals needs that.
        workers: the number of threads for sync functions (default one) and of concurrent async calls (default all).
        tokenizer: its special tokens are stripped from the end of an answer. By default the env's tokenizer is used.
        each_turn: reward each answer of an episode. By default only the last one is rewarded.
        question_key, answer_key: the entries of the texts. If the data has the entries ``"metadata"`` and ``"messages"``, a
            function gets the first as ``metadata``, and the second, the conversation, as ``metadata["messages"]``.

    Shapes:
        All entries are ``[*B, 1]``, under ``"next"``. ``"reward"`` is the sum of weight times part, and ``("rewards", name)``
        a part without its weight, both float32. ``"reward_failures"`` is the number of parts of the row that failed, int64.

    Raises:
        RewardError: if a function fails for all answers of its first batch.
        TypeError: at construction, if a part cannot be called with the three arguments.
        ValueError: at construction, if a weight is not finite.

    Example:
        >>> import tensordict
        >>> _ = tensordict.set_list_to_stack(True).set()
        >>> def right(question, answer, metadata):
        ...     return answer == metadata["answer"]
        >>> def short(question, answer, metadata):
        ...     return -len(answer)
        >>> data = tensordict.TensorDict(
        ...     query=["2 + 2?", "1 + 2?"],
        ...     text=tensordict.TensorDict(response=["4", "22"], batch_size=[2]),
        ...     metadata=tensordict.NonTensorStack({"answer": "4"}, {"answer": "3"}),
        ...     batch_size=[2],
        ... )
        >>> data = FunctionReward({"right": right, "short": (0.1, short)})(data)
        >>> data["next", "reward"].squeeze(-1), data["next", "rewards", "short"].squeeze(-1)
        (tensor([ 0.9000, -0.2000]), tensor([-1., -2.]))
    """

    def __init__(
        self,
        reward: Reward,
        *,
        weights: Mapping[str, float] | None = None,
        timeout: float | None = 30.0,
        workers: int | None = None,
        tokenizer: Tokenizer | None = None,
        each_turn: bool = False,
        question_key: NestedKey = "query",
        answer_key: NestedKey = ("text", "response"),
    ) -> None:
        check_range(above=0.0, timeout=timeout)
        check_range(1, workers=workers)
        self.functions, self.weights = _read_reward(reward, weights)
        self.named = weights is not None or isinstance(reward, Mapping)
        self.tokenizer, self.each_turn = tokenizer, each_turn
        self.question_key, self.answer_key = question_key, answer_key
        self._call_all = Caller(timeout, workers)
        self._worked: set[str] = set()
        self._log = FailureLog()
        super().__init__(
            in_keys=[question_key, answer_key, "metadata"],
            out_keys=["reward", *(("rewards", name) for name in self.names), "reward_failures"],
        )

    @property
    def names(self) -> list[str]:
        """The names of the parts. Empty for a single function that returns a number."""
        return list(self.weights) if self.named else []

    @property
    def part_keys(self) -> list[NestedKey]:
        """The entries of the named parts in a batch. ``gdpo`` takes them as ``keys={"rewards": reward.part_keys}``."""
        return [("next", "rewards", name) for name in self.names]

    # ------------------------------------------------------------------ where TorchRL calls it

    # An env calls `_step`, a replay buffer `forward`. Both read the answer at time t and write under "next".

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the rewards of collected data."""
        if "next" not in tensordict.keys():  # noqa: SIM118  # of a TensorDict
            tensordict.set("next", tensordict.empty())
        tensordict.set("next", self._step(tensordict, tensordict["next"]))
        return tensordict

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        shape = tensordict.batch_size
        values, failures = self._evaluate(self._answered(tensordict, next_tensordict), shape.numel())
        total = torch.stack([weight * values[name] for name, weight in self.weights.items()]).sum(0)
        outputs = [total, *(values[name] for name in self.names), failures]
        for key, x in zip(self.out_keys, outputs, strict=True):
            next_tensordict.set(key, x.reshape(*shape, 1).to(next_tensordict.device or x.device))
        return next_tensordict

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Declare the reward, its parts and the failures."""
        shape = (*reward_spec.shape, 1)
        for key in self.out_keys:
            dtype = torch.int64 if key == "reward_failures" else torch.float32
            reward_spec[key] = Unbounded(shape=shape, dtype=dtype, device=reward_spec.device)
        return reward_spec

    # ------------------------------------------------------------------ the calls

    def _evaluate(self, rows: list[AnsweredRow], count: int) -> tuple[dict[str, Tensor], Tensor]:
        """Call the functions for ``rows``.

        Returns:
            The values of each part and the number of failures, ``[count]`` each. Rows that are not in ``rows`` hold 0.
        """
        values = {name: torch.zeros(count) for name in self.weights}
        failures = torch.zeros(count, dtype=torch.int64)
        calls = [
            Call(function, (each.question, each.answer, dict(each.metadata)))  # a copy: functions may change it
            for function in self.functions.values()
            for each in rows
        ]
        results = iter(self._call_all(calls))
        for part in self.functions:
            names = [part] if part in self.weights else list(self.weights)
            failed: list[tuple[AnsweredRow, BaseException]] = []
            for each in rows:
                numbers = self._numbers(next(results), part, names)
                if isinstance(numbers, Failure):
                    failures[each.row] += len(names)
                    failed.append((each, numbers.error))
                else:
                    for name, value in zip(names, numbers, strict=True):
                        values[name][each.row] = value
            self._report(part, failed, len(rows))
        return values, failures

    def _numbers(self, result: object, part: str, names: list[str]) -> list[float] | Failure:
        """Read the result of a call: one number for each of ``names``."""
        if isinstance(result, Failure):
            return result
        try:
            if part in self.weights:
                return [_float32(result)]
            if isinstance(result, Mapping) and set(result) == set(names):
                return [_float32(result[name]) for name in names]
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            return Failure(error)
        return Failure(TypeError(f"returned {result!r:.60}, expected a dict with {', '.join(names)}"))

    def _report(self, part: str, failed: list[tuple[AnsweredRow, BaseException]], count: int) -> None:
        """Log the failures of a part. Raise an error if the part has never worked."""
        if len(failed) < count:
            self._worked.add(part)
        if not failed:
            return
        row, error = failed[0]
        what = f"the reward {part!r}" if part else "the reward function"
        reason = f"{type(error).__name__}: {error}".rstrip(": .")
        if part not in self._worked:
            where = f"all {count} answers of its first batch, first in {row}"
            raise RewardError(f"{what} failed for {where}: {reason}.") from error
        where = f"{len(failed)} of {count} answers, first in {row}"
        self._log.add(f"{what} failed for {where}: {reason}. Their reward is 0")

    # ------------------------------------------------------------------ reading the data

    def _answered(self, td: TensorDictBase, next_td: TensorDictBase) -> list[AnsweredRow]:
        """The rows whose episode ends at this step."""
        questions = self._texts(td, next_td, self.question_key)
        parent = self.parent
        own = None if parent is None else getattr(parent.base_env, "tokenizer", None)
        special = special_tokens(own if self.tokenizer is None else self.tokenizer)
        answers = [strip_end(text, special) for text in self._answers(td, next_td)]
        metadata = self._column(td, next_td, "metadata") or [{} for _ in answers]
        messages = self._column(next_td, td, "messages")  # under "next" the conversation includes the answer
        if messages is not None:
            metadata = [{**each, "messages": list(own)} for each, own in zip(metadata, messages, strict=True)]
        flags = zip(active_rows(td), _finished_rows(next_td), strict=True)
        rows = (row for row, (active, done) in enumerate(flags) if active and (done or self.each_turn))
        return [AnsweredRow(row, questions[row], answers[row], metadata[row]) for row in rows]

    def _answers(self, td: TensorDictBase, next_td: TensorDictBase) -> list[str]:
        if self._column(td, next_td, self.answer_key) is None:
            # An action that the env's spec samples has only the whole text or conversation, without its parts.
            whole, prompts = (self._column(td, next_td, ("text", part)) for part in ("full", "prompt"))
            if whole is not None:
                prompts = [""] * len(whole) if prompts is None else prompts
                return [text.removeprefix(prompt) for text, prompt in zip(whole, prompts, strict=True)]
            conversations = read_conversations(td, ("history", "full"))
            if conversations is not None:
                return [str(messages[-1].get("content", "")) for messages in conversations]
        return self._texts(td, next_td, self.answer_key)

    def _texts(self, td: TensorDictBase, next_td: TensorDictBase, key: NestedKey) -> list[str]:
        texts = self._column(td, next_td, key)
        if texts is None:
            advice = "name another entry with question_key= or answer_key="
            raise MissingEntryError(f"expected texts under {key!r}, found {describe_entries(td)}: {advice}.")
        return texts

    def _column(self, td: TensorDictBase, next_td: TensorDictBase, key: NestedKey) -> list[Node] | None:
        column = read_rows_of(td, key)
        return read_rows_of(next_td, key) if column is None else column


def _read_reward(
    reward: Reward, weights: Mapping[str, float] | None
) -> tuple[dict[str, RewardFunction], dict[str, float]]:
    """The functions by name (``""`` for a single function), and the weights of the numbers that they return."""
    if isinstance(reward, Mapping):
        if weights is not None:
            raise ValueError("weights= belong to one function that returns a dict: pass {name: (weight, function)}.")
        pairs = {name: part if isinstance(part, tuple) else (1.0, part) for name, part in reward.items()}
        functions = {name: function for name, (_, function) in pairs.items()}
        factors: Mapping[str, float] = {name: weight for name, (weight, _) in pairs.items()}
    else:
        functions, factors = {"": reward}, {"": 1.0} if weights is None else weights
    if not factors:
        raise ValueError("no reward is given: pass a function, or named parts such as {'right': function}.")
    for name, function in functions.items():
        what = f"the reward {name!r}" if isinstance(reward, Mapping) else "reward"
        check_takes(function, what, "question", "answer", "metadata")
    for name, weight in factors.items():
        check_range(-_LARGEST, _LARGEST, **{f"the weight of {name!r}": weight})
    return functions, {name: float(weight) for name, weight in factors.items()}


def _float32(value: Any) -> float:
    """Read a finite number of Python, numpy or a one-element tensor. Anything else is an error."""
    value = value.item() if hasattr(value, "item") else value
    if not (isinstance(value, numbers.Real) and abs(float(value)) <= _LARGEST):
        raise ValueError(f"returned {value!r:.60}, expected a finite number of at most {_LARGEST:.2g}")
    return float(value)


def read_rows_of(td: TensorDictBase, key: NestedKey) -> list[Node] | None:
    """The values of an entry, one for each row of a batch of any shape. None if the entry is missing.

    Example:
        >>> from tensordict import NonTensorStack, TensorDict
        >>> read_rows_of(TensorDict(x=NonTensorStack("a", {"b": 3}), batch_size=[2]), "x")
        ['a', {'b': 3}]
    """
    column = read_column(td, key)
    if column is None:
        return None
    if isinstance(column, list):  # the leaves of a lazy stack
        return [value.tolist() if is_non_tensor(value) else value for value in column]
    rows = [column.tolist() if is_non_tensor(column) else column]
    for _ in range(td.batch_dims):
        rows = [item for part in rows for item in part]
    return rows


def active_rows(td: TensorDictBase) -> list[bool]:
    """Whether each row takes a step. TorchRL's entry ``"_step"`` is False for rows that have ended and wait for others.

    Example:
        >>> from tensordict import TensorDict
        >>> active_rows(TensorDict(_step=torch.tensor([True, False]), batch_size=[2]))
        [True, False]
    """
    return _flags(td, "_step")


def _finished_rows(next_td: TensorDictBase) -> list[bool]:
    """Whether each row ends its episode. Data without ``"done"`` has episodes of one step."""
    return _flags(next_td, "done")


def _flags(td: TensorDictBase, key: NestedKey) -> list[bool]:
    """A flag of each row. All are True if the data lacks it."""
    count = td.batch_size.numel()
    column = read_column(td, key)
    if column is None:
        return [True] * count
    rows: Sequence[Tensor] = column if isinstance(column, list) else column.reshape(count, -1).unbind(0)
    return [bool(row.any()) for row in rows]


def reward_metrics(batch: TensorDictBase) -> dict[str, Tensor]:
    """Means over the finished answers of a batch, for a :class:`~torchrl_llm_kl.RunMonitor` or a logger.

    Args:
        batch: a batch of any shape with the entries that :class:`FunctionReward` writes.

    Returns:
        ``"rewards/NAME"``, the mean of each named part, and ``"reward_failures"``, the share of answers with a failed part.

    Raises:
        MissingEntryError: if the batch lacks these entries.

    Example:
        >>> from tensordict import TensorDict
        >>> part = TensorDict(right=torch.tensor([[1.0], [0.0]]), batch_size=[2])
        >>> after = TensorDict(rewards=part, reward_failures=torch.tensor([[0], [1]]), batch_size=[2])
        >>> reward_metrics(TensorDict(next=after, batch_size=[2]))
        {'rewards/right': tensor(0.5000), 'reward_failures': tensor(0.5000)}
    """
    after = batch.reshape(-1)["next"]
    done = torch.tensor(_finished_rows(after))

    def finished(key: NestedKey) -> Tensor:
        column = read_column(after, key)
        if column is None:
            raise MissingEntryError(f"expected {key!r} under 'next', found {describe_entries(after)}.")
        rows = (torch.stack(column) if isinstance(column, list) else column).reshape(len(done), -1)
        return rows[done.to(rows.device)].float()

    failed = finished("reward_failures") > 0
    names = sorted(key[1] for key in after.keys(True) if isinstance(key, tuple) and key[0] == "rewards")
    return {f"rewards/{name}": finished(("rewards", name)).mean() for name in names} | {
        "reward_failures": failed.float().mean()
    }


class FailureLog:
    """Logs a line at most every :data:`_LOG_EVERY` seconds. Each line states how many lines were left out before it."""

    def __init__(self) -> None:
        self._last, self._unsaid = -math.inf, 0

    def add(self, line: str) -> None:
        if time.monotonic() - self._last < _LOG_EVERY:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more lines such as this since the last one)" if self._unsaid else ""
        logger.warning("%s%s.", line, more)
        self._last, self._unsaid = time.monotonic(), 0
