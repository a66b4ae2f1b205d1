"""PolicyLoss on a tiny model, compared with values and gradients of one plain forward for each sequence."""

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor, nn
from torch.testing import assert_close

from policy_batches import assert_loss, batch, gradients, responses, token_mean, total
from refused import refused
from torchrl_llm_kl import LogProbScorer, Sampling, ScoreOptions, losses
from torchrl_llm_kl.estimators import ScheduledCoefficient
from torchrl_llm_kl.losses import (
    AdaptiveEntropyCoefficient,
    EntropyBonus,
    KLToReference,
    LossInputs,
    LossTerm,
    PolicyLoss,
)
from torchrl_llm_kl.losses._objective import _REGISTRY
from toy_models import tiny_model

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
BOUNDS = {"clip_low": 0.1, "clip_high": 0.3}
EXPERTS = torch.tensor([False, True, False, False, True, False])
NOT_SECOND = torch.tensor([True, False, True, True, True, True])
SAMPLER, REF = ("next", "log_probs", "full"), ("next", "ref_log_probs", "full")
WARM = LogProbScorer(tiny_model(), temperature=2.0)


def objective(model: nn.Module, data: TensorDictBase, *name: Any, **settings: Any) -> Tensor:
    return PolicyLoss(model, *name, **settings)(data)["loss_objective"]


def ppo_by_hand(row: dict[str, Tensor]) -> Tensor:
    """PPO with bounds 0.1 and 0.3 and a dual clip at 3."""
    ratio, advantage = (row["log_prob"] - row["log_probs"]).exp(), row["advantage"]
    value = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.9, 1.3))
    return torch.where(advantage < 0, torch.minimum(value, -3.0 * advantage), value)


@pytest.mark.parametrize("layout", ["padded", "nested", "lazy"])
def test_value_and_gradient_in_every_layout(model: nn.Module, layout: str) -> None:
    out = PolicyLoss(model, "ppo", **BOUNDS)(batch(layout=layout))
    assert_loss(out["loss_objective"], token_mean(model, batch(), ppo_by_hand), model)
    assert (out["num_tokens"], out["num_sequences"]) == (20, 6)


def test_any_number_of_batch_dimensions_and_advantages_in_any_shape(model: nn.Module) -> None:
    loss, data = PolicyLoss(model, terms=[EntropyBonus(0.1)]), batch()
    before = data.clone()
    expected = loss(data)["loss_objective"]
    assert (data == before).all()
    assert set(data.keys(True)) == set(before.keys(True))
    assert_close(loss(data.reshape(2, 3))["loss_objective"], expected)
    one = loss(data[1])["loss_objective"]
    assert_close(one, loss(data[1:2])["loss_objective"])
    assert one != expected
    for shape in ((6,), (6, 1), (6, 1, 1), (6, 9), (6, 9, 1)):
        data["advantage"] = before["advantage"].reshape(6, *[1] * (len(shape) - 1)).expand(shape).clone()
        assert_close(loss(data)["loss_objective"], expected)


def test_terms_and_metrics(model: nn.Module) -> None:
    terms, data = [KLToReference(0.2, "k2"), losses.KLToSampler(0.3, "k2"), EntropyBonus(0.05)], batch()
    out = PolicyLoss(model, "gpg", terms=terms)(data)
    by_hand = {
        "loss_objective": lambda row: -row["advantage"] * row["log_prob"],
        "loss_kl_to_ref": lambda row: 0.2 * (row["log_prob"] - row["ref_log_probs"]).square() / 2,
        "loss_kl_to_sampler": lambda row: 0.3 * (row["log_prob"] - row["sampler_log_probs"]).square() / 2,
        "loss_entropy": lambda row: -0.05 * row["entropy"],
    }
    for name, value in by_hand.items():
        assert_loss(out[name], token_mean(model, data, value), model)
    rows = responses(model, data)
    keys = ("log_prob", "log_probs", "ref_log_probs", "sampler_log_probs", "entropy")
    now, old, ref, sampler, entropy = (torch.cat([row[key].detach() for row in rows]) for key in keys)
    ratio = (now - old).exp()
    metrics = {
        "ESS": ratio.sum() ** 2 / (20 * (ratio**2).sum()),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "ratio_median": ratio.sort().values[10],  # of 20: position 9.5, rounded to even
        "kl_to_ref": ((ref - now).exp() - 1 - (ref - now)).mean(),
        "kl_to_sampler": ((now - sampler).exp() - 1 - (now - sampler)).mean(),
        "entropy": entropy.mean(),
    }
    assert_close({name: out[name] for name in metrics}, metrics, **CLOSE)
    assert not any(out[key].requires_grad for key in set(out.keys()) if not key.startswith("loss_"))


