"""Rejection and metrics of a sampler that differs from the trainer: by hand, in a loss, and as verl has them."""

from __future__ import annotations

import itertools
import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from peers import sampled, verl
from policy_batches import batch
from torchrl_llm_kl.losses import (
    Divergence,
    ImportanceWeights,
    KLToReference,
    PolicyLoss,
    RejectionMask,
    apply_correction,
    importance_weights,
    mismatch_metrics,
    ppo,
    rejection_mask,
    rollout_corrections,
)
from toy_models import tiny_model

NAN, INF = float("nan"), float("inf")
DIVERGENCES = get_args(Divergence)


def f64(rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# Trainer over sampler: 2, 1/4, 1 | 1, 1/2 | 4. Masked out: anything.
D = f64([[2.0, 0.25, 1.0], [1.0, 0.5, 1.0], [4.0, 1.0, 1.0]]).log()
MASK = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
SAMPLER = f64([[-3.0, -0.5, -1.0], [-1.0, -2.0, NAN], [-2.0, -INF, 3.0]])
OLD = torch.where(MASK, SAMPLER + D, f64(7.0))
LN2 = math.log(2)


@pytest.mark.parametrize(
    ("divergence", "bounds", "kept"),
    [
        # k1 of tokens in units of ln 2: -1, 2, 0 | 0, 1 | -2
        ("token_k1", {"low": -1.5 * LN2, "high": 1.5 * LN2}, [[1, 0, 1], [1, 1, 0], [0, 0, 0]]),
        ("token_k1", {"low": -0.5 * LN2}, [[0, 1, 1], [1, 1, 0], [0, 0, 0]]),
        ("token_k1", {"high": 0.5 * LN2}, [[1, 0, 1], [1, 0, 0], [1, 0, 0]]),
        # halves of squares: .24, .96, 0 | 0, .24 | .96
        ("token_k2", {"high": 0.5}, [[1, 0, 1], [1, 1, 0], [0, 0, 0]]),
        # r - 1 - ln r: .307, .636, 0 | 0, .193 | 1.614
        ("token_k3", {"high": 0.7}, [[1, 1, 1], [1, 1, 0], [0, 0, 0]]),
        ("token_k3", {"high": 0.25}, [[0, 0, 1], [1, 1, 0], [0, 0, 0]]),
        # sums: 1 | 1 | -2; 1.2 | .24 | .96; .943 | .193 | 1.614
        ("seq_sum_k1", {"low": -1.5 * LN2, "high": 1.5 * LN2}, [[1, 1, 1], [1, 1, 0], [0, 0, 0]]),
        ("seq_sum_k1", {"high": 0.5 * LN2}, [[0, 0, 0], [0, 0, 0], [1, 0, 0]]),
        ("seq_sum_k2", {"high": 1.0}, [[0, 0, 0], [1, 1, 0], [1, 0, 0]]),
        ("seq_sum_k3", {"high": 0.9}, [[0, 0, 0], [1, 1, 0], [0, 0, 0]]),
        # means: 1/3 | 1/2 | -2; .4 | .12 | .96; .314 | .097 | 1.614
        ("seq_mean_k1", {"low": -1.5 * LN2, "high": 0.4 * LN2}, [[1, 1, 1], [0, 0, 0], [0, 0, 0]]),
        ("seq_mean_k2", {"high": 0.3}, [[0, 0, 0], [1, 1, 0], [0, 0, 0]]),
        ("seq_mean_k3", {"high": 0.35}, [[1, 1, 1], [1, 1, 0], [0, 0, 0]]),
        ("seq_max_k1", {"low": -1.5 * LN2}, [[1, 1, 1], [1, 1, 0], [0, 0, 0]]),
        ("seq_max_k1", {"high": 1.5 * LN2}, [[0, 0, 0], [1, 1, 0], [1, 0, 0]]),
        ("seq_max_k2", {"high": 0.9}, [[0, 0, 0], [1, 1, 0], [0, 0, 0]]),
        ("seq_max_k3", {"high": 0.7}, [[1, 1, 1], [1, 1, 0], [0, 0, 0]]),
    ],
)
@pytest.mark.parametrize("as_tensors", [False, True])
def test_rejection_by_hand(divergence: str, bounds: dict[str, Any], kept: list[list[int]], as_tensors: bool) -> None:
    given = {name: f64(value) for name, value in bounds.items()} if as_tensors else bounds
    weights, metrics = rejection_mask(OLD.clone().requires_grad_(), SAMPLER, MASK, divergence=divergence, **given)
    assert weights.tolist() == kept
    assert not weights.requires_grad
    assert set(metrics) == {f"{divergence}_masked_fraction", f"{divergence}_seq_masked_fraction"}
    assert metrics[f"{divergence}_masked_fraction"].item() == pytest.approx(1 - sum(map(sum, kept)) / 6)
    whole = sum(sum(row) == int(mask.sum()) for row, mask in zip(kept, MASK, strict=True))
    assert metrics[f"{divergence}_seq_masked_fraction"].item() == pytest.approx(1 - whole / 3)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_bounds_are_part_of_what_is_kept_and_agreement_is_never_rejected(divergence: str) -> None:
    same, mask = f64([[-1.0, -2.0]]), torch.ones(1, 2, dtype=torch.bool)
    tiny = {"high": 1e-9} | ({"low": -1e-9} if divergence.endswith("k1") else {})
    assert rejection_mask(same, same, mask, divergence=divergence, **tiny)[0].tolist() == [[1, 1]]
    if divergence.endswith("k1"):
        assert rejection_mask(same, same, mask, divergence=divergence, low=0.0, high=0.0)[0].tolist() == [[1, 1]]


def test_masked_out_tokens_reject_nothing() -> None:
    """A bound that is a tensor is not read: it may exclude 0, the value of masked-out tokens."""
    weights, metrics = rejection_mask(
        f64([[-1.5, -1.0]]), f64([[-1.0, -1.0]]), torch.tensor([[True, False]]), divergence="seq_max_k1", low=f64(0.1)
    )
    assert weights.tolist() == [[1, 0]]
    assert metrics["seq_max_k1_seq_masked_fraction"] == 0


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_rejection_of_anything(divergence: str) -> None:
    """Not scored is not rejected; impossible in one of the two is; no token, no metric."""
    low = {"low": -3.0} if divergence.endswith("k1") else {}
    mask = torch.ones(1, 1, dtype=torch.bool)
    for old, sampler, kept in ((-1.0, NAN, 1), (-INF, -INF, 1), (-INF, -1.0, 0), (-1.0, -INF, 0), (-200.0, -1.0, 0)):
        weights, metrics = rejection_mask(f64([[old]]), f64([[sampler]]), mask, divergence=divergence, high=3.0, **low)
        assert weights.tolist() == [[kept]], (old, sampler)
        assert all(metric == 1 - kept for metric in metrics.values())
    for shape in ((2, 3), (0, 3), (2, 0)):
        nothing = torch.zeros(shape, dtype=torch.bool)
        weights, metrics = rejection_mask(
            torch.zeros(shape).bfloat16(), torch.zeros(shape), nothing, divergence=divergence, high=3.0
        )
        assert weights.dtype == torch.float32
        assert weights.sum() == 0
        assert all(metric == 0 for metric in metrics.values())
    meta = [x.to("meta") for x in (OLD, SAMPLER, MASK)]
    assert rejection_mask(*meta, divergence=divergence, high=f64(3.0).to("meta"))[0].shape == (3, 3)


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"divergence": "seq_k1", "high": 1.0}, "divergence must be one of 'token_k1', .*, got 'seq_k1'"),
        ({"divergence": "token_k3"}, "token_k3 rejects nothing without a bound"),
        ({"divergence": "seq_sum_k2", "low": 0.1, "high": 1.0}, r"seq_sum_k2 is never negative.*leave out low=0\.1"),
        ({"divergence": "token_k1", "low": 0.1}, r"low must be at most 0.*got 0\.1"),
        ({"divergence": "token_k1", "high": -0.1}, r"high must be at least 0.*got -0\.1"),
        ({"divergence": "token_k2", "high": 0.0}, r"high must be greater than 0.*got 0\.0"),
        ({"divergence": "token_k2", "high": NAN}, "high must be greater than 0.*got nan"),
    ],
)
def test_bounds_of_rejection(hyper: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rejection_mask(OLD, SAMPLER, MASK, **hyper)
    with pytest.raises(ValueError, match=message):
        RejectionMask(**hyper)


def test_rejected_tokens_keep_their_denominator_and_lose_their_gradient() -> None:
    log_prob = OLD.nan_to_num(0.0).clone().requires_grad_()
    (term,) = ppo(log_prob, MASK, old_log_prob=log_prob.detach(), advantage=torch.ones(3, 3).double())
    weights, _ = rejection_mask(OLD, SAMPLER, MASK, divergence="seq_max_k2", high=0.9)
    (corrected,) = apply_correction([term], weights)
    assert torch.equal(corrected.mask, MASK)
    (gradient,) = torch.autograd.grad(corrected.value.sum() / 6, log_prob)
    assert_close(gradient, -weights / 6)


# ------------------------------------------------------------------ metrics


def test_mismatch_metrics_by_hand() -> None:
    """Mean log-probs of the trainer, of the sampler; and the ratios that are above."""
    found = mismatch_metrics(OLD.clone().requires_grad_(), SAMPLER, MASK)
    sampler = [4.5 / 3, 3.0 / 2, 2.0]  # log-perplexities
    trainer = [sampler[0] + LN2 / 3, sampler[1] + LN2 / 2, sampler[2] - 2 * LN2]
    difference = [LN2 / 3, LN2 / 2, -2 * LN2]
    expected = {
        "trainer_log_ppl": sum(trainer) / 3,
        "sampler_log_ppl": 5 / 3,
        "trainer_ppl": sum(map(math.exp, trainer)) / 3,
        "sampler_ppl": sum(map(math.exp, sampler)) / 3,
        "log_ppl_diff": sum(difference) / 3,
        "log_ppl_abs_diff": (LN2 / 3 + LN2 / 2 + 2 * LN2) / 3,
        "log_ppl_diff_max": LN2 / 2,
        "log_ppl_diff_min": -2 * LN2,
        "ppl_ratio": (2 ** (1 / 3) + 2**0.5 + 0.25) / 3,
        "mismatch_k1": 0.0,
        "mismatch_k3": (2 + 0.25 + 1 + 1 + 0.5 + 4) / 6 - 1,
        "chi2_token": (4 + 1 / 16 + 1 + 1 + 1 / 4 + 16) / 6 - 1,
        "chi2_seq": (1 / 4 + 1 / 4 + 16) / 3 - 1,
    }
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].shape == ()
        assert not found[name].requires_grad
        assert found[name].item() == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_metrics_of_sequences_that_all_differ_one_way() -> None:
    """The third has no tokens; of the last the trainer did not score one."""
    old, sampler = f64([[-1.5, -2.0], [-0.75, 9.0], [7.0, 7.0], [NAN, -1.25]]), f64([[-1.0, -1.0]] * 4)
    sampler[1, 0] = -0.5
    mask = torch.tensor([[True, True], [True, False], [False, False], [True, True]])
    found = mismatch_metrics(old, sampler, mask)
    assert found["mismatch_k1"].item() == pytest.approx((0.5 + 1.0 + 0.25 + 0.25) / 4)
    assert found["log_ppl_diff_max"].item() == pytest.approx(0.75)
    assert found["log_ppl_diff_min"].item() == pytest.approx(0.25)
    other = mismatch_metrics(sampler, old, mask)
    assert (other["log_ppl_diff_max"].item(), other["log_ppl_diff_min"].item()) == pytest.approx((-0.25, -0.75))
    far = mismatch_metrics(torch.full((1, 2), -1.0), torch.full((1, 2), -1e4), torch.ones(1, 2) == 1)
    assert all(value.isfinite() for value in far.values())


