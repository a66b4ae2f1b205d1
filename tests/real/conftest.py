"""Tests with a real pre-trained model. Only ``make real`` collects them."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from real_model import FOLDER, QUESTIONS, RealModel

collect_ignore_glob = [] if os.environ.get(FOLDER) else ["test_*.py"]


@pytest.fixture(scope="session")
def real() -> RealModel:
    if not os.environ.get(FOLDER):
        pytest.skip(f"{FOLDER} names no folder: run `make real`")
    if not QUESTIONS.exists():
        pytest.skip(
            f"{QUESTIONS} is missing: it is grade_school_math/data/test.jsonl of github.com/openai/grade-school-math"
        )
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    return RealModel(Path(os.environ[FOLDER]))


@pytest.fixture(scope="session")
def measured() -> Iterator[dict[str, Any]]:
    """Measured values by claim. They are printed at the end, for docs/real_model.md."""
    found: dict[str, Any] = {}
    yield found
    print("", *(f"{claim}: {value}" for claim, value in found.items()), sep="\n")
