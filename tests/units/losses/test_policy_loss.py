"""PolicyLoss on a tiny model: values and gradients of one plain forward for each sequence, in every layout."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from torch.testing import assert_close

from policy_batches import assert_same, batch, gradients, responses, token_mean, total
from torchrl_llm_kl import LogProbScorer
from torchrl_llm_kl.losses import (
    AdaptiveEntropyCoefficient,
    AdaptiveKLCoefficient,
    EntropyBonus,
    ImportanceWeights,
    KLToReference,
    KLToSampler,
    LossTerm,
    PolicyLoss,
    TopEntropyMask,
)
from toy_models import tiny_model

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model(seed=0)


@pytest.fixture(scope="module")
def reference() -> nn.Module:
    return tiny_model(seed=1)


def ppo_by_hand(row: dict[str, Tensor]) -> Tensor:
    """Clip 0.1 / 0.3, dual 3."""
    ratio, advantage = (row["log_prob"] - row["log_probs"]).exp(), row["advantage"]
    value = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.9, 1.3))
    return torch.where(advantage < 0, torch.minimum(value, -3.0 * advantage), value)


def same_gradients(loss: Tensor, expected: Tensor, model: nn.Module) -> None:
    assert_same(gradients(loss, model), gradients(expected, model), **CLOSE)


def ragged() -> TensorDictBase:
    """The usual batch as rows of their own lengths, to be changed one by one."""
    return lazy_stack(list(batch(layout="lazy").unbind(0)))


EXPERTS = torch.tensor([False, True, False, False, True, False])


@pytest.mark.parametrize("layout", ["padded", "nested", "lazy"])
def test_value_and_gradient_in_every_layout(model: nn.Module, layout: str) -> None:
    data = batch(layout=layout)
    loss = PolicyLoss(model, "ppo", clip_low=0.1, clip_high=0.3)
    out, expected = loss(data), token_mean(model, batch(), ppo_by_hand)
    assert_close(out["loss_objective"], expected, **CLOSE)
    same_gradients(out["loss_objective"], expected, model)
    assert out["num_tokens"] == 20
    assert out["num_sequences"] == 6


def test_any_number_of_batch_dimensions(model: nn.Module) -> None:
    """The data and their layout are left alone."""
    loss, data = PolicyLoss(model, terms=[EntropyBonus(0.1)]), batch()
    before = data.clone()
    expected = loss(data)["loss_objective"]
    assert (data == before).all()
    assert set(data.keys(True)) == set(before.keys(True))
    assert_close(loss(data.reshape(2, 3))["loss_objective"], expected)
    one = loss(data[1])["loss_objective"]
    assert_close(one, loss(data[1:2])["loss_objective"])
    assert one != expected


def test_advantages_in_any_shape(model: nn.Module) -> None:
    loss, data = PolicyLoss(model), batch()
    expected, advantage = loss(data)["loss_objective"], data["advantage"]
    for shape in ((6,), (6, 1), (6, 1, 1), (6, 9), (6, 9, 1)):
        data["advantage"] = advantage.reshape(6, *[1] * (len(shape) - 1)).expand(shape).clone()
        assert_close(loss(data)["loss_objective"], expected)


def test_terms_and_metrics(model: nn.Module, reference: nn.Module) -> None:
    terms = [KLToReference(0.2, "k2"), KLToSampler(0.3, "k2"), EntropyBonus(0.05)]
    data = batch()
    out = PolicyLoss(model, "gpg", terms=terms)(data)
    by_hand = {
        "loss_objective": lambda row: -row["advantage"] * row["log_prob"],
        "loss_kl_to_ref": lambda row: 0.2 * (row["log_prob"] - row["ref_log_probs"]).square() / 2,
        "loss_kl_to_sampler": lambda row: 0.3 * (row["log_prob"] - row["sampler_log_probs"]).square() / 2,
        "loss_entropy": lambda row: -0.05 * row["entropy"],
    }
    for name, value in by_hand.items():
        expected = token_mean(model, data, value)
        assert_close(out[name], expected, **CLOSE)
        assert_same(gradients(out[name], model, keep=True), gradients(expected, model), **CLOSE)
    rows = [{k: v.detach() for k, v in row.items()} for row in responses(model, data)]
    ratio = torch.cat([(row["log_prob"] - row["log_probs"]).exp() for row in rows])
    difference = torch.cat([row["ref_log_probs"] - row["log_prob"] for row in rows])
    to_sampler = torch.cat([row["log_prob"] - row["sampler_log_probs"] for row in rows])
    assert_close(out["ESS"], ratio.sum() ** 2 / (20 * (ratio**2).sum()), **CLOSE)
    assert_close(out["ratio_min"], ratio.min(), **CLOSE)
    assert_close(out["ratio_max"], ratio.max(), **CLOSE)
    assert_close(out["ratio_median"], ratio.sort().values[10], **CLOSE)  # of 20: position 9.5, rounded to even
    assert_close(out["kl_to_ref"], (difference.exp() - 1 - difference).mean(), **CLOSE)
    assert_close(out["kl_to_sampler"], (to_sampler.exp() - 1 - to_sampler).mean(), **CLOSE)
    assert_close(out["entropy"], torch.cat([row["entropy"] for row in rows]).mean(), **CLOSE)
    assert not any(out[key].requires_grad for key in set(out.keys()) if not key.startswith("loss_"))


def test_exact_kl_to_a_reference_model(model: nn.Module, reference: nn.Module) -> None:
    data = batch()
    loss = PolicyLoss(model, "gpg", terms=[KLToReference(0.5, "exact")], reference=reference)
    ref_rows = iter(responses(reference, data))

    def by_hand(row: dict[str, Tensor]) -> Tensor:
        return 0.5 * (row["all"].exp() * (row["all"] - next(ref_rows)["all"].detach())).sum(-1)

    expected = token_mean(model, data, by_hand)
    out = loss(data)
    assert_close(out["loss_kl_to_ref"], expected, **CLOSE)
    same_gradients(out["loss_kl_to_ref"], expected, model)
    assert not any(p is q for p in loss.parameters() for q in reference.parameters())
    warm = LogProbScorer(reference, temperature=2.0)
    with pytest.raises(ValueError, match="scored at temperature 1 and the reference at 2"):
        PolicyLoss(model, terms=[KLToReference(0.5, "k2")], reference=warm)
    with pytest.raises(ValueError, match="pass the reference model as reference="):
        PolicyLoss(model, terms=[KLToReference(0.5, "exact")])


def test_a_reference_model_stands_in_for_its_log_probs(model: nn.Module, reference: nn.Module) -> None:
    data = batch()
    loss = PolicyLoss(model, "gpg", terms=[KLToReference(0.5, "k2")], reference=reference)
    del data["next", "ref_log_probs"]
    refs = iter(responses(reference, data))
    expected = token_mean(model, data, lambda row: 0.25 * (row["log_prob"] - next(refs)["log_prob"].detach()).square())
    assert_close(loss(data)["loss_kl_to_ref"], expected, **CLOSE)


def test_temperature_divides_the_logits(model: nn.Module) -> None:
    data = batch()
    expected = token_mean(model, data, ppo_by_hand, temperature=0.7)
    hyper = {"clip_low": 0.1, "clip_high": 0.3}
    assert_close(PolicyLoss(model, temperature=0.7, **hyper)(data)["loss_objective"], expected, **CLOSE)
    scorer = LogProbScorer(model, temperature=0.7)
    assert_close(PolicyLoss(scorer, **hyper)(data)["loss_objective"], expected, **CLOSE)
    with pytest.raises(ValueError, match=r"its own settings: set \['temperature'\] there"):
        PolicyLoss(scorer, temperature=0.5)


# ---------------------------------------------------------------------- which tokens count


def test_defect_38_means_are_of_tokens_that_count(model: nn.Module) -> None:
    """More padding and a longer prompt change no number."""
    data = batch()
    wide = {
        "tokens": {"full": nn.functional.pad(data["tokens", "full"], (0, 30)), "prompt": data["tokens", "prompt"]},
        "masks": {"all_attention_mask": nn.functional.pad(data["masks", "all_attention_mask"], (0, 30))},
        "next": {
            key: {"full": nn.functional.pad(data["next", key, "full"], (0, 30))}
            for key in ("log_probs", "ref_log_probs")
        },
        "advantage": data["advantage"],
    }
    loss = PolicyLoss(model, terms=[KLToReference(0.1), EntropyBonus(0.1)])
    narrow, out = loss(data.exclude(("next", "sampler_log_probs"))), loss(TensorDict(wide, batch_size=[6]))
    assert set(narrow.keys()) == set(out.keys())
    for key in set(out.keys()):
        assert_close(out[key], narrow[key], **CLOSE, msg=lambda text, key=key: f"{key}: {text}")


def test_defect_39_generic_masking_leaves_the_first_token_out(model: nn.Module) -> None:
    out = PolicyLoss(model, "gpg", masking_strategy="generic")(batch())
    assert out["num_tokens"] == sum((9, 7, 5, 9, 6, 8)) - 6


def test_rlhf_masking_takes_the_assistant_mask_as_it_is(model: nn.Module) -> None:
    data = batch()
    data["masks", "all_assistant_mask"][:, 2] = True
    assert PolicyLoss(model, "gpg", masking_strategy="rlhf")(data)["num_tokens"] == 26
    assert PolicyLoss(model, "gpg", masking_strategy="sft")(data)["num_tokens"] == 20


def test_loss_mask_takes_tokens_or_sequences_away(model: nn.Module) -> None:
    data = batch()
    data["loss_mask"] = torch.tensor([True, False, True, True, True, True])
    out = PolicyLoss(model)(data)
    keep = torch.tensor([0, 2, 3, 4, 5])
    assert_close(out["loss_objective"], PolicyLoss(model)(data.exclude("loss_mask")[keep])["loss_objective"], **CLOSE)
    assert out["num_sequences"] == 5
    data["loss_mask"] = torch.arange(9).expand(6, 9) != 5
    assert PolicyLoss(model)(data)["num_tokens"] == 15


def test_nothing_counts(model: nn.Module) -> None:
    data = batch()
    data["loss_mask"] = torch.zeros(6, dtype=torch.bool)
    loss = PolicyLoss(model, terms=[KLToReference(0.1), EntropyBonus(0.1)])
    with pytest.warns(UserWarning, match="the mask is empty"):
        out = loss(data)
    assert total(out) == 0
    assert all((g == 0).all() for g in gradients(total(out), model).values())
    loss.count(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert total(loss(data)) == 0  # as one micro-batch of several


def test_defect_41_what_does_not_count_may_be_nan_and_what_counts_raises(model: nn.Module) -> None:
    data, loss = batch(), PolicyLoss(model, terms=[KLToReference(0.1)])
    expected = loss(data)
    data["next", "ref_log_probs", "full"][:, :4] = float("nan")
    data["next", "log_probs", "full"][1, 7:] = float("inf")
    out = loss(data)
    assert_close(out["loss_kl_to_ref"], expected["loss_kl_to_ref"])
    assert_close(out["loss_objective"], expected["loss_objective"])
    data["next", "ref_log_probs", "full"][3, 6] = -float("inf")
    with pytest.raises(ValueError, match=r"ref_log_prob \(.*ref_log_probs.*\) is -inf at sequence 3, position 6"):
        loss(data)


def test_defect_42_the_entropy_bonus_holds_no_logits(model: nn.Module) -> None:
    """No tensor as large as positions x vocabulary is kept for the backward."""
    wide = tiny_model(seed=0, vocab_size=5000)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        out = PolicyLoss(wide, terms=[EntropyBonus(0.1)])(batch())
    largest_weight = max(p.numel() for p in wide.parameters())
    assert max(n for n in kept if n != largest_weight) < 20 * 5000
    assert out["loss_entropy"] < 0


def test_first_tokens_that_the_sampler_never_scored_are_left_out(model: nn.Module) -> None:
    """torchrl's wrappers leave 0 there, at the root; what a transform wrote under "next" is taken as it is."""
    data = batch()
    data["next", "log_probs", "full"][:, 4] = 0.0
    assert PolicyLoss(model)(data)["num_tokens"] == 20
    data["log_probs"] = data.pop(("next", "log_probs"))
    data["log_probs", "full"][2, 4] = -0.3
    loss = PolicyLoss(model)
    with pytest.warns(UserWarning, match="holds exactly 0 for the first generated token of 5 responses"):
        assert loss(data)["num_tokens"] == 15  # row 2 was scored


