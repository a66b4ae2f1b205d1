"""Checkpointed layers are recomputed in the backward, when the pack is gone: the gradient must stay that of the forward."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from checkpointed import enable, enable_and_wrap, enable_in_own_code, in_own_code, layers, wrap
from closeness import assert_near
from scoring_reference import SHARED, body_tokens, conversation
from torchrl_llm_kl import LogProbScorer, Ragged
from toy_models import BACKWARD, FAMILIES, tiny_model
from toy_rollouts import plain_log_probs

ROWS = conversation()
APART = sum(len(row) - 1 for row in ROWS)
WEIGHTS = torch.linspace(-1, 2, sum(map(len, ROWS)))


class Recomputed(torch.autograd.Function):
    """A checkpoint that is not torch's."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(hidden)
        return run(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        (hidden,) = ctx.saved_tensors
        hidden = hidden.detach().requires_grad_()
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
    runs = 0

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    found = LogProbScorer(model, **settings).score(Ragged.from_list(ROWS), grad=True)
    handles = [
        module.register_forward_hook(count) for module in model.modules() if "Attention" in type(module).__name__
    ]
    (found.values * WEIGHTS).sum().backward()
    for handle in handles:
        handle.remove()
    return [p.grad for p in model.parameters()], runs


def plain_gradients(model: Any) -> list[Tensor | None]:
    """Each sequence alone through the plain model."""
    total = torch.zeros(())
    for row, weights in zip(ROWS, WEIGHTS.split([len(row) for row in ROWS]), strict=True):
        log_probs = model(input_ids=row[None]).logits[0].log_softmax(-1)
        total = total + (weights[1:] * log_probs[:-1].gather(-1, row[1:, None])[:, 0]).sum()
    total.backward()
    return [p.grad for p in model.parameters()]


def assert_gradients(got: list[Tensor | None], want: list[Tensor | None]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert_near(a, b, **BACKWARD)


@pytest.mark.parametrize("tokens_per_batch", [9, 8192])  # keys from earlier packs, and one pack
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("checkpointed", "reentrant"),
    [(enable, False), (wrap, False), (enable_and_wrap, False), (enable, True), (wrap, True), (enable_and_wrap, True)],
)
def test_packs_under_checkpointing(checkpointed: Any, reentrant: bool, family: str, tokens_per_batch: int) -> None:
    """The recomputation attends as the forward did: same tokens through the body, same gradient to the last bit."""
    if reentrant and family not in ("llama", "gemma2", "gpt2"):
        pytest.skip("as the others")
    model = tiny_model(family).train()
    checkpointed(model, reentrant)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="None of the inputs")  # torch, where the check needs no gradient
        got, runs = backward(model, tokens_per_batch=tokens_per_batch)
        scorer = LogProbScorer(model)
        assert body_tokens(model, lambda: scorer.score(Ragged.from_list(ROWS), grad=True)) == SHARED
    assert runs > 0, "the layers did not run again"
    assert_gradients(got, plain_gradients(tiny_model(family)))
    for a, b in zip(got, backward(tiny_model(family).train(), tokens_per_batch=tokens_per_batch)[0], strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("tokens_per_batch", [9, 8192])
@pytest.mark.parametrize(
    ("checkpointed", "reentrant"),
    [
        (in_own_code, True),
        (in_own_code, False),
        (enable_in_own_code, False),
        (of_another_library, False),
    ],
)
def test_other_checkpoints_are_padded_with_one_warning(
    checkpointed: Any, reentrant: bool, tokens_per_batch: int
) -> None:
    model, batch = tiny_model("llama").train(), Ragged.from_list(ROWS)
    checkpointed(model, reentrant)
    with pytest.warns(
        UserWarning, match=r"^Layers run in a checkpoint .* share no prefixes where LlamaForCausalLM"
    ) as caught:
        got, _ = backward(model, tokens_per_batch=tokens_per_batch)
    assert sum("share no prefixes" in str(w.message) for w in caught) == 1
    assert_gradients(got, plain_gradients(tiny_model("llama")))

    scorer = LogProbScorer(model)
    with pytest.warns(UserWarning, match="share no prefixes"):
        scorer.score(batch, grad=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*LogProbScorer")
        assert body_tokens(model, lambda: scorer.score(batch, grad=True)) >= APART
        assert body_tokens(model, lambda: scorer.score(batch)) == SHARED, "without gradient nothing is recomputed"


def test_no_warning_where_prefixes_are_not_to_be_shared() -> None:
    model = tiny_model("llama").train()
    in_own_code(model, True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*LogProbScorer")
        got, _ = backward(model, share_prefixes=False)
    assert_gradients(got, plain_gradients(tiny_model("llama")))


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
        (scorer.score(Ragged.from_list(ROWS), grad=True).values * WEIGHTS).sum().backward()
        found.append([p.grad for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_the_model_is_as_before_after_the_backward() -> None:
    model = tiny_model("gemma2").train()
    enable(model, False)
    name, functions = model.config._attn_implementation, [x._gradient_checkpointing_func for x in layers(model)]
    backward(model)
    assert model.config._attn_implementation == name
    assert [x._gradient_checkpointing_func for x in layers(model)] == functions
    model.eval()
    for row in ROWS:
        assert_close(plain_log_probs(model, row), plain_log_probs(tiny_model("gemma2"), row))


def test_a_backward_in_another_thread() -> None:
    """As on a GPU: the recomputation runs in a thread of autograd."""
    model = tiny_model("llama").train()
    enable(model, False)
    total = (LogProbScorer(model).score(Ragged.from_list(ROWS), grad=True).values * WEIGHTS).sum()
    thread = threading.Thread(target=total.backward)
    thread.start()
    thread.join()
    assert_gradients([p.grad for p in model.parameters()], plain_gradients(tiny_model("llama")))


def test_two_forwards_before_their_backwards() -> None:
    """Each recomputation finds the pack of its own forward, whatever was scored in between; twice, if the graph is kept."""
    model = tiny_model("llama").train()
    enable(model, False)
    scorer = LogProbScorer(model, tokens_per_batch=16)
    first = scorer.score(Ragged.from_list(ROWS[:4]), grad=True).values
    second = scorer.score(Ragged.from_list(ROWS[4:]), grad=True).values
    scorer.score(Ragged.from_list(ROWS[2:5]))
    cut = len(first)
    (first * WEIGHTS[:cut]).sum().backward(retain_graph=True)
    (second * WEIGHTS[cut:]).sum().backward()
    assert_gradients([p.grad for p in model.parameters()], plain_gradients(tiny_model("llama")))
    once = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    (first * WEIGHTS[:cut]).sum().backward()
    (scorer.score(Ragged.from_list(ROWS[4:]), grad=True).values * WEIGHTS[cut:]).sum().backward()
    assert_gradients([p.grad for p in model.parameters()], once)
