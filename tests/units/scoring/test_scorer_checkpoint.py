"""Checkpointed layers are recomputed in the backward, when the pack is gone: the gradient must stay that of the forward."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpointed import enable, enable_and_wrap, enable_in_own_code, in_own_code, layers, wrap
from closeness import assert_near
from scoring_reference import SHARED, assert_scores, body_tokens, conversation, plain_log_probs
from torchrl_llm_kl import LogProbScorer, Ragged
from toy_models import BACKWARD, FAMILIES, tiny_model

ROWS = conversation()
BATCH = Ragged.from_list(ROWS)
APART = sum(len(row) - 1 for row in ROWS)
WEIGHTS = torch.linspace(-1, 2, len(BATCH.values))


class Recomputed(torch.autograd.Function):
    """A checkpoint that is not torch's."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        ctx.run, ctx.hidden = run, hidden
        return run(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        hidden = ctx.hidden.detach().requires_grad_()
        with torch.enable_grad():
            ctx.run(hidden).backward(gradient)
        return None, hidden.grad


def of_another_library(model: Any, reentrant: bool) -> None:
    for layer in layers(model):

        def forward(hidden: Tensor, *args: Any, plain: Callable[..., Any] = layer.forward, **options: Any) -> Any:
            return Recomputed.apply(lambda x: plain(x, *args, **options), hidden)

        layer.forward = forward


def backward(model: Any, **settings: Any) -> tuple[list[Tensor | None], int]:
    """The gradients of a weighted sum of all log-probs, and how often layers ran in the backward."""
    runs: list[int] = []
    found = LogProbScorer(model, **settings).score(BATCH, grad=True)
    attention = [module for module in model.modules() if "Attention" in type(module).__name__]
    handles = [module.register_forward_hook(lambda *_: runs.append(1)) for module in attention]
    (found.values * WEIGHTS).sum().backward()
    for handle in handles:
        handle.remove()
    return [p.grad for p in model.parameters()], len(runs)


@cache
def plain_gradients(family: str = "llama") -> list[Tensor | None]:
    """Each sequence alone through the plain model."""
    model = tiny_model(family)
    (plain_log_probs(model, BATCH) * WEIGHTS).sum().backward()
    return [p.grad for p in model.parameters()]


def assert_gradients(model: Any, want: list[Tensor | None]) -> None:
    for a, b in zip([p.grad for p in model.parameters()], want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_near(a, b, **BACKWARD)


WAYS = [enable, wrap, enable_and_wrap]


@pytest.mark.parametrize(
    ("family", "checkpointed", "reentrant"),
    [
        *((family, WAYS[i % 3], False) for i, family in enumerate(FAMILIES)),
        *zip(("llama", "gemma2", "gpt2"), WAYS, [True] * 3, strict=True),
    ],
)
def test_packs_under_checkpointing(checkpointed: Any, reentrant: bool, family: str) -> None:
    """The recomputation attends as the forward did: same tokens through the body, same gradient to the last bit."""
    for tokens_per_batch in (9, 8192):  # keys from earlier packs, and one pack
        model = tiny_model(family).train()
        checkpointed(model, reentrant)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", message="None of the inputs")  # torch, where the check needs no gradient
            got, runs = backward(model, tokens_per_batch=tokens_per_batch)
        assert runs > 0, "the layers did not run again"
        assert_gradients(model, plain_gradients(family))
        for a, b in zip(got, backward(tiny_model(family).train(), tokens_per_batch=tokens_per_batch)[0], strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
    scorer = LogProbScorer(model)
    assert body_tokens(model, lambda: scorer.score(BATCH, grad=True)) == SHARED


@pytest.mark.parametrize(
    ("checkpointed", "reentrant"),
    [(in_own_code, True), (in_own_code, False), (enable_in_own_code, False), (of_another_library, False)],
)
def test_other_checkpoints_are_padded_with_one_warning(checkpointed: Any, reentrant: bool) -> None:
    for tokens_per_batch in (9, 8192):
        model = tiny_model("llama").train()
        checkpointed(model, reentrant)
        message = r"^Layers run in a checkpoint .* share no prefixes where LlamaForCausalLM"
        with pytest.warns(UserWarning, match=message) as caught:
            backward(model, tokens_per_batch=tokens_per_batch)
        assert sum("share no prefixes" in str(w.message) for w in caught) == 1
        assert_gradients(model, plain_gradients())
    scorer = LogProbScorer(model)
    with pytest.warns(UserWarning, match="share no prefixes"):
        scorer.score(BATCH, grad=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*LogProbScorer")
        assert body_tokens(model, lambda: scorer.score(BATCH, grad=True)) >= APART
        assert body_tokens(model, lambda: scorer.score(BATCH)) == SHARED, "without gradient nothing is recomputed"
        model.zero_grad()
        backward(model, share_prefixes=False)  # no warning where prefixes are not to be shared
    assert_gradients(model, plain_gradients())


@pytest.mark.parametrize("dropped", [False, True])
def test_autocast_and_dropout_are_recomputed(dropped: bool) -> None:
    """Under autocast and, with the same random numbers, under dropout."""
    options: dict[str, Any] = {"attention_dropout": 0.4} if dropped else {}
    found = []
    for checkpointed in (False, True):
        model = tiny_model("llama", **options).train()
        if checkpointed:
            enable(model, False)
        scorer = LogProbScorer(model, dtype=torch.bfloat16)
        torch.manual_seed(3)
        (scorer.score(BATCH, grad=True).values * WEIGHTS).sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_backward_in_another_thread_leaves_the_model_as_before() -> None:
    """As on a GPU: the recomputation runs in a thread of autograd."""
    model = tiny_model("gemma2").train()
    enable(model, False)
    name, functions = model.config._attn_implementation, [x._gradient_checkpointing_func for x in layers(model)]
    total = (LogProbScorer(model).score(BATCH, grad=True).values * WEIGHTS).sum()
    thread = threading.Thread(target=total.backward)
    thread.start()
    thread.join()
    assert_gradients(model, plain_gradients("gemma2"))
    assert model.config._attn_implementation == name
    assert [x._gradient_checkpointing_func for x in layers(model)] == functions
    assert_scores(LogProbScorer(tiny_model("gemma2")), model.eval(), ROWS)


def test_two_forwards_before_their_backwards() -> None:
    """Each recomputation finds the pack of its own forward, whatever was scored in between; twice, if the graph is kept."""
    model = tiny_model("llama").train()
    enable(model, False)
    scorer = LogProbScorer(model, tokens_per_batch=16)
    first, second = (scorer.score(Ragged.from_list(rows), grad=True).values for rows in (ROWS[:4], ROWS[4:]))
    scorer.score(Ragged.from_list(ROWS[2:5]))
    totals = (first * WEIGHTS[: len(first)]).sum(), (second * WEIGHTS[len(first) :]).sum()
    for keep in (True, False):
        model.zero_grad()
        for total in totals:
            total.backward(retain_graph=keep)
        assert_gradients(model, plain_gradients())