def test_masks_of_the_response_alone(model: nn.Module) -> None:
    """Padded on the right as the responses of one block are, or nested; of any dtype."""
    data = ragged()
    expected = PolicyLoss(model, "gpg")(data)["loss_objective"]
    for dtype in (torch.bool, torch.float32, torch.int64):
        for step in data.tensordicts:
            step["loss_mask"] = torch.ones(len(step["tokens", "full"]) - 4, dtype=dtype)
        out = PolicyLoss(model, "gpg", masking_strategy="generic")(data)
        assert out["num_tokens"] == 20
        assert_close(out["loss_objective"], expected)


def test_rows_of_the_response_alone_begin_with_its_first_token(model: nn.Module) -> None:
    """Also where that token is taken out of the loss; of one width for several lengths their side is unknown."""
    data, loss = ragged(), PolicyLoss(model, "gpg")
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
    with pytest.raises(ValueError, match=r"Rows of the response alone must begin with its first token"):
        loss(data)


# ---------------------------------------------------------------------- as torchrl's losses


def test_keys_in_and_out(model: nn.Module) -> None:
    loss = PolicyLoss(model, terms=[KLToReference(0.1)])
    log_probs, refs = (("next", name, "full") for name in ("log_probs", "ref_log_probs"))
    assert loss.in_keys == [("tokens", "full"), ("tokens", "prompt"), log_probs, refs, "advantage"]
    data = batch().select(*loss.in_keys, ("masks", "all_attention_mask"))
    out = loss(data)
    assert set(out.keys()) == set(loss.out_keys)
    assert loss.tensor_keys.old_log_prob == log_probs
    loss.set_keys(advantage="A", sample_log_prob=("mine", "lp"))
    assert loss.in_keys == [("tokens", "full"), ("tokens", "prompt"), ("mine", "lp"), refs, "A"]
    renamed = data.rename_key_("advantage", "A").rename_key_(log_probs, ("mine", "lp"))
    assert_close(loss(renamed)["loss_objective"], out["loss_objective"])
    with pytest.raises(ValueError, match="not an accepted tensordict key"):
        loss.set_keys(advantages="A")


