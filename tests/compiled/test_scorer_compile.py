"""Compiled layers and bodies: one graph for all packs, and the numbers of the same model without a graph."""

import gc
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


def compile_layers(model: Any, backend: str) -> None:
    for layer in model.get_decoder().layers:
        layer.compile(backend=backend)


def compile_body(model: Any, backend: str) -> None:
    model.model.compile(backend=backend)


def pair(way: Callable[[Any, str], None], family="llama", backend="aot_eager", **config: Any) -> list[Any]:
    """A model in float64, and the same one compiled."""
    plain, compiled = (tiny_model(family, **config).double().train() for _ in range(2))
    way(compiled, backend)
    return [plain, compiled]


def train(scorer: LogProbScorer, rows: list[Tensor]) -> tuple[Tensor, list[Tensor | None]]:
    """Log-probs, and the gradients of a weighted sum of them."""
    scorer.model.zero_grad()
    found = scorer.score(Ragged.from_list(rows), grad=True).values
    (found * torch.linspace(-1, 2, len(found), dtype=found.dtype)).sum().backward()
    return found.detach(), [p.grad for p in scorer.model.parameters()]


ROWS = conversation()
BATCH = Ragged.from_list(ROWS)


@pytest.fixture
def _nothing_compiled_before() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture(scope="module")
def shared() -> Iterator[list[Any]]:
    """A model, and the same one with compiled layers, whose graphs several tests use."""
    torch.compiler.reset()
    yield pair(compile_layers, backend="eager")
    torch.compiler.reset()


@pytest.fixture(scope="module")
def want(shared: list[Any]) -> list[Tensor | None]:
    """Gradients without a graph."""
    return train(LogProbScorer(shared[0], tokens_per_batch=16), ROWS)[1]


def total_of(compiled: Any) -> Tensor:
    compiled.zero_grad()
    found = LogProbScorer(compiled, tokens_per_batch=16).score(BATCH, grad=True).values
    return (found * torch.linspace(-1, 2, len(found), dtype=found.dtype)).sum()


# ------------------------------------------------------------------ with the graphs of one model
@pytest.mark.smoke
def test_a_kept_graph_and_freed_memory(shared: list[Any], want: list[Tensor | None]) -> None:
    """A second backward gives the same gradient. No memory is left after the graph is gone."""
    gc.collect()
    total = total_of(shared[1])
    for keep in (True, False):
        shared[1].zero_grad()
        total.backward(retain_graph=keep)
        assert_close([p.grad for p in shared[1].parameters()], want, **EXACT)
    held = list(_attention._LAYOUTS.values())
    assert held
    assert not any(layout.recorded or layout.gradients for layout in held)
    del held, total
    gc.collect()
    assert not _attention._LAYOUTS


def test_a_backward_that_failed_leaves_nothing_in_the_next(shared: list[Any], want: list[Tensor | None]) -> None:
    compiled, calls = shared[1], []
    total = total_of(compiled)

    def fail(gradient: Tensor) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("interrupted")

    weight = compiled.model.embed_tokens.weight
    with weight.register_hook(fail), pytest.raises(OSError, match="interrupted"):
        total.backward(retain_graph=True)
    for layout in _attention._LAYOUTS.values():  # as if interrupted between two packs
        for kept, call in [(kept, i) for _, _, kept in layout.kept for i in range(2)]:
            k, v = kept[call]
            layout.gradients[id(kept), call] = (-2, torch.ones_like(k), torch.ones_like(v))
    compiled.zero_grad()
    total.backward()
    assert_close([p.grad for p in compiled.parameters()], want, **EXACT)


def test_packs_share_prefixes_and_use_the_prefix_cache(shared: list[Any]) -> None:
    plain, scorer = LogProbScorer(shared[0]), LogProbScorer(shared[1], tokens_per_batch=16)
    seen: list[int] = []

    def count(_: Any, __: Any, options: Any) -> None:
        seen.append(options["input_ids"].numel())

    with shared[1].model.register_forward_pre_hook(count, with_kwargs=True):
        scorer.score(BATCH, grad=True)
    assert sum(seen) == SHARED
    for rows in (ROWS, [torch.cat([row, ids(4, 11)]) for row in ROWS]):
        found = scorer.score(Ragged.from_list(rows), remember=True).values
        assert_close(found, plain.score(Ragged.from_list(rows)).values, **EXACT)
    assert scorer.memory.tokens_recalled > 0


def test_frozen_layers_have_no_backward(shared: list[Any]) -> None:
    plain, compiled = shared
    for model in shared:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.1" in name)
    scorer = LogProbScorer(compiled, tokens_per_batch=16)
    try:
        gc.collect()
        value = scorer.score(BATCH, grad=True).values.sum()
        assert {call for layout in _attention._LAYOUTS.values() for call in layout.recorded} == {1}
        del value
        assert_close(train(scorer, ROWS), train(LogProbScorer(plain, tokens_per_batch=16), ROWS), **EXACT)
    finally:
        for model in shared:
            model.requires_grad_(True)


