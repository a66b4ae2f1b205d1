"""Truncated sampling over whole rows, and over kept tokens found in one sweep, compared with transformers' warpers."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import head_reference as reference
from head_reference import OPTIONS, PAIR, REF_OPTIONS, V, assert_same, at, entropy_of, make_head, pair, pair_of, plain
from torchrl_llm_kl.head import Kept, Truncation, _functions, _kept, linear_kept, linear_log_prob
from torchrl_llm_kl.head._tiles import floor_of


def warped(log_p, truncation):
    """All log-probs after transformers' warpers, in its order. Excluded tokens have ``-inf``."""
    warpers = (TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
    for warper, value, off in zip(warpers, truncation, Truncation(), strict=True):
        log_p = log_p if value == off else warper(value)(None, log_p)
    return log_p.log_softmax(-1)


def drawn(log_p, truncation, seed=0):
    """Tokens that the truncated sampler draws."""
    rng = torch.Generator().manual_seed(seed)
    return warped(log_p.detach(), truncation).exp().multinomial(1, generator=rng).squeeze(1)


def recorded(log_p):
    """The tokens of finite log-prob, as a sampler records them."""
    rows = [row.isfinite().nonzero().squeeze(1) for row in log_p]
    return Kept(torch.cat(rows), torch.tensor([0, *(len(row) for row in rows)]).cumsum(0))


# ---------------------------------------------------------------------- whole rows
def test_by_hand():
    """Probabilities 1/2, 1/4, 1/8, 1/8: the top two of them are 2/3 and 1/3."""
    weight = torch.tensor([[4.0], [2.0], [1.0], [1.0]]).log().requires_grad_()
    one, targets = torch.ones(3, 1), torch.tensor([0, 1, 2])
    for truncation in (Truncation(top_k=2), Truncation(top_p=0.7), Truncation(min_p=0.4)):
        out = linear_log_prob(one, weight, targets, truncation=truncation, entropy=True)
        assert_close(out.log_prob, torch.tensor([math.log(2 / 3), math.log(1 / 3), -math.inf]))
        assert_close(out.entropy, torch.full((3,), math.log(3) - 2 / 3 * math.log(2)))
        (gradient,) = torch.autograd.grad(out.log_prob[0], weight)
        assert_close(gradient, torch.tensor([[1 / 3], [-1 / 3], [0.0], [0.0]]))  # nothing flows to the others
    # Ties stay together, as in transformers' top-k: a third equal token would be as probable as the second.
    weight = torch.tensor([[4.0], [2.0], [2.0], [1.0]]).log()
    for truncation in (Truncation(top_k=2), Truncation(top_k=2, top_p=0.6)):  # the share of all three counts
        out = linear_log_prob(torch.ones(1, 1), weight, torch.tensor([2]), truncation=truncation)
        assert_close(out.log_prob.exp(), torch.tensor([0.25]))
    weight = torch.tensor([[4.0, 4.0, 1.0]]).T.log()
    kept = linear_kept(torch.ones(1, 1), weight, Truncation(min_p=1.0), torch.tensor([0]))
    assert kept.ids.tolist() == [0, 1]
    # ``keep_targets``: the target beside the two of 1/2 and 1/4, values and gradient; targets of kept tokens are kept too.
    weight = torch.tensor([[4.0], [1.0], [2.0], [1.0]]).log().requires_grad_()
    two, targets = torch.ones(2, 1), torch.tensor([3, 2])
    kept = linear_kept(two, weight, Truncation(top_k=2), targets)
    assert [kept.ids[kept.rows == i].tolist() for i in range(2)] == [[0, 2, 3], [0, 2]]
    assert kept.added.tolist() == [True, False]
    for options in ({"truncation": Truncation(top_k=2), "keep_targets": True, "chunk": (1, 3)}, {"kept": kept}):
        out = linear_log_prob(two, weight, targets, **options)
        assert_close(out.log_prob.exp(), torch.tensor([1 / 7, 1 / 3]))
        (gradient,) = torch.autograd.grad(out.log_prob[0], weight)
        assert_close(gradient, torch.tensor([[-4 / 7], [0.0], [-2 / 7], [6 / 7]]))


@pytest.fixture(params=["kept tokens alone", "whole rows"])
def path(request, monkeypatch):
    if request.param == "whole rows":
        monkeypatch.setattr(_functions, "_few", lambda *args: False)
    return request.param


TRUNCATIONS = [Truncation(top_k=1), Truncation(top_k=5), Truncation(top_k=V), Truncation(top_k=10 * V)]
TRUNCATIONS += [Truncation(top_p=0.8), Truncation(top_p=1e-9), Truncation(top_p=1 - 1e-7), Truncation(7, 0.5)]
TRUNCATIONS += [Truncation(min_p=0.1), Truncation(min_p=1.0), Truncation(40, 0.9, 0.02)]


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_values_and_gradients(truncation, path):
    inputs = hidden, weight, bias = make_head(grad=True)
    weights = torch.randn(2, reference.N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    log_p = plain(hidden, weight, bias, **OPTIONS)
    expected, targets = warped(log_p, truncation), drawn(log_p, truncation)
    wanted = (at(expected, targets), entropy_of(expected))
    found = linear_kept(hidden, weight, truncation, targets, bias=bias, most=V, **OPTIONS)
    assert not found.added.any()
    for given_as in ({"truncation": truncation}, {"kept": recorded(expected.detach())}, {"kept": found}):
        for chunk in ((2, 7), (4, 1000)):
            options = {"bias": bias, "entropy": True, "chunk": chunk, **OPTIONS, **given_as}
            assert_same(linear_log_prob(hidden, weight, targets, **options), wanted, inputs, weights)


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.lists(st.floats(-30, 10, width=32), min_size=6, max_size=6), min_size=1, max_size=4),
    truncation=st.builds(Truncation, st.integers(0, 8), st.floats(0.01, 1), st.floats(0, 1)),
)
def test_the_same_tokens_as_transformers(logits, truncation):
    """Except for ties within rounding, which a sort breaks by chance."""
    scores = torch.tensor(logits, dtype=torch.float64)
    scores = scores[(scores.sort(-1).values.diff(dim=-1) > 1e-6).all(-1)]
    if len(scores):
        kept = scores >= floor_of(scores, truncation).unsqueeze(-1)
        borders = scores.softmax(-1).sort(-1, descending=True).values.cumsum(-1) - truncation.top_p
        if truncation.top_k == 0 and borders.abs().min() > 1e-9:
            assert torch.equal(kept, warped(scores, truncation).isfinite())
        assert kept.any(-1).all()


