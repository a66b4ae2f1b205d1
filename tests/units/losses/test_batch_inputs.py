"""What is computed once for a whole batch is stored with each row, so that any split of it adds up to the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.testing import assert_close
from torchrl.data import LazyStackStorage, ReplayBuffer

from policy_batches import LENGTHS, PROMPT, assert_same, batch, gradients, responses, total
from torchrl_llm_kl import LogProbScorer
from torchrl_llm_kl.losses import (
    EntropyBonus,
    KLToReference,
    PolicyLoss,
    ValueLoss,
    aot_match,
    bco_reference_point,
    get_objective,
)
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.rollouts import mismatch
from torchrl_llm_kl.scoring import TokenCritic
from toy_models import tiny_model

CLOSE = {"rtol": 1e-3, "atol": 2e-5}
FLAGS = torch.tensor([True, False, True, True, False, False])
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model(seed=0)


@pytest.fixture(scope="module")
def reference() -> nn.Module:
    return tiny_model(seed=1)


def labelled(layout: str = "padded") -> TensorDictBase:
    data = batch(layout=layout)
    data["chosen"] = FLAGS.clone()
    return data


def log_ratio(model: nn.Module, reference: nn.Module, ids: Tensor) -> Tensor:
    """Of the tokens after the prompt, under one plain forward each."""
    found = []
    for each in (model, reference):
        logits = each(input_ids=ids.unsqueeze(0)).logits[0, PROMPT - 1 : -1].float().log_softmax(-1)
        found.append(logits.gather(-1, ids[PROMPT:].unsqueeze(-1)).sum())
    return found[0] - found[1]


def ratios(model: nn.Module) -> Tensor:
    return torch.stack([(row["log_prob"] - row["ref_log_probs"]).sum() for row in responses(model, batch())])


def reduced(model: nn.Module, mode: str, objective: str = "ppo", **hyper: Any) -> PolicyLoss:
    terms = [KLToReference(0.2), EntropyBonus(0.05)]
    return PolicyLoss(model, objective, terms=terms, aggregation=mode, max_len=8, **hyper)


def sum_of_parts(loss: Any, data: TensorDictBase, split: Any) -> dict[str, Tensor]:
    parts = [gradients(total(loss(data[torch.as_tensor(rows)])), loss) for rows in split]
    return {name: sum(part[name] for part in parts) for name in parts[0]}


@pytest.mark.parametrize("layout", ["padded", "nested"])
def test_ktos_reference_point_is_of_answers_after_other_prompts(
    model: nn.Module, reference: nn.Module, layout: str
) -> None:
    """Rows share their prompts by twos, so that answers move on by two rows."""
    loss = PolicyLoss(model, "kto", reference=reference)
    data = loss.batch_inputs(labelled(layout))
    full = batch()["tokens", "full"]
    mixed = [torch.cat([full[i, :PROMPT], full[i - 2, PROMPT : LENGTHS[i - 2]]]) for i in range(6)]
    with torch.no_grad():
        mean = torch.stack([log_ratio(model, reference, ids) for ids in mixed]).mean()
        turned = torch.stack([log_ratio(reference, model, ids) for ids in mixed]).mean()
    assert_close(data["reference_point"], mean.clamp(min=0).expand(6), **CLOSE)
    other = PolicyLoss(reference, "kto", reference=model).batch_inputs(labelled(layout))
    assert_close(other["reference_point"], turned.clamp(min=0).expand(6), **CLOSE)
    assert data["reference_point"].any() != other["reference_point"].any()  # one of the two is negative


def test_kto_of_a_batch(model: nn.Module) -> None:
    data = labelled()
    data["reference_point"] = torch.full((6,), 0.7)
    ratio = ratios(model)
    surprise = torch.sigmoid(0.3 * torch.where(FLAGS, 0.7 - ratio, ratio - 0.7))
    expected = (torch.where(FLAGS, 1.5, 0.6) * surprise).mean()
    out = PolicyLoss(model, "kto", beta=0.3, desirable_weight=1.5, undesirable_weight=0.6)(data)
    assert_close(out["loss_objective"], expected, **CLOSE)
    assert_same(gradients(out["loss_objective"], model), gradients(expected, model))
    each = PolicyLoss(model, "kto", aggregation="none", beta=0.3)(data)["loss_objective"]
    assert_close(each, surprise, **CLOSE)


@pytest.mark.parametrize("layout", ["nested", "lazy"])
def test_inputs_of_the_others_are_of_their_own_log_probs(model: nn.Module, layout: str) -> None:
    with torch.no_grad():
        ratio = ratios(model)
    half = (ratio[FLAGS].mean() + ratio[~FLAGS].mean()) / 2
    found = PolicyLoss(model, "bco").batch_inputs(labelled(layout))["reference_point"]
    assert_close(found, half.expand(6), **CLOSE)
    found = PolicyLoss(model, "bco_pair").batch_inputs(batch(layout=layout))["reference_point"]
    assert_close(found, ratio.mean().expand(6), **CLOSE)
    found = PolicyLoss(model, "aot_unpaired").batch_inputs(labelled(layout))["match_id"]
    expected = torch.empty(6, dtype=torch.long)
    for side in (FLAGS, ~FLAGS):
        expected[side] = ratio[side].argsort().argsort()
    assert torch.equal(found, expected)
    loss = PolicyLoss(model, "aot", beta=0.3)
    loss.set_keys(reference_point=("of", "the_batch"))
    data = loss.batch_inputs(batch(layout=layout))
    assert data["of", "the_batch"].shape == (6,)
    assert_close(loss(data)["loss_objective"], PolicyLoss(model, "aot", beta=0.3)(batch())["loss_objective"], **CLOSE)
    if layout != "nested":
        assert PolicyLoss(model, "aot").batch_inputs(data_for("aot", layout))["reference_point"].any()


def test_a_reference_that_the_loss_scores_will_do_too(model: nn.Module, reference: nn.Module) -> None:
    bare = labelled().exclude(("next", "ref_log_probs"))
    found = PolicyLoss(model, "bco", reference=reference).batch_inputs(bare)["reference_point"]
    full = batch()["tokens", "full"]
    ratio = torch.stack([log_ratio(model, reference, full[i, :n]) for i, n in enumerate(LENGTHS)])
    mask = torch.ones(6, 1, dtype=torch.bool)
    zeros = torch.zeros(6, 1)
    assert_close(
        found, bco_reference_point(ratio.detach().unsqueeze(-1), mask, ref_log_prob=zeros, chosen=FLAGS), **CLOSE
    )


# ---------------------------------------------------------------------- parts of a batch

WITH_CHOSEN = ("kto", "bco", "aot_unpaired")


def data_for(name: str, layout: str = "padded") -> TensorDictBase:
    """The reference ranks the pairs unlike the policy, for which longer answers are less likely."""
    data = labelled(layout) if name in WITH_CHOSEN else batch(layout=layout)
    for row in (0, 3):
        data[row]["next", "ref_log_probs", "full"].mul_(0.1)
    return data


@pytest.mark.parametrize(
    ("name", "hyper", "layout", "split"),
    [
        ("kto", {"beta": 0.4, "desirable_weight": 1.4}, "padded", [[0, 1], [2, 3, 4, 5]]),
        ("bco", {"beta": 0.4}, "lazy", [[4, 5], [2, 3], [0, 1]]),
        ("bco_pair", {"beta": 0.4, "weighting": "aligned"}, "padded", [[4, 5], [2, 3], [0, 1]]),
        ("aot", {"beta": 0.4}, "lazy", [[0, 1], [2, 3, 4, 5]]),
        ("cpo", {"nll_aggregation": "token-mean"}, "padded", [[4, 5], [2, 3], [0, 1]]),
        ("orpo", {}, "padded", [[0, 1], [2, 3, 4, 5]]),
        ("simpo", {}, "lazy", [[4, 5], [2, 3], [0, 1]]),
        (
            "dpo",
            {"f_divergence": "js_divergence", "ld_alpha": 0.4, "weighting": "probability"},
            "padded",
            [[0, 1], [2, 3, 4, 5]],
        ),
    ],
)
def test_parts_of_preferences_add_up(
    model: nn.Module, reference: nn.Module, name: str, hyper: dict[str, Any], layout: str, split: list[list[int]]
) -> None:
    loss = PolicyLoss(model, name, reference=reference, **hyper)
    data = loss.count(loss.batch_inputs(data_for(name, layout)))
    out = loss(data)
    assert_close(sum(total(loss(data[torch.tensor(some)])) for some in split).detach(), total(out).detach(), **CLOSE)
    assert_same(sum_of_parts(loss, data, split), gradients(total(out), loss))


@pytest.mark.parametrize(
    ("mode", "layout", "split"),
    [*zip(MODES, ["padded", "lazy"] * 2, [[[0, 5], [1], [2, 3, 4]], [[4, 1, 0, 2, 3], [5]]] * 2, strict=True)],
)
def test_micro_batches_of_a_counted_batch(model: nn.Module, mode: str, layout: str, split: list[list[int]]) -> None:
    loss, data = reduced(model, mode), batch(layout=layout)
    whole = gradients(total(loss(data)), loss)
    uncounted = sum_of_parts(loss, data, split)
    assert not all(torch.allclose(uncounted[name] / len(split), whole[name], rtol=1e-3) for name in whole)
    loss.count(data)
    assert_same(gradients(total(loss(data)), loss), whole)
    assert_same(sum_of_parts(loss, data, split), whole)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum-norm"])
def test_micro_batches_of_a_critic(mode: str) -> None:
    critic = TokenCritic(tiny_model(seed=2).model)
    nn.init.normal_(critic.head.weight, std=0.1)
    loss, data = ValueLoss(critic, aggregation=mode, max_len=8), batch()
    data["value_target"] = torch.linspace(-1, 1, 54).reshape(6, 9)
    whole = gradients(total(loss(data)), loss)
    loss.count(data)
    assert_same(sum_of_parts(loss, data, [[0, 5], [1], [2, 3, 4]]), whole)


def test_a_critic_of_nothing_has_gradient_0() -> None:
    loss, data = ValueLoss(TokenCritic(tiny_model(seed=2).model)), batch()
    data["value_target"], data["loss_mask"] = torch.ones(6, 9), torch.zeros(6, dtype=torch.bool)
    with pytest.warns(UserWarning, match="the mask is empty"):
        out = loss(data)
    assert all((g == 0).all() for g in gradients(out["loss_critic"], loss).values())


def test_terms_have_denominators_of_their_own(model: nn.Module) -> None:
    """Two experts' sequences of 3 and 2 tokens; a micro-batch of experts alone is no special case."""
    data = batch()
    data["expert_mask"] = torch.tensor([False, True, False, False, True, False])
    loss = reduced(model, "token-mean", "mix", mu=0.25)
    whole = gradients(total(loss(data)), loss)
    loss.count(data)
    counts = {name.split("/")[0]: x.unique().item() for name, x in data["denominators"].exclude("batch").items()}
    assert counts == {"usual": 15, "expert": 5, "kl_to_ref": 20, "entropy": 20}
    assert_same(sum_of_parts(loss, data, [[1, 4], [0, 2], [3, 5]]), whole)


