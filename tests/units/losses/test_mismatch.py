"""A loss whose sampler differs from the trainer or did not score all tokens: corrections, metrics, verl's settings."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.testing import assert_close

from closeness import assert_near
from policy_batches import LENGTHS, PROMPT, assert_loss, assert_same, batch, gradients, responses, total
from refused import refused
from torchrl_llm_kl import losses
from torchrl_llm_kl.losses import ImportanceWeights, KLToSampler, PolicyLoss, RejectionMask, rollout_corrections

NAN = float("nan")
OLD, SAMPLER = ("next", "log_probs", "full"), ("next", "sampler_log_probs", "full")
ROOT = ("log_probs", "full")
TOKENS = sum(LENGTHS) - 6 * PROMPT  # 20; without first ones 14


def near() -> TensorDictBase:
    """The usual batch with a sampler close to the trainer."""
    data, rng = batch(), torch.Generator().manual_seed(5)
    data[SAMPLER] = data[OLD] + 0.4 * torch.randn(6, 9, generator=rng)
    return data


@pytest.mark.parametrize(
    ("correction", "aggregation", "lead"),
    [
        (RejectionMask("token_k1", high=1e-6), "token-mean", 2.0),
        (RejectionMask("seq_max_k1", high=1e-6), "seq-mean-token-mean", 2.0),
        (ImportanceWeights(level="geometric", mode="mask", low=1e6, high=None), "token-mean", -2.0),
    ],
)
def test_a_fully_rejected_batch_has_loss_0_with_graph(model: Any, correction: Any, aggregation: Any, lead: Any) -> None:
    """The sampler is far from the trainer at every token, in one direction. Other terms are not corrected."""
    data = batch()
    data[SAMPLER] = data[OLD] + lead
    out = PolicyLoss(model, corrections=[correction], aggregation=aggregation)(data)
    assert out.total_loss == 0
    assert not any(gradient.any() for gradient in gradients(out.total_loss, model).values())  # 0, and so not NaN
    assert all(value.isfinite() for value in out.values())
    assert (out["rejected_fraction"], out["rejected_seq_fraction"], out["correction_ess"]) == (1, 1, 0)
    terms = [losses.KLToReference(0.1)]
    both = PolicyLoss(model, corrections=[correction], terms=terms, aggregation=aggregation)(data)
    alone = PolicyLoss(model, terms=terms, aggregation=aggregation)(data)
    assert_loss(both.total_loss, alone["loss_kl_to_ref"], model)


def test_two_corrections_of_one_kind_log_both(model: nn.Module) -> None:
    both = [ImportanceWeights(high=1.1), ImportanceWeights(level="sequence", high=1.2)]
    loss, data = PolicyLoss(model, corrections=both), near()
    out = loss(data)
    alone = [PolicyLoss(model, corrections=[each])(data) for each in both]
    for name in ("weight_mean", "weight_max", "truncated_fraction", "effective_sample_size"):
        assert_close([out[name], out[f"{name}_2"]], [each[name] for each in alone])
        assert out[name] != out[f"{name}_2"]
    of_product = {"rejected_fraction", "rejected_seq_fraction", "correction_ess"}
    assert {"weight_mean", "weight_mean_2"} | of_product <= set(loss.out_keys) <= set(out.keys())
    assert not of_product & set(PolicyLoss(model)(data).keys())


def mixed(old: float, sampler: float) -> TensorDictBase:
    """An expert wrote the first two rows. The policies' log-probs of them are arbitrary."""
    data = batch().set("expert_mask", (torch.arange(6) < 2).unsqueeze(-1))
    data[OLD][:2], data[SAMPLER][:2] = old, sampler
    return data


@pytest.mark.parametrize(
    ("correction", "old", "sampler"),
    [
        *((ImportanceWeights(mode="mask", low=0.5, high=2.0), *values) for values in ((0.0, -9.0), (NAN, NAN))),
        (RejectionMask("seq_max_k2", high=5.0), -9.0, 0.0),
    ],
)
def test_corrections_ignore_experts(model: nn.Module, correction: Any, old: float, sampler: float) -> None:
    """The policies' log-probs of experts' tokens are placeholders and must not change the experts' loss."""
    plain = PolicyLoss(model, "mix")(mixed(old, sampler))
    loss = PolicyLoss(model, "mix", corrections=[correction])
    out = loss(mixed(old, sampler))
    assert_loss(out["loss_expert"], plain["loss_expert"], model)
    assert plain["loss_expert"] > 0
    for name, value in loss(mixed(-1.0, -1.0)).items():
        assert_near(out[name], value, terms=64, exponent=9)  # a policy's metrics read its tokens alone


