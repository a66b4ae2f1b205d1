"""Kept tokens found in one sweep and scored alone: beside transformers' warpers and masked softmaxes over whole rows."""

from __future__ import annotations

import math

import pytest
import torch
from test_head_truncation import drawn, recorded, warped
from torch.testing import assert_close

from closeness import assert_near
from head_reference import OPTIONS, PAIR, Sizes, assert_same, at, entropy_of, kl_of, make_head, make_targets, plain
from torchrl_llm_kl.head import Kept, Truncation, _functions, linear_kept, linear_log_prob, linear_pair

SIZES = {"n": 9, "h": 13, "v": 1000}
FEW = [
    Truncation(top_k=1),
    Truncation(top_k=20),
    Truncation(top_p=0.3),
    Truncation(top_p=1e-9),
    Truncation(min_p=0.3),
    Truncation(top_k=40, top_p=0.7, min_p=0.05),
    Truncation(top_p=0.5, min_p=0.2),
]


def big_head(seed=0, **kwargs):
    """Logits of a wide range, so that few tokens hold most of the probability."""
    hidden, weight, bias = make_head(seed, **{**SIZES, **kwargs})
    return [(hidden.detach() * 1.5).requires_grad_(hidden.requires_grad), weight, bias]


def masked(log_p, keep):
    return log_p.masked_fill(~keep, -math.inf).log_softmax(-1)


def as_mask(kept, v):
    found = torch.zeros(len(kept.offsets) - 1, v, dtype=torch.bool)
    found[kept.rows, kept.ids] = True
    return found


# ---------------------------------------------------------------------------------------------------------------------
# the search


@pytest.mark.parametrize("truncation", FEW, ids=str)
def test_the_same_tokens_as_transformers(truncation):
    hidden, weight, bias = big_head()
    expected = warped(plain(hidden, weight, bias, temperature=0.7), truncation).isfinite()
    logits = (hidden @ weight.T + bias) / 0.7
    for chunk in ((4, 64), (9, 1000), (100, 37), (3, 320)):
        kept = linear_kept(hidden, weight, truncation, bias=bias, temperature=0.7, chunk=chunk, most=1000)
        assert torch.equal(as_mask(kept, 1000), expected), chunk
        assert len(kept.ids) == int(expected.sum())
        assert_close(kept.logits, logits[kept.rows, kept.ids])


def test_candidates_are_dropped_on_the_way():
    """More candidates than are held at once, most of them early: rising logits."""
    weight = torch.linspace(-3, 3, 5000, dtype=torch.float64).unsqueeze(1)
    hidden = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    kept = linear_kept(hidden, weight, Truncation(top_k=3), chunk=(2, 64), most=3)
    assert kept.offsets.tolist() == [0, 3, 6]
    assert kept.ids.tolist() == [4999, 4998, 4997, 0, 1, 2]


def test_ties_stay_together():
    weight = torch.tensor([[0.0], [2.0], [1.0], [2.0], [2.0], [0.0]])
    kept = linear_kept(torch.ones(1, 1), weight, Truncation(top_k=2), chunk=(1, 2))
    assert sorted(kept.ids.tolist()) == [1, 3, 4]


def test_targets_are_kept():
    """Probabilities 1/2, 1/8, 1/4, 1/8; by hand."""
    weight = torch.tensor([[4.0], [1.0], [2.0], [1.0]]).log()
    kept = linear_kept(torch.ones(2, 1), weight, Truncation(top_k=2), torch.tensor([3, 2]))
    assert [kept.ids[kept.rows == i].tolist() for i in range(2)] == [[0, 2, 3], [0, 2]]
    assert kept.added.tolist() == [True, False]
    out = linear_log_prob(torch.ones(2, 1), weight, torch.tensor([3, 2]), kept=kept)
    assert_close(out.log_prob.exp(), torch.tensor([1 / 7, 1 / 3]))


def test_too_many_tokens_and_none():
    hidden, weight, _ = make_head(**SIZES)
    assert linear_kept(hidden, weight, Truncation(top_p=1 - 1e-12), chunk=(4, 64)) is None
    assert linear_kept(hidden, weight, Truncation(top_k=900), chunk=(4, 64)) is None
    kept = linear_kept(torch.zeros(0, 3), torch.zeros(5, 3), Truncation(top_k=2))
    assert (len(kept.ids), kept.offsets.tolist()) == (0, [0])
    with pytest.raises(ValueError, match="leaves every token"):
        linear_kept(torch.zeros(1, 3), torch.zeros(5, 3), Truncation())


