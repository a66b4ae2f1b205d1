"""Log-probs that the sampler never computed: NaN, or torchrl's 0, at the first token of a response. No part reads them."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.testing import assert_close

from closeness import assert_near
from policy_batches import LENGTHS, PROMPT, assert_same, batch, gradients, responses, total
from torchrl_llm_kl.losses import (
    ImportanceWeights,
    KLToReference,
    KLToSampler,
    LossTerm,
    OffPolicySequenceMask,
    PolicyLoss,
    RejectionMask,
)
from toy_models import tiny_model

OLD, SAMPLER = ("next", "log_probs", "full"), ("next", "sampler_log_probs", "full")
ROOT = ("log_probs", "full")
TOKENS = sum(LENGTHS) - 6 * PROMPT  # 20; without first ones 14


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model(seed=0)


def at_root(data: TensorDictBase, key: Any = OLD) -> TensorDictBase:
    """The log-probs where torchrl's policy writes them, with its 0 for each first token."""
    stored = data.pop(key).clone()
    stored[:, PROMPT] = 0.0
    data[ROOT] = stored
    return data


def on_policy(model: nn.Module) -> TensorDictBase:
    """Stored log-probs are the model's own."""
    data = batch()
    del data["next", "sampler_log_probs"]
    for i, row in enumerate(responses(model, data)):
        data[OLD][i, PROMPT : LENGTHS[i]] = row["log_prob"].detach()
    return data


def scored(model: nn.Module, data: TensorDictBase) -> tuple[Tensor, Tensor]:
    """Log-probs of all response tokens but the first, now and of the sampler."""
    rows = responses(model, data)
    return tuple(torch.cat([row[key][1:] for row in rows]) for key in ("log_prob", "sampler_log_probs"))  # type: ignore[return-value]