def test_mismatch_metrics_are_logged_for_data_with_sampler_log_probs(model: nn.Module) -> None:
    names = set(losses.mismatch_metrics(*torch.zeros(2, 1, 1), torch.ones(1, 1) == 1))
    assert not names & set(PolicyLoss(model)(batch().exclude(("next", "sampler_log_probs"))).keys())
    data = near()
    out = PolicyLoss(model)(data)
    assert names <= set(out.keys())
    assert not any(out[name].requires_grad for name in names)
    # of the same tokens as a correction sees
    corrected = PolicyLoss(model, corrections=[ImportanceWeights()])
    again = corrected(data)
    assert names <= set(corrected.out_keys) <= set(again.keys())
    assert_close({name: again[name] for name in names}, {name: out[name] for name in names})
    # without old log-probs: of the current policy
    del data["next", "log_probs"]
    own = PolicyLoss(model, "gpg")(data)
    assert names <= set(own.keys())
    assert own["mismatch_k3"] != out["mismatch_k3"]
    assert_close(own["mismatch_k3"], own["kl_to_sampler"])


def test_verls_settings() -> None:
    verl = {"rollout_is": "token", "rollout_is_threshold": "0.8_1.2", "rollout_rs": "token_k1, seq_max_k3,token_k1"}
    rejection = RejectionMask("token_k1", low=math.log(0.5), high=math.log(1.6)), RejectionMask("seq_max_k3", high=0.1)
    own = [ImportanceWeights(mode="mask", low=0.8, high=1.2), *rejection]
    assert repr(rollout_corrections(**verl, rollout_rs_threshold="0.5_1.6,0.1")) == repr(own)  # type: ignore[arg-type]
    assert repr(rollout_corrections(rollout_is="geometric")) == repr([ImportanceWeights(level="geometric", high=2.0)])
    shared = rollout_corrections(rollout_rs="seq_mean_k2,seq_sum_k3", rollout_rs_threshold=0.25)
    assert [x.high.item() for x in shared] == [0.25, 0.25]
    (one,) = rollout_corrections(rollout_rs="seq_mean_k1", rollout_rs_threshold=4.0)
    assert (one.low.item(), one.high.item()) == pytest.approx((-math.log(4), math.log(4)))
    assert rollout_corrections() == []


test_verls_settings_that_make_no_sense = refused(
    lambda settings: rollout_corrections(**settings),
    ({"rollout_is_threshold": 3.0}, "rollout_is_threshold=3.0 has no effect"),
    ({"rollout_rs_threshold": 3.0}, "rollout_rs_threshold=3.0 has no effect"),
    ({"rollout_rs": "token_k1"}, "could not convert string to float: 'None'"),
    ({"rollout_rs": "token_k2,seq_sum_k2,seq_max_k2", "rollout_rs_threshold": "1,2"}, "pass one bound each"),
)


# ------------------------------------------------------------------ NaN, or torchrl's 0, at the first token of a response
def at_root(data: TensorDictBase, key: Any = OLD) -> TensorDictBase:
    """Move log-probs to where torchrl's policy writes them, with its 0 for each first token."""
    stored = data.pop(key).clone()
    stored[:, PROMPT] = 0.0
    return data.set(ROOT, stored)


def unscored(missing: str, key: Any = OLD) -> TensorDictBase:
    data = batch()
    data[key][:, PROMPT] = torch.nan
    return data if missing == "nan" else at_root(data, key)


def scored(model: nn.Module, key: str) -> Tensor:
    """A quantity at all response tokens except the first."""
    return torch.cat([row[key][1:] for row in responses(model, batch())])