def test_tokens_that_the_sampler_did_not_score_are_left_out_of_the_metrics() -> None:
    old, sampler = f64([[-1.0, -2.0, -9.0], [-4.0, -1.0, -1.0]]), f64([[-1.5, -1.0, NAN], [NAN, NAN, NAN]])
    everywhere = torch.ones(2, 3, dtype=torch.bool)
    fewer = torch.tensor([[True, True, False], [False, False, False]])
    found, expected = mismatch_metrics(old, sampler, everywhere), mismatch_metrics(old, sampler, fewer)
    assert found == expected
    assert expected["log_ppl_diff"].item() == pytest.approx(0.25)


def test_metrics_without_tokens_without_data_and_of_impossible_tokens() -> None:
    for shape in ((2, 3), (0, 3), (2, 0)):
        nothing = mismatch_metrics(torch.zeros(shape), torch.zeros(shape), torch.zeros(shape, dtype=torch.bool))
        assert all(value == 0 for value in nothing.values())
    meta = mismatch_metrics(*(x.to("meta") for x in (OLD, SAMPLER, MASK)))
    assert all(value.shape == () for value in meta.values())
    far = mismatch_metrics(torch.tensor([[-1e4, -1.0]]), torch.tensor([[-1.0, -1e4]]), torch.ones(1, 2) == 1)
    assert all(value.isfinite() for value in far.values())
    with pytest.raises(ValueError, match=r"mask has shape \(3, 3\) but sampler_log_prob has shape \(3, 1\)"):
        mismatch_metrics(OLD, SAMPLER[:, :1], MASK)


