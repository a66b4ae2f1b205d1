"""The check of losses: faults that other libraries published, as small functions, and sound losses without a finding."""

import json
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from torchrl_llm_kl.diagnostics import LossReport, check_loss
from torchrl_llm_kl.diagnostics._check_loss import _FAULTS
from torchrl_llm_kl.estimators import contracts, get_estimator, k1, k2, k3, low_var_kl
from torchrl_llm_kl.losses import LossInputs, LossTerm, MissingInputError, aggregate
from torchrl_llm_kl.losses.terms import kl_to_ref, kl_to_sampler

# ------------------------------------------------------------------ the contract table as an oracle

#: Gradients of the contract table -> fits.
FITS: dict[str, Any] = {
    "zero": {},
    "reverse": {"reverse KL": 1.0},
    "forward": {"forward KL": 1.0},
    "total_variation": {"total variation": 1.0},
    "reverse_minus_forward": {"reverse KL": 1.0, "forward KL": -1.0},
    "minus_sampler": {"KL(sampler, policy)": -1.0},
    "none": None,
}
CONTRACT = {contract.name: contract for contract in contracts() if contract.name != "exact"}


@pytest.mark.parametrize("name", CONTRACT)
def test_estimators_have_the_values_and_gradients_of_their_contract(name: str) -> None:
    contract, function = CONTRACT[name], get_estimator(name)  # type: ignore[call-overload]
    fits = check_loss(function).fits
    assert (fits["value"] == FITS["reverse"]) == contract.unbiased
    assert (fits["value, off-policy"] == FITS["reverse"]) == contract.unbiased_off_policy
    assert fits["gradient"] == FITS[contract.loss_gradient]
    assert fits["gradient, off-policy"] == FITS[contract.loss_gradient_off_policy]

    def in_reward(log_prob: Tensor, ref_log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
        return function(log_prob, ref_log_prob, old_log_prob).detach() * log_prob

    reward = check_loss(in_reward).fits["gradient"]
    # The squared log-ratio is no divergence: the contract counts its gradient as "none".
    assert FITS[contract.reward_gradient] == (None if "squared log-ratio / 2" in (reward or ()) else reward)


# ------------------------------------------------------------------ faults


def token_mean(value: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, value, 0).sum() / mask.sum()


def per_sequence(value: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, value, 0).sum(-1) / mask.sum(-1)


def cleaned(estimator: Any, log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
    """The values of an estimator, where masked-out tokens are filled first."""
    log_prob, ref_log_prob = (torch.where(mask, x, 0) for x in (log_prob, ref_log_prob))
    return torch.where(mask, estimator(log_prob, ref_log_prob), 0)


def k3_called_reverse(log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
    return cleaned(k3, log_prob, ref_log_prob, mask).sum()


def k3_beside_a_policy_gradient(
    log_prob: Tensor, ref_log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor
) -> Tensor:
    log_prob, ref, old, advantage = (torch.where(mask, x, 0) for x in (log_prob, ref_log_prob, old_log_prob, advantage))
    ratio = (log_prob - old).exp()
    return torch.where(mask, -ratio * advantage + 0.04 * k3(log_prob, ref), 0).sum(-1).mean()


def k3_beside_reinforce(log_prob: Tensor, ref_log_prob: Tensor, advantage: Tensor) -> Tensor:
    return 0.1 * k3(log_prob, ref_log_prob) - advantage * log_prob


def k1_beside_a_policy_gradient(
    log_prob: Tensor, ref_log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor
) -> Tensor:
    return 0.1 * k1(log_prob, ref_log_prob) - (log_prob - old_log_prob).exp() * advantage


def k1_in_a_loss(log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
    return cleaned(k1, log_prob, ref_log_prob, mask).sum()


def nan_times_mask(log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
    return (k2(log_prob, ref_log_prob) * mask).sum()


def filled_too_late(log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
    """The value is right, but the gradient of the masked-out branch is 0 times NaN."""
    return torch.where(mask, k2(log_prob, ref_log_prob).exp(), 0).sum()


def sum_over_all(log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
    return k2(log_prob, ref_log_prob).nan_to_num().clamp(max=1e6).sum() / mask.sum()


def padding_in_the_denominator(log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
    return cleaned(k2, log_prob, ref_log_prob, mask).mean()


def mean_of_means(log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
    value = cleaned(k2, log_prob, ref_log_prob, mask)
    parts = [token_mean(x, m) for x, m in zip(value.split(2), mask.split(2), strict=True)]
    return torch.stack(parts).mean()


def mean_over_tokens(log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
    return token_mean(cleaned(k2, log_prob, ref_log_prob, mask), mask)


def clamped(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    return low_var_kl(log_prob, ref_log_prob)


def normalised_over_the_batch(log_prob: Tensor, advantage: Tensor) -> Tensor:
    return -(advantage - advantage.mean()) * log_prob


FAULTY: list[tuple[Any, set[str]]] = [
    (k3_called_reverse, {"wrong_gradient"}),
    (k3_beside_a_policy_gradient, {"wrong_gradient"}),
    (k3_beside_reinforce, {"wrong_gradient"}),
    (k1_in_a_loss, {"no_gradient"}),
    (k1_beside_a_policy_gradient, {"no_gradient"}),
    (nan_times_mask, {"nan_times_mask"}),
    (filled_too_late, {"nan_times_mask"}),
    (sum_over_all, {"nan_times_mask", "masked_tokens_leak", "split_changes"}),
    (padding_in_the_denominator, {"padding_changes", "split_changes"}),
    (mean_of_means, {"mean_of_means"}),
    (mean_over_tokens, {"split_changes"}),
    (clamped, {"wrong_gradient", "clamped"}),
    (normalised_over_the_batch, {"split_changes"}),
]


@pytest.mark.parametrize(("loss", "names"), FAULTY, ids=lambda x: getattr(x, "__name__", ""))
def test_published_faults_are_named(loss: Any, names: set[str]) -> None:
    assert set(check_loss(loss).findings) == names


def test_every_fault_has_a_case_and_a_sentence() -> None:
    assert set(_FAULTS) == {name for _, names in FAULTY for name in names}
    text = check_loss(k3_beside_a_policy_gradient).findings["wrong_gradient"]
    assert text.startswith("the value estimates the reverse KL, the gradient belongs to forward KL: use k2")
    assert "its mean gradient is 0" in check_loss(k1).findings["no_gradient"]


def test_a_gradient_of_no_known_quantity_is_a_fault_of_a_known_value() -> None:
    def loss(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
        probability = log_prob.exp()  # its gradient belongs to the sum of squared probabilities
        return k1(log_prob, ref_log_prob).detach() + probability - probability.detach()

    report = check_loss(loss)
    assert report.fits["value"] == {"reverse KL": 1.0}
    assert report.fits["gradient"] is None
    assert "the gradient belongs to no known quantity" in report.findings["wrong_gradient"]


# ------------------------------------------------------------------ sound losses


def exact_kl(kl: Tensor, log_prob: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, kl, 0).sum()


def importance_weighted_sequences(log_prob: Tensor, ref_log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """Half of an unbiased estimate of the KL of whole sequences of two tokens."""
    log_ratio = (log_prob - old_log_prob).sum(-1, keepdim=True)
    return log_ratio.exp() * (log_prob - ref_log_prob)


PPO = partial(aggregate, mode="seq-mean-token-mean")


def bounded_ratio(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """PPO with the mean of the means of sequences."""
    log_prob, old, advantage = (torch.where(mask, x, 0) for x in (log_prob, old_log_prob, advantage))
    ratio = (log_prob - old).exp()
    return PPO(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage), mask)


SOUND: list[tuple[Any, str, dict[str, float] | None, dict[str, float] | None]] = [
    (k2, "none", {"reverse KL": 1.0}, None),
    (exact_kl, "sum", {"reverse KL": 2.0}, {"reverse KL": 2.0}),
    (importance_weighted_sequences, "none", {"sequence KL": 1.0}, {"sequence KL": 1.0}),
    (bounded_ratio, "seq-mean-token-mean", {"-advantage": 1.0}, {"-advantage": 1.0}),
    ("ppo", "none", {"-advantage": 1.0}, {"-advantage": 1.0}),
    ("gspo", "none", {"-advantage": 1.0}, None),
    ("gpg", "none", {"-advantage": 1.0}, {"-advantage * log_prob": 1.0}),
    ("importance_sampling", "none", {"-advantage": 1.0}, {"-advantage": 1.0}),
    ("sft", "none", {}, {"KL(sampler, policy)": 1.0}),
    (partial(kl_to_ref, estimator="exact", coeff=0.5), "none", {"reverse KL": 0.5}, {"reverse KL": 0.5}),
    (partial(kl_to_ref, estimator="corrected_k3", coeff=2.0), "none", {"reverse KL": 2.0}, {"reverse KL": 2.0}),
    *[
        (
            partial(kl_to_ref, estimator=name, level="sequence", coeff=1.0),
            "none",
            {"sequence KL": 1.0},
            {"sequence KL": 1.0},
        )
        for name in ("exact", "k1", "k3")
    ],
    (partial(kl_to_sampler, estimator="corrected_k3", coeff=1.0), "none", {}, None),
]


@pytest.mark.parametrize(("loss", "aggregation", "gradient", "off_policy"), SOUND)
def test_sound_losses_have_no_finding(loss: Any, aggregation: str, gradient: Any, off_policy: Any) -> None:
    report = check_loss(loss)
    assert report.findings == {}
    assert report.aggregation == aggregation
    for key, expected in (("gradient", gradient), ("gradient, off-policy", off_policy)):
        assert report.fits[key] == (expected if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("mode", "shown"),
    [
        ("token-mean", "token-mean"),
        ("seq-mean-token-mean", "seq-mean-token-mean"),
        ("seq-mean-token-sum", "seq-mean-token-sum"),
        ("seq-mean-token-sum-norm", "seq-mean-token-sum-norm"),
        ("none", "none"),
    ],
)
def test_the_aggregation_is_named(mode: Any, shown: str) -> None:
    def loss(log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
        return aggregate(cleaned(k2, log_prob, ref_log_prob, mask), mask, mode)

    report = check_loss(loss)
    assert report.aggregation == shown
    split = {"token-mean": {"split_changes"}, "seq-mean-token-sum-norm": {"split_changes", "padding_changes"}}
    assert set(report.findings) == split.get(mode, set())


def test_a_fixed_length_in_the_denominator_is_sound() -> None:
    def loss(log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
        return aggregate(cleaned(k2, log_prob, ref_log_prob, mask), mask, "seq-mean-token-sum-norm", max_len=8)

    report = check_loss(loss)
    assert (report.aggregation, report.findings) == ("seq-mean-token-sum", {})
    assert report.fits["gradient"] == pytest.approx({"reverse KL": 0.25})  # two tokens of eight


def test_losses_in_float32_and_other_signatures() -> None:
    def in_float32(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
        return 0.2 * k3(log_prob.float(), ref_log_prob.float())

    report = check_loss(in_float32)
    assert report.fits["gradient"] == pytest.approx({"forward KL": 0.2}, rel=1e-3)
    assert set(report.findings) == {"wrong_gradient"}

    def of_record(data: LossInputs) -> tuple[LossTerm, ...]:
        squared = (data.log_prob - data.ref_log_prob).square()
        return LossTerm("one", squared, data.mask, weight=0.5), LossTerm("two", -data.entropy, data.mask, weight=0.3)

    assert check_loss(of_record).fits["gradient"] == pytest.approx({"reverse KL": 1.0, "entropy": -0.3})
    with pytest.raises(TypeError, match=r"the loss takes logits, labels: expected some of log_prob, "):
        check_loss(lambda logits, labels: logits)
    with pytest.raises(MissingInputError, match="kto needs reference_point"):
        check_loss("kto")


def test_the_report_as_text_and_as_json() -> None:
    report: LossReport = check_loss(k3)
    lines = str(report).splitlines()
    assert lines[:3] == ["k3", "value: reverse KL", "gradient: forward KL"]
    assert lines[-1].startswith("wrong_gradient: the value estimates the reverse KL")
    assert str(check_loss(k2)).endswith("sum over tokens: none\nno fault")
    assert json.loads(json.dumps(vars(report)))["fits"]["value, off-policy"] is None


def test_a_wide_clamp_is_found_far_from_the_reference() -> None:
    def clamped(log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, (log_prob - ref_log_prob).clamp(-20, 20).square() / 2, 0)

    assert set(check_loss(clamped).findings) == {"clamped"}


def test_a_loss_may_change_its_inputs_and_take_no_mask() -> None:
    def in_place(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
        old_log_prob.sub_(log_prob.detach())
        log_prob[~mask] = 0
        advantage.mul_(1.0)
        return -torch.where(mask, (log_prob - log_prob.detach() - old_log_prob).exp() * advantage, 0)

    assert check_loss(in_place).findings == {}
    plain = check_loss(lambda log_prob, advantage: -(log_prob * advantage).mean())
    assert (plain.aggregation, plain.findings) == ("token-mean", {})
    one = check_loss(lambda log_prob, advantage: -(log_prob * advantage).mean().reshape(1))
    assert (one.aggregation, one.findings) == ("token-mean", {})


def test_modules_and_other_results() -> None:
    class Loss(torch.nn.Module):
        def forward(self, log_prob: Tensor, advantage: Tensor) -> Tensor:
            return -log_prob * advantage

    assert check_loss(Loss()).fits["gradient"] == {"-advantage": 1.0}
    with pytest.raises(TypeError, match="returned a tuple: return a tensor"):
        check_loss(lambda log_prob: (log_prob, {}))