def test_a_total_that_rounding_leaves_below_top_p():
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(0))
    assert (logits >= floor_of(logits, Truncation(top_p=1 - 1e-9)).unsqueeze(1)).all()


def test_backward_with_other_rounding():
    """Tiles of other shapes round logits differently. A token at the bound must stay on its side."""
    hidden, weight, _ = make_head(n=64, h=256, v=1000, dtype=torch.float32, grad=True)
    targets = drawn(plain(hidden, weight), Truncation(top_k=30))
    out = linear_log_prob(hidden, weight, targets, truncation=Truncation(top_k=30), chunk=(16, 37)).log_prob
    found = torch.autograd.grad(out.sum(), (hidden, weight))
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = at(warped(plain(*exact), Truncation(top_k=30)), targets)
    wanted = torch.autograd.grad(expected.sum(), exact)
    assert_close(tuple(gradient.double() for gradient in found), wanted, atol=1e-4, rtol=1e-5)


# ---------------------------------------------------------------------- kept tokens: the search
SIZES = {"n": 9, "h": 13, "v": 1000}
FEW = [Truncation(top_k=1), Truncation(top_k=20), Truncation(top_p=0.3), Truncation(top_p=1e-9), Truncation(min_p=0.3)]
FEW += [Truncation(40, 0.7, 0.05), Truncation(top_p=0.5, min_p=0.2)]


def big_head(seed=0, **options):
    """Logits of a wide range, so that few tokens hold most of the probability."""
    hidden, weight, bias = make_head(seed, **SIZES, **options)
    return [(hidden.detach() * 1.5).requires_grad_(hidden.requires_grad), weight, bias]


def masked(log_p, keep):
    return log_p.masked_fill(~keep, -math.inf).log_softmax(-1)


def as_mask(kept, v=1000):
    found = torch.zeros(len(kept.offsets) - 1, v, dtype=torch.bool)
    found[kept.rows, kept.ids] = True
    return found