# ------------------------------------------------------------------ in a loss


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model()


def with_sampler(noise: float = 0.3) -> Any:
    data = batch()
    old = data["next", "log_probs", "full"]
    rng = torch.Generator().manual_seed(5)
    data["next", "sampler_log_probs", "full"] = old + noise * torch.randn(old.shape, generator=rng)
    return data


def test_metrics_are_logged_wherever_there_are_log_probs_of_the_sampler(model: nn.Module) -> None:
    names = set(mismatch_metrics(OLD, SAMPLER, MASK))
    assert not names & set(PolicyLoss(model)(batch().exclude(("next", "sampler_log_probs"))).keys())
    data = with_sampler()
    out = PolicyLoss(model)(data)
    assert names <= set(out.keys())
    assert not any(out[name].requires_grad for name in names)
    # of the same tokens as a correction sees
    corrected = PolicyLoss(model, corrections=[ImportanceWeights()])
    assert names <= set(corrected.out_keys)
    again = corrected(data)
    assert set(corrected.out_keys) <= set(again.keys())
    for name in names:
        assert_close(again[name], out[name])
    # without old log-probs: of the current policy
    del data["next", "log_probs"]
    own = PolicyLoss(model, "gpg")(data)
    assert names <= set(own.keys())
    assert own["mismatch_k3"] != out["mismatch_k3"]
    assert_close(own["mismatch_k3"], own["kl_to_sampler"])


