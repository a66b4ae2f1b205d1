"""Gradients one branch after the other: they equal those of one graph, and hold the activations of one path."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import example, given, strategies as st
from tensordict import TensorDict
from torch import Tensor

from closeness import assert_near
from torchrl_llm_kl import LogProbScorer, PolicyLoss
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring import ScoreOptions, ScoreRequest
from torchrl_llm_kl.scoring._plans import plan_branches
from torchrl_llm_kl.scoring._tree import PrefixTree
from toy_models import stateful_model, tiny_model

VOCAB = 50


def rows_of(*, seed: int = 0) -> list[Tensor]:
    """Answers to two prompts, one of which continues the other, and a sequence that shares nothing."""
    generator = torch.Generator().manual_seed(seed)

    def some(count: int) -> list[int]:
        return torch.randint(VOCAB, (count,), generator=generator).tolist()

    first = some(34)
    second = first + some(12)
    rows = [first + some(n) for n in (5, 9, 3)] + [second + some(n) for n in (6, 14, 4)]
    return [torch.tensor(row) for row in [*rows, some(21)]]


def gradients(
    scorer: LogProbScorer, rows: list[Tensor], *, recompute: bool, **changes: Any
) -> tuple[Any, dict[str, Any]]:
    """The scores, and the gradient of a weighted sum of all that are differentiable."""
    scorer.model.zero_grad()
    scores = scorer.evaluate(rows, grad=True, recompute=recompute, **changes)
    total = torch.zeros((), dtype=scores.log_prob.values.dtype)
    for name in ("log_prob", "entropy", "kl"):
        if name in scores.per_token:
            values = scores.per_token[name].values
            total = total + (torch.linspace(-1, 1, len(values), dtype=values.dtype) * values).sum()
    total.backward()
    return scores, {name: p.grad for name, p in scorer.model.named_parameters()}


def check_same(model: Any, rows: list[Tensor], *, size: int, dtype: Any = None, **changes: Any) -> None:
    scorer = LogProbScorer(model, tokens_per_batch=size)
    want, expected = gradients(scorer, rows, recompute=False, **changes)
    got, found = gradients(scorer, rows, recompute=True, **changes)
    for name, values in want.per_token.items():
        assert_near(got.per_token[name].values.detach(), values.values.detach(), terms=64, size=20.0, msg=name)
    assert {name for name, x in found.items() if x is None} == {name for name, x in expected.items() if x is None}
    for name, x in expected.items():
        if x is not None:
            assert_near(found[name], x, terms=4096, size=max(1.0, float(x.abs().max())), dtype=dtype, msg=name)


DENSE: dict[str, Callable[..., Any]] = {
    "qwen2": partial(tiny_model, "qwen2"),
    "tied": partial(tiny_model, "qwen2", tie_word_embeddings=True),
    "gpt2": partial(tiny_model, "gpt2"),
    "sliding": partial(tiny_model, "mistral", sliding_window=8),
    "mixtral": partial(tiny_model, "mixtral"),
    "convolutions": partial(stateful_model, "lfm2"),
    "recurrent": partial(stateful_model, "qwen3_next"),
}


@pytest.mark.parametrize("size", [16, 40, 1024])
@pytest.mark.parametrize("name", DENSE)
def test_gradients_equal_those_of_one_graph(name: str, size: int) -> None:
    model = DENSE[name](vocab_size=VOCAB).double()
    if name in ("mixtral", "recurrent"):
        model.set_experts_implementation("eager")  # the default has no float64
    # The recurrent state is kept in float32, and its gradients are added in another order.
    check_same(model, rows_of(), size=size, entropy=True, dtype=torch.float32 if name == "recurrent" else None)


def test_a_kl_and_frozen_parameters() -> None:
    model, reference = tiny_model(vocab_size=VOCAB).double(), tiny_model(vocab_size=VOCAB, seed=1).double()
    model.get_input_embeddings().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0.self_attn.k_proj" not in name and parameter.requires_grad)
    check_same(model, rows_of(), size=24, reference=LogProbScorer(reference, tokens_per_batch=24))


def test_without_shared_prefixes() -> None:
    model, rows = tiny_model(vocab_size=VOCAB).double(), rows_of()
    scorer = LogProbScorer(model, tokens_per_batch=64, share_prefixes=False)
    _, want = gradients(scorer, rows, recompute=False)
    _, got = gradients(scorer, rows, recompute=True)
    for name, x in want.items():
        assert_near(got[name], x, terms=4096, size=max(1.0, float(x.abs().max())), msg=name)


def test_checkpointed_layers() -> None:
    """A layer that is checkpointed is forwarded a third time."""
    model = tiny_model(vocab_size=VOCAB).double()
    model.train()
    model.gradient_checkpointing_enable()
    check_same(model, rows_of(), size=24)


def test_a_gradient_without_backward_and_a_part_of_the_tokens() -> None:
    """``torch.autograd.grad`` returns it too, and accumulates nothing."""
    model, rows = tiny_model(vocab_size=VOCAB).double(), rows_of()
    mask = torch.rand(sum(map(len, rows)), generator=torch.Generator().manual_seed(2)) < 0.3
    mask[[0, *accumulate(map(len, rows[:-1]))]] = False
    request, scorer = ScoreRequest.of(rows, mask), LogProbScorer(model, tokens_per_batch=24)
    found = []
    for recompute in (False, True):
        loss = scorer.score(request, grad=True, recompute=recompute).values.square().sum()
        found.append(torch.autograd.grad(loss, [*model.parameters()]))
    assert all(parameter.grad is None for parameter in model.parameters())
    for one, other in zip(*found, strict=True):
        assert_near(other, one, terms=4096, size=max(1.0, float(one.abs().max())))


def test_in_a_loss() -> None:
    model, full = tiny_model(vocab_size=VOCAB).double(), torch.stack([row[:37] for row in rows_of()[:3]])
    tokens = TensorDict(full=full, prompt=full[:, :34], batch_size=[3])
    found = []
    for recompute in (False, True):
        loss = PolicyLoss(model, "sft", options=ScoreOptions(recompute=recompute))
        model.zero_grad()
        loss(TensorDict(tokens=tokens, batch_size=[3])).total_loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    for one, other in zip(*found, strict=True):
        assert_near(other, one, terms=4096, size=max(1.0, float(one.abs().max())))


class TwoBiases(torch.nn.Module):
    """A layer to which two trained biases are added, which have one gradient."""

    def __init__(self, inner: torch.nn.Module, size: int) -> None:
        super().__init__()
        self.inner = inner
        self.one, self.two = (torch.nn.Parameter(torch.randn(size).double()) for _ in range(2))

    def forward(self, hidden: Tensor, *args: Any, **options: Any) -> Any:
        return self.inner(hidden, *args, **options) + (self.one + self.two)


@pytest.mark.parametrize("kind", ["two biases", "frozen lower layers", "lora", "hook"])
def test_parameters_of_all_kinds(kind: str) -> None:
    model = tiny_model(vocab_size=VOCAB).double()
    if kind == "two biases":
        model.model.layers[0].mlp = TwoBiases(model.model.layers[0].mlp, model.config.hidden_size)
    if kind == "frozen lower layers":
        for part in (model.get_input_embeddings(), model.model.layers[0]):
            part.requires_grad_(False)
    if kind == "lora":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(
            model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        )
    if kind == "hook":  # it clips the whole gradient, once
        calls: list[float] = []

        def clipped(gradient: Tensor) -> Tensor:
            calls.append(float(gradient.norm()))
            return gradient.clamp(-1e-2, 1e-2)

        model.model.norm.weight.register_hook(clipped)
    check_same(model, rows_of(), size=24)
    if kind == "hook":
        assert len(calls) == 2
        assert calls[0] == pytest.approx(calls[1])


@pytest.mark.parametrize("change", ["weights", "mode", "adapters", "frozen"])
def test_a_model_that_changes_before_the_backward_is_refused(change: str) -> None:
    peft = pytest.importorskip("peft")
    base = tiny_model(vocab_size=VOCAB)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    loss = LogProbScorer(model, tokens_per_batch=24).score(rows_of(), grad=True, recompute=True).values.mean()
    weight = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    if change == "weights":
        with torch.no_grad():
            weight.mul_(2)
    if change == "mode":
        model.train()
    if change == "frozen":
        weight.requires_grad_(False)
    refused = pytest.raises(RuntimeError, match="have changed since: call backward")
    with model.disable_adapter() if change == "adapters" else nullcontext(), refused:
        loss.backward()


def test_a_score_in_another_thread_waits_for_the_backward() -> None:
    """A layer that runs in the backward starts a score in another thread. It ends after the backward, with its numbers."""
    model, rows = tiny_model(vocab_size=VOCAB).double(), rows_of()
    scorer = LogProbScorer(model, tokens_per_batch=24)
    want = scorer.score(rows).values
    loss = scorer.score(rows, grad=True, recompute=True).values.sum()
    with ThreadPoolExecutor(1) as pool:
        begun: list[Any] = []

        def begin(*_: Any) -> None:
            if not begun:
                begun.append(pool.submit(lambda: scorer.score(rows).values))
                with pytest.raises(TimeoutError):
                    begun[0].result(0.5)

        handle = model.model.layers[0].register_forward_pre_hook(begin)
        loss.backward()
        handle.remove()
        assert torch.equal(begun[0].result(), want)


# ------------------------------------------------------------------ memory


class Saved:
    """Counts the bytes that graphs hold."""

    live = peak = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.size = tensor, tensor.numel() * tensor.element_size()
        Saved.live += self.size
        Saved.peak = max(Saved.peak, Saved.live)

    def __del__(self) -> None:
        Saved.live -= self.size


def peak(scorer: LogProbScorer, rows: list[Tensor], *, recompute: bool) -> int:
    Saved.live = Saved.peak = 0
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        scorer.score(rows, grad=True, recompute=recompute).values.mean().backward()
    return Saved.peak


@pytest.mark.parametrize("size", [64, 100, 128, 256, 512])
def test_the_activations_of_one_path_are_held(size: int) -> None:
    """A history with a branch at each of its 16 turns. One graph would hold twice the longest path."""
    generator = torch.Generator().manual_seed(0)
    path, rows = torch.randint(VOCAB, (32,), generator=generator), []
    for _ in range(16):
        turns = torch.randint(VOCAB, (2, 16), generator=generator)
        rows.append(torch.cat([path, turns[0]]))
        path = torch.cat([path, turns[1]])
    rows.append(path)
    scorer = LogProbScorer(tiny_model(vocab_size=VOCAB, max_position_embeddings=512), tokens_per_batch=size)
    longest, whole = (peak(scorer, some, recompute=False) for some in (rows[-1:], rows))
    assert whole > 1.8 * longest
    assert peak(scorer, rows, recompute=True) < 1.3 * longest


def tree_of(rows: list[list[int]]) -> PrefixTree:
    tokens = Ragged.from_list([torch.tensor(row) for row in rows])
    return PrefixTree.build(tokens, tokens.lengths, min_shared=1)


# Forks below forks: a finished branch must not share a pack with a long path to the next one.
@example([[0] * 5, [1] + [0] * 11, [1, 0, 1] + [0] * 9, [1, 1] + [0] * 10], 8)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=12), st.integers(1, 9))
def test_each_token_is_in_one_pack_after_its_prefix(rows: list[list[int]], size: int) -> None:
    tree = tree_of(rows)
    plan = plan_branches(tree, size)
    order = [i for pack in plan.packs for i in pack]
    assert order == list(range(len(plan.pieces)))
    covered: dict[int, list[range]] = {}
    for i, piece in enumerate(plan.pieces):
        assert piece.past < i
        before = covered.setdefault(piece.node, [])
        assert piece.first == sum(map(len, before))
        parent = int(tree.parent[piece.node])
        if piece.first == 0:
            ends = [j for j, other in enumerate(plan.pieces[:i]) if other.node == parent]
            assert piece.past == (ends[-1] if ends else -1)
        else:
            assert plan.pieces[piece.past].node == piece.node
        before.append(range(piece.first, piece.first + piece.length))
    assert {node: sum(map(len, ranges)) for node, ranges in covered.items()} == dict(enumerate(tree.length.tolist()))
    assert all(0 < sum(plan.pieces[i].length for i in pack) <= size for pack in plan.packs)
    # Tokens of the packs that are held at once: one path, and branches beside it.
    longest, done, held = max(map(len, rows)), set[int](), set[int]()
    for pack in range(len(plan.packs)):
        held.add(pack)
        assert sum(plan.pieces[i].length for j in held for i in plan.packs[j]) <= 1.2 * longest
        for last in sorted(held, reverse=True):
            if plan.readers[last] <= done:
                done.add(last)
                held.remove(last)


# ------------------------------------------------------------------ refused


@pytest.mark.parametrize("why", ["full", "dropout", "compiled", "deterministic"])
def test_a_forward_that_cannot_be_repeated_is_refused(why: str) -> None:
    model: Any = tiny_model(vocab_size=VOCAB, attention_dropout=0.5 if why == "dropout" else 0.0)
    settings: dict[str, Any] = {}
    if why == "dropout":
        model.train()
    if why == "compiled":
        model.model.layers[0].compile(backend="eager")
    if why == "deterministic":
        settings = {"deterministic": True}
    if why == "full":

        class Whole(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = model

            def forward(self, input_ids: Tensor) -> Any:
                return (self.inner(input_ids=input_ids).logits,)

        model = Whole()
    messages = {
        "full": "full forward",
        "dropout": r"eval\(\)",
        "compiled": "is compiled",
        "deterministic": "deterministic",
    }
    with pytest.warns(UserWarning, match="full forward") if why == "full" else torch.no_grad():
        scorer = LogProbScorer(model)
    with pytest.raises(ValueError, match=f"recompute=True is not possible.*{messages[why]}"):
        scorer.score([[1, 2, 3]], grad=True, recompute=True, **settings)
    scorer.score([[1, 2, 3]], recompute=True)  # without a gradient it has no effect
