"""Good data in three forms, the transforms on two models, and the check that bad input is refused and left as it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchrl.data.llm import History
from torchrl.envs import Transform
from torchrl.modules.llm.policies import ChatHistory

from torchrl_llm_kl import KLComputation, KLRewardTransform, RetrieveKL, RetrieveLogProb
from toy_rollouts import make_scoring_wrapper

FORMS = ["padded", "nested", "lazy"]
SCORING = ["RetrieveLogProb", "RetrieveKL", "KLRewardTransform"]
PROMPTS = [[7, 8, 9], [10, 11]]
RESPONSES = [[20, 21], [30, 31, 32, 33]]
GEN = [[0.0, 0.0, 0.0, -1.0, -2.0], [0.0, 0.0, -3.0, -0.5, -1.5, -2.5]]
REF = [[0.0, 0.0, 0.0, -2.0, -1.0], [0.0, 0.0, -1.0, -0.75, -1.25, -4.5]]
CHATS = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]] * 2


# ------------------------------------------------------------------ data


def ids(rows: list[list[int]]) -> list[Tensor]:
    return [torch.tensor(row) for row in rows]


def full(prompts: list[Tensor], responses: list[Tensor], form: str, fill: Any = 0) -> Any:
    """Whole sequences as torchrl lays them out: padded ones have padding left of the prompt and right of the response."""
    if form != "padded":
        return [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    left = pad_sequence(prompts, batch_first=True, padding_value=fill, padding_side="left")
    return torch.cat([left, pad_sequence(responses, batch_first=True, padding_value=fill)], -1)


def split(rows: Sequence[Sequence[float]]) -> tuple[list[Tensor], list[Tensor]]:
    """At the end of the prompts."""
    pairs = [(row[: len(prompt)], row[len(prompt) :]) for row, prompt in zip(rows, PROMPTS, strict=True)]
    return [torch.tensor(a) for a, _ in pairs], [torch.tensor(b) for _, b in pairs]


def build(form: str, columns: dict[Any, Any]) -> TensorDictBase:
    """A TensorDict of two sequences; a column is a dense tensor or a list of rows."""
    if form == "lazy":
        return lazy_stack([TensorDict({k: rows[i] for k, rows in columns.items()}) for i in range(2)])
    entries = {
        key: torch.nested.as_nested_tensor(list(rows), layout=torch.strided) if isinstance(rows, list) else rows
        for key, rows in columns.items()
    }
    return TensorDict(entries, batch_size=[2])


def columns_of(form: str, gen: Any = GEN, ref: Any = REF) -> dict[Any, Any]:
    """Tokens, masks, log-probs of both models and an outcome, in one form."""
    prompts, responses = ids(PROMPTS), ids(RESPONSES)
    ones = (
        [torch.ones_like(row, dtype=torch.bool) for row in prompts],
        [torch.ones_like(row, dtype=torch.bool) for row in responses],
    )
    prompt = pad_sequence(prompts, batch_first=True, padding_side="left") if form == "padded" else prompts
    return {
        ("tokens", "full"): full(prompts, responses, form),
        ("tokens", "prompt"): prompt,
        ("masks", "all_attention_mask"): full(*ones, form, fill=False),
        ("log_probs", "full"): full(*split(gen), form, fill=0.0),
        ("next", "ref_log_probs", "full"): full(*split(ref), form, fill=0.0),
        ("next", "reward"): torch.tensor([[1.0], [-1.0]]),
    }


def masks(form: str, rows: list[list[int]]) -> Any:
    prompts, responses = split(rows)
    return full([p.bool() for p in prompts], [r.bool() for r in responses], form, fill=False)


def histories() -> TensorDictBase:
    return TensorDict(history=ChatHistory(full=History.from_chats(CHATS)), batch_size=[2])


# ------------------------------------------------------------------ before and after


def everything(td: TensorDictBase) -> dict[Any, Any]:
    """All keys and copies of all leaves, also of "next" and of each element of a lazy stack."""
    if hasattr(td, "tensordicts"):
        return {i: everything(sub) for i, sub in enumerate(td.tensordicts)}
    found = {}
    for key in td.keys(True):
        value = td.get(key)
        if isinstance(value, Tensor):
            found[key] = [row.clone() for row in value.unbind()] if value.is_nested else value.clone()
        else:
            found[key] = type(value).__name__
    return found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Tensor):
        return (
            isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and bool(a.isclose(b, 0, 0, True).all())
        )
    return a == b


@contextmanager
def assert_refused(error: type[Exception], data: TensorDictBase, *mentions: str) -> Iterator[None]:
    """``error`` is raised, its text holds all ``mentions``, and ``data`` stays as it is."""
    before, batch = everything(data), data.batch_size
    with pytest.raises(error) as caught:
        yield
    text = str(caught.value)
    assert isinstance(caught.value, (ValueError, KeyError, TypeError))
    missing = [mention for mention in mentions if mention not in text]
    assert not missing, f"expected {missing} in {text!r}"
    assert data.batch_size == batch
    assert same(before, everything(data)), "the data was changed"


# ------------------------------------------------------------------ transforms


class Models:
    """Each transform on the two models."""

    def __init__(self, tokenizer: Any, gen: Any, ref: Any) -> None:
        self.tokenizer, self.gen, self.ref = tokenizer, gen, ref

    def wrapper(self, model: Any, key: str, **kwargs: Any) -> Any:
        return make_scoring_wrapper(model, self.tokenizer, **{"pad_output": True, "log_probs_key": key, **kwargs})

    def make(self, name: str, *, gen: Any = None, ref: Any = None, **kwargs: Any) -> Transform:
        gen, ref = gen or self.gen, ref or self.ref
        if name == "RetrieveLogProb":
            return RetrieveLogProb(ref, **kwargs)
        if name == "RetrieveKL":
            return RetrieveKL(gen, ref, **kwargs)
        return {"KLRewardTransform": lambda: KLRewardTransform(ref, **kwargs), "KLComputation": KLComputation}[name]()