@pytest.mark.parametrize("guessing", [False, True])
@pytest.mark.parametrize("truncation", FEW, ids=str)
def test_the_tokens_that_are_found_are_those_of_transformers(truncation, guessing, monkeypatch):
    monkeypatch.setattr(_kept, "_FIRST_LOOK", (16, 0 if guessing else 10**6))
    hidden, weight, bias = big_head()
    expected = warped(plain(hidden, weight, bias, temperature=0.7), truncation).isfinite()
    logits = (hidden @ weight.T + bias) / 0.7
    for chunk in ((4, 64), (9, 1000), (100, 37), (3, 320)):
        kept = linear_kept(hidden, weight, truncation, bias=bias, temperature=0.7, chunk=chunk, most=1000)
        assert torch.equal(as_mask(kept), expected), chunk
        assert len(kept.ids) == int(expected.sum())
        assert_close(kept.logits, logits[kept.rows, kept.ids])


@pytest.mark.parametrize("impossible", [0, 300])
@pytest.mark.parametrize("shift", [0, 2000])
def test_positions_with_a_wrong_guess_of_top_p_are_searched_again(impossible, shift, monkeypatch):
    searched_again = []
    replace = _kept._Candidates.replace
    monkeypatch.setattr(_kept, "_FIRST_LOOK", (16, 0))
    monkeypatch.setattr(
        _kept._Candidates,
        "replace",
        lambda self, at, other: searched_again.append(at.tolist()) or replace(self, at, other),
    )
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 3000, generator=generator, dtype=torch.float64)
    # Half of the probability has two tokens, half those after 1500: too unlikely, each, to be kept if only the two are seen.
    logits[2, :1500] -= 50.0
    logits[2, 300:302] = logits[2].logsumexp(-1) - math.log(2) + torch.tensor([0.0, 0.1])
    logits[:2] *= torch.tensor([[4.0], [1.0]])
    logits = logits.roll(shift, 1)
    bias = torch.zeros(3000, dtype=torch.float64)
    bias[:impossible] = -math.inf
    hidden, weight = torch.eye(3, dtype=torch.float64), logits.T.contiguous()
    expected = warped((logits + bias).log_softmax(-1), Truncation(top_p=0.9)).isfinite()
    kept = linear_kept(hidden, weight, Truncation(top_p=0.9), bias=bias, chunk=(3, 64), most=3000)
    assert torch.equal(as_mask(kept, 3000), expected)
    assert searched_again == ([[2]] if shift == 0 else [])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_no_token_is_kept_after_a_logit_that_is_not_finite(bad):
    """The score is NaN then, and the scorer's own check raises the error."""
    bias = torch.zeros(1000)
    bias[800] = bad
    kept = linear_kept(
        torch.ones(2, 1), torch.arange(1000.0)[:, None] / 100, Truncation(top_p=0.5), bias=bias, chunk=(2, 64)
    )
    assert kept.offsets.tolist() == [0, 0, 0]


def test_ties_too_many_kept_tokens_and_no_positions():
    weight = torch.tensor([[0.0], [2.0], [1.0], [2.0], [2.0], [0.0]])
    kept = linear_kept(torch.ones(1, 1), weight, Truncation(top_k=2), chunk=(1, 2))
    assert sorted(kept.ids.tolist()) == [1, 3, 4]
    hidden, weight, _ = make_head(**SIZES)
    for truncation in (Truncation(top_p=1 - 1e-12), Truncation(top_k=900)):
        assert linear_kept(hidden, weight, truncation, chunk=(4, 64)) is None
    kept = linear_kept(torch.zeros(0, 3), torch.zeros(5, 3), Truncation(top_k=2))
    assert (len(kept.ids), kept.offsets.tolist()) == (0, [0])


