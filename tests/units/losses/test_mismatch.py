"""Corrections of a sampler that differs from the trainer: expectations by enumeration, in a loss, and verl's settings."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from closeness import assert_near
from policy_batches import LENGTHS, PROMPT, batch, gradients
from torchrl_llm_kl.losses import (
    Correction,
    ImportanceWeights,
    KLToReference,
    PolicyLoss,
    RejectionMask,
    apply_correction,
    gpg,
    importance_weights,
    mismatch_metrics,
    rejection_mask,
    rollout_corrections,
)
from toy_models import tiny_model

NAN = float("nan")


def test_without_bounds_the_sequence_weight_gives_the_trainers_policy_gradient() -> None:
    """E_sampler[w A grad log pi] = grad E_policy[A], which the product of both ratios alone achieves.

    Over all nine sequences of two tokens, the second one depending on the first. The policy is the trainer's before a step.
    """
    sequences = list(itertools.product(range(3), repeat=2))

    def of_tokens(logits: Tensor) -> Tensor:
        """Log-probs ``[9, 2]``; row 0 is of the first token, row 1 + a of the second after a."""
        table = logits.log_softmax(-1)
        return torch.stack([torch.stack([table[0, a], table[1 + a, b]]) for a, b in sequences])

    for seed in range(3):
        rng = torch.Generator().manual_seed(seed)
        logits, noise = torch.randn(2, 4, 3, generator=rng, dtype=torch.float64)
        advantage = torch.randn(9, generator=rng, dtype=torch.float64)
        sampler = of_tokens(logits + 0.6 * noise)
        policy = logits.clone().requires_grad_()
        mask = torch.ones(9, 2, dtype=torch.bool)
        (expected,) = torch.autograd.grad(-(of_tokens(policy).sum(-1).exp() * advantage).sum(), policy)
        for level in ("sequence", "token", "geometric"):
            (term,) = gpg(of_tokens(policy), mask, advantage=advantage[:, None].expand(9, 2))
            # Old log-probs have a graph, which the weights must not pass.
            weights, _ = importance_weights(of_tokens(policy), sampler, mask, level=level, high=None)
            (term,) = apply_correction([term], weights, mask)
            mean = (sampler.sum(-1).exp()[:, None] * term.value).sum()
            (found,) = torch.autograd.grad(mean, policy)
            if level == "sequence":
                assert_close(found, expected, rtol=1e-10, atol=1e-13)
            else:
                assert (found - expected).abs().max() > 1e-3


def test_the_geometric_mask_is_rejection_by_the_mean_of_k1() -> None:
    """The geometric mean of the ratio lies in [0.9, 1.2] where the mean of k1 lies in [-log 1.2, -log 0.9]."""
    rng = torch.Generator().manual_seed(0)
    old, noise = torch.randn(2, 7, 6, generator=rng, dtype=torch.float64)
    mask = torch.rand(7, 6, generator=rng) < 0.7
    sampler = old + 0.4 * noise
    weights, _ = importance_weights(old, sampler, mask, level="geometric", mode="mask", low=0.9, high=1.2)
    kept, _ = rejection_mask(old, sampler, mask, divergence="seq_mean_k1", low=-math.log(1.2), high=-math.log(0.9))
    assert torch.equal(weights != 0, kept != 0)
    assert 0 < (weights != 0).sum() < mask.sum()


# ------------------------------------------------------------------ in a loss


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model()


def near(layout: str = "padded") -> Any:
    """The usual batch, with a sampler near the trainer."""
    data, noise = batch(layout=layout), torch.Generator().manual_seed(5)
    for row, old in enumerate(data["next", "log_probs", "full"].unbind() if layout != "lazy" else ()):
        data["next", "sampler_log_probs", "full"].unbind()[row].copy_(
            old + 0.4 * torch.randn(9, generator=noise)[: len(old)]
        )
    for step in data.unbind(0) if layout == "lazy" else ():
        old = step["next", "log_probs", "full"]
        step["next", "sampler_log_probs", "full"] = old + 0.4 * torch.randn(9, generator=noise)[: len(old)]
    return data


def loss_and_gradient(model: nn.Module, loss: PolicyLoss, data: Any) -> tuple[Any, Tensor]:
    model.zero_grad()
    out = loss(data)
    out.total_loss.backward()
    return out, model.get_input_embeddings().weight.grad.clone()


@pytest.mark.parametrize(
    ("correction", "layout"),
    [
        (ImportanceWeights(level="token", low=0.6, high=1.4), "nested"),
        (ImportanceWeights(level="sequence", mode="mask", low=0.6, high=1.4), "lazy"),
        (ImportanceWeights(level="geometric", low=0.6, high=1.4), "nested"),
        (RejectionMask("token_k1", high=0.07), "lazy"),
        (RejectionMask("seq_sum_k2", high=0.07), "nested"),
        (RejectionMask("seq_mean_k3", high=0.07), "lazy"),
        (RejectionMask("seq_max_k2", high=0.07), "nested"),
    ],
)
def test_padded_rows_agree_with_those_of_their_own_lengths(
    model: nn.Module, correction: Correction, layout: str
) -> None:
    loss = PolicyLoss(model, corrections=[correction])
    expected, gradient = loss_and_gradient(model, loss, near())
    assert expected["correction_ess"] < 1
    found, again = loss_and_gradient(model, loss, near(layout))
    for key in sorted(expected.keys()):
        assert_near(found[key], expected[key], terms=64, size=1, exponent=8, msg=key)
    assert_near(again, gradient, terms=64, size=1)


@pytest.mark.parametrize(
    ("correction", "aggregation", "lead"),
    [
        (RejectionMask("token_k1", high=1e-6), "token-mean", 2.0),
        (RejectionMask("seq_sum_k2", high=1e-6), "seq-mean-token-mean", -2.0),
        (RejectionMask("seq_mean_k3", high=1e-6), "token-mean", -2.0),
        (RejectionMask("seq_max_k1", high=1e-6), "seq-mean-token-mean", 2.0),
        (ImportanceWeights(level="geometric", mode="mask", low=1e6, high=None), "token-mean", -2.0),
    ],
)
def test_a_batch_without_an_accepted_token_is_a_zero_with_graph(
    model: nn.Module, correction: Correction, aggregation: Any, lead: float
) -> None:
    """The sampler is far from the trainer at every token, and on one side of it."""
    data = batch()
    data["next", "sampler_log_probs", "full"] = data["next", "log_probs", "full"] + lead
    loss = PolicyLoss(model, corrections=[correction], aggregation=aggregation)
    model.zero_grad()
    out = loss(data)
    assert out.total_loss == 0
    assert out.total_loss.requires_grad
    out.total_loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())  # 0, and so not NaN
    assert all(value.isfinite() for value in out.values())
    assert (out["rejected_fraction"], out["rejected_seq_fraction"], out["correction_ess"]) == (1, 1, 0)
    # other terms are not corrected
    both = PolicyLoss(model, corrections=[correction], terms=[KLToReference(0.1)], aggregation=aggregation)
    alone = PolicyLoss(model, terms=[KLToReference(0.1)], aggregation=aggregation)
    _, gradient = loss_and_gradient(model, both, data)
    assert_close(both(data).total_loss, alone(data)["loss_kl_to_ref"])
    assert gradient.any()


def test_two_corrections_log_their_product(model: nn.Module) -> None:
    parts = [ImportanceWeights(high=1.2), RejectionMask("seq_max_k2", high=0.2)]
    loss, seen = PolicyLoss(model, corrections=parts), []
    for part in parts:
        part.register_forward_hook(lambda _, args, out: seen.append((args[0]["mask"], out[0])))
    out = loss(near())
    (mask, one), (_, two) = seen[-2:]
    product = (one * two)[mask]
    assert out["rejected_fraction"].item() == pytest.approx((product == 0).double().mean().item())
    assert out["correction_ess"].item() == pytest.approx(
        (product.mean() ** 2 / product.square().mean()).item(), rel=1e-5
    )
    names = {"rejected_fraction", "rejected_seq_fraction", "correction_ess"}
    assert names <= set(loss.out_keys) <= set(out.keys())
    assert not names & set(PolicyLoss(model)(near()).keys())


def test_experts_are_not_in_the_metrics(model: nn.Module) -> None:
    data = near()
    data["expert_mask"] = torch.tensor([True, False, True, False, False, False])
    data["next", "sampler_log_probs", "full"][0::2] = -50.0
    data["next", "sampler_log_probs", "full"][1::2] = data["next", "log_probs", "full"][1::2]
    out = PolicyLoss(model, "mix", corrections=[RejectionMask("token_k2", high=0.1)])(data)
    own = [length - PROMPT for length in LENGTHS]
    assert out["rejected_fraction"].item() == pytest.approx(own[4] / (own[1] + own[3] + own[4] + own[5]))


def test_the_wrappers_first_zero_is_not_taken_for_certainty(model: nn.Module) -> None:
    """At the root, where torchrl's policy writes, exactly 0 for the first response token means that it was not scored."""
    data = near()
    several, first = [0, 1, 3, 4, 5], 4  # sequence 2 has one response token: nothing shows that its 0 is no score
    data["next", "sampler_log_probs", "full"][several, first] = torch.nan
    expected = PolicyLoss(model, corrections=[ImportanceWeights(high=1.2)])(data)
    stored = data["next", "sampler_log_probs", "full"].clone()
    stored[several, first] = 0.0
    del data["next", "sampler_log_probs"]
    data["log_probs", "full"] = stored
    loss = PolicyLoss(model, corrections=[ImportanceWeights(high=1.2)])
    loss.set_keys(sampler_log_prob=("log_probs", "full"))
    found = loss(data)
    for key in sorted(expected.keys()):
        assert_close(found[key], expected[key], msg=lambda text, key=key: f"{key}: {text}")