def test_a_sampler_that_did_not_score_all_tokens_leaves_the_metrics_finite(model: nn.Module) -> None:
    data = with_sampler()
    full = data["next", "sampler_log_probs", "full"]
    expected = PolicyLoss(model)(data)
    full[0] = NAN
    out = PolicyLoss(model, corrections=[ImportanceWeights(), RejectionMask("seq_max_k2", high=9.0)])(data)
    for name, value in out.items():
        assert value.isfinite().all(), name
    assert out["kl_to_sampler"] != expected["kl_to_sampler"]


def test_two_corrections_of_one_kind_log_both(model: nn.Module) -> None:
    one, two = ImportanceWeights(high=1.1), ImportanceWeights(level="sequence", high=1.2)
    data = with_sampler()
    out = PolicyLoss(model, corrections=[one, two])(data)
    alone = [PolicyLoss(model, corrections=[each])(data) for each in (one, two)]
    for name in ("weight_mean", "weight_max", "truncated_fraction", "effective_sample_size"):
        assert_close(out[name], alone[0][name])
        assert_close(out[f"{name}_2"], alone[1][name])
        assert out[name] != out[f"{name}_2"]
    found = set(PolicyLoss(model, corrections=[one, two]).out_keys)
    assert {"weight_mean", "weight_mean_2"} <= found <= set(out.keys())


def test_several_masks_multiply_and_leave_other_terms_alone(model: nn.Module) -> None:
    data = with_sampler()
    masks = [RejectionMask("token_k2", high=0.05), RejectionMask("seq_max_k3", high=0.2)]
    plain = PolicyLoss(model, terms=[KLToReference(0.1)])(data)
    out = PolicyLoss(model, terms=[KLToReference(0.1)], corrections=masks)(data)
    assert_close(out["loss_kl_to_ref"], plain["loss_kl_to_ref"])
    assert 0 < out["token_k2_masked_fraction"] < 1
    assert out["seq_max_k3_masked_fraction"] > 0
    assert out["loss_objective"] != plain["loss_objective"]