def test_entries_are_found_on_either_side_of_next(model: nn.Module) -> None:
    """One lookup for losses and advantages."""
    data = batch()
    data["loss_mask"] = torch.tensor([True, False, True, True, True, True])
    data["expert_mask"] = EXPERTS
    loss = PolicyLoss(model, "mix", terms=[KLToReference(0.1)])
    expected = total(loss(data))
    for key in ("advantage", "loss_mask", "expert_mask"):
        other = data.copy()
        other["next", key] = other.pop(key)
        assert_close(total(loss(other)), expected, msg=key)
    for key in ("log_probs", "ref_log_probs"):
        data[key] = data.pop(("next", key))
    assert_close(total(loss(data)), expected)


def test_missing_entries_say_what_to_do(model: nn.Module) -> None:
    data = batch()
    del data["advantage"]
    with pytest.raises(
        KeyError, match=r"ppo needs advantage: expected 'advantage' in the TensorDict, found: masks.*set_keys"
    ):
        PolicyLoss(model)(data)
    with pytest.raises(KeyError, match="ppo needs old_log_prob"):
        PolicyLoss(model)(batch().exclude(("next", "log_probs")))
    data["advantage"] = torch.zeros(6, 11)
    message = "'advantage' must have the length of the tokens: sequence 0 has 11 values and 9 tokens"
    with pytest.raises(ValueError, match=message):
        PolicyLoss(model)(data)