# ---------------------------------------------------------------------------------------------------------------------
# scores, and what no sweep over all tokens may compute


@pytest.fixture(params=["kept tokens alone", "whole rows"])
def path(request, monkeypatch):
    if request.param == "whole rows":
        monkeypatch.setattr(_functions, "_few", lambda *args: False)
    return request.param


@pytest.mark.parametrize("truncation", FEW, ids=str)
def test_values_and_gradients(truncation, path):
    hidden, weight, bias = big_head(grad=True)
    weights = torch.randn(2, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    log_p = plain(hidden, weight, bias, **OPTIONS)
    targets = drawn(log_p.detach(), truncation)
    kept = linear_kept(hidden, weight, truncation, targets, bias=bias, chunk=(4, 64), most=1000, **OPTIONS)
    assert not kept.added.any()
    expected = masked(log_p, as_mask(kept, 1000))
    out = linear_log_prob(hidden, weight, targets, bias=bias, kept=kept, entropy=True, **OPTIONS)
    assert_same(out, (at(expected, targets), entropy_of(expected)), (hidden, weight, bias), weights)


@pytest.mark.parametrize("ref_kept", [False, True])
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_kl(direction, ref_kept, path):
    truncation = Truncation(20, 0.9)
    policy, ref = big_head(0, grad=True), big_head(1)
    log_p = plain(*policy, **OPTIONS)
    log_q = plain(*ref, temperature=OPTIONS["temperature"], scale=PAIR["ref_scale"], soft_cap=PAIR["ref_soft_cap"])
    targets = drawn(log_p.detach(), truncation)
    kept = linear_kept(policy[0], policy[1], truncation, targets, bias=policy[2], **OPTIONS)
    log_p = masked(log_p, as_mask(kept, 1000))
    log_q = masked(log_q, as_mask(kept, 1000)) if ref_kept else log_q
    arguments = (policy[0], policy[1], ref[0], ref[1], targets)
    options = {"bias": policy[2], "ref_bias": ref[2], "kept": kept, "direction": direction, "ref_kept": ref_kept}
    if direction == "forward" and not ref_kept:
        with pytest.raises(ValueError, match="infinite where the policy is truncated"):
            linear_pair(*arguments, **options, **PAIR)
        return
    found = linear_pair(*arguments, entropy=True, chunk=(4, 64), **options, **PAIR)
    expected = kl_of(log_p, log_q) if direction == "reverse" else kl_of(log_q, log_p)
    assert_same(found[:1], [expected], policy)
    assert_same(found[1:], (at(log_p, targets), at(log_q, targets), entropy_of(log_p)))


def test_gradient_of_a_restricted_reference():
    """It needs whole rows, where the log-probs of both have a gradient without a KL too."""
    policy, ref = big_head(0, grad=True), big_head(1, grad=True)
    truncation = Truncation(top_k=20)
    log_p, log_q = plain(*policy), plain(*ref)
    targets = drawn(log_p.detach(), truncation)
    keep = warped(log_p.detach(), truncation).isfinite()
    options = {"bias": policy[2], "ref_bias": ref[2], "truncation": truncation, "ref_kept": True}
    found = linear_pair(policy[0], policy[1], ref[0], ref[1], targets, chunk=(4, 64), **options)
    want = (at(masked(log_p, keep), targets), at(masked(log_q, keep), targets))
    assert_same((found.log_prob, found.ref_log_prob), want, [*policy, *ref], (1.0, -1.0))


def test_targets_stay_in_whole_rows():
    """``keep_targets``: the target beside the two of 1/2 and 1/4, values and gradient."""
    weight = torch.tensor([[4.0], [1.0], [2.0], [1.0]]).log().requires_grad_()
    options = {"truncation": Truncation(top_k=2), "keep_targets": True, "chunk": (1, 3)}
    out = linear_log_prob(torch.ones(2, 1), weight, torch.tensor([3, 2]), **options)
    assert_close(out.log_prob.exp(), torch.tensor([1 / 7, 1 / 3]))
    (gradient,) = torch.autograd.grad(out.log_prob[0], weight)
    assert_close(gradient, torch.tensor([[-4 / 7], [0.0], [-2 / 7], [6 / 7]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Logits are rounded as the head rounds them; all else is exact to float32, and each gradient is rounded once."""
    hidden, weight, _ = big_head(dtype=dtype, grad=True)
    truncation = Truncation(top_k=30)
    rounded = (hidden @ weight.T).detach().double().log_softmax(-1)
    targets = drawn(rounded, truncation)
    kept = linear_kept(hidden, weight, truncation, targets)
    assert torch.equal(as_mask(kept, 1000), warped(rounded, truncation).isfinite())
    out = linear_log_prob(hidden, weight, targets, kept=kept).log_prob
    assert_close(out.double(), at(masked(rounded, as_mask(kept, 1000)), targets), atol=1e-5, rtol=1e-5)
    replayed = linear_log_prob(hidden, weight, targets, kept=kept._replace(logits=None)).log_prob
    assert_close(replayed, out, atol=0.1, rtol=0.02)  # a logit may round the other way
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    truth = at(masked(plain(*exact), as_mask(kept, 1000)), targets).sum()
    for found, wanted in zip(
        torch.autograd.grad(out.sum(), (hidden, weight)), torch.autograd.grad(truth, exact), strict=True
    ):
        assert found.dtype == dtype
        assert_close(found.double(), wanted, atol=0.05 * float(wanted.abs().max()), rtol=0.05)


def test_recorded_twice_counts_once(path):
    hidden, weight, _ = make_head(n=2, v=50)
    once = Kept(torch.tensor([3, 8, 5]), torch.tensor([0, 2, 3]))
    twice = Kept(torch.tensor([8, 3, 8, 5, 5]), torch.tensor([0, 3, 5]))
    assert_same(
        *(linear_log_prob(hidden, weight, torch.tensor([8, 5]), kept=kept, entropy=True) for kept in (once, twice))
    )
    # A target that was not recorded.
    found = linear_log_prob(hidden, weight, torch.tensor([9, 5]), kept=once).log_prob
    assert found.tolist() == [-math.inf, 0.0]


def test_a_position_without_tokens():
    """Positions that are not read may have no record: they cost nothing and turn nothing into NaN."""
    hidden, weight, _ = make_head(n=2, v=50, grad=True)
    kept = Kept(torch.tensor([3, 8]), torch.tensor([0, 0, 2]))
    out = linear_log_prob(hidden, weight, torch.tensor([9, 8]), kept=kept, entropy=True)
    assert out.log_prob[0] == -math.inf
    gradients = torch.autograd.grad(out.log_prob[1] + out.entropy.sum(), (hidden, weight))
    assert all(g.isfinite().all() for g in gradients)
    assert gradients[0][0].abs().max() == 0


def test_records_that_do_not_fit():
    hidden, weight, _ = make_head(n=1, v=50)
    target, kept = torch.tensor([3]), Kept(torch.tensor([3, 50]), torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="token ids from 3 to 50; expected 0 to 49"):
        linear_log_prob(hidden, weight, target, kept=kept)
    with pytest.raises(ValueError, match="pass one of them"):
        linear_log_prob(hidden, weight, target, truncation=Truncation(2), kept=kept)


def test_no_whole_matrix_of_logits():
    hidden, weight, _ = make_head(n=600, h=4, v=3000, dtype=torch.float32, grad=True)
    targets = make_targets(600, 3000)
    with Sizes() as sizes:
        kept = linear_kept(hidden, weight, Truncation(50, 0.9), targets, chunk=(64, 512))
        linear_log_prob(hidden, weight, targets, kept=kept, chunk=(64, 512)).log_prob.sum().backward()
    assert sizes.largest <= max(64 * 512, 64 * 4 * 50, 600 * 51)


def test_record_of_a_sampler():
    """A record has no logits: they are computed at the recorded tokens alone."""
    hidden, weight, bias = big_head(dtype=torch.float32)
    log_p = plain(hidden, weight, bias, **OPTIONS)
    sampler = warped(log_p, Truncation(top_p=0.4))
    targets = sampler.exp().multinomial(1, generator=torch.Generator().manual_seed(0)).squeeze(1)
    out = linear_log_prob(hidden, weight, targets, bias=bias, kept=recorded(sampler), **OPTIONS).log_prob
    assert_near(out, at(sampler, targets), terms=SIZES["h"], size=8)