def test_rows_of_batches_counted_apart_are_refused(model: nn.Module) -> None:
    loss, data = reduced(model, "token-mean"), batch()
    first, second = loss.count(data[:2].clone()), loss.count(data[2:].clone())
    with pytest.raises(
        ValueError, match=r"rows of 2 batches that were counted apart: found denominators \[8.0, 12.0\]"
    ):
        loss(torch.cat([first, second]))
    twins = reduced(model, "seq-mean-token-sum")
    first, second = (twins.count(data[rows].exclude("denominators")) for rows in ([0, 1], [2, 3]))
    with pytest.raises(ValueError, match=r"rows of 2 batches .* denominators \[2.0\] of objective"):
        twins(torch.cat([first, second]))  # the counts are equal
    first, second = loss.count(data[:2].exclude("denominators")), loss.count(data[2:].exclude("denominators"))
    other = PolicyLoss(model, terms=[EntropyBonus(0.1)])
    del first["denominators", "entropy/token-mean"]
    with pytest.raises(ValueError, match=r"was counted for kl_to_ref/token-mean, .* but not for entropy/token-mean"):
        other(first)


def test_counts_of_another_way_to_sum_are_refused(model: nn.Module) -> None:
    data = reduced(model, "token-mean").count(batch())
    with pytest.raises(ValueError, match="but not for objective/seq-mean-token-sum: count it with this loss"):
        reduced(model, "seq-mean-token-sum")(data)
    reduced(model, "seq-mean-token-sum").count(data)
    assert total(reduced(model, "seq-mean-token-sum")(data)).isfinite()