def test_an_estimator_that_changes_later(model: nn.Module, reference: nn.Module) -> None:
    data = batch()
    loss = PolicyLoss(model, "gpg", terms=[KLToReference(0.5, "k2")], reference=reference)
    loss.kl_to_ref_estimator = "exact"
    fresh = PolicyLoss(model, "gpg", terms=[KLToReference(0.5, "exact")], reference=reference)
    assert_close(loss(data)["loss_kl_to_ref"], fresh(data)["loss_kl_to_ref"])
    alone = PolicyLoss(model, "gpg", terms=[KLToReference(0.5, "k2")])
    alone.kl_to_ref_estimator = "exact"
    with pytest.raises(ValueError, match="pass the reference model as reference="):
        alone(data)


def test_the_entropy_that_is_logged_is_an_output(model: nn.Module) -> None:
    loss = PolicyLoss(model, "gpg", log_entropy=True)
    assert "entropy" in loss.out_keys
    assert set(loss.out_keys) <= set(loss(batch()).keys())


def test_warnings_of_the_constructor_name_the_callers_line(model: nn.Module) -> None:
    with pytest.warns(UserWarning, match="has no effect here") as caught:
        PolicyLoss(model, "mix", train_batch_size_usual=8)
    assert [warning.filename for warning in caught] == [__file__]


def test_dispatch(model: nn.Module) -> None:
    loss, data = PolicyLoss(model), batch()
    data = data.exclude("masks")
    expected = loss(data)
    found = loss(
        tokens_full=data["tokens", "full"],
        tokens_prompt=data["tokens", "prompt"],
        next_log_probs_full=data["next", "log_probs", "full"],
        advantage=data["advantage"],
    )
    assert len(found) == len(loss.out_keys)
    assert_close(found[0], expected["loss_objective"])


