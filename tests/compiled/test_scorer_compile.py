"""Compiled layers and bodies: one graph for all packs, and the numbers of the same model without a graph."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.testing import assert_close

from checkpointed import enable, in_own_code, wrap
from scoring_reference import SHARED, conversation, ids
from torchrl_llm_kl import LogProbScorer, Ragged
from torchrl_llm_kl.scoring import _attention
from toy_models import tiny_model

EXACT = {"atol": 1e-10, "rtol": 1e-10}


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def compile_layers(model: Any, backend: str) -> None:
    for layer in model.get_decoder().layers:
        layer.compile(backend=backend)


def replace_layers(model: Any, backend: str) -> None:
    layers = model.get_decoder().layers
    for i, layer in enumerate(layers):
        layers[i] = torch.compile(layer, backend=backend)


def compile_body(model: Any, backend: str) -> None:
    model.model.compile(backend=backend)


def replace_body(model: Any, backend: str) -> None:
    model.model = torch.compile(model.model, backend=backend)


def compile_last_layer(model: Any, backend: str) -> None:
    """The others run beside the graph."""
    model.get_decoder().layers[-1].compile(backend=backend)


OTHER_WAYS = [replace_layers, replace_body, compile_last_layer]


def pair(
    way: Callable[[Any, str], None], family: str = "llama", backend: str = "aot_eager", **config: Any
) -> list[Any]:
    """A model in float64, and the same one compiled."""
    plain, compiled = (tiny_model(family, **config).double().train() for _ in range(2))
    way(compiled, backend)
    return [plain, compiled]


def layouts() -> list[list[Tensor]]:
    """Batches whose packs have different trees and sizes."""
    prompts = [ids(5 + 7 * i, i) for i in range(3)]
    return [conversation(), *([*(torch.cat([p, ids(4 + j, j)]) for j in range(3)), ids(9, 9)] for p in prompts)]


def train(scorer: LogProbScorer, rows: list[Tensor]) -> tuple[Tensor, list[Tensor | None]]:
    """Log-probs, and the gradients of a weighted sum of them."""
    scorer.model.zero_grad()
    found = scorer.score(Ragged.from_list(rows), grad=True).values
    (found * torch.linspace(-1, 2, len(found), dtype=found.dtype)).sum().backward()
    return found.detach(), [p.grad for p in scorer.model.parameters()]


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def assert_one_graph_each(
    plain: Any, compiled: Any, number: int = 1, close: dict[str, float] = EXACT, **settings: Any
) -> None:
    """``number`` graphs for scoring and for training, whatever the packs; and the same numbers."""
    want, scorer = LogProbScorer(plain, **settings), LogProbScorer(compiled, **settings)
    assert scorer.shares_prefixes
    assert graphs() == 0, "the check of the fast path compiled"
    for rows in layouts():
        assert_close(scorer.score(Ragged.from_list(rows)).values, want.score(Ragged.from_list(rows)).values, **close)
    assert graphs() == number
    for rows in layouts():
        assert_close(train(scorer, rows), train(want, rows), **close)
    assert graphs() == 2 * number
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    "way", [compile_layers, compile_body, *(pytest.param(way, marks=pytest.mark.slow) for way in OTHER_WAYS)]
)
def test_one_graph_for_all_packs(way: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*LogProbScorer")
        assert_one_graph_each(*pair(way), tokens_per_batch=16)


@pytest.mark.parametrize(("family", "number"), [("mistral", 1), ("gemma2", 2)])
def test_windows_and_soft_caps(family: str, number: int) -> None:
    """gemma2's layers are of two kinds, and have a graph for each."""
    assert_one_graph_each(*pair(compile_layers, family), number, tokens_per_batch=30)


@pytest.mark.slow
@pytest.mark.parametrize("way", [compile_layers, compile_body])
def test_inductor(way: Any) -> None:
    """Its graphs write into the memory of tensors that they no longer need; a body in float64 differs by 5e-6 of itself."""
    assert_one_graph_each(*pair(way, backend="inductor"), close={"atol": 1e-4, "rtol": 1e-5}, tokens_per_batch=16)


def test_packs_are_shared() -> None:
    _, model = pair(compile_layers, backend="eager")
    seen = []
    model.model.register_forward_pre_hook(lambda _, args, options: seen.append(options["input_ids"]), with_kwargs=True)
    scorer = LogProbScorer(model)
    seen.clear()
    scorer.score(Ragged.from_list(conversation()), grad=True)
    assert sum(each.numel() for each in seen) == SHARED


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("first", "then"),
    [(compile_layers, wrap), (enable, compile_layers), (wrap, compile_body)],
    ids=["wrapped after", "enabled before", "wrapped before"],
)
def test_checkpointed_layers(first: Any, then: Any, reentrant: bool) -> None:
    """A checkpoint around compiled layers, and within compiled layers and bodies."""
    plain, compiled = pair(lambda *_: None)
    for way in (first, then):
        way(compiled, reentrant if way in (enable, wrap) else "aot_eager")
    want, scorer = LogProbScorer(plain, tokens_per_batch=16), LogProbScorer(compiled, tokens_per_batch=16)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*LogProbScorer")
        for rows in layouts()[:2]:
            assert_close(train(scorer, rows), train(want, rows), **EXACT)
    assert graphs() == 1