@pytest.mark.parametrize("missing", ["nan", "zero"])
def test_the_kl_to_the_sampler_uses_its_scored_tokens(model: nn.Module, missing: str) -> None:
    expected = 0.05 * (scored(model, "log_prob") - scored(model, "sampler_log_probs")).square().mean()
    loss = PolicyLoss(model, terms=[KLToSampler(0.1)])
    if missing == "zero":
        loss.set_keys(sampler_log_prob=ROOT)
    out = loss(unscored(missing, SAMPLER))
    assert_loss(out["loss_kl_to_sampler"], expected, model)
    assert_close(out["loss_objective"], PolicyLoss(model)(batch())["loss_objective"])  # it reads the trainer's
    assert out["num_tokens"] == TOKENS


def test_the_wrappers_zero_at_the_first_token_means_not_scored(model: nn.Module) -> None:
    """torchrl's policy writes at the root. There, exactly 0 at the first response token means that it was not scored."""
    data = near()
    several, first = [0, 1, 3, 4, 5], PROMPT  # sequence 2 has one token: nothing shows that its 0 is not a score
    data[SAMPLER][several, first] = torch.nan
    expected = PolicyLoss(model, corrections=[ImportanceWeights(high=1.2)])(data)
    stored = data.pop(("next", "sampler_log_probs"))
    stored["full"][several, first] = 0.0
    loss = PolicyLoss(model, corrections=[ImportanceWeights(high=1.2)])
    loss.set_keys(sampler_log_prob=ROOT)
    assert_close(dict(loss(data.set("log_probs", stored)).items()), dict(expected.items()))


def drift(inputs: losses.LossInputs) -> tuple[losses.LossTerm, ...]:
    return (losses.LossTerm("drift", inputs.log_ratio.square(), inputs.mask),)


@pytest.mark.parametrize("objective", ["gpg", "sft"])
def test_an_objective_that_reads_no_old_log_probs(model: nn.Module, objective: str) -> None:
    """On-policy, every ratio is 1. A stored 0 at the first token must not change ratios and effective sample size."""
    data = batch().exclude(("next", "sampler_log_probs"))
    for i, row in enumerate(responses(model, data)):
        data[OLD][i, PROMPT : LENGTHS[i]] = row["log_prob"].detach()
    data = at_root(data)
    out = PolicyLoss(model, objective)(data)
    assert out["num_tokens"] == TOKENS
    for name in ("ESS", "ratio_min", "ratio_max"):
        assert_close(out[name], torch.tensor(1.0), msg=name)
    assert abs(out["kl_to_sampler"]) < 1e-5
    for term, name in ((KLToSampler(0.1), "loss_kl_to_sampler"), (drift, "loss_drift")):
        with pytest.warns(UserWarning, match=r"exactly 0 for the first generated token of 6 .*leaves those tokens out"):
            out = PolicyLoss(model, objective, terms=[term])(data)
        assert abs(out[name]) < 1e-5
        assert out["num_tokens"] == TOKENS - 6
        assert all(gradient.isfinite().all() for gradient in gradients(total(out), model).values())


@pytest.mark.parametrize(("objective", "missing"), [("gpg", "nan"), ("sft", "zero")])
def test_a_user_estimator_may_read_old_log_probs(model: nn.Module, objective: str, missing: str) -> None:
    """It leaves out the first tokens. A built-in estimator that reads no old log-probs keeps them."""
    data = unscored(missing)
    away = losses.KLToReference(0.1, estimator=lambda now, ref, old_log_prob: (now - old_log_prob).abs())
    with pytest.warns(UserWarning, match="first generated token of 6 responses"):
        out = PolicyLoss(model, objective, terms=[away])(data)
    expected = 0.1 * (scored(model, "log_prob") - scored(model, "log_probs")).abs().mean()
    assert_near(out["loss_kl_to_ref"], expected, terms=TOKENS, size=10.0)
    assert out["num_tokens"] == TOKENS - 6
    assert PolicyLoss(model, objective, terms=[losses.KLToReference(0.1, estimator="k3")])(data)["num_tokens"] == TOKENS