# ------------------------------------------------------------------ verl's names


def test_verls_settings_in_a_loss(model: nn.Module) -> None:
    data = with_sampler()
    verl = {"rollout_is": "token", "rollout_is_threshold": "0.8_1.2", "rollout_rs": "token_k1, seq_max_k3,token_k1"}
    loss = PolicyLoss(model, **verl, rollout_rs_threshold="0.5_1.6,0.1")
    own = [
        ImportanceWeights(mode="mask", low=0.8, high=1.2),
        RejectionMask("token_k1", low=math.log(0.5), high=math.log(1.6)),
        RejectionMask("seq_max_k3", high=0.1),
    ]
    assert [repr(x) for x in loss.corrections] == [repr(x) for x in own]
    assert_close(loss(data)["loss_objective"], PolicyLoss(model, corrections=own)(data)["loss_objective"])
    both = PolicyLoss(model, corrections=[own[0]], rollout_rs="seq_max_k3", rollout_rs_threshold=0.1)
    assert len(both.corrections) == 2


def test_verls_thresholds() -> None:
    assert repr(rollout_corrections(rollout_is="sequence")) == repr([ImportanceWeights(level="sequence", high=2.0)])
    assert repr(rollout_corrections(rollout_is="token", rollout_is_threshold=" 3.5 ")) == repr(
        [ImportanceWeights(high=3.5)]
    )
    shared = rollout_corrections(rollout_rs="seq_mean_k2,seq_sum_k3", rollout_rs_threshold=0.25)
    assert [x.high.item() for x in shared] == [0.25, 0.25]
    (one,) = rollout_corrections(rollout_rs="seq_mean_k1", rollout_rs_threshold=4.0)
    assert (one.low.item(), one.high.item()) == pytest.approx((-math.log(4), math.log(4)))
    default = {"rollout_is": None, "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": False, "rollout_rs": None}
    default |= {"rollout_rs_threshold": None, "bypass_mode": False, "loss_type": "ppo_clip"}
    assert rollout_corrections(**default) == []  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"rollout_is": "turn"}, ValueError, "rollout_is must be one of 'token', 'sequence', 'geometric', got 'turn'"),
        ({"rollout_is_threshold": 3.0}, ValueError, r"rollout_is_threshold=3\.0 has no effect without rollout_is"),
        ({"rollout_rs_threshold": 3.0}, ValueError, r"rollout_rs_threshold=3\.0 has no effect without rollout_rs"),
        ({"rollout_rs": "token_k1"}, TypeError, "rollout_rs_threshold must be a number or a string .*, got None"),
        ({"rollout_is": "token", "rollout_is_threshold": True}, TypeError, "must be a number or a string .*, got True"),
        ({"rollout_is": "token", "rollout_is_threshold": "5_0.5"}, ValueError, "positive number or 'lower_upper'"),
        ({"rollout_is": "token", "rollout_is_threshold": "two"}, ValueError, "'lower_upper' such as .*, got 'two'"),
        ({"rollout_is": "token", "rollout_is_threshold": -1.0}, ValueError, r"got -1\.0"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_0.2"}, ValueError, "never negative"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1.0}, ValueError, "divergence must be one of"),
        (
            {"rollout_rs": "token_k2,seq_sum_k2,seq_max_k2", "rollout_rs_threshold": "1,2"},
            ValueError,
            "3 div.* 2 bounds",
        ),
        ({"rollout_rs": " , ", "rollout_rs_threshold": 1.0}, ValueError, "has 0 divergences"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "2_5"}, ValueError, "low must be at most 0"),
        ({"rollout_is_batch_normalize": True}, ValueError, "rollout_is_batch_normalize=True is not supported"),
        ({"bypass_mode": True}, ValueError, "bypass_mode=True is not supported"),
        ({"loss_type": "reinforce"}, ValueError, "loss_type='reinforce' is not supported"),
        ({"rollout_iss": "token"}, TypeError, "no hyper-parameter 'rollout_iss'.*Did you mean 'rollout_is'"),
    ],
)
def test_verls_settings_that_make_no_sense(settings: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rollout_corrections(**settings)


BOUND = {"token_k1": "0.6_1.5", "seq_sum_k1": "0.4_2", "seq_mean_k1": "0.8_1.3"}
BOUND |= {"token_k2": 0.1, "seq_sum_k2": 0.3, "seq_mean_k2": 0.08, "seq_max_k2": 0.2}
BOUND |= {"token_k3": 0.08, "seq_sum_k3": 0.3, "seq_mean_k3": 0.06, "seq_max_k3": 0.3}


@pytest.mark.parametrize(
    ("options", "threshold"),
    [*BOUND.items(), ("token_k1,seq_max_k2", "0.6_1.5,0.2"), ("seq_mean_k3,token_k3,seq_sum_k1", "0.1,0.2,3")],
)
def test_verls_rejection(monkeypatch: pytest.MonkeyPatch, options: str, threshold: Any) -> None:
    helper, rejected = verl(monkeypatch), 0
    for seed in range(5):
        old, sampler, mask = sampled(seed)
        kept, metrics = helper.compute_rollout_rejection_mask(old - sampler, mask.double(), options, threshold)
        weights = torch.ones_like(old)
        for part in rollout_corrections(rollout_rs=options, rollout_rs_threshold=threshold):
            each, seen = part({"old_log_prob": old, "sampler_log_prob": sampler, "mask": mask})
            weights = weights * each
            for name, value in seen.items():
                assert value.item() == pytest.approx(metrics[f"rollout_rs_{name}"], abs=1e-6)
        assert torch.equal(weights, kept)
        rejected += int((mask & (weights == 0)).sum())
    assert 0 < rejected < 5 * 7 * 6 * 0.7


@pytest.mark.parametrize(("level", "threshold"), list(itertools.product(("token", "sequence"), (1.3, "0.3_2.5"))))
def test_verls_weights(monkeypatch: pytest.MonkeyPatch, level: Any, threshold: Any) -> None:
    helper = verl(monkeypatch)
    for seed in range(5):
        old, sampler, mask = sampled(seed)
        theirs, metrics = helper.compute_rollout_correction_weights(old - sampler, mask.double(), level, threshold)
        (part,) = rollout_corrections(rollout_is=level, rollout_is_threshold=threshold)
        weights, seen = part({"old_log_prob": old, "sampler_log_prob": sampler, "mask": mask})
        assert_close(weights, theirs)
        if level == "token":  # verl weights sequences by their length
            size = metrics["rollout_is_eff_sample_size"]
            assert seen["effective_sample_size"].item() == pytest.approx(size, rel=1e-6)
    assert importance_weights(old, sampler, mask, high=1.3)[0].max() == 1.3


VERLS_NAMES = {
    "trainer_log_ppl": "training_log_ppl",
    "sampler_log_ppl": "rollout_log_ppl",
    "trainer_ppl": "training_ppl",
    "sampler_ppl": "rollout_ppl",
    "mismatch_k1": "kl",
    "mismatch_k3": "k3_kl",
}


def test_verls_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    helper = verl(monkeypatch)
    for seed in range(5):
        old, sampler, mask = sampled(seed)
        theirs = helper.compute_offpolicy_metrics(old, sampler, mask.double())
        found = {
            VERLS_NAMES.get(name, name): value.item() for name, value in mismatch_metrics(old, sampler, mask).items()
        }
        assert found == pytest.approx(theirs, rel=1e-6, abs=1e-7)


def test_verl_counts_empty_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of docs/differences.md: with a perplexity of 1 and a ratio of 1."""
    helper = verl(monkeypatch)
    old, sampler, mask = sampled(0)
    expected = mismatch_metrics(old, sampler, mask)["sampler_ppl"]
    pad = lambda x, value: torch.cat([x, torch.full_like(x, value)])  # noqa: E731
    old, sampler, mask = pad(old, -1.0), pad(sampler, -1.0), pad(mask, False)
    assert_close(mismatch_metrics(old, sampler, mask)["sampler_ppl"], expected)
    theirs = helper.compute_offpolicy_metrics(old, sampler, mask.double())["rollout_ppl"]
    assert theirs == pytest.approx((expected.item() + 1) / 2, rel=1e-6)