def mixed(old: float, sampler: float) -> Any:
    """The first pair of rows written by an expert, with arbitrary log-probs of the policies."""
    data = batch()
    data["expert_mask"] = (torch.arange(6) < 2).unsqueeze(-1)
    for key, value in (("log_probs", old), ("sampler_log_probs", sampler)):
        full = data["next", key, "full"].clone()
        full[:2] = value
        data["next", key, "full"] = full
    return data


@pytest.mark.parametrize(
    ("correction", "old", "sampler"),
    [
        (ImportanceWeights(mode="mask", low=0.5, high=2.0), 0.0, -9.0),
        (ImportanceWeights(mode="mask", low=0.5, high=2.0), NAN, NAN),
        (RejectionMask("seq_max_k2", high=5.0), -9.0, 0.0),
    ],
)
def test_corrections_leave_experts_alone(model: nn.Module, correction: Correction, old: float, sampler: float) -> None:
    """Their log-probs under the policies are placeholders: with -9 and 0 the loss of the experts was 0."""
    plain = PolicyLoss(model, "mix")(mixed(old, sampler))
    out = PolicyLoss(model, "mix", corrections=[correction])(mixed(old, sampler))
    assert_close(out["loss_expert"], plain["loss_expert"])
    assert plain["loss_expert"] > 0
    same = dict(gradients(plain["loss_expert"], model))
    for name, gradient in gradients(out["loss_expert"], model).items():
        assert_close(gradient, same[name])
    other = PolicyLoss(model, "mix", corrections=[correction])(mixed(-1.0, -1.0))
    for name, value in other.items():
        assert_near(out[name], value, terms=64, exponent=9)  # every metric of a policy is of its own tokens