def test_first_tokens_that_were_not_scored_are_left_out(model: nn.Module) -> None:
    """verl's bypass mode: the sampler's log-probs, as RetrieveLogProb stores them, serve as old log-probs.

    A 0 under "next", where a transform wrote it, is taken as it is; a row at the root that has no 0 was scored.
    """
    with pytest.warns(UserWarning, match="holds NaN for the first generated token of 6 responses"):
        out = PolicyLoss(model)(unscored("nan"))
    assert out["num_tokens"] == TOKENS - 6
    data = batch()
    data[OLD][:, PROMPT] = 0.0
    assert PolicyLoss(model)(data)["num_tokens"] == TOKENS
    data = at_root(data)
    assert_close(total(out), total(PolicyLoss(model)(data)))
    data[ROOT][2, PROMPT] = -0.3
    with pytest.warns(UserWarning, match="holds exactly 0 for the first generated token of 5 responses"):
        assert PolicyLoss(model)(data)["num_tokens"] == TOKENS - 5


def test_missing_log_probs_of_later_tokens_raise(model: nn.Module) -> None:
    cases: list[tuple[dict[str, Any], float]] = [
        ({"terms": [KLToSampler(0.1)]}, math.nan),
        ({"terms": [drift]}, math.inf),
        ({"corrections": [losses.OffPolicySequenceMask()]}, -math.inf),
        ({"corrections": [ImportanceWeights()]}, math.nan),
    ]
    for parts, bad in cases:
        data, loss = batch(), PolicyLoss(model, "gpg", **parts)
        data[OLD][3, PROMPT + 2] = bad
        if "terms" in parts:
            del data["next", "sampler_log_probs"]
        with pytest.raises(ValueError, match=rf"old_log_prob \(.*\) is {bad} at sequence 3, position {PROMPT + 2}"):
            loss(data)


def test_the_sampler_may_skip_a_token_but_not_store_an_infinite_number(model: nn.Module) -> None:
    for parts in ({"terms": [KLToSampler(0.1)]}, {"corrections": [RejectionMask("seq_max_k2", high=0.5)]}):
        data, loss = batch(), PolicyLoss(model, "gpg", **parts)
        data[SAMPLER][3, PROMPT + 2] = torch.nan
        assert all(value.isfinite().all() for value in loss(data).values())
        data[SAMPLER][3, PROMPT + 2] = -torch.inf
        with pytest.raises(ValueError, match=r"sampler_log_prob .* is -inf at sequence 3, position 6"):
            loss(data)


@pytest.mark.parametrize("objective", ["ppo", "gpg"])
@pytest.mark.filterwarnings("ignore:.*first generated token")
def test_losses_of_counted_rows_add_up(model: nn.Module, objective: str) -> None:
    """Sequence 2 has an answer of one token. Its 0 is not a log-prob, by itself and in the batch."""
    loss = PolicyLoss(model, objective, terms=[KLToSampler(0.1)])
    data = loss.count(at_root(batch(), OLD))
    data[SAMPLER][1::2, PROMPT] = torch.nan
    data = loss.count(data)
    whole, rows = loss(data), [loss(data[i : i + 1]) for i in range(6)]
    assert whole["num_tokens"] == sum(row["num_tokens"] for row in rows) == TOKENS - 6 * (objective == "ppo")
    for name in ("loss_objective", "loss_kl_to_sampler"):
        assert_close(sum(row[name] for row in rows), whole[name])
    want, got = gradients(total(whole), model), [gradients(total(row), model) for row in rows]
    assert_same({name: sum(row[name] for row in got) for name in want}, want, rtol=1e-4, atol=1e-5)


def test_masks_and_experts_do_not_move_the_first_token(model: nn.Module) -> None:
    """Experts' tokens are trained whatever is stored for them. A later token with probability 1 counts as scored."""
    data = at_root(batch()).set("expert_mask", torch.tensor([False, False, True, True, False, False]))
    data[ROOT][2:4] = 0.0
    with pytest.warns(UserWarning, match="first generated token of 4 responses"):
        assert PolicyLoss(model, "mix")(data)["num_tokens"] == TOKENS - 4
    data = at_root(batch()).set("loss_mask", torch.arange(9).expand(6, 9) > PROMPT)
    data[ROOT][0, PROMPT + 1] = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert PolicyLoss(model)(data)["num_tokens"] == TOKENS - 6


