"""What objectives take from a whole batch: computed from TensorDicts, stored with each row, and true for any split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.testing import assert_close
from torchrl.data import LazyStackStorage, ReplayBuffer

from policy_batches import LENGTHS, PROMPT, batch, gradients, responses, total
from torchrl_llm_kl import LogProbScorer
from torchrl_llm_kl.losses import PolicyLoss, aot_match, bco_reference_point, get_objective
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.rollouts import mismatch
from toy_models import tiny_model

CLOSE = {"rtol": 1e-3, "atol": 2e-5}
FLAGS = torch.tensor([True, False, True, True, False, False])


@pytest.fixture
def model() -> nn.Module:
    return tiny_model(seed=0)


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


@pytest.mark.parametrize("layout", ["padded", "nested", "lazy"])
def test_ktos_reference_point_is_of_answers_after_other_prompts(model: nn.Module, layout: str) -> None:
    """Rows share their prompts by twos, so that answers move on by two rows."""
    reference = tiny_model(seed=1)
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
    got, want = (gradients(x, model) for x in (out["loss_objective"], expected))
    for name in want:
        assert_close(got[name], want[name], **CLOSE)
    each = PolicyLoss(model, "kto", aggregation="none", beta=0.3)(data)["loss_objective"]
    assert_close(each, surprise, **CLOSE)


@pytest.mark.parametrize("layout", ["padded", "nested", "lazy"])
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


def test_a_reference_that_the_loss_scores_will_do_too(model: nn.Module) -> None:
    reference = tiny_model(seed=1)
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

SPLITS = [[[0, 1], [2, 3, 4, 5]], [[4, 5], [2, 3], [0, 1]]]
WITH_CHOSEN = ("kto", "bco", "aot_unpaired")


def data_for(name: str, layout: str = "padded") -> TensorDictBase:
    """The reference ranks the pairs unlike the policy, for which longer answers are less likely."""
    data = labelled(layout) if name in WITH_CHOSEN else batch(layout=layout)
    for row in (0, 3):
        data[row]["next", "ref_log_probs", "full"].mul_(0.1)
    return data


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("layout", ["padded", "lazy"])
@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        ("kto", {"beta": 0.4, "desirable_weight": 1.4}),
        ("bco", {"beta": 0.4}),
        ("bco_pair", {"beta": 0.4, "weighting": "aligned"}),
        ("aot", {"beta": 0.4}),
        ("cpo", {"nll_aggregation": "token-mean"}),
        ("orpo", {}),
        ("simpo", {}),
        ("dpo", {"f_divergence": "js_divergence", "ld_alpha": 0.4, "weighting": "probability"}),
    ],
)
def test_parts_add_up(model: nn.Module, name: str, hyper: dict[str, Any], layout: str, split: list[list[int]]) -> None:
    loss = PolicyLoss(model, name, reference=tiny_model(seed=1), **hyper)
    data = loss.count(loss.batch_inputs(data_for(name, layout)))
    out = loss(data)
    whole = gradients(total(out), loss)
    parts = [loss(data[torch.tensor(some)]) for some in split]
    assert_close(sum(total(part) for part in parts).detach(), total(out).detach(), **CLOSE)
    found = [gradients(total(part), loss) for part in parts]
    for key, expected in whole.items():
        assert_close(sum(part[key] for part in found), expected, **CLOSE)


def test_matches_stay_together(model: nn.Module) -> None:
    loss = PolicyLoss(model, "aot_unpaired", beta=0.4)
    data = loss.count(loss.batch_inputs(data_for("aot_unpaired")))
    whole = gradients(total(loss(data)), loss)
    match = data["match_id"]
    found = [gradients(total(loss(data[rows])), loss) for rows in (match == 1, match != 1)]
    for key, expected in whole.items():
        assert_close(found[0][key] + found[1][key], expected, **CLOSE)
    with pytest.raises(ValueError, match=r"match_id . has . chosen and . rejected rows, expected one of each"):
        loss(data[:3])


@pytest.mark.parametrize("name", ["bco", "bco_pair", "aot"])
def test_without_the_inputs_of_the_batch_parts_do_not_add_up(model: nn.Module, name: str) -> None:
    """Negative control."""
    loss = PolicyLoss(model, name, beta=0.4)
    data = loss.count(data_for(name))
    whole = gradients(total(loss(data)), loss)
    found = [gradients(total(loss(data[rows])), loss) for rows in (torch.arange(2), torch.arange(2, 6))]
    assert not all(torch.allclose(found[0][key] + found[1][key], whole[key], rtol=1e-3, atol=1e-5) for key in whole)


def test_the_storage_of_a_buffer_is_left_alone(model: nn.Module) -> None:
    buffer = ReplayBuffer(storage=LazyStackStorage(6), collate_fn=lambda x: x)
    buffer.extend(labelled("lazy"))
    sample = PolicyLoss(model, "bco").batch_inputs(buffer[torch.arange(4)])
    assert "reference_point" in sample
    assert "reference_point" not in buffer[torch.arange(4)]


# ---------------------------------------------------------------------- errors


def test_an_objective_without_such_an_input_is_left_alone(model: nn.Module) -> None:
    data = batch()
    loss = PolicyLoss(model, "dpo")
    assert loss.once is None
    assert set(loss.batch_inputs(data).keys(True, True)) == set(batch().keys(True, True))
    assert PolicyLoss(model, lambda log_prob, mask, **_: get_objective("sft")(log_prob, mask)).once is None


def test_mismatched_answers_need_the_reference_itself(model: nn.Module) -> None:
    with pytest.raises(
        ValueError, match=r"kto scores mismatched .* pass the model as reference=, or store 'reference_point'"
    ):
        PolicyLoss(model, "kto").batch_inputs(labelled())


def test_a_missing_reference_point_names_the_method(model: nn.Module) -> None:
    with pytest.raises(
        KeyError, match=r"kto needs reference_point.*batch_inputs\(batch\) computes it from a whole batch"
    ):
        PolicyLoss(model, "kto")(labelled())


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
        got, want = (gradients(x, model) for x in (out["loss_objective"], (weight * each).mean()))
        for name in want:
            assert_close(got[name], want[name], **CLOSE)


# ---------------------------------------------------------------------- mismatched answers


def mixed(prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    rows = [torch.tensor(p + a) for p, a in zip(prompts, answers, strict=True)]
    marks = torch.cat([torch.tensor([False] * len(p) + [True] * len(a)) for p, a in zip(prompts, answers, strict=True)])
    tokens, mask = mismatch(Ragged.from_list(rows), marks)
    assert [int(row.sum()) for row in tokens.like(mask).to_list()] == [
        len(row) - len(p) for row, p in zip(tokens.to_list(), prompts, strict=True)
    ]
    return [row.tolist() for row in tokens.to_list()]


def test_answers_move_on_by_one_row() -> None:
    found = mixed([[1, 2], [3], [4, 5, 6]], [[7], [8, 8], [9, 9, 9]])
    assert found == [[1, 2, 9, 9, 9], [3, 7], [4, 5, 6, 8, 8]]


def test_answers_leave_the_neighbours_of_their_own_prompt() -> None:
    found = mixed([[1], [1], [2], [2]], [[5], [6], [7], [8]])
    assert found == [[1, 7], [1, 8], [2, 5], [2, 6]]
    assert mixed([[1], [1], [2]], [[5], [6], [7]]) == [[1, 7], [1, 5], [2, 6]]  # no shift is better
    assert mixed([[1]], [[5]]) == [[1, 5]]


def test_a_sequence_without_an_answer_is_left_out() -> None:
    """Where its prompt ends is unknown: all of it may be an answer that ``loss_mask`` leaves out."""
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