def test_a_reference_model(model: nn.Module, reference: nn.Module) -> None:
    """An exact KL needs it. It also provides missing log-probs. The estimator may change later."""
    data, rows = batch(), responses(reference, batch())
    loss = PolicyLoss(model, "gpg", terms=[KLToReference(0.5, "exact")], reference=reference)
    assert not any(p is q for p in loss.parameters() for q in reference.parameters())
    refs = iter(rows)

    def exact(row: dict[str, Tensor]) -> Tensor:
        return 0.5 * (row["all"].exp() * (row["all"] - next(refs)["all"].detach())).sum(-1)

    assert_loss(loss(data)["loss_kl_to_ref"], token_mean(model, data, exact), model)
    del data["next", "ref_log_probs"]
    k2 = PolicyLoss(model, "gpg", terms=[KLToReference(0.5, "k2")], reference=reference)
    refs = iter(rows)
    expected = token_mean(model, data, lambda row: 0.25 * (row["log_prob"] - next(refs)["log_prob"].detach()).square())
    assert_close(k2(data)["loss_kl_to_ref"], expected, **CLOSE)
    k2.kl_to_ref_estimator = "exact"
    assert_close(k2(data)["loss_kl_to_ref"], loss(data)["loss_kl_to_ref"])


def test_temperature_divides_the_logits(model: nn.Module) -> None:
    expected, scorer = token_mean(model, batch(), ppo_by_hand, temperature=0.7), LogProbScorer(model, temperature=0.7)
    assert_close(objective(model, batch(), options=ScoreOptions(Sampling(0.7)), **BOUNDS), expected, **CLOSE)
    assert_close(objective(scorer, batch(), **BOUNDS), expected, **CLOSE)


def test_defect_38_padding_changes_no_mean(model: nn.Module) -> None:
    """More padding changes no number."""
    data = batch().exclude(("next", "sampler_log_probs"), ("masks", "all_assistant_mask"))
    wide = data.clone()
    for key in (("tokens", "full"), ("masks", "all_attention_mask"), SAMPLER, REF):
        wide[key] = nn.functional.pad(data[key], (0, 30))
    loss = PolicyLoss(model, terms=[KLToReference(0.1), EntropyBonus(0.1)])
    assert_close(dict(loss(wide).items()), dict(loss(data).items()), **CLOSE)


def test_masks_remove_tokens_and_sequences(model: nn.Module) -> None:
    data = batch()
    assert PolicyLoss(model, "gpg")(data)["num_tokens"] == 20
    data["masks", "all_assistant_mask"][:, 2] = True
    for strategy, tokens in (("rlhf", 26), ("sft", 20)):  # the assistant mask as it is
        assert PolicyLoss(model, "gpg", masking_strategy=strategy)(data)["num_tokens"] == tokens
    out = PolicyLoss(model)(data.set("loss_mask", NOT_SECOND))
    assert_close(out["loss_objective"], objective(model, data.exclude("loss_mask")[NOT_SECOND]), **CLOSE)
    assert out["num_sequences"] == 5
    assert PolicyLoss(model)(data.set("loss_mask", torch.arange(9).expand(6, 9) != 5))["num_tokens"] == 15


def test_defect_39_generic_masking_leaves_the_first_token_out(model: nn.Module) -> None:
    assert PolicyLoss(model, "gpg", masking_strategy="generic")(batch())["num_tokens"] == sum((9, 7, 5, 9, 6, 8)) - 6