def test_hyper_parameters_are_buffers_that_change_in_place(model: nn.Module) -> None:
    loss, data = PolicyLoss(model, clip_range=0.1, terms=[KLToReference(0.2), EntropyBonus(0.3)]), batch()
    assert_close(loss.clip_high, torch.tensor(0.1))
    first = loss(data)
    buffer = loss.clip_high
    loss.clip_high, loss.clip_low = 0.3, 0.2
    assert loss.clip_high is buffer
    loss.kl_to_ref_coeff = 0.4
    assert_close(loss.entropy_coeff, torch.tensor(0.3))
    out = loss(data)
    fresh = PolicyLoss(model, clip_low=0.2, clip_high=0.3, terms=[KLToReference(0.4), EntropyBonus(0.3)])(data)
    assert_close(total(out), total(fresh))
    assert out["loss_objective"] != first["loss_objective"]
    assert_close(out["loss_kl_to_ref"], 2 * first["loss_kl_to_ref"])
    with pytest.raises(AttributeError):
        _ = loss.clip_mid
    for owner in (loss, loss.objective):
        with pytest.raises(ValueError, match="clip_low must be at least 0 and at most 1, got -5"):
            owner.clip_low = -5.0
    assert_close(loss.clip_low, torch.tensor(0.2))


def test_bounds_that_come_and_go(model: nn.Module) -> None:
    data = batch()
    loss = PolicyLoss(model, clip_ratio_c=None)
    for bound in (1.01, None, 1.5):
        loss.clip_ratio_c = bound
        assert_close(loss(data)["loss_objective"], PolicyLoss(model, clip_ratio_c=bound)(data)["loss_objective"])


def test_state_dict_and_dtype(model: nn.Module) -> None:
    one, two = ([KLToReference(AdaptiveKLCoefficient(x, 1.0, 10))] for x in (0.2, 0.9))
    loss = PolicyLoss(model, "gspo", clip_low=3e-4, clip_high=4e-4, terms=one)
    other = PolicyLoss(tiny_model(seed=9), "gspo", clip_low=0.1, clip_high=0.2, terms=two)
    other.load_state_dict(loss.state_dict())
    assert_close(total(other(batch())), total(loss(batch())))
    assert_close(other.clip_low, torch.tensor(3e-4))
    half = copy.deepcopy(loss).to(torch.bfloat16)
    assert half.clip_low.dtype == torch.float32
    assert next(half.actor_network.parameters()).dtype == torch.bfloat16


def test_an_adaptive_coefficient_is_read_at_every_step(model: nn.Module) -> None:
    coefficient = AdaptiveKLCoefficient(0.2, target=1.0, horizon=10)
    loss, data = PolicyLoss(model, terms=[KLToReference(coefficient)]), batch()
    first = loss(data)["loss_kl_to_ref"]
    coefficient.update(5.0, n=10)
    assert_close(loss(data)["loss_kl_to_ref"], 1.2 * first)
    with pytest.raises(TypeError, match="coeff is a AdaptiveKLCoefficient: change that"):
        loss.kl_to_ref_coeff = 0.1


def test_an_adaptive_entropy_coefficient_is_updated_with_the_metric_and_saved(model: nn.Module) -> None:
    data = batch()
    entropy = PolicyLoss(model, log_entropy=True)(data)["entropy"]
    coefficient = AdaptiveEntropyCoefficient(0.1, target=float(entropy) + 0.01, delta=0.03)
    loss = PolicyLoss(model, terms=[EntropyBonus(coefficient)])
    assert loss.entropy_coeff is coefficient
    out = loss(data)
    assert out["loss_entropy"] == 0
    coefficient.update(out["entropy"])
    out = loss(data)
    assert_close(out["loss_entropy"].detach(), -0.13 * entropy)
    fixed = PolicyLoss(model, terms=[EntropyBonus(0.13)])(data)["loss_entropy"]
    same_gradients(out["loss_entropy"], fixed, model)
    another = AdaptiveEntropyCoefficient(0.5, target=coefficient.target)
    other = PolicyLoss(tiny_model(seed=9), terms=[EntropyBonus(another)])
    other.load_state_dict(loss.state_dict())
    assert_close(other(data)["loss_entropy"], out["loss_entropy"])
    with pytest.raises(TypeError, match="coeff is a AdaptiveEntropyCoefficient: change that"):
        loss.entropy_coeff = 0.1


def test_functional_keeps_the_parameters_apart(model: nn.Module) -> None:
    data = batch()
    expected = PolicyLoss(model)(data)["loss_objective"]
    loss = PolicyLoss(copy.deepcopy(model), functional=True)
    assert loss.functional
    out = loss(data)["loss_objective"]
    assert_close(out, expected)
    same = dict(gradients(expected, model))
    out.backward()
    for name, parameter in loss.actor_network_params.flatten_keys(".").items():
        if name in same:
            assert_close(parameter.grad, same[name], **CLOSE)
    with torch.no_grad():
        loss.actor_network_params.apply_(lambda p: p.mul_(1.5))
    assert loss(data)["loss_objective"] != out
    assert not PolicyLoss(model).functional