# ------------------------------------------------------------------ older weights

BEHAVIOR = ("next", "behavior_log_probs", "full")


def stale() -> TensorDictBase:
    """Rows of ages 0 to 5, whose sampling weights are the further from the trainer's the older they are."""
    data = near()
    data["age"] = torch.arange(6).reshape(6, 1)
    data[BEHAVIOR] = data[OLD] - 0.1 * data["age"]
    return data


def test_mismatch_and_staleness_are_logged_apart(model: nn.Module) -> None:
    out = PolicyLoss(model)(stale())
    same = PolicyLoss(model)(stale().set(SAMPLER, stale()[BEHAVIOR]))
    assert float(same["mismatch_k3"]) == pytest.approx(0, abs=1e-9)
    where = torch.stack([(torch.arange(9) >= PROMPT) & (torch.arange(9) < length) for length in LENGTHS])
    own, theirs = stale()[BEHAVIOR][where], near()[SAMPLER][where]
    assert float(out["mismatch_k1"]) == pytest.approx(float((theirs - own).mean()), rel=1e-4)
    log_prob = torch.cat([row["log_prob"].detach() for row in responses(model, stale())])
    assert float(out["staleness_k1"]) == pytest.approx(float((own - log_prob).mean()), rel=1e-4)
    ages = stale()["age"].expand(6, 9)[where]
    for low, high in ((0, 1), (1, 2), (2, 4), (4, 8)):
        group = (ages >= low) & (ages < high)
        d = (log_prob - own)[group]
        assert float(out[f"staleness_k3_age{low}"]) == pytest.approx(float((d.exp() - 1 - d).mean()), rel=1e-3)
        assert float(out[f"age{low}_fraction"]) == pytest.approx(float(group.double().mean()))
    assert not {"staleness_k1", "age0_fraction"} & set(PolicyLoss(model)(near()).keys())


def test_old_rows_have_no_gradient_and_stay_in_the_denominator(model: nn.Module) -> None:
    data = stale()
    masked = PolicyLoss(model, corrections=[losses.StalenessMask(2)])(data)
    zero = data.clone()
    zero["advantage"] = torch.where(data["age"] > 2, 0, data["advantage"])
    assert_loss(masked.total_loss, PolicyLoss(model)(zero).total_loss, model)
    assert float(masked["too_old_fraction"]) == pytest.approx(sum(n - PROMPT for n in LENGTHS[3:]) / TOKENS)


def test_an_age_for_each_token(model: nn.Module) -> None:
    data = stale()
    data["age"] = torch.arange(9).expand(6, 9).clone()
    corrections = [losses.StalenessMask(decay=0.5)]
    out = PolicyLoss(model, corrections=corrections)(data)
    by_hand = data.clone()
    by_hand["advantage"] = data["advantage"].expand(6, 9) * 0.5 ** data["age"]
    assert_loss(out.total_loss, PolicyLoss(model)(by_hand).total_loss, model)


def test_decoupled_ppo_clips_to_the_newest_weights_and_weighs_by_both(model: nn.Module) -> None:
    data = stale()
    correction = ImportanceWeights(ratio="staleness", high=None)
    out = PolicyLoss(model, corrections=[correction])(data)
    weighted = data.clone()
    weighted["advantage"] = data["advantage"].expand(6, 9) * (data[OLD] - data[BEHAVIOR]).exp()
    # The dual clip depends on the sign of the advantage only, so positive weights pass through the surrogate.
    assert_loss(out.total_loss, PolicyLoss(model)(weighted).total_loss, model)


def test_an_unrelated_entry_with_the_name_of_the_age_is_not_read(model: nn.Module) -> None:
    data = batch()
    data["age"] = torch.ones(6, 5)
    assert_loss(PolicyLoss(model)(data).total_loss, PolicyLoss(model)(batch()).total_loss, model)


def test_two_exact_kls_would_need_two_references(model: nn.Module) -> None:
    terms = [losses.KLToReference(0.1, "exact"), KLToSampler(0.1, "exact")]
    with pytest.raises(ValueError, match="two exact KLs need two other models"):
        PolicyLoss(model, terms=terms, reference=copy.deepcopy(model))