def test_an_empty_mask_has_loss_and_gradient_0(model: nn.Module) -> None:
    data = batch().set("loss_mask", torch.zeros(6, dtype=torch.bool))
    loss = PolicyLoss(model, terms=[KLToReference(0.1), EntropyBonus(0.1)])
    with pytest.warns(UserWarning, match="the mask is empty"):
        out = loss(data)
    assert total(out) == 0
    assert all((g == 0).all() for g in gradients(total(out), model).values())
    with pytest.warns(UserWarning, match="the mask is empty"):
        assert total(PolicyLoss(copy.deepcopy(model).requires_grad_(False))(data)) == 0
    loss.count(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert total(loss(data)) == 0  # as one micro-batch of several


def test_defect_41_only_masked_in_numbers_must_be_finite(model: nn.Module) -> None:
    data, loss = batch(), PolicyLoss(model, terms=[KLToReference(0.1)])
    expected = loss(data)
    data[REF][:, :4] = float("nan")
    data[SAMPLER][1, 7:] = float("inf")
    out = loss(data)
    for name in ("loss_kl_to_ref", "loss_objective"):
        assert_close(out[name], expected[name])
    data[REF][3, 6] = -float("inf")
    with pytest.raises(ValueError, match=r"ref_log_prob \(.*ref_log_probs.*\) is -inf at sequence 3, position 6"):
        loss(data)
    # entries that no part reads
    data["chosen"], data["selected"] = [f"answer {i}" for i in range(6)], torch.full((6, 9), float("nan"))
    assert_close(objective(model, data), expected["loss_objective"])


def test_defect_42_the_entropy_bonus_holds_no_logits() -> None:
    """No tensor as large as positions x vocabulary is kept for the backward."""
    wide = tiny_model(seed=0, vocab_size=5000)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        out = PolicyLoss(wide, terms=[EntropyBonus(0.1)])(batch())
    largest_weight = max(p.numel() for p in wide.parameters())
    assert max(n for n in kept if n != largest_weight) < 20 * 5000
    assert out["loss_entropy"] < 0


def test_rows_that_cover_only_the_response(model: nn.Module) -> None:
    """They begin with the first token of the response, even if it is masked out."""
    data, loss = lazy_stack(list(batch(layout="lazy").unbind(0))), PolicyLoss(model, "gpg")
    expected = loss(data)["loss_objective"]
    for dtype in (torch.bool, torch.float32, torch.int64):
        for step in data.tensordicts:
            step["loss_mask"] = torch.ones(len(step["tokens", "full"]) - 4, dtype=dtype)
        assert_close(objective(model, data, "gpg", masking_strategy="generic"), expected)  # of 20 tokens
    for step in data.tensordicts:
        step["loss_mask"] = torch.arange(len(step["tokens", "full"])) != 4
        step["advantage"] = torch.linspace(-1, 1, len(step["tokens", "full"]))
    expected, whole = loss(data), loss(data.exclude("loss_mask"))
    for step in data.tensordicts:
        step["advantage"] = step["advantage"][4:]
    out = loss(data)
    assert out["num_tokens"] == 14
    assert_close(out["loss_objective"], expected["loss_objective"])
    assert_close(loss(data.exclude("loss_mask"))["loss_objective"], whole["loss_objective"])
    for step in data.tensordicts:
        step["advantage"] = torch.zeros(5)
    with pytest.raises(ValueError, match=r"Pass one value per token"):
        loss(data)


def test_keys_in_and_out(model: nn.Module) -> None:
    loss = PolicyLoss(model, terms=[KLToReference(0.1)])
    tokens = [("tokens", "full"), ("tokens", "prompt")]
    assert loss.in_keys == [*tokens, SAMPLER, REF, "advantage"]
    data = batch().select(*loss.in_keys, ("masks", "all_attention_mask"))
    out = loss(data)
    assert set(out.keys()) == set(loss.out_keys)
    assert loss.tensor_keys.old_log_prob == SAMPLER
    bare = data.exclude("masks")
    given = {"_".join(key): value for key, value in bare.items(True, True) if isinstance(key, tuple)}
    dispatched = loss(**given, advantage=bare["advantage"])
    assert len(dispatched) == len(loss.out_keys)
    assert_close(dispatched[0], loss(bare)["loss_objective"])
    loss.set_keys(advantage="A", sample_log_prob=("mine", "lp"))
    assert loss.in_keys == [*tokens, ("mine", "lp"), REF, "A"]
    renamed = data.rename_key_("advantage", "A").rename_key_(SAMPLER, ("mine", "lp"))
    assert_close(loss(renamed)["loss_objective"], out["loss_objective"])
    with pytest.raises(ValueError, match="not an accepted tensordict key"):
        loss.set_keys(advantages="A")
    loss = PolicyLoss(model, "gpg", options=ScoreOptions(entropy=True))
    assert "entropy" in loss.out_keys
    assert set(loss.out_keys) <= set(loss(batch()).keys())


def test_entries_are_found_on_either_side_of_next(model: nn.Module) -> None:
    data = batch().set("loss_mask", NOT_SECOND).set("expert_mask", EXPERTS)
    loss = PolicyLoss(model, "mix", terms=[KLToReference(0.1)])
    expected = total(loss(data))
    for key in ("advantage", "loss_mask", "expert_mask"):
        other = data.copy()
        other["next", key] = other.pop(key)
        assert_close(total(loss(other)), expected, msg=key)
    for key in ("log_probs", "ref_log_probs"):
        data[key] = data.pop(("next", key))
    assert_close(total(loss(data)), expected)


def test_hyper_parameters_are_buffers_that_change_in_place(model: nn.Module) -> None:
    loss, data = PolicyLoss(model, clip_low=0.1, clip_high=0.1, terms=[KLToReference(0.2), EntropyBonus(0.3)]), batch()
    assert_close(loss.clip_high, torch.tensor(0.1))
    first, buffer = loss(data), loss.clip_high
    loss.clip_high, loss.clip_low, loss.kl_to_ref_coeff = 0.3, 0.2, 0.4
    assert loss.clip_high is buffer
    assert_close(loss.entropy_coeff, torch.tensor(0.3))
    out = loss(data)
    fresh = PolicyLoss(model, clip_low=0.2, clip_high=0.3, terms=[KLToReference(0.4), EntropyBonus(0.3)])(data)
    assert_close(total(out), total(fresh))
    assert out["loss_objective"] != first["loss_objective"]
    assert_close(out["loss_kl_to_ref"], 2 * first["loss_kl_to_ref"])
    assert not hasattr(loss, "clip_mid")
    for owner in (loss, loss.objective):
        with pytest.raises(ValueError, match="clip_low must be at least 0 and at most 1, got -5"):
            owner.clip_low = -5.0
    assert_close(loss.clip_low, torch.tensor(0.2))
    loss = PolicyLoss(model, clip_ratio_c=None)
    for bound in (1.01, None, 1.5):
        loss.clip_ratio_c = bound
        assert_close(loss(data)["loss_objective"], objective(model, data, clip_ratio_c=bound))


def test_adaptive_coefficients_are_read_at_every_step_and_saved(model: nn.Module) -> None:
    kl, data = losses.AdaptiveKLCoefficient(0.2, target=1.0, horizon=10), batch()
    entropy = PolicyLoss(model, options=ScoreOptions(entropy=True))(data)["entropy"]
    bonus = AdaptiveEntropyCoefficient(0.1, target=float(entropy) + 0.01, delta=0.03)
    loss = PolicyLoss(model, terms=[KLToReference(kl), EntropyBonus(bonus)])
    assert loss.entropy_coeff is bonus
    first = loss(data)
    assert first["loss_entropy"] == 0
    kl.update(5.0, n=10)
    bonus.update(first["entropy"])
    out = loss(data)
    assert_close(out["loss_kl_to_ref"], 1.2 * first["loss_kl_to_ref"])
    assert_close(out["loss_entropy"].detach(), -0.13 * entropy)
    assert_loss(out["loss_entropy"], PolicyLoss(model, terms=[EntropyBonus(0.13)])(data)["loss_entropy"], model)
    others = losses.AdaptiveKLCoefficient(0.5, target=1.0, horizon=10), AdaptiveEntropyCoefficient(0.5, bonus.target)
    other = PolicyLoss(tiny_model(seed=9), terms=[KLToReference(others[0]), EntropyBonus(others[1])])
    other.load_state_dict(loss.state_dict())
    assert_close(other(data)["loss_entropy"], out["loss_entropy"])
    with pytest.raises(KeyError, match="'coeff' already exists"):
        loss.kl_to_ref_coeff = 0.1


def test_functional_keeps_the_parameters_apart(model: nn.Module) -> None:
    expected, loss = objective(model, batch()), PolicyLoss(copy.deepcopy(model), functional=True)
    assert loss.functional
    assert not PolicyLoss(model).functional
    out = loss(batch())["loss_objective"]
    assert_close(out, expected)
    same = gradients(expected, model)
    out.backward()
    for name, parameter in loss.actor_network_params.flatten_keys(".").items():
        if name in same:
            assert_close(parameter.grad, same[name], **CLOSE)
    with torch.no_grad():
        loss.actor_network_params.apply_(lambda p: p.mul_(1.5))
    assert loss(batch())["loss_objective"] != out


def test_defect_44_aggregations_are_honoured(model: nn.Module) -> None:
    data, rows = batch(), responses(model, batch())
    sums = torch.stack([(-row["advantage"] * row["log_prob"]).sum() for row in rows]).detach()
    lengths = torch.tensor([5.0, 3, 1, 5, 2, 4])
    by_sequence = {"sum": sums.mean(), "mean": (sums / lengths).mean(), "sum-norm": sums.sum() / (6 * 12)}
    modes = {"token-mean": sums.sum() / 20} | {f"seq-mean-token-{key}": x for key, x in by_sequence.items()}
    for mode, expected in modes.items():
        longest = 12 if mode == "seq-mean-token-sum-norm" else None
        assert_close(objective(model, data, "gpg", aggregation=mode, max_len=longest), expected, **CLOSE)
    assert_close(objective(model, data, "gpg", aggregation="seq-mean-token-sum"), sums.mean(), **CLOSE)
    pairs = objective(model, data, "dpo", aggregation="none")
    assert_close(pairs.mean(), objective(model, data, "dpo"))
    assert pairs.shape == (3,)
    for layout in ("padded", "nested"):  # each token in its own place
        value = objective(model, batch(layout=layout), "gpg", aggregation="none")
        assert value.is_nested == (layout == "nested")
        for i, row in enumerate(rows):
            assert_close(value[i][4 : 4 + len(row["log_prob"])], -row["advantage"] * row["log_prob"], **CLOSE)
            assert (value[i][:4] == 0).all()


def test_mix_reads_one_flag_for_each_sequence_and_nothing_of_experts(model: nn.Module) -> None:
    data, rows = batch().set("expert_mask", EXPERTS.unsqueeze(-1)), responses(model, batch())
    loss = PolicyLoss(model, "mix", mu=0.25, **BOUNDS)
    out, expert = loss(data), torch.cat([-rows[i]["log_prob"] for i in (1, 4)]).mean()
    assert_close(out["loss_expert"], 0.25 * expert, **CLOSE)
    assert out["loss_usual"] != 0
    data[SAMPLER][1], data["advantage"][4] = float("nan"), float("nan")
    assert_close(total(loss(data)), total(out))
    data["advantage"][0] = float("nan")
    with pytest.raises(ValueError, match=r"advantage .* is nan at sequence 0"):
        loss(data)


@pytest.mark.parametrize("estimator", ["k2", "corrected_k3"])
@pytest.mark.filterwarnings("ignore:KL estimator")
def test_terms_that_leave_out_experts_read_none_of_their_inputs(model: nn.Module, estimator: str) -> None:
    data = batch().set("expert_mask", EXPERTS)
    loss = PolicyLoss(model, "mix", terms=[KLToReference(0.5, estimator, leave_out_experts=True)])
    expected = total(loss(data))
    data[REF][1], data[SAMPLER][4] = float("nan"), float("nan")
    assert_loss(total(loss(data)), expected, model, rtol=1.3e-6)


def test_roles_of_observed_tokens_are_read_from_the_data(model: nn.Module) -> None:
    role = torch.tensor([2, 3, 2, 2, 1, 2]).unsqueeze(-1)
    data = batch().set("expert_mask", EXPERTS.unsqueeze(-1)).set("message_role", role)
    out = PolicyLoss(model, "echo", mu=0.5, roles={"tool": 1.0, "user": 0.5})(data)
    rows = responses(model, batch())  # 1 and 4 are the experts'
    assert_close(out["loss_observation_tool"], -0.5 * rows[1]["log_prob"].mean())
    assert_close(out["loss_observation_user"], -0.25 * rows[4]["log_prob"].mean())
    with pytest.raises(KeyError, match="echo needs message_role"):
        PolicyLoss(model, "echo", roles={"tool": 1.0})(data.exclude("message_role"))


def test_ages_of_tokens_are_read_from_the_data(model: nn.Module) -> None:
    """One integer for each sequence. Rows of age 5 are clipped around a policy near the current one."""
    age, bounds = torch.tensor([1, 5, 0, 5, 1, 5]), {"clip_low": 0.3, "clip_high": 0.2}
    out = PolicyLoss(model, "a3po", weight_max=None, **bounds)(batch().set("age", age.unsqueeze(-1)))
    values = []
    for row, steps in zip(responses(model, batch()), age.clamp(min=1).tolist(), strict=True):
        way = row["log_prob"] - row["log_probs"]
        ratio, weight = (way / steps).exp(), (way * (1 - 1 / steps)).exp()
        values.append(weight * torch.maximum(-row["advantage"] * ratio, -row["advantage"] * ratio.clamp(0.7, 1.2)))
    assert_close(out["loss_objective"], torch.cat(values).mean())
    with pytest.raises(KeyError, match="a3po needs age"):
        PolicyLoss(model, "a3po")(batch())


def test_inputs_that_a_part_reads_at_experts_must_be_finite(model: nn.Module) -> None:
    """PPO does not separate experts from the policy. A KL term next to "mix" does not either."""
    ppo = PolicyLoss(model, "ppo", terms=[EntropyBonus(0.1, leave_out_experts=True)])
    for missing, loss in (("advantage", ppo), (REF, PolicyLoss(model, "mix", terms=[KLToReference(0.5)]))):
        data = batch().set("expert_mask", EXPERTS)
        data[missing][1] = float("nan")
        with pytest.raises(ValueError, match="is nan at sequence 1, position 4"):
            loss(data)


def test_corrections_and_metrics_leave_out_experts_that_no_part_reads(model: nn.Module) -> None:
    data = batch().set("expert_mask", EXPERTS)
    out = PolicyLoss(model, "gpg", corrections=[losses.ImportanceWeights(high=1.5)])(data)
    values, kls = [], []
    for row, expert in zip(responses(model, batch()), EXPERTS, strict=True):
        weight = 1 if expert else (row["log_probs"] - row["sampler_log_probs"]).exp().clamp(max=1.5)
        values.append(-row["advantage"] * weight * row["log_prob"])
        log_ratio = row["ref_log_probs"] - row["log_prob"]
        kls += [] if expert else [torch.expm1(log_ratio) - log_ratio]
    assert_close(out["loss_objective"], torch.cat(values).mean(), **CLOSE)
    assert_close(out["kl_to_ref"], torch.cat(kls).mean().detach(), **CLOSE)


def test_dpo_by_interleaved_rows_and_by_key(model: nn.Module) -> None:
    data = batch()
    ratio = torch.stack([(row["log_prob"] - row["ref_log_probs"]).sum() for row in responses(model, data)])
    expected = -nn.functional.logsigmoid(0.3 * (ratio[::2] - ratio[1::2])).mean()
    assert_loss(objective(model, data, "dpo", beta=0.3), expected, model)
    data["pair_id"], data["chosen"] = torch.tensor([7, 7, 8, 8, 2, 2]), torch.tensor([True, False] * 3)
    assert_close(objective(model, data[torch.tensor([3, 0, 5, 2, 1, 4])], "dpo", beta=0.3), expected, **CLOSE)


def test_corrections_multiply_only_the_objective(model: nn.Module) -> None:
    data, kl = batch(), [KLToReference(0.1)]
    corrected = PolicyLoss(model, "gpg", terms=kl, corrections=[losses.ImportanceWeights(high=1.5)])
    out = corrected(data)

    def by_hand(row: dict[str, Tensor]) -> Tensor:
        weight = (row["log_probs"] - row["sampler_log_probs"]).exp().clamp(max=1.5)
        return -row["advantage"] * weight * row["log_prob"]

    assert_loss(out["loss_objective"], token_mean(model, data, by_hand), model)
    assert_close(out["loss_kl_to_ref"], PolicyLoss(model, "gpg", terms=kl)(data)["loss_kl_to_ref"])
    with pytest.raises(KeyError, match="needs sampler_log_prob"):
        corrected(data.exclude(("next", "sampler_log_probs")))
    top = objective(model, data, "gpg", corrections=[losses.TopEntropyMask(0.25)])
    cut = torch.cat([row["entropy"] for row in responses(model, data)]).detach().sort(descending=True).values[4]
    expected = token_mean(model, data, lambda row: -row["advantage"] * row["log_prob"] * (row["entropy"] >= cut))
    assert_close(top, expected, **CLOSE)


def test_user_functions(model: nn.Module) -> None:
    """Plain functions, partial functions and callable objects."""

    def scaled(inputs: LossInputs, *, scale: float = 1.0) -> tuple[LossTerm, ...]:
        value, metrics = -scale * inputs.advantage * inputs.log_prob, {"least": inputs.log_prob.detach().min()}
        return (LossTerm("mine", value, inputs.mask, metrics=metrics),)

    class Scaled:
        def __call__(self, inputs: LossInputs) -> tuple[LossTerm, ...]:
            return (LossTerm("mine", -2.0 * inputs.advantage * inputs.log_prob, inputs.mask),)

    data = batch()
    expected = token_mean(model, data, lambda row: -2.0 * row["advantage"] * row["log_prob"])
    loss = PolicyLoss(model, scaled, scale=2.0)
    out = loss(data)
    assert_close(out["loss_mine"], expected, **CLOSE)
    assert {"loss_mine", "least"} <= set(loss.out_keys) <= set(out.keys())
    loss.scale = 1.0
    assert_close(loss(data)["loss_mine"], out["loss_mine"] / 2)
    for function in (functools.partial(scaled, scale=2.0), Scaled()):
        loss = PolicyLoss(model, function)
        assert_close(loss(data)["loss_mine"], out["loss_mine"])
        with pytest.raises(KeyError, match="needs advantage"):
            loss(data.exclude("advantage"))
        repr(loss)


def minus(inputs: LossInputs, bonus: Tensor | float) -> tuple[LossTerm, ...]:
    return (LossTerm("objective", -inputs.advantage * inputs.log_prob - bonus, inputs.mask),)


def test_inputs_that_depend_on_a_loaded_or_scheduled_number(model: nn.Module) -> None:
    def with_bonus(inputs: LossInputs, *, weight: float = 0.0) -> tuple[LossTerm, ...]:
        return minus(inputs, weight * inputs.entropy if weight > 0 else 0.0)

    def later_on_policy(inputs: LossInputs, *, weight: Any) -> tuple[LossTerm, ...]:
        return minus(inputs, inputs.old_log_prob if weight < 0.5 else 0.0)

    data, loaded = batch(), PolicyLoss(model, with_bonus)
    loaded(data)
    trained = PolicyLoss(model, with_bonus, weight=0.1)
    loaded.load_state_dict(trained.state_dict())
    assert_close(loaded(data)["loss_objective"], trained(data)["loss_objective"])
    weight = ScheduledCoefficient(peak=1.0, valley=0.1, warmup=0, decay=2)
    loss = PolicyLoss(model, later_on_policy, weight=weight)
    data[SAMPLER][1] = float("nan")
    assert loss(data)["loss_objective"].isfinite()
    weight.update(2)
    assert SAMPLER in loss.in_keys
    with pytest.raises(ValueError, match=r"old_log_prob .* is nan at sequence 1"):
        loss(data)


def test_all_inputs_at_once(model: nn.Module) -> None:
    """``given`` lists the inputs that the data holds."""
    seen: list[set[str]] = []

    def every(inputs: LossInputs) -> tuple[LossTerm, ...]:
        seen.append(set(inputs.given))
        return losses.gpg(LossInputs(**inputs.given))

    loss, data = PolicyLoss(model, lambda inputs: minus(inputs, 0.0)), batch()
    assert loss.reads == {"advantage"}
    assert_close(loss(data)["loss_objective"], PolicyLoss(model, every)(data)["loss_objective"])
    assert {"log_prob", "mask", "advantage", "old_log_prob", "ref_log_prob"} <= seen[-1]
    assert "entropy" not in seen[-1]


def test_a_registered_function(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its required and optional inputs are clean. Unknown hyper-parameters are refused."""
    monkeypatch.setattr(_REGISTRY, "data", dict(_REGISTRY))

    @losses.objective("shifted")
    def shifted(inputs: LossInputs, *, baseline: float = 0.0) -> tuple[LossTerm, ...]:
        old = inputs.get("old_log_prob")
        metrics = {} if old is None else {"lowest": old.min()}
        value = -(inputs.advantage - baseline) * inputs.log_prob
        return (LossTerm("objective", value, inputs.mask, metrics=metrics),)

    spec = losses.spec_of(shifted)
    assert (spec.hyper, spec.needs, spec.defaults) == (("baseline",), {"advantage"}, {"baseline": 0.0})
    data = batch()
    expected = token_mean(model, data, lambda row: -(row["advantage"] - 0.5) * row["log_prob"])
    assert_close(objective(model, data, "shifted", baseline=0.5), expected, **CLOSE)
    assert "lowest" in PolicyLoss(model, "shifted")(data)
    assert "lowest" not in PolicyLoss(model, "shifted")(data.exclude(("next", "log_probs")))
    log_prob, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-3.0, torch.nan]])
    inputs = LossInputs(log_prob, torch.tensor([[True, False]]), advantage=log_prob, old_log_prob=old)
    assert shifted(inputs)[0].metrics["lowest"] == -3
    with pytest.raises(TypeError, match="shifted has no hyper-parameter 'basline'"):
        shifted(inputs, basline=1.0)


def test_metrics_stay_finite_and_the_sample_size_below_1(model: nn.Module) -> None:
    data = batch()
    data[SAMPLER][:], data[REF][:] = -1000.0, 1000.0
    out = PolicyLoss(model)(data)
    assert all(out[key].isfinite() for key in set(out.keys()) - {"loss_objective"})
    assert 0 < out["ESS"] <= 1


test_missing_entries_say_what_to_do = refused(
    lambda changed: PolicyLoss(tiny_model())(changed),
    (batch().exclude("advantage"), KeyError, r"ppo needs advantage: expected 'advantage' in .*, found: masks.*set_k"),
    (batch().exclude(("next", "log_probs")), KeyError, "ppo needs old_log_prob"),
    (batch().set("advantage", torch.zeros(6, 11)), "'advantage' must have the length .* 0 has 11 values and 9 tokens"),
)


test_refused_at_construction = refused(
    lambda settings: PolicyLoss(**{"actor": tiny_model(), **settings}),
    ({"terms": [KLToReference(0.5, "k2")], "reference": WARM}, "scored at temperature 1 and the reference at 2"),
    ({"terms": [KLToReference(0.5, "exact")]}, "pass the reference model as reference="),
    ({"actor": WARM, "tokens_per_batch": 64}, "a scorer with its own settings: set options and tokens_per_batch there"),
    ({"options": ScoreOptions(top_k=3)}, "options has top_k=3, which a loss decides: leave it out"),
    ({"objective": "pppo"}, r"unknown objective 'pppo'.*Did you mean 'ppo'"),
    ({"terms": [EntropyBonus(0.1)] * 2}, "two terms of the loss are called 'entropy'"),
    ({"masking_strategy": "all"}, "masking_strategy must be one of 'sft', 'rlhf', 'generic', got 'all'"),
    ({"objective": "mix", "expert_aggregation": "seq-mean-token-sum-norm"}, "pass max_len="),
    ({"objective": "simpo", "reference": tiny_model(seed=1)}, "reference has no effect: no part of the loss compares"),
    ({"max_len": 8}, "max_len=8 has no effect: leave it out, or pass aggregation='seq-mean-token-sum-norm'"),
    ({"objective": "dpo", "f_alpha": 0.2}, "f_alpha=0.2 has no effect with f_divergence='reverse_kl'"),
)


def test_defect_43_sft_and_distillation_are_means_of_responses(model: nn.Module) -> None:
    """Prompts and padding do not dilute the mean. Reference log-probs of another length are refused."""
    data, loss = batch(), PolicyLoss(model, "sft", terms=[KLToReference(0.5, "k2")])
    out = loss(data)
    assert_close(out["loss_objective"], token_mean(model, data, lambda row: -row["log_prob"]), **CLOSE)
    by_hand = token_mean(model, data, lambda row: 0.25 * (row["log_prob"] - row["ref_log_probs"]).square())
    assert_close(out["loss_kl_to_ref"], by_hand, **CLOSE)
    data[REF] = torch.zeros(6, 12)
    with pytest.raises(ValueError, match=r"ref_log_probs.* must have the length .*: sequence 0 has 12 values"):
        loss(data)