# ------------------------------------------------------------------ the number of graphs
def replace_layers(model: Any, backend: str) -> None:
    layers = model.get_decoder().layers
    for i, layer in enumerate(layers):
        layers[i] = torch.compile(layer, backend=backend)


def replace_body(model: Any, backend: str) -> None:
    model.model = torch.compile(model.model, backend=backend)


def compile_last_layer(model: Any, backend: str) -> None:
    """The others run beside the graph."""
    model.get_decoder().layers[-1].compile(backend=backend)


def layouts() -> list[list[Tensor]]:
    """Batches whose packs have different trees and sizes."""
    prompts = [ids(5 + 7 * i, i) for i in range(2)]
    return [ROWS, *([*(torch.cat([p, ids(4 + j, j)]) for j in range(3)), ids(9, 9)] for p in prompts)]


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.usefixtures("_nothing_compiled_before")
@pytest.mark.filterwarnings("error:.*LogProbScorer")
@pytest.mark.parametrize(
    ("way", "family", "number", "backend"),
    [
        (compile_layers, "llama", 1, "aot_eager"),
        (compile_body, "llama", 1, "aot_eager"),
        (compile_layers, "gemma2", 2, "aot_eager"),  # layers of two kinds, windows and soft-caps
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *((way, "llama", 1, "aot_eager") for way in (replace_layers, replace_body, compile_last_layer)),
                (compile_layers, "mistral", 1, "aot_eager"),
                # Its graphs write into the memory of tensors that they no longer need.
                *((way, "llama", 1, "inductor") for way in (compile_layers, compile_body)),
            )
        ),
    ],
)
def test_one_graph_for_all_packs(way: Any, family: str, number: int, backend: str) -> None:
    """Scoring and training have ``number`` graphs each, and the same results, with inductor to 5e-6 of themselves."""
    close = {"atol": 1e-4, "rtol": 1e-5} if backend == "inductor" else EXACT
    want, scorer = (LogProbScorer(model, tokens_per_batch=16) for model in pair(way, family, backend))
    assert scorer.shares_prefixes
    assert graphs() == 0, "the check of the fast path compiled"
    for rows in layouts():
        assert_close(scorer.score(Ragged.from_list(rows)).values, want.score(Ragged.from_list(rows)).values, **close)
    assert graphs() == number
    for rows in layouts():
        assert_close(train(scorer, rows), train(want, rows), **close)
    assert graphs() == 2 * number
    assert not counters["graph_break"]


@pytest.mark.usefixtures("_nothing_compiled_before")
@pytest.mark.filterwarnings("error:.*LogProbScorer")
@pytest.mark.parametrize(
    ("first", "then", "reentrant"),
    [
        pytest.param(*case, reentrant, marks=[pytest.mark.slow] if reentrant else [])
        for reentrant in (False, True)
        for case in ((compile_layers, wrap), (enable, compile_layers), (wrap, compile_body))
    ],
)
def test_checkpointed_layers(first: Any, then: Any, reentrant: bool) -> None:
    """A checkpoint around compiled layers, and within compiled layers and bodies."""
    plain, compiled = pair(lambda *_: None)
    for way in (first, then):
        way(compiled, reentrant if way in (enable, wrap) else "aot_eager")
    want, scorer = LogProbScorer(plain, tokens_per_batch=16), LogProbScorer(compiled, tokens_per_batch=16)
    assert_close(train(scorer, ROWS), train(want, ROWS), **EXACT)
    assert graphs() == 1


@pytest.mark.usefixtures("_nothing_compiled_before")
def test_a_checkpoint_in_compiled_code_of_its_own_is_an_error() -> None:
    _, model = pair(lambda *_: None, num_hidden_layers=1)
    in_own_code(model, False)
    compile_layers(model, "aot_eager")
    with pytest.raises(RuntimeError, match="recomputed without its pack"):
        train(LogProbScorer(model), ROWS)
    model.zero_grad()
    train(LogProbScorer(model, share_prefixes=False), ROWS)


@pytest.mark.usefixtures("_nothing_compiled_before")
def test_autocast_and_dropout() -> None:
    """The random numbers are the same, so results agree to the precision of bfloat16."""
    found = []
    for way in (lambda *_: None, compile_layers):
        model = pair(way, backend="eager", attention_dropout=0.4)[1].float()
        torch.manual_seed(3)
        values, gradients = train(LogProbScorer(model, dtype=torch.bfloat16, tokens_per_batch=16), ROWS)
        found.append((values, torch.cat([g.flatten() for g in gradients if g is not None])))
    (values, want), (compiled_values, got) = found
    assert_close(compiled_values, values, atol=2e-2, rtol=2e-2)
    assert (got - want).norm() < 1e-2 * want.norm()