def test_aggregations(model: nn.Module) -> None:
    data = batch()
    rows = responses(model, data)
    sums = torch.stack([(-row["advantage"] * row["log_prob"]).sum() for row in rows]).detach()
    lengths = torch.tensor([5.0, 3, 1, 5, 2, 4])
    for mode, expected in {
        "token-mean": sums.sum() / 20,
        "seq-mean-token-sum": sums.mean(),
        "seq-mean-token-mean": (sums / lengths).mean(),
        "seq-mean-token-sum-norm": sums.sum() / (6 * 12),
    }.items():
        loss = PolicyLoss(model, "gpg", aggregation=mode, max_len=12)
        assert_close(loss(data)["loss_objective"], expected, **CLOSE)
    named = PolicyLoss(model, "gpg", loss_agg_mode="seq-mean-token-sum")(data)["loss_objective"]
    assert_close(named, sums.mean(), **CLOSE)
    pairs = PolicyLoss(model, "dpo", aggregation="none")(data)["loss_objective"]
    assert_close(pairs.mean(), PolicyLoss(model, "dpo")(data)["loss_objective"])
    assert pairs.shape == (3,)


@pytest.mark.parametrize("layout", ["padded", "nested"])
def test_aggregation_none_gives_tokens_in_their_own_layout(model: nn.Module, layout: str) -> None:
    data = batch(layout=layout)
    value = PolicyLoss(model, "gpg", aggregation="none")(data)["loss_objective"]
    assert value.is_nested == (layout == "nested")
    for i, row in enumerate(responses(model, batch())):
        got = value[i][4 : 4 + len(row["log_prob"])]
        assert_close(got, -row["advantage"] * row["log_prob"], **CLOSE)
        assert (value[i][:4] == 0).all()


# ---------------------------------------------------------------------- objectives with inputs of their own


def test_mix_reads_one_flag_for_each_sequence(model: nn.Module) -> None:
    data = batch()
    data["expert_mask"] = torch.tensor([[False], [True], [False], [False], [True], [False]])
    out = PolicyLoss(model, "mix", mu=0.25, clip_low=0.1, clip_high=0.3)(data)
    rows = responses(model, data)
    expert = torch.cat([-rows[i]["log_prob"] for i in (1, 4)]).mean()
    assert_close(out["loss_expert"], 0.25 * expert, **CLOSE)
    assert out["loss_usual"] != 0


def test_dpo_by_interleaved_rows_and_by_key(model: nn.Module) -> None:
    data = batch()
    rows = responses(model, data)
    ratio = torch.stack([(row["log_prob"] - row["ref_log_probs"]).sum() for row in rows])
    expected = -nn.functional.logsigmoid(0.3 * (ratio[::2] - ratio[1::2])).mean()
    out = PolicyLoss(model, "dpo", beta=0.3)(data)
    assert_close(out["loss_objective"], expected, **CLOSE)
    same_gradients(out["loss_objective"], expected, model)
    order = torch.tensor([3, 0, 5, 2, 1, 4])
    data["pair_id"], data["chosen"] = torch.tensor([7, 7, 8, 8, 2, 2]), torch.tensor([True, False] * 3)
    assert_close(PolicyLoss(model, "dpo", beta=0.3)(data[order])["loss_objective"], expected, **CLOSE)


def test_corrections_multiply_the_objective_alone(model: nn.Module) -> None:
    data = batch()
    corrected = PolicyLoss(model, "gpg", terms=[KLToReference(0.1)], corrections=[ImportanceWeights(high=1.5)])
    out = corrected(data)

    def by_hand(row: dict[str, Tensor]) -> Tensor:
        weight = (row["log_probs"] - row["sampler_log_probs"]).exp().clamp(max=1.5)
        return -row["advantage"] * weight * row["log_prob"]

    expected = token_mean(model, data, by_hand)
    assert_close(out["loss_objective"], expected, **CLOSE)
    same_gradients(out["loss_objective"], expected, model)
    plain = PolicyLoss(model, "gpg", terms=[KLToReference(0.1)])(data)
    assert_close(out["loss_kl_to_ref"], plain["loss_kl_to_ref"])
    with pytest.raises(KeyError, match="needs sampler_log_prob"):
        corrected(data.exclude(("next", "sampler_log_probs")))


