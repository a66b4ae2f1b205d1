"""The task: Countdown problems, their split into training and held-out problems, and the environment."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch.utils.data import DataLoader
from torchrl.envs import EnvBase, StepCounter
from torchrl.envs.llm.datasets.countdown import CountdownEnv
from torchrl.envs.llm.reward.countdown import CountdownRewardParser
from transformers import PreTrainedTokenizerBase

OPERATIONS = "+-*"


@dataclass(frozen=True)
class Problem:
    """Two numbers, a target, and the operation that reaches it."""

    numbers: tuple[int, int]
    target: int
    operation: str

    @property
    def query(self) -> str:
        """The user's message, in the words of torchrl's ``CountdownEnv``."""
        return (
            f"Using the numbers {list(self.numbers)}, create an arithmetic expression that equals {self.target}. "
            f"You may use each number at most once. Only use +, -, *, / and parentheses."
        )

    @property
    def ground_truth(self) -> str:
        """The string that torchrl's ``CountdownRewardParser`` checks answers against."""
        return f"target={self.target}, numbers={','.join(map(str, self.numbers))}"

    def answer(self, operation: str) -> str:
        """The assistant's message with the given operation."""
        first, second = self.numbers if self.operation != "-" else sorted(self.numbers, reverse=True)
        return f"<answer>{first}{operation}{second}</answer>"

    def is_solved_by(self, reply: str) -> bool:
        """Whether torchrl's reward parser accepts the reply."""
        _, expression = CountdownRewardParser.extract_tags(reply)
        return bool(expression) and CountdownRewardParser.validate_expression(
            expression, self.target, list(self.numbers)
        )


def all_problems(max_number: int = 20) -> list[Problem]:
    """All problems with two numbers from 1 to ``max_number``; targets are their sum, positive difference and product."""
    problems: dict[tuple[tuple[int, int], int], Problem] = {}
    for a, b in product(range(1, max_number + 1), repeat=2):
        for target, operation in ((a + b, "+"), (abs(a - b), "-"), (a * b, "*")):
            if target > 0:
                problems.setdefault(((a, b), target), Problem((a, b), target, operation))
    return list(problems.values())


def split_problems(problems: Sequence[Problem], num_held_out: int = 200) -> tuple[list[Problem], list[Problem]]:
    """Split into (training, held out), identically in every run.

    [3, 5] and [5, 3] with the same target are on the same side of the split, so that no held-out problem can be solved by
    recalling its mirror image. At most ``num_held_out`` problems are held out.
    """
    groups: dict[tuple[tuple[int, ...], int], list[Problem]] = {}
    for problem in problems:
        groups.setdefault((tuple(sorted(problem.numbers)), problem.target), []).append(problem)
    keys = sorted(groups)
    random.Random(0).shuffle(keys)
    train: list[Problem] = []
    held_out: list[Problem] = []
    for key in keys:
        fits = len(held_out) + len(groups[key]) <= num_held_out
        (held_out if fits else train).extend(groups[key])
    return train, held_out


def reward(question: str, answer: str, metadata: dict[str, Any]) -> float:
    """The reward of torchrl's parser, as a function for ``countdown.yaml``: 1 right, 0.1 wrong, 0 no answer."""
    _, expression = CountdownRewardParser.extract_tags(answer)
    return 1.0 if solved(question, answer, metadata) else 0.1 if expression else 0.0


def solved(question: str, answer: str, metadata: dict[str, Any]) -> float:
    """1 if the answer is right."""
    return float(Problem(tuple(metadata["numbers"]), metadata["target"], "").is_solved_by(answer))


class ShortCountdownEnv(CountdownEnv):
    """torchrl's environment with a short system prompt that contains no tags, since the reward parser searches for them."""

    SYSTEM_PROMPT = "Reach the target with one expression. Put it in answer tags."


def make_env(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_prompts: int,
    group_size: int,
    seed: int | None,
) -> EnvBase:
    """An env of one step that poses ``num_prompts`` problems at a time, each ``group_size`` times in a row.

    The order of the problems is random, by ``seed``; with None they are posed as they come.
    ``CountdownEnv(...)`` generates random problems; ``from_dataloader`` lets us choose them and hold some out.
    """
    rows = [{"query": problem.query, "answer": problem.ground_truth} for problem in problems]
    env = ShortCountdownEnv.from_dataloader(
        in_order(rows, seed, collate=_collate),
        repeats=group_size,
        batch_size=(num_prompts * group_size,),
        tokenizer=tokenizer,
        # Conversations as text: several times faster here than ``History`` objects, which multi-turn tasks need.
        input_mode="text",
        # The model's own template. By default, torchrl chooses a template by the model's name.
        template_kwargs={"chat_template": tokenizer.chat_template},
    )
    env = env.append_transform(StepCounter(max_steps=1))
    return env.append_transform(CountdownRewardParser(tokenizer=tokenizer))


def in_order(rows: Sequence[Any], seed: int | None, *, collate: Callable[[list[Any]], Any]) -> DataLoader:
    """Rows one at a time; each pass in another random order, by ``seed``, or as they come with None."""
    order = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(rows, batch_size=1, shuffle=seed is not None, generator=order, collate_fn=collate)  # type: ignore[arg-type]


def _collate(rows: list[dict[str, str]]) -> TensorDictBase:
    return torch.stack([TensorDict.from_dict(row) for row in rows])
