"""Inputs that would give a wrong loss, or a gradient of 0, without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.testing import assert_close

from policy_batches import batch
from torchrl_llm_kl.losses import (
    EntropyBonus,
    ImportanceWeights,
    KLToReference,
    KLToSampler,
    LossTerm,
    PolicyLoss,
    RejectionMask,
    TermPart,
    aggregate,
    apply_correction,
    dapo,
    get_objective,
    importance_weights,
    kl_to_ref,
    mismatch_metrics,
    off_policy_sequence_mask,
    opmd,
    ppo,
    rejection_mask,
    sppo,
    top_entropy_mask,
    value_error,
)
from toy_models import tiny_model

NAN = float("nan")
MASK = torch.ones(2, 2, dtype=torch.bool)
OLD = torch.tensor([[-1.0, -2.0], [-0.5, -1.0]], dtype=torch.float64)
ONES = torch.ones(2, 2, dtype=torch.float64)
PAIR = torch.tensor([0.1, 0.5])


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model()


def with_entry(key: Any, value: Tensor) -> TensorDictBase:
    data = batch()
    data[key] = value
    return data


# ------------------------------------------------------------------ graphs of data


def test_on_policy_data_with_a_graph_have_the_policy_gradient() -> None:
    log_prob = OLD.clone().requires_grad_()
    for function in (ppo, sppo, dapo):
        (term,) = function(log_prob, MASK, old_log_prob=log_prob, advantage=3 * ONES)
        assert_close(torch.autograd.grad(term.value.sum(), log_prob)[0], -3 * ONES)
    (term,) = kl_to_ref(log_prob, MASK, ref_log_prob=log_prob - 0.5)
    assert_close(torch.autograd.grad(term.value.sum(), log_prob)[0], 0.5 * ONES)


def test_a_target_made_from_the_value_still_trains_it() -> None:
    value = OLD.clone().requires_grad_()
    (term,) = value_error(value, MASK, value_target=value + 2.0)
    assert_close(torch.autograd.grad(term.value.sum(), value)[0], -2 * ONES)


def test_weights_of_a_correction_are_constant() -> None:
    log_prob = OLD.clone().requires_grad_()
    (term,) = apply_correction([LossTerm("objective", log_prob * 2, MASK)], log_prob.exp())
    assert_close(torch.autograd.grad(term.value.sum(), log_prob)[0], 2 * OLD.exp())


# ------------------------------------------------------------------ shapes and kinds


def test_booleans_are_not_numbers() -> None:
    for call in (
        lambda: ppo(OLD, MASK, old_log_prob=OLD, advantage=MASK),
        lambda: ppo(OLD, MASK, old_log_prob=MASK, advantage=ONES),
        lambda: get_objective("gpg")(MASK, MASK, advantage=ONES),
        lambda: kl_to_ref(OLD, MASK, ref_log_prob=MASK),
        lambda: importance_weights(OLD, MASK, MASK),
        lambda: rejection_mask(MASK, OLD, MASK, divergence="token_k2", high=1.0),
        lambda: mismatch_metrics(OLD, MASK, MASK),
        lambda: top_entropy_mask(MASK, MASK),
        lambda: value_error(OLD, MASK, value_target=MASK),
    ):
        with pytest.raises(TypeError, match=r"must hold numbers, got a boolean tensor: pass \w+\.float\(\)"):
            call()


def test_a_hyper_parameter_does_not_broadcast_over_tokens() -> None:
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("clip_high", lambda: ppo(OLD, MASK, old_log_prob=OLD, advantage=ONES, clip_high=PAIR)),
        ("tau", lambda: opmd(OLD, MASK, advantage=ONES, tau=PAIR)),
        ("coeff", lambda: kl_to_ref(OLD, MASK, ref_log_prob=OLD, coeff=PAIR)),
        ("weight", lambda: LossTerm("objective", OLD, MASK, weight=PAIR)),
        ("denominator", lambda: aggregate(OLD, MASK, denominator=PAIR)),
        ("high", lambda: importance_weights(OLD, OLD, MASK, high=PAIR)),
        ("low", lambda: importance_weights(OLD, OLD, MASK, low=PAIR)),
        ("low", lambda: rejection_mask(OLD, OLD, MASK, divergence="token_k1", low=-PAIR)),
        ("high", lambda: rejection_mask(OLD, OLD, MASK, divergence="token_k1", high=PAIR)),
        ("delta", lambda: off_policy_sequence_mask(OLD, OLD, OLD, MASK, delta=PAIR)),
        ("threshold", lambda: top_entropy_mask(-OLD, MASK, threshold=PAIR)),
        ("fraction", lambda: top_entropy_mask(-OLD, MASK, fraction=PAIR)),
        ("clip_value", lambda: value_error(OLD, MASK, value_target=OLD, old_value=OLD, clip_value=PAIR)),
    ]
    for name, call in calls:
        with pytest.raises(ValueError, match=rf"{name} must be one number, got a tensor of shape \(2,\)"):
            call()


def test_weights_and_their_mask_have_one_shape() -> None:
    term, weights = LossTerm("objective", torch.ones(2, 1), MASK[:, :1]), torch.tensor([[2.0, 0.0], [1.0, 1.0]])
    assert apply_correction([term], weights, MASK)[0].value.tolist() == [[1.0], [1.0]]
    with pytest.raises(ValueError, match=r"weights has shape \(2, 2\) but mask has shape \(2, 1\)"):
        apply_correction([term], weights, MASK[:, :1])
    with pytest.raises(TypeError, match="mask must be boolean"):
        apply_correction([term], weights, MASK.float())


def test_counts_and_thresholds_that_are_none() -> None:
    with pytest.raises(ValueError, match="threshold must be a number, got nan"):
        top_entropy_mask(-OLD, MASK, threshold=NAN)
    for term in (KLToReference, KLToSampler, EntropyBonus):
        with pytest.raises(ValueError, match=r"coeff must be a (finite )?number.*got nan"):
            term(NAN)
    with pytest.raises(TypeError, match="mask must be boolean"):
        value_error(OLD, MASK.float(), value_target=OLD)


def test_half_precision_values_do_not_overflow() -> None:
    (term,) = value_error(torch.full((1, 1), 500.0).half(), MASK[:1, :1], value_target=torch.zeros(1, 1).half())
    assert term.value.item() == 125_000


# ------------------------------------------------------------------ hyper-parameters of parts


def test_every_kind_of_number_is_a_checked_buffer() -> None:
    for value in (3, np.float32(3), np.float64(3), np.int64(3), torch.tensor(3), torch.tensor([3.0])):
        part = TermPart(dapo, clip_ratio_c=value)
        assert part.state_dict()["clip_ratio_c"].item() == 3.0
        assert part.clip_ratio_c.shape == ()
    part = TermPart(dapo)
    part.clip_ratio_c = 4
    assert part.state_dict()["clip_ratio_c"].item() == 4.0
    assert set(ImportanceWeights(low=1, high=2).state_dict()) == {"low", "high"}
    assert set(RejectionMask("token_k1", low=-1, high=2).state_dict()) == {"low", "high"}
    with pytest.raises(ValueError, match=r"clip_high must be at least 0, got -5\.0"):
        TermPart(ppo, clip_high=np.float32(-5))
    with pytest.raises(ValueError, match=r"clip_high must be at least 0, got -5\.0"):
        part.clip_high = np.float32(-5)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (PAIR, ValueError, r"clip_high has shape \(2,\): pass one number"),
        (torch.tensor(0.1, requires_grad=True), ValueError, "clip_high requires grad but would be copied"),
        (True, TypeError, "clip_high must be a number, a tensor or a module, got True"),
        ("0.2", TypeError, "clip_high must be a number, a tensor or a module, got '0.2'"),
    ],
)
def test_what_is_not_a_number(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TermPart(ppo, clip_high=value)
    part = TermPart(ppo)
    with pytest.raises(error, match=message):
        part.clip_high = value
    assert_close(part.clip_high, torch.tensor(0.2))


# ------------------------------------------------------------------ on data


def test_a_misspelt_attribute_is_refused(model: nn.Module) -> None:
    loss = PolicyLoss(model, terms=[KLToReference(0.1)])
    with pytest.raises(AttributeError, match=r"PolicyLoss has no 'clip_hihg' to set\. Did you mean 'clip_high'"):
        loss.clip_hihg = 0.3
    with pytest.raises(AttributeError, match="Did you mean 'kl_to_ref_coeff'"):
        loss.kl_coeff = 0.3
    loss.log_entropy = True
    loss.note = "anything else"  # type: ignore[assignment]


def test_a_mask_is_no_weight(model: nn.Module) -> None:
    half, advice = torch.full((6, 1), 0.5), "is a mask: expected True and False, or 1 and 0"
    for value in (half, 2 * torch.ones(6, 1).long(), torch.full((6, 1), NAN)):
        with pytest.raises(ValueError, match=f"'loss_mask' {advice}"):
            PolicyLoss(model)(with_entry("loss_mask", value))
    with pytest.raises(ValueError, match=f"'expert_mask' {advice}"):
        PolicyLoss(model, "mix")(with_entry("expert_mask", half))
    rows = torch.tensor([1, 0, 1, 0, 1, 1]).unsqueeze(-1)
    results = [PolicyLoss(model)(with_entry("loss_mask", x))["loss_objective"] for x in (rows, rows.float(), rows == 1)]
    assert results[0] == results[1] == results[2]
    with pytest.raises(TypeError, match="advantage must hold numbers"):
        PolicyLoss(model)(with_entry("advantage", torch.ones(6, 1) == 1))


@pytest.mark.parametrize(
    ("objective", "name"),
    [("ppo", "loss_mask"), ("ppo", "sampler_log_prob"), ("clip_cov", "selected"), ("dpo", "pair_id")],
)
def test_an_optional_entry_under_another_key_must_be_there(model: nn.Module, objective: Any, name: str) -> None:
    loss = PolicyLoss(model, objective)
    loss(batch())
    loss.set_keys(**{name: "misspelt"})
    with pytest.raises(KeyError, match=rf"{name}.*expected 'misspelt' in the TensorDict.*set_keys\({name}="):
        loss(batch())


def test_responses_longer_than_the_limit(model: nn.Module) -> None:
    data = batch()  # the longest response has five tokens
    assert PolicyLoss(model, "dr_grpo", max_len=5)(data)["loss_objective"].isfinite()
    loss = PolicyLoss(model, "dr_grpo", max_len=4)
    for call in (loss, loss.count):
        with pytest.raises(ValueError, match=r"max_len=4, but a sequence has 5 trained tokens"):
            call(data)


def test_terms_and_corrections_are_not_mixed_up(model: nn.Module) -> None:
    with pytest.raises(TypeError, match="terms must not hold a ImportanceWeights: pass it in corrections="):
        PolicyLoss(model, terms=[ImportanceWeights()])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="corrections must not hold a KLToReference: pass it in terms="):
        PolicyLoss(model, corrections=[KLToReference(0.1)])  # type: ignore[list-item]
    plain = PolicyLoss(model, corrections=[importance_weights])(batch())
    assert_close(
        plain["loss_objective"], PolicyLoss(model, corrections=[ImportanceWeights()])(batch())["loss_objective"]
    )


def test_the_metrics_do_not_need_old_log_probs_of_every_token(model: nn.Module) -> None:
    data = batch()
    data["next", "log_probs", "full"][0] = NAN
    out = PolicyLoss(model, "gpg")(data)
    assert all(value.isfinite() for value in out.values())
