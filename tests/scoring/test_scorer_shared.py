"""Sequences that share prefixes: every shared stretch goes through the body once, and the numbers stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from torchrl_llm_kl import LogProbScorer, Ragged
from toy_models import FAMILIES, VOCAB_SIZE, tiny_model
from toy_rollouts import plain_log_probs


def ids(length: int, seed: int) -> Tensor:
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))


def conversation() -> list[Tensor]:
    """Two groups of answers, one of which goes on for a second turn with two answers, and a stranger."""
    prompt, other = ids(20, 0), ids(18, 1)
    second = torch.cat([prompt, ids(17, 2)])
    return [
        torch.cat([prompt, ids(6, 3)]),
        torch.cat([prompt, ids(3, 4)]),
        torch.cat([second, ids(4, 5)]),
        torch.cat([second, ids(7, 6)]),
        torch.cat([other, ids(5, 7)]),
        torch.cat([other, ids(9, 8)]),
        ids(11, 9),
        ids(1, 10),
    ]


def body_tokens(model: Any, run: Any) -> int:
    """Real tokens that go through the first layer while ``run`` runs."""
    seen = 0

    def count(_: Any, args: Any, kwargs: Any) -> None:
        nonlocal seen
        given = kwargs.get("input_ids", args[0] if args else None)
        mask = kwargs["attention_mask"]
        seen += int(mask[:, mask.shape[1] - given.shape[1] :].sum())

    handle = model.get_decoder().register_forward_pre_hook(count, with_kwargs=True)
    run()
    handle.remove()
    return seen


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens_per_batch", [64, 8192])
def test_exact_for_every_family(family: str, tokens_per_batch: int) -> None:
    model = tiny_model(family)
    scorer = LogProbScorer(model, tokens_per_batch=tokens_per_batch)
    assert scorer.shares_prefixes
    rows = conversation()
    found = scorer.score(Ragged.from_list(rows)).to_list()
    for row, log_probs in zip(rows, found, strict=True):
        assert_close(log_probs, plain_log_probs(model, row), atol=1e-5, rtol=0)


def test_each_shared_stretch_goes_through_the_body_once() -> None:
    model, rows = tiny_model("llama"), conversation()
    batch = Ragged.from_list(rows)
    # By hand, without each sequence's last token: 20 + 17 shared, 5 + 2 + 3 + 6 behind; 18 shared, 4 + 8; 10; 0.
    scorer = LogProbScorer(model)
    assert body_tokens(model, lambda: scorer.score(batch)) == 37 + 16 + 18 + 12 + 10
    apart = LogProbScorer(model, share_prefixes=False)
    assert not apart.shares_prefixes
    assert body_tokens(model, lambda: apart.score(batch)) == sum(len(row) - 1 for row in rows)


def test_mask_and_temperature_hold() -> None:
    model, rows = tiny_model("qwen2"), conversation()
    batch = Ragged.from_list(rows)
    mask = (batch.positions > 0) & (torch.arange(len(batch.values)) % 3 == 0)
    found = LogProbScorer(model, temperature=0.7).score(batch, mask)
    for row, log_probs, asked in zip(rows, found.to_list(), batch.like(mask).to_list(), strict=True):
        with torch.no_grad():
            logits = model(input_ids=row[None]).logits[0].float() / 0.7
        want = torch.cat([torch.zeros(1), logits.log_softmax(-1)[:-1].gather(-1, row[1:, None])[:, 0]])
        assert_close(log_probs, torch.where(asked, want, 0.0), atol=1e-5, rtol=0)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 12)), min_size=2, max_size=7))
def test_any_tree_of_prefixes(shape: list[tuple[int, int, int]]) -> None:
    """Sequences cut out of four trunks at any length, with tails of their own, exact copies included."""
    model = tiny_model("mistral")  # a sliding window shorter than most sequences
    rows = [torch.cat([ids(40, trunk)[:cut], ids(tail, 50 + trunk)]) for trunk, cut, tail in shape]
    rows = [row if len(row) else ids(2, 99) for row in rows]
    for row, log_probs in zip(rows, LogProbScorer(model).score(Ragged.from_list(rows)).to_list(), strict=True):
        assert_close(log_probs, plain_log_probs(model, row), atol=1e-5, rtol=0)


def test_with_gradient_nothing_is_shared_and_the_numbers_hold() -> None:
    model, rows = tiny_model("qwen2"), conversation()[:4]
    batch = Ragged.from_list(rows)
    scorer = LogProbScorer(model)
    assert body_tokens(model, lambda: scorer.score(batch, grad=True)) == sum(len(row) - 1 for row in rows)
    assert_close(scorer.score(batch, grad=True).values, scorer.score(batch).values, atol=1e-5, rtol=0)


def test_a_body_that_forgets_its_past_is_never_given_one() -> None:
    """The probe finds out: this one returns hidden states as if there were no keys and values."""
    model = tiny_model("llama")
    forward = model.model.forward

    def forgetful(*args: Any, past_key_values: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        return forward(*args, attention_mask=None if past_key_values is not None else attention_mask, **kwargs)

    model.model.forward = forgetful
    scorer = LogProbScorer(model)
    assert scorer.path == "head"
    assert not scorer.shares_prefixes
    rows = conversation()
    for row, log_probs in zip(rows, scorer.score(Ragged.from_list(rows)).to_list(), strict=True):
        assert_close(log_probs, plain_log_probs(model, row), atol=1e-5, rtol=0)


def test_kl_of_a_model_with_itself_stays_exactly_zero() -> None:
    model, batch = tiny_model("qwen2"), Ragged.from_list(conversation())
    assert torch.equal(LogProbScorer(model).score(batch).values, LogProbScorer(model).score(batch).values)