def test_matches_stay_together(model: nn.Module) -> None:
    loss = PolicyLoss(model, "aot_unpaired", beta=0.4)
    data = loss.count(loss.batch_inputs(data_for("aot_unpaired")))
    whole = gradients(total(loss(data)), loss)
    match = data["match_id"]
    assert_same(sum_of_parts(loss, data, (match == 1, match != 1)), whole)
    with pytest.raises(ValueError, match=r"match_id . has . chosen and . rejected rows, expected one of each"):
        loss(data[:3])


@pytest.mark.parametrize("name", ["bco", "bco_pair", "aot"])
def test_without_the_inputs_of_the_batch_parts_do_not_add_up(model: nn.Module, name: str) -> None:
    """Negative control."""
    loss = PolicyLoss(model, name, beta=0.4)
    data = loss.count(data_for(name))
    whole = gradients(total(loss(data)), loss)
    found = sum_of_parts(loss, data, (torch.arange(2), torch.arange(2, 6)))
    assert not all(torch.allclose(found[key], whole[key], rtol=1e-3, atol=1e-5) for key in whole)


def test_the_storage_of_a_buffer_is_left_alone(model: nn.Module) -> None:
    buffer = ReplayBuffer(storage=LazyStackStorage(6), collate_fn=lambda x: x)
    buffer.extend(labelled("lazy"))
    loss = PolicyLoss(model, "bco")
    sample = loss.count(loss.batch_inputs(buffer[torch.arange(4)]))
    assert {"reference_point", "denominators"} <= set(sample.keys())
    assert not {"reference_point", "denominators"} & set(buffer[torch.arange(4)].keys())