@pytest.mark.parametrize("missing", ["nan", "zero"])
def test_the_kl_to_the_sampler_is_that_of_its_scored_tokens(model: nn.Module, missing: str) -> None:
    data = batch()
    now, sampler = scored(model, data)
    expected = 0.1 * ((now - sampler).square() / 2).mean()
    loss, plain = PolicyLoss(model, terms=[KLToSampler(0.1)]), PolicyLoss(model)(data)
    if missing == "nan":
        data[SAMPLER][:, PROMPT] = torch.nan
    else:
        data = at_root(data, SAMPLER)
        loss.set_keys(sampler_log_prob=ROOT)
    out = loss(data)
    assert_close(out["loss_kl_to_sampler"], expected)
    assert_close(out["loss_objective"], plain["loss_objective"])  # it reads the trainer's, of all tokens
    assert out["num_tokens"] == TOKENS
    assert_same(gradients(out["loss_kl_to_sampler"], model), gradients(expected, model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("objective", ["gpg", "sft"])
def test_metrics_of_an_objective_that_reads_no_old_log_probs(model: nn.Module, objective: str) -> None:
    """On policy: every ratio is 1. The stored 0 made an effective sample size of 0.7 and a ratio of 0.0005."""
    data = at_root(on_policy(model))
    out = PolicyLoss(model, objective)(data)
    assert out["num_tokens"] == TOKENS
    for name in ("ESS", "ratio_min", "ratio_max"):
        assert_close(out[name], torch.tensor(1.0), msg=name)
    assert abs(out["kl_to_sampler"]) < 1e-5
    with pytest.warns(UserWarning, match=r"exactly 0 for the first generated token of 6 responses.*left out"):
        out = PolicyLoss(model, objective, terms=[KLToSampler(0.1)])(data)
    assert abs(out["loss_kl_to_sampler"]) < 1e-5
    assert out["num_tokens"] == TOKENS - 6


@pytest.mark.parametrize(("objective", "missing"), [("gpg", "nan"), ("sft", "zero")])
def test_an_estimator_of_the_users_may_read_old_log_probs(model: nn.Module, objective: str, missing: str) -> None:
    """The first tokens are left out; a built-in estimator that reads none keeps them."""
    data = batch()
    now = scored(model, data)[0]
    old = torch.cat([row["log_probs"][1:] for row in responses(model, data)])
    if missing == "nan":
        data[OLD][:, PROMPT] = torch.nan
    else:
        data = at_root(data)
    drift = KLToReference(0.1, estimator=lambda log_prob, ref_log_prob, old_log_prob: (log_prob - old_log_prob).abs())
    with pytest.warns(UserWarning, match="first generated token of 6 responses"):
        out = PolicyLoss(model, objective, terms=[drift])(data)
    assert_near(out["loss_kl_to_ref"], 0.1 * (now - old).abs().mean(), terms=TOKENS, size=10.0)
    assert out["num_tokens"] == TOKENS - 6
    assert PolicyLoss(model, objective, terms=[KLToReference(0.1, estimator="k3")])(data)["num_tokens"] == TOKENS


def optional(log_prob: Tensor, mask: Tensor, old_log_prob: Tensor | None = None) -> tuple[LossTerm, ...]:
    assert old_log_prob is not None
    return (LossTerm("drift", (log_prob - old_log_prob).square(), mask),)


def test_an_input_that_is_optional(model: nn.Module) -> None:
    data = at_root(on_policy(model))
    with pytest.warns(UserWarning, match="first generated token of 6 responses"):
        out = PolicyLoss(model, "gpg", terms=[optional])(data)
    assert abs(out["loss_drift"]) < 1e-5
    assert all(gradient.isfinite().all() for gradient in gradients(total(out), model).values())


def test_nan_of_a_first_token_is_left_out_like_a_zero(model: nn.Module) -> None:
    """verl's bypass mode: the sampler's log-probs, as RetrieveLogProb stores them, are the old ones."""
    data = batch()
    expected = PolicyLoss(model)(at_root(batch()))
    data[OLD][:, PROMPT] = torch.nan
    with pytest.warns(UserWarning, match="holds NaN for the first generated token of 6 responses"):
        out = PolicyLoss(model)(data)
    assert out["num_tokens"] == TOKENS - 6
    assert_close(total(out), total(expected))


@pytest.mark.parametrize(
    ("parts", "bad"),
    [
        ({"terms": [KLToSampler(0.1)]}, math.nan),
        ({"terms": [optional]}, math.inf),
        ({"corrections": [OffPolicySequenceMask()]}, -math.inf),
        ({"corrections": [ImportanceWeights()]}, math.nan),
    ],
    ids=["term", "optional", "mask", "weights"],
)
def test_any_other_is_an_error(model: nn.Module, parts: dict[str, Any], bad: float) -> None:
    data, loss = batch(), PolicyLoss(model, "gpg", **parts)
    data[OLD][3, PROMPT + 2] = bad
    if "terms" in parts:
        del data["next", "sampler_log_probs"]
    with pytest.raises(ValueError, match=rf"old_log_prob \(.*\) is {bad} at sequence 3, position {PROMPT + 2}"):
        loss(data)


@pytest.mark.parametrize(
    "parts", [{"terms": [KLToSampler(0.1)]}, {"corrections": [RejectionMask("seq_max_k2", high=0.5)]}]
)
def test_the_sampler_may_skip_a_token_but_not_store_an_infinite_number(model: nn.Module, parts: dict[str, Any]) -> None:
    data, loss = batch(), PolicyLoss(model, "gpg", **parts)
    data[SAMPLER][3, PROMPT + 2] = torch.nan
    assert all(value.isfinite().all() for value in loss(data).values())
    data[SAMPLER][3, PROMPT + 2] = -torch.inf
    with pytest.raises(ValueError, match=r"sampler_log_prob .* is -inf at sequence 3, position 6"):
        loss(data)


@pytest.mark.parametrize("objective", ["ppo", "gpg"])
@pytest.mark.filterwarnings("ignore:.*first generated token")
def test_losses_of_counted_rows_add_up(model: nn.Module, objective: str) -> None:
    """Sequence 2 has an answer of one token: alone, as in the batch, its 0 is no log-prob."""
    loss = PolicyLoss(model, objective, terms=[KLToSampler(0.1)])
    data = loss.count(at_root(batch(), OLD))
    data[SAMPLER][1::2, PROMPT] = torch.nan
    data = loss.count(data)
    whole = loss(data)
    rows = [loss(data[i : i + 1]) for i in range(6)]
    assert whole["num_tokens"] == sum(row["num_tokens"] for row in rows) == TOKENS - 6 * (objective == "ppo")
    for name in ("loss_objective", "loss_kl_to_sampler"):
        assert_close(sum(row[name] for row in rows), whole[name])
    want, got = gradients(total(whole), model), [gradients(total(row), model) for row in rows]
    assert_same({name: sum(row[name] for row in got) for name in want}, want, rtol=1e-4, atol=1e-5)


def test_experts_tokens_are_trained_whatever_is_stored_for_them(model: nn.Module) -> None:
    """A mixed batch holds 0 for experts, also for an expert's answer of one token."""
    data = at_root(batch())
    data["expert_mask"] = torch.tensor([False, False, True, True, False, False])
    data[ROOT][2:4] = 0.0
    with pytest.warns(UserWarning, match="first generated token of 4 responses"):
        out = PolicyLoss(model, "mix")(data)
    assert out["num_tokens"] == TOKENS - 4


def test_a_mask_of_the_loss_does_not_move_the_first_token(model: nn.Module) -> None:
    """A later token of probability 1 is scored, also where a mask takes out those before it."""
    data = at_root(batch())
    data[ROOT][0, PROMPT + 1] = 0.0
    data["loss_mask"] = torch.arange(9).expand(6, 9) > PROMPT
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert PolicyLoss(model)(data)["num_tokens"] == TOKENS - 6
