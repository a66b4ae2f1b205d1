"""Questions of GSM8K in folds, their worked solutions as conversations, and right against wrong solutions of four models.

The rows of one fold are held out, the other three are for training; a question is never on both sides.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl_llm_kl import read_rows

FILE = "gsm8k_model_solutions.jsonl"
#: Where the file is, unless an option or the environment names another folder: beside the checkout.
FOLDER = Path(os.environ.get("KL_BENCH_DATA", Path(__file__).parents[3] / "shared" / "data"))
#: The models that wrote the solutions.
WRITERS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
FOLDS = 4
TUNING_SEEDS = 100  #: seeds from here on hold out the last fold, on which the settings were chosen


@dataclass(frozen=True)
class Question:
    """A question, its worked solution, and the solutions of models: text and whether its result is right, by writer."""

    text: str
    solution: str
    answers: dict[str, tuple[str, bool]]


def read_questions(folder: Path) -> list[Question]:
    """All questions.

    Raises:
        FileNotFoundError: if the folder lacks the file; the message says where to get it.
    """
    path = folder / FILE
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing: it is data/example_model_solutions.jsonl of github.com/openai/grade-school-math, under the "
            f"name {FILE}. Pass its folder."
        )
    return [
        Question(
            row["question"],
            row["ground_truth"],
            {name: (row[name]["solution"], row[name]["is_correct"]) for name in WRITERS},
        )
        for row in read_rows(path).values()
    ]


def split(questions: Sequence[Question], seed: int) -> tuple[list[Question], list[Question]]:
    """The training questions, and the seed's held-out ones: one of the first three folds, or the last one for tuning."""
    order = list(range(len(questions)))
    random.Random(0).shuffle(order)
    held = FOLDS - 1 if seed >= TUNING_SEEDS else seed % (FOLDS - 1)
    folds = [[questions[i] for i in order[fold::FOLDS]] for fold in range(FOLDS)]
    return [q for i, fold in enumerate(folds) if i != held for q in fold], folds[held]


# ------------------------------------------------------------------ rows for training and scoring


def solutions(questions: Iterable[Question]) -> list[dict[str, Any]]:
    """One conversation for each question: the worked solution is the assistant's turn."""
    return [{"messages": [*_asked(question), _said(question.solution)]} for question in questions]


def pairs(questions: Sequence[Question]) -> list[dict[str, Any]]:
    """Every right solution of a question against every wrong one, with the numbers of the question and the writers."""
    return [
        {
            "prompt": _asked(question),
            "chosen": [_said(right)],
            "rejected": [_said(wrong)],
            "question": number,
            "chosen_by": one,
            "rejected_by": other,
        }
        for number, question in enumerate(questions)
        for one, (right, one_is_right) in question.answers.items()
        for other, (wrong, other_is_right) in question.answers.items()
        if one_is_right and not other_is_right
    ]


def _asked(question: Question) -> list[dict[str, str]]:
    return [{"role": "user", "content": question.text}]


def _said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# ------------------------------------------------------------------ guesses that ignore the content


def guess_by_length(train: Sequence[dict[str, Any]], held_out: Sequence[dict[str, Any]]) -> list[float]:
    """The lead in length of each chosen answer, in the direction that is right more often in training."""
    longer = sum(_lead(row) > 0 for row in train) >= sum(_lead(row) < 0 for row in train)
    return [float(_lead(row) if longer else -_lead(row)) for row in held_out]


def guess_by_writer(train: Sequence[dict[str, Any]], held_out: Sequence[dict[str, Any]]) -> list[float]:
    """The lead of the chosen answer's writer, by how often it won against the other one in training."""
    won = Counter((row["chosen_by"], row["rejected_by"]) for row in train)
    leads = ((row["chosen_by"], row["rejected_by"]) for row in held_out)
    return [float(won[one, other] - won[other, one]) for one, other in leads]


def _lead(row: dict[str, Any]) -> int:
    return len(row["chosen"][0]["content"]) - len(row["rejected"][0]["content"])