def test_metrics_are_logged_wherever_there_are_log_probs_of_the_sampler(model: nn.Module) -> None:
    names = set(mismatch_metrics(*torch.zeros(2, 1, 1), torch.ones(1, 1) == 1))
    assert not names & set(PolicyLoss(model)(batch().exclude(("next", "sampler_log_probs"))).keys())
    data = near()
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


def test_two_corrections_of_one_kind_log_both(model: nn.Module) -> None:
    one, two = ImportanceWeights(high=1.1), ImportanceWeights(level="sequence", high=1.2)
    data = near()
    out = PolicyLoss(model, corrections=[one, two])(data)
    alone = [PolicyLoss(model, corrections=[each])(data) for each in (one, two)]
    for name in ("weight_mean", "weight_max", "truncated_fraction", "effective_sample_size"):
        assert_close(out[name], alone[0][name])
        assert_close(out[f"{name}_2"], alone[1][name])
        assert out[name] != out[f"{name}_2"]
    found = set(PolicyLoss(model, corrections=[one, two]).out_keys)
    assert {"weight_mean", "weight_mean_2"} <= found <= set(out.keys())


# ------------------------------------------------------------------ verl's names


def test_verls_settings_in_a_loss(model: nn.Module) -> None:
    data = near()
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


NO_SENSE: list[tuple[Any, type[Exception], str]] = [
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
]


def test_verls_settings_that_make_no_sense() -> None:
    for settings, error, message in NO_SENSE:
        with pytest.raises(error, match=message):
            rollout_corrections(**settings)


def test_the_geometric_level_as_a_setting() -> None:
    """Beside verl's two."""
    (one,) = rollout_corrections(rollout_is="geometric", rollout_is_threshold="0.9_1.1")
    assert repr(one) == repr(ImportanceWeights(level="geometric", mode="mask", low=0.9, high=1.1))
    (two,) = rollout_corrections(rollout_is="geometric")
    assert repr(two) == repr(ImportanceWeights(level="geometric", high=2.0))