def test_top_entropy_tokens_alone_are_trained(model: nn.Module) -> None:
    data = batch()
    out = PolicyLoss(model, "gpg", corrections=[TopEntropyMask(0.25)])(data)
    entropies = torch.cat([row["entropy"] for row in responses(model, data)]).detach()
    cut = entropies.sort(descending=True).values[4]
    expected = token_mean(model, data, lambda row: -row["advantage"] * row["log_prob"] * (row["entropy"] >= cut))
    assert_close(out["loss_objective"], expected, **CLOSE)


def test_a_function_of_ones_own(model: nn.Module) -> None:
    def squared(
        log_prob: Tensor, mask: Tensor, *, advantage: Tensor, scale: float = 1.0, **_: Any
    ) -> tuple[LossTerm, ...]:
        return (
            LossTerm("mine", scale * advantage * log_prob.square(), mask, metrics={"largest": log_prob.detach().min()}),
        )

    data = batch()
    loss = PolicyLoss(model, squared, scale=2.0)
    out = loss(data)
    assert_close(
        out["loss_mine"], token_mean(model, data, lambda row: 2 * row["advantage"] * row["log_prob"] ** 2), **CLOSE
    )
    assert set(loss.out_keys) <= set(out.keys())
    loss.scale = 1.0
    assert_close(loss(data)["loss_mine"], out["loss_mine"] / 2)


def test_functions_without_a_name(model: nn.Module) -> None:
    def scaled(log_prob: Tensor, mask: Tensor, *, advantage: Tensor, scale: float, **_: Tensor) -> tuple[LossTerm, ...]:
        return (LossTerm("mine", -scale * advantage * log_prob, mask),)

    def takes_all(log_prob: Tensor, mask: Tensor, **inputs: Tensor) -> tuple[LossTerm, ...]:
        return (LossTerm("mine", -2.0 * inputs["advantage"] * log_prob, mask),)

    class Scaled:
        def __call__(self, log_prob: Tensor, mask: Tensor, *, advantage: Tensor, **_: Any) -> tuple[LossTerm, ...]:
            return (LossTerm("mine", -2.0 * advantage * log_prob, mask),)

    data = batch()
    expected = 2 * PolicyLoss(model, "gpg")(data)["loss_objective"]
    for objective in (functools.partial(scaled, scale=2.0), Scaled()):
        loss = PolicyLoss(model, objective)
        assert_close(loss(data)["loss_mine"], expected)
        with pytest.raises(KeyError, match="needs advantage"):
            loss(data.exclude("advantage"))
        repr(loss)
    loss = PolicyLoss(model, takes_all)  # names no input, so none is required: the function raises by itself
    assert_close(loss(data)["loss_mine"], expected)
    with pytest.raises(KeyError, match="advantage"):
        loss(data.exclude("advantage"))


def test_entries_that_no_part_reads_may_be_anything(model: nn.Module) -> None:
    data = batch()
    expected = total(PolicyLoss(model)(data))
    data["chosen"], data["selected"] = [f"answer {i}" for i in range(6)], torch.full((6, 9), float("nan"))
    data["next", "ref_log_probs", "full"][:] = float("nan")
    assert_close(total(PolicyLoss(model)(data)), expected)


def test_log_probs_of_experts_may_be_missing(model: nn.Module) -> None:
    data = batch()
    data["expert_mask"] = EXPERTS
    loss = PolicyLoss(model, "mix", mu=0.25)
    expected = total(loss(data))
    data["next", "log_probs", "full"][1] = float("nan")
    data["advantage"][4] = float("nan")
    assert_close(total(loss(data)), expected)
    data["advantage"][0] = float("nan")
    with pytest.raises(ValueError, match=r"advantage .* is nan at sequence 0"):
        loss(data)


@pytest.mark.parametrize("estimator", ["k2", "corrected_k3"])
@pytest.mark.filterwarnings("ignore:KL estimator")
def test_terms_that_leave_experts_out_read_nothing_of_them(model: nn.Module, estimator: str) -> None:
    data = batch()
    data["expert_mask"] = EXPERTS
    loss = PolicyLoss(model, "mix", terms=[KLToReference(0.5, estimator, leave_out_experts=True)])
    expected = loss(data)
    want = gradients(total(expected), model)
    data["next", "ref_log_probs", "full"][1] = float("nan")
    data["next", "log_probs", "full"][4] = float("nan")
    out = loss(data)
    assert_close(total(out), total(expected))
    assert_same(gradients(total(out), model), want)