def test_a_checkpoint_in_compiled_code_of_its_own_is_an_error() -> None:
    _, model = pair(lambda *_: None)
    in_own_code(model, False)
    compile_layers(model, "aot_eager")
    with pytest.raises(RuntimeError, match="recomputed in the backward, by a checkpoint in the model's own code"):
        train(LogProbScorer(model), conversation())
    model.zero_grad()
    train(LogProbScorer(model, share_prefixes=False), conversation())


def test_a_kept_graph_and_freed_memory() -> None:
    """A second backward gives the same gradient; nothing is left once the graph is gone."""
    plain, compiled = pair(compile_layers, backend="eager")
    _, want = train(LogProbScorer(plain, tokens_per_batch=16), conversation())
    found = LogProbScorer(compiled, tokens_per_batch=16).score(Ragged.from_list(conversation()), grad=True).values
    total = (found * torch.linspace(-1, 2, len(found), dtype=found.dtype)).sum()
    for keep in (True, False):
        compiled.zero_grad()
        total.backward(retain_graph=keep)
        assert_close([p.grad for p in compiled.parameters()], want, **EXACT)
    held = list(_attention._LAYOUTS.values())
    assert held
    assert not any(layout.recorded or layout.gradients for layout in held)
    del held, total, found
    gc.collect()
    assert not _attention._LAYOUTS


def test_a_backward_that_failed_leaves_nothing_in_the_next() -> None:
    plain, compiled = pair(compile_layers, backend="eager")
    _, want = train(LogProbScorer(plain, tokens_per_batch=16), conversation())
    found = LogProbScorer(compiled, tokens_per_batch=16).score(Ragged.from_list(conversation()), grad=True).values
    total = (found * torch.linspace(-1, 2, len(found), dtype=found.dtype)).sum()
    calls = 0

    def fail(gradient: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise OSError("interrupted")

    handle = compiled.model.embed_tokens.weight.register_hook(fail)
    with pytest.raises(OSError, match="interrupted"):
        total.backward(retain_graph=True)
    handle.remove()
    for layout in _attention._LAYOUTS.values():  # as if interrupted between two packs
        for kept, call in [(piece.kept, i) for piece in layout.pieces if piece.kept for i in range(2)]:
            k, v = kept[call]
            assert layout.gradients is not None
            layout.gradients[id(kept), call] = (-2, torch.ones_like(k), torch.ones_like(v))
    compiled.zero_grad()
    total.backward()
    assert_close([p.grad for p in compiled.parameters()], want, **EXACT)


def test_frozen_layers_have_no_backward() -> None:
    plain, compiled = pair(compile_layers, backend="eager", num_hidden_layers=3)
    for model in (plain, compiled):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.2" in name)
    scorer = LogProbScorer(compiled, tokens_per_batch=16)
    value = scorer.score(Ragged.from_list(conversation()), grad=True).values.sum()
    assert {call for layout in _attention._LAYOUTS.values() for call in layout.recorded} == {2}
    del value
    assert_close(
        train(scorer, conversation()), train(LogProbScorer(plain, tokens_per_batch=16), conversation()), **EXACT
    )


@pytest.mark.parametrize("options", [{}, {"attention_dropout": 0.4}])
def test_autocast_and_dropout(options: dict[str, Any]) -> None:
    """With the same random numbers, to the precision of bfloat16."""
    found = []
    for way in (lambda *_: None, compile_layers):
        model = pair(way, backend="eager", **options)[1].float()
        torch.manual_seed(3)
        values, gradients = train(LogProbScorer(model, dtype=torch.bfloat16, tokens_per_batch=16), conversation())
        found.append((values, torch.cat([g.flatten() for g in gradients if g is not None])))
    (values, want), (compiled_values, got) = found
    assert_close(compiled_values, values, atol=2e-2, rtol=2e-2)
    assert (got - want).norm() < 1e-2 * want.norm()


def test_the_prefix_cache() -> None:
    plain, compiled = pair(compile_body, backend="eager")
    want, scorer = LogProbScorer(plain), LogProbScorer(compiled, tokens_per_batch=16)
    for rows in (conversation(), [torch.cat([row, ids(4, 11)]) for row in conversation()]):
        found = scorer.score(Ragged.from_list(rows), remember=True).values
        assert_close(found, want.score(Ragged.from_list(rows)).values, **EXACT)
    assert scorer.memory.tokens_recalled > 0
