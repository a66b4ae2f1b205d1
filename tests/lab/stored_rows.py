"""Rows of a score store that follow from their number, so that any process can check them. Does not import torch."""

from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np

from project import script

# The module is loaded by its path, since the package would import torch in each process.
load = partial(script, "torchrl_llm_kl/scoring/_store.py")
ScoreStore: Any = load().ScoreStore


def row(number: int, length: int = 50, dtype: Any = np.float32) -> tuple[bytes, np.ndarray]:
    """Key and scores of a sequence, which follow from its number. NaN stands for no score."""
    key = blake2b(str(number).encode(), digest_size=16).digest()
    rng = np.random.default_rng(number)
    mask = rng.random(length) < 0.6
    mask[1] = True
    return key, np.where(mask, rng.standard_normal(length), np.nan).astype(dtype)


def put(store: Any, *numbers: int, **options: Any) -> None:
    for number in numbers:
        key, values = row(number, **options)
        store.add([key], [len(values)], values)


def has(store: Any, number: int, **options: Any) -> bool:
    """Whether a sequence is stored. Checks that stored scores are equal to the last bit."""
    key, values = row(number, **options)
    found = store.read([key], [len(values)])
    known = not np.isnan(found).all()
    assert not known or np.array_equal(found, values, equal_nan=True)
    return known