# ---------------------------------------------------------------------- errors


def test_an_objective_without_such_an_input_is_left_alone(model: nn.Module) -> None:
    data = batch()
    loss = PolicyLoss(model, "dpo")
    assert loss.once is None
    assert set(loss.batch_inputs(data).keys(True, True)) == set(batch().keys(True, True))
    assert PolicyLoss(model, lambda log_prob, mask, **_: get_objective("sft")(log_prob, mask)).once is None


def test_what_is_missing_names_what_computes_it(model: nn.Module) -> None:
    message = r"kto scores mismatched .* pass the model as reference=, or store 'reference_point'"
    with pytest.raises(ValueError, match=message):
        PolicyLoss(model, "kto").batch_inputs(labelled())
    message = r"kto needs reference_point.*batch_inputs\(batch\) computes it from a whole batch"
    with pytest.raises(KeyError, match=message):
        PolicyLoss(model, "kto")(labelled())
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialised"):
        PolicyLoss(model).count(batch(), all_ranks=True)


def test_a_reference_point_that_is_no_number_is_named(model: nn.Module) -> None:
    data = labelled()
    data["reference_point"] = torch.tensor([0.0, 0.0, torch.nan, 0.0, 0.0, 0.0])
    with pytest.raises(ValueError, match=r"reference_point \('reference_point'\) is nan at sequence 2"):
        PolicyLoss(model, "kto")(data)
    data["loss_mask"] = torch.tensor([True, True, False, True, True, True])
    assert PolicyLoss(model, "kto")(data)["loss_objective"].isfinite()


