"""``deterministic=True``: the scores of a sequence have the same bits in every pack, or the model is refused."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from checkpointed import enable
from closeness import assert_near, needs_equal_rows
from layouts import tokens
from scoring_reference import plain_log_probs, random_sequences
from torchrl_llm_kl import LogProbScorer, PolicyLoss, Ragged, RetrieveKL, ScoreOptions, make_algorithm
from torchrl_llm_kl.scoring import _attention, _invariant, _packs, _passes, _probe, _scorer
from torchrl_llm_kl.scoring._attention import PackLayout, PackPiece
from torchrl_llm_kl.scoring._scores import HeadReading, Scores
from toy_models import FORWARD, VOCAB_SIZE, altered, tiny_model, with_lora

pytestmark = needs_equal_rows
# Wide enough that products of different numbers of rows are summed in different orders.
WIDE = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 1500, "max_position_embeddings": 1024}
LENGTHS = (150, 3, 67, 262)
ROW = [[3, 4, 5]]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model(**WIDE, initializer_range=0.1)


@pytest.fixture(scope="module")
def other() -> nn.Module:
    return tiny_model(**WIDE, initializer_range=0.1, seed=1)


@pytest.fixture(scope="module")
def fixed(model: nn.Module) -> LogProbScorer:
    return LogProbScorer(model, deterministic=True)


def rows_of(*lengths: int, seed: int = 0) -> list[Tensor]:
    return random_sequences(*lengths, seed=seed, vocab=WIDE["vocab_size"]).to_list()


def packs(mine: list[Tensor], number: int, vocab: int) -> Iterator[tuple[list[Tensor], list[int], list[Tensor]]]:
    """Yield random packs that contain the same rows, with their places and masks.

    The other sequences share prefixes with them, are copies of them, or continue them.
    """
    rng = torch.Generator().manual_seed(0)

    def below(n: int) -> int:
        return int(torch.randint(n, (1,), generator=rng))

    for i in range(number):
        rows = list(mine)
        for _ in range(below(7)):
            start = mine[below(len(mine))]
            start = start[: below(len(start) + 1)]  # nothing, a part, or all
            rows.append(torch.cat([start, torch.randint(vocab, (2 + below(200),), generator=rng)])[:202])
        order = torch.randperm(len(rows), generator=rng).tolist()
        places = [order.index(i) for i in range(len(mine))]
        rows = [rows[i] for i in order]
        masks = [torch.rand(len(row), generator=rng) < (0.5 if i % 3 else 1.0) for row in rows]
        for place, mask in enumerate(masks):
            mask[:] |= place in places
            mask[0] = False
        yield rows, places, masks


def bits(scores: Scores, index: int) -> list[Tensor]:
    return [each.to_list()[index].detach() for each in scores.per_token.values()]


def differing(scorer: LogProbScorer, mine: list[Tensor], number: int, vocab: int = VOCAB_SIZE, **options: Any) -> int:
    """The number of packs in which the scores of a row have different bits than without other sequences."""
    alone = [bits(scorer.evaluate([row], **options), 0) for row in mine]
    count = 0
    for i, (rows, places, masks) in enumerate(packs(mine, number, vocab)):
        scores = scorer.evaluate(rows, masks, grad=i % 5 == 0 and scorer.options.adapters is True, **options)
        for want, place in zip(alone, places, strict=True):
            count += not all(torch.equal(a, b) for a, b in zip(bits(scores, place), want, strict=True))
    return count


@pytest.mark.parametrize("number", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_scores_have_equal_bits_in_random_packs(fixed, other, number):
    rows, vocab = rows_of(*LENGTHS), WIDE["vocab_size"]
    options: dict[str, Any] = {"entropy": True, "top_k": 3, "moments": True}
    assert differing(fixed, rows, number, vocab, reference=LogProbScorer(other, deterministic=True), **options) == 0
    assert differing(LogProbScorer(fixed.model), rows, 2, vocab) > 0, "the data would not show a difference"


def long(family: str = "qwen2") -> nn.Module:
    return tiny_model(family, max_position_embeddings=256)


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        *((partial(long, family), {"temperature": 0.7}) for family in ("mistral", "gemma2", "gpt2", "opt", "cohere")),
        (lambda: altered("qwen2", lambda m: m.lm_head.register_forward_hook(lambda _, __, out: out + 0), **WIDE), {}),
        (lambda: with_lora(long()), {}),
        (lambda: with_lora(long()), {"adapters": False}),
    ],
)
def test_equal_bits_with_windows_soft_caps_other_heads_and_adapters(build: Any, settings: dict[str, Any]) -> None:
    rows = random_sequences(90, 3, 140).to_list()
    scorer = LogProbScorer(build(), deterministic=True, **settings)
    assert scorer.path == "head"
    assert differing(scorer, rows, 4, entropy=True) == 0
    plain = scorer.model if scorer.options.adapters is True else long()
    want = plain_log_probs(plain, Ragged.from_list(rows), temperature=scorer.options.temperature)
    assert_near(scorer.score(rows).values, want, **FORWARD)
    if scorer.options.adapters is not True:
        assert torch.equal(scorer.score(rows).values, LogProbScorer(plain, deterministic=True).score(rows).values)


def test_scores_with_gradient_have_equal_bits(model: nn.Module, fixed: LogProbScorer) -> None:
    rows = rows_of(*LENGTHS)
    rows.append(torch.cat([rows[0][:100], rows[2]]))
    weights = torch.randn(sum(map(len, rows)), generator=torch.Generator().manual_seed(0))
    gradients = []
    for scorer in (LogProbScorer(model), fixed):
        found = scorer.score(rows, grad=True).values
        gradients.append(torch.autograd.grad((found * weights).sum(), list(model.parameters())))
    assert torch.equal(found.detach(), scorer.score(rows).values)
    for want, gradient in zip(*gradients, strict=True):
        assert_close(gradient, want, atol=1e-4 * float(want.abs().max()), rtol=1e-3)


def test_checkpointed_layers_keep_the_bits() -> None:
    model = long()
    scorer, rows = LogProbScorer(model, deterministic=True), random_sequences(100, 130, 20).to_list()
    weights = [model.lm_head.weight, *model.model.layers.parameters()]
    want = scorer.score(rows, grad=True).values
    gradients = torch.autograd.grad(want.sum(), weights)
    enable(model)
    model.train()
    found = scorer.score(rows, grad=True).values
    assert torch.equal(found, want)
    again = torch.autograd.grad(found.sum(), weights)
    assert all(torch.equal(a, b) for a, b in zip(again, gradients, strict=True))


def test_cached_keys_and_values_give_the_same_bits(model: nn.Module) -> None:
    scorer = LogProbScorer(model, deterministic=True)
    full = rows_of(400, 333)
    want = [scorer.score([row]).values for row in full]
    for turn in (37, 230, 333):  # the env's conversations grow, in changing company
        company = rows_of(50 + turn // 2, seed=turn)
        found = scorer.score([*company, *(row[:turn] for row in full)], remember=True).to_list()[1:]
        for part, whole in zip(found, want, strict=True):
            assert torch.equal(part, whole[:turn])
    assert scorer.memory.tokens_recalled > 2 * 230
    mask = [torch.arange(len(row)) >= 333 for row in full]  # only new tokens: all others are cached
    assert torch.equal(scorer.score(full, mask, remember=True).to_list()[0][333:], want[0][333:])


def test_attention_in_blocks_equals_the_normal_attention() -> None:
    """With prefixes inside and outside the pack, a window, soft-caps, sinks and grouped heads."""
    rng = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    query, key, value = random(1, 4, 150, 8), random(1, 2, 150, 8), random(1, 2, 150, 8)
    outside = [[(random(1, 2, n, 8), random(1, 2, n, 8))] for n in (70, 31)]
    places = [(0, 70, -1, []), (70, 72, 0, []), (72, 149, -1, outside), (149, 150, 1, [])]
    module: Any = nn.Module()
    for extra in ({}, {"sliding_window": 40}, {"softcap": 2.0}, {"s_aux": random(4), "sliding_window": 90}):
        found = []
        for attend in (None, _invariant.attend):
            pieces = [PackPiece(*place) for place in places]
            _attention._ACTIVE.layout = PackLayout(pieces, attend=attend, saving=_attention.saving())
            try:
                found.append(_attention._attention(module, query, key, value, scaling=0.3, **extra)[0])
            finally:
                _attention._ACTIVE.layout = None
        assert_close(found[1], found[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("build", "options", "reason"),
    [
        (tiny_model, {"dtype": torch.bfloat16}, "Qwen2ForCausalLM computes in torch.bfloat16"),
        (tiny_model, {"share_prefixes": False}, "scored in padded batches: leave out share_prefixes=False"),
        (tiny_model, {"tokens_per_batch": 100}, "Expected a multiple of 64, got 100"),
        (partial(tiny_model, "mixtral"), {}, "on sizes that depend on the tokens, as in a mixture of experts"),
        (lambda: altered("qwen2", lambda m: m.model.layers[0].mlp.compile(backend="eager")), {}, "has compiled layers"),
    ],
)
def test_unsuitable_models_are_refused_with_the_reason(build: Any, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        LogProbScorer(build(), deterministic=True, **options)


def test_changed_settings_are_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, calls = LogProbScorer(tiny_model(), deterministic=True), []
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"computes in torch\.bfloat16"):
        scorer.score(ROW)
    # A change of threads is checked again.
    monkeypatch.setattr(_scorer, "find_variance", lambda *_: calls.append(1) or "computes other bits")
    scorer.score(ROW)
    assert not calls
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(ValueError, match="Qwen2ForCausalLM computes other bits"):
            scorer.score(ROW)
    finally:
        torch.set_num_threads(threads)


def _in_pieces(layout: PackLayout, past: Any, inputs: Any) -> Tensor:
    """The normal attention, piece by piece. The padding is a separate piece."""
    pieces, end = [*layout.pieces], layout.pieces[-1].last
    length = inputs.query.shape[2]
    if end < length:
        pieces.append(PackPiece(end, length, -1, []))
    return _attention._attend(replace(layout, pieces=pieces, kept=[], shared={}, attend=None), past, inputs)


def _read_anyhow(*args: Any, tile: Any = None) -> HeadReading:
    return HeadReading(*args)


@pytest.mark.parametrize(
    ("module", "name", "broken"),
    [(_packs, "pad_pack", lambda row, _: row), (_packs, "attend", _in_pieces), (_probe, "HeadReading", _read_anyhow)],
    ids=["packs", "attention", "head"],
)
def test_the_check_finds_different_bits(module, name, broken, model, monkeypatch):
    """If one of the three parts is broken, scores vary, and the check of the model raises an error."""
    monkeypatch.setattr(module, name, broken)
    with pytest.raises(ValueError, match="other bits for a sequence in a pack, with differences up to"):
        LogProbScorer(model, deterministic=True)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("opt", {"dropout": 0.3}),  # by functions, without a module
        ("opt", {"layerdrop": 0.5}),  # whole layers
        ("gpt2", {"resid_pdrop": 0.1}),
        ("qwen2", {"attention_dropout": 0.1}),
    ],
)
def test_dropout_with_gradient(family: str, config: dict[str, Any]) -> None:
    scorer = LogProbScorer(tiny_model(family, **config).train(), deterministic=True)
    scorer.score(ROW)  # in evaluation mode
    with pytest.raises(ValueError, match=r"drops activations at random: call its eval\(\)"):
        scorer.score(ROW, grad=True)


def test_out_of_memory_keeps_the_budget_and_a_kl_needs_equal_settings(fixed, other, monkeypatch):
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    for reference in (LogProbScorer(other), LogProbScorer(other, deterministic=True, tokens_per_batch=128)):
        with pytest.raises(ValueError, match="their KL would include rounding"):
            fixed.evaluate(ROW, reference=reference)
    default = LogProbScorer(fixed.model, deterministic=True, tokens_per_batch=256)
    assert not fixed.evaluate(ROW, reference=default).kl.values.any()
    monkeypatch.setattr(_passes.ScoringRun, "_attempt", fail)
    with pytest.raises(torch.OutOfMemoryError):
        fixed.score(ROW)
    assert fixed.tokens_per_batch is None


def test_settings_reach_every_scorer(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the KL of a copy is exactly 0, since both models' log-probs have the same bits."""
    monkeypatch.setattr(_scorer, "find_variance", lambda *_: None)
    kl = RetrieveKL(model, copy.deepcopy(model), estimator="exact", options=ScoreOptions(deterministic=True))
    assert [kl[0].scorer.options.deterministic, kl[1].scorer.options.deterministic] == [True] * 2
    rows = rows_of(9, 40)
    data = tokens("padded", [row[:3].tolist() for row in rows], [row[3:].tolist() for row in rows])
    assert not kl(data)["kl_penalty"].any()
    with pytest.raises(ValueError, match=r"own settings: set options"):
        PolicyLoss(LogProbScorer(model), "ppo", options=ScoreOptions(deterministic=True))
    options = {"reference": LogProbScorer(model), "group_size": 2, "options": ScoreOptions(deterministic=True)}
    with pytest.raises(ValueError, match=r"is a scorer with deterministic=False, the actor has True"):
        make_algorithm("grpo", copy.deepcopy(model), **options)