@pytest.mark.parametrize("missing", [("next", "ref_log_probs", "full"), "advantage"])
def test_what_any_part_reads_of_experts_is_checked(model: nn.Module, missing: Any) -> None:
    """PPO does not separate experts from the policy, nor does the KL beside "mix"."""
    data = batch()
    data["expert_mask"] = EXPERTS
    ppo = PolicyLoss(model, "ppo", terms=[EntropyBonus(0.1, leave_out_experts=True)])
    mix = PolicyLoss(model, "mix", terms=[KLToReference(0.5)])
    data[missing][1] = float("nan")
    with pytest.raises(ValueError, match="is nan at sequence 1, position 4"):
        (ppo if missing == "advantage" else mix)(data)


def test_a_frozen_actor_has_a_loss_all_the_same(model: nn.Module) -> None:
    frozen = copy.deepcopy(model).requires_grad_(False)
    data = batch()
    data["loss_mask"] = torch.zeros(6, dtype=torch.bool)
    with pytest.warns(UserWarning, match="the mask is empty"):
        assert total(PolicyLoss(frozen)(data)) == 0


def test_metrics_stay_finite_and_the_sample_size_below_1(model: nn.Module) -> None:
    data = batch()
    data["next", "log_probs", "full"][:] = -1000.0
    data["next", "ref_log_probs", "full"][:] = 1000.0
    out = PolicyLoss(model)(data)
    assert all(out[key].isfinite() for key in set(out.keys()) - {"loss_objective"})
    assert 0 < out["ESS"] <= 1


def test_refused_at_construction(model: nn.Module) -> None:
    twice, strategies = [EntropyBonus(0.1), EntropyBonus(0.2)], "'sft', 'rlhf', 'generic', got 'all'"
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"clip_hi": 0.3}, TypeError, r"ppo has no hyper-parameter 'clip_hi'.*Did you mean 'clip_high'"),
        ({"clip_low": 2.0}, ValueError, "clip_low must be at least 0 and at most 1, got 2"),
        ({"objective": "pppo"}, ValueError, r"unknown objective 'pppo'.*Did you mean 'ppo'"),
        ({"terms": twice}, ValueError, "two terms of the loss are called 'entropy'"),
        ({"masking_strategy": "all"}, ValueError, f"masking_strategy must be one of {strategies}"),
        ({"aggregation": "seq-mean-token-sum-norm"}, ValueError, "pass max_len="),
        ({"aggregation": "mean"}, ValueError, "unknown aggregation 'mean'"),
    ]
    for settings, error, message in refused:
        with pytest.raises(error, match=message):
            PolicyLoss(model, **settings)


def test_estimators_that_pull_elsewhere_warn() -> None:
    elsewhere = {"k1": "mean gradient is zero", "k3": "forward KL", "low_var_kl": "forward KL"}
    elsewhere |= {"abs": "total variation", "corrected_k3": "clamped"}
    for estimator, remedy in elsewhere.items():
        with pytest.warns(UserWarning, match=rf"KL estimator '{estimator}' in the loss: .*{remedy}.*Use 'k2'"):
            KLToReference(0.1, estimator)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for estimator in ("k2", "k3+", "k1+", "exact", "none"):
            KLToReference(0.1, estimator)


# ---------------------------------------------------------------------- the other rows of the table of defects


def test_defect_43_sft_and_distillation_are_means_of_responses(model: nn.Module, reference: nn.Module) -> None:
    """Not diluted by prompts and padding; reference log-probs of another length are refused."""
    data = batch()
    loss = PolicyLoss(model, "sft", terms=[KLToReference(0.5, "k2")])
    out = loss(data)
    assert_close(out["loss_objective"], token_mean(model, data, lambda row: -row["log_prob"]), **CLOSE)
    by_hand = token_mean(model, data, lambda row: 0.25 * (row["log_prob"] - row["ref_log_probs"]).square())
    assert_close(out["loss_kl_to_ref"], by_hand, **CLOSE)
    data["next", "ref_log_probs", "full"] = torch.zeros(6, 12)
    with pytest.raises(
        ValueError, match=r"ref_log_probs.* must have the length of the tokens: sequence 0 has 12 values"
    ):
        loss(data)


def test_defect_44_the_papers_bounds_of_dapo_and_sums_that_are_honoured(model: nn.Module) -> None:
    loss, data = PolicyLoss(model, "dapo"), batch()
    assert_close(loss.clip_low, torch.tensor(0.2))
    assert_close(loss.clip_high, torch.tensor(0.28))
    whole = PolicyLoss(model, "gpg", aggregation="seq-mean-token-sum")(data)["loss_objective"]
    rows = [(-row["advantage"] * row["log_prob"]).sum() for row in responses(model, data)]
    assert_close(whole, torch.stack(rows).mean(), **CLOSE)