# ---------------------------------------------------------------------- kept tokens: scores
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("direction", "ref_kept"), [("reverse", False), ("reverse", True), ("forward", True)])
def test_kl(direction, ref_kept, whole):
    """A gradient to the reference needs whole rows."""
    truncation = Truncation(20, 0.9)
    policy, ref = big_head(0, grad=True), big_head(1, grad=whole)
    log_p, log_q = plain(*policy, **OPTIONS), plain(*ref, **REF_OPTIONS)
    targets = drawn(log_p, truncation)
    kept = linear_kept(policy[0], policy[1], truncation, targets, bias=policy[2], **OPTIONS)
    log_p, log_q = masked(log_p, as_mask(kept)), masked(log_q, as_mask(kept)) if ref_kept else log_q
    options = {"direction": direction, "ref_kept": ref_kept, **PAIR}
    want = pair_of(log_p, log_q, targets, direction=direction)
    for given_as in ({"kept": kept}, {"truncation": truncation}) if whole else ({"kept": kept},):
        found = pair(policy, ref, targets, entropy=True, chunk=(4, 64), **options, **given_as)
        assert_same(found[:1], want[:1], [*policy, *ref] if whole else policy)
        assert_same(found[1:], want[1:])
        if whole:  # the log-probs of both have a gradient without a KL too
            assert_same(found[1:3], want[1:3], [*policy, *ref], (1.0, -1.0))
    with pytest.raises(ValueError, match="infinite where only the policy is truncated"):
        pair(policy, ref, targets, kept=kept, **{**options, "direction": "forward", "ref_kept": False})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Logits have the head's rounding. Everything else is exact to float32, and each gradient is rounded once."""
    hidden, weight, _ = big_head(dtype=dtype, grad=True)
    truncation = Truncation(top_k=30)
    rounded = (hidden @ weight.T).detach().double().log_softmax(-1)
    targets = drawn(rounded, truncation)
    kept = linear_kept(hidden, weight, truncation, targets)
    keep = as_mask(kept)
    assert torch.equal(keep, warped(rounded, truncation).isfinite())
    out = linear_log_prob(hidden, weight, targets, kept=kept).log_prob
    assert_close(out.double(), at(masked(rounded, keep), targets), atol=1e-5, rtol=1e-5)
    replayed = linear_log_prob(hidden, weight, targets, kept=kept._replace(logits=None)).log_prob
    assert_close(replayed, out, atol=0.1, rtol=0.02)  # a logit may round the other way
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    wanted = torch.autograd.grad(at(masked(plain(*exact), keep), targets).sum(), exact)
    for found, want in zip(torch.autograd.grad(out.sum(), (hidden, weight)), wanted, strict=True):
        assert found.dtype == dtype
        assert_close(found.double(), want, atol=0.05 * float(want.abs().max()), rtol=0.05)


def test_unusual_records(path):
    hidden, weight, _ = make_head(n=2, v=50, grad=True)
    # Recorded twice counts once; a target that was not recorded has no probability.
    once = Kept(torch.tensor([3, 8, 5]), torch.tensor([0, 2, 3]))
    twice = Kept(torch.tensor([8, 3, 8, 5, 5]), torch.tensor([0, 3, 5]))
    found = [linear_log_prob(hidden, weight, torch.tensor([8, 5]), kept=kept, entropy=True) for kept in (once, twice)]
    assert_same(*found)
    found = linear_log_prob(hidden, weight, torch.tensor([9, 5]), kept=once).log_prob
    assert found.tolist() == [-math.inf, 0.0]
    # A recorded token that both models rule out adds nothing to the KL.
    bias = torch.zeros(50, dtype=torch.float64).index_fill(0, torch.tensor([8]), -math.inf)
    heads = (hidden, weight, bias), (hidden.detach(), 2 * weight.detach(), bias)
    assert pair(*heads, kept=once, ref_kept=True).kl.tolist() == [0.0, 0.0]
    # Positions that are not read may have no record: they cost nothing and turn nothing into NaN.
    if path == "kept tokens alone":
        kept = Kept(torch.tensor([3, 8]), torch.tensor([0, 0, 2]))
        out = linear_log_prob(hidden, weight, torch.tensor([9, 8]), kept=kept, entropy=True)
        assert out.log_prob[0] == -math.inf
        gradients = torch.autograd.grad(out.log_prob[1] + out.entropy.sum(), (hidden, weight))
        assert all(g.isfinite().all() for g in gradients)
        assert gradients[0][0].abs().max() == 0


@pytest.mark.parametrize("wrong", [{"top_k": -1}, {"top_p": 1.5}, {"top_p": math.nan}, {"min_p": 2.0}], ids=str)
def test_a_truncation_out_of_range(wrong: dict[str, float]) -> None:
    hidden, weight, targets = torch.randn(2, 4), torch.randn(5, 4), torch.tensor([1, 3])
    with pytest.raises(ValueError, match=r"expected top_k of at least 0, top_p in \(0, 1\]"):
        linear_log_prob(hidden, weight, targets, truncation=Truncation(**wrong))