# ---------------------------------------------------------------------- half the temperature


@pytest.mark.parametrize("kind", ["module", "scorer", "functional"])
def test_aligned_weights_are_of_the_policys_own_distribution(kind: str) -> None:
    """``log p - log sum p^2`` of each token, at the temperature of the loss."""
    model, data = tiny_model(seed=0), batch()
    rows = responses(model, data, temperature=0.8)
    aligned = [(row["log_prob"] - (2 * row["all"]).logsumexp(-1)).mean() for row in rows]
    weight = torch.stack(aligned).exp().detach().view(-1, 2).prod(-1)
    ratio = torch.stack([(row["log_prob"] - row["ref_log_probs"]).sum() for row in rows])
    each = -nn.functional.logsigmoid(0.3 * (ratio[::2] - ratio[1::2]))
    settings = {} if kind == "scorer" else {"temperature": 0.8, "functional": kind == "functional"}
    actor = LogProbScorer(model, temperature=0.8) if kind == "scorer" else model
    loss = PolicyLoss(actor, "dpo", beta=0.3, weighting="aligned", **settings)
    assert "sharp_log_prob" not in loss.in_keys
    out = loss(data)
    assert_close(out["loss_objective"], (weight * each).mean(), **CLOSE)
    assert_close(out["weight_mean"], weight.mean(), **CLOSE)
    if kind != "functional":
        assert_same(gradients(out["loss_objective"], model), gradients((weight * each).mean(), model))


# ---------------------------------------------------------------------- mismatched answers


def mixed(prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    rows = [torch.tensor(p + a) for p, a in zip(prompts, answers, strict=True)]
    marks = torch.cat([torch.tensor([False] * len(p) + [True] * len(a)) for p, a in zip(prompts, answers, strict=True)])
    tokens, mask = mismatch(Ragged.from_list(rows), marks)
    assert [int(row.sum()) for row in tokens.like(mask).to_list()] == [
        len(row) - len(p) for row, p in zip(tokens.to_list(), prompts, strict=True)
    ]
    return [row.tolist() for row in tokens.to_list()]


def test_answers_move_on_to_other_prompts() -> None:
    assert mixed([[1, 2], [3], [4, 5, 6]], [[7], [8, 8], [9, 9, 9]]) == [[1, 2, 9, 9, 9], [3, 7], [4, 5, 6, 8, 8]]
    # past the neighbours of their own prompt
    assert mixed([[1], [1], [2], [2]], [[5], [6], [7], [8]]) == [[1, 7], [1, 8], [2, 5], [2, 6]]
    assert mixed([[1], [1], [2]], [[5], [6], [7]]) == [[1, 7], [1, 5], [2, 6]]  # no shift is better
    assert mixed([[1]], [[5]]) == [[1, 5]]
    # Where the prompt of a sequence without an answer ends is unknown: all of it may be one that ``loss_mask`` leaves out.
    assert mixed([[1, 2], [3], [4]], [[], [8, 8], [9]]) == [[1, 2], [3, 9], [4, 8, 8]]


def test_later_turns_stay_with_the_answer() -> None:
    """Three turns: the first masked-in token begins the answer, whose mask keeps its holes."""
    tokens = Ragged.from_list([torch.tensor([1, 5, 6, 7]), torch.tensor([2, 8])])
    marks = torch.tensor([False, True, False, True, False, True])
    found, mask = mismatch(tokens, marks)
    assert [row.tolist() for row in found.to_list()] == [[1, 8], [2, 5, 6, 7]]
    assert mask.tolist() == [False, True, False, True, False, True]
    assert aot_match(
        torch.tensor([[1.0], [2.0]]), torch.ones(2, 1).bool(), ref_log_prob=torch.zeros(2, 1), chosen=FLAGS[:2]
    ).tolist() == [0, 0]
