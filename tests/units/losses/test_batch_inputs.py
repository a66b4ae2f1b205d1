"""Inputs that are computed once for a whole batch are stored with each row, so that the parts of any split add up."""

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.testing import assert_close
from torchrl.data import LazyStackStorage, ReplayBuffer

from policy_batches import LENGTHS, PROMPT, assert_loss, assert_same, batch, gradients, responses, total
from torchrl_llm_kl import LogProbScorer, Sampling, ScoreOptions
from torchrl_llm_kl.losses import EntropyBonus, KLToReference, PolicyLoss, ValueLoss, get_objective
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.rollouts import mismatch
from torchrl_llm_kl.scoring import TokenCritic
from toy_models import tiny_model

CLOSE = {"rtol": 1e-3, "atol": 2e-5}
FLAGS = torch.tensor([True, False, True, True, False, False])
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def labelled(layout: str = "padded") -> TensorDictBase:
    return batch(layout=layout).set("chosen", FLAGS.clone())


def data_for(name: str, layout: str = "padded") -> TensorDictBase:
    """A batch in which the reference ranks the pairs differently from the policy."""
    data = labelled(layout) if name in ("kto", "bco", "aot_unpaired") else batch(layout=layout)
    for row in (0, 3):
        data[row]["next", "ref_log_probs", "full"].mul_(0.1)
    return data


def log_ratio(model: nn.Module, reference: nn.Module, ids: Tensor) -> Tensor:
    """The log-ratio of the tokens after the prompt, from one plain forward of each model."""
    both = (each(input_ids=ids.unsqueeze(0)).logits[0, PROMPT - 1 : -1].float() for each in (model, reference))
    found = [logits.log_softmax(-1).gather(-1, ids[PROMPT:].unsqueeze(-1)).sum() for logits in both]
    return found[0] - found[1]


def longest(mode: str) -> int | None:
    """``max_len`` if the aggregation divides by it, else None."""
    return 8 if mode == "seq-mean-token-sum-norm" else None


def reduced(model: nn.Module, mode: str, objective: str = "ppo", **hyper: Any) -> PolicyLoss:
    terms = [KLToReference(0.2), EntropyBonus(0.05)]
    return PolicyLoss(model, objective, terms=terms, aggregation=mode, max_len=longest(mode), **hyper)


def sum_of_parts(loss: Any, data: TensorDictBase, split: Any) -> dict[str, Tensor]:
    parts = [gradients(total(loss(data[torch.as_tensor(rows)])), loss) for rows in split]
    return {name: sum(part[name] for part in parts) for name in parts[0]}


@pytest.mark.parametrize("layout", ["padded", "nested"])
def test_ktos_reference_point_uses_answers_to_other_prompts(model: Any, reference: Any, layout: str) -> None:
    """Two neighbouring rows share a prompt, so answers move by two rows. One of the two means is negative."""
    full, found = batch()["tokens", "full"], []
    mixed = [torch.cat([full[i, :PROMPT], full[i - 2, PROMPT : LENGTHS[i - 2]]]) for i in range(6)]
    for one, other in ((model, reference), (reference, model)):
        with torch.no_grad():
            mean = torch.stack([log_ratio(one, other, ids) for ids in mixed]).mean()
        point = PolicyLoss(one, "kto", reference=other).batch_inputs(labelled(layout))["reference_point"]
        assert_close(point, mean.clamp(min=0).expand(6), **CLOSE)
        found.append(point.any())
    assert found[0] != found[1]


@pytest.mark.parametrize("layout", ["nested", "lazy"])
def test_batch_inputs_of_bco_and_aot(model: nn.Module, reference: nn.Module, layout: str) -> None:

    def found(name: str, data: TensorDictBase, key: str = "reference_point", **settings: Any) -> Tensor:
        return PolicyLoss(model, name, **settings).batch_inputs(data)[key]

    def half(ratio: Tensor) -> Tensor:
        return ((ratio[FLAGS].mean() + ratio[~FLAGS].mean()) / 2).expand(6)

    # The loss of kto, with a point that is given.
    data, full = labelled(layout).set("reference_point", torch.full((6,), 0.7)), batch()["tokens", "full"]
    ratio = torch.stack([(row["log_prob"] - row["ref_log_probs"]).sum() for row in responses(model, batch())])
    surprise = torch.sigmoid(0.3 * torch.where(FLAGS, 0.7 - ratio, ratio - 0.7))
    out = PolicyLoss(model, "kto", beta=0.3, desirable_weight=1.5, undesirable_weight=0.6)(data)
    assert_loss(out["loss_objective"], (torch.where(FLAGS, 1.5, 0.6) * surprise).mean(), model, **CLOSE)
    each = PolicyLoss(model, "kto", aggregation="none", beta=0.3)(data)["loss_objective"]
    assert_close(each, surprise, **CLOSE)
    with torch.no_grad():
        scored = torch.stack([log_ratio(model, reference, full[i, :n]) for i, n in enumerate(LENGTHS)])
    assert_close(found("bco", labelled(layout)), half(ratio), **CLOSE)
    bare = labelled().exclude(("next", "ref_log_probs"))
    assert_close(found("bco", bare, reference=reference), half(scored), **CLOSE)
    assert_close(found("bco_pair", batch(layout=layout)), ratio.mean().expand(6), **CLOSE)
    match = found("aot_unpaired", labelled(layout), "match_id")
    for side in (FLAGS, ~FLAGS):
        assert torch.equal(match[side], ratio[side].argsort().argsort())
    loss = PolicyLoss(model, "aot", beta=0.3)
    loss.set_keys(reference_point=("of", "the_batch"))
    data = loss.batch_inputs(batch(layout=layout))
    assert data["of", "the_batch"].shape == (6,)
    assert_close(loss(data)["loss_objective"], PolicyLoss(model, "aot", beta=0.3)(batch())["loss_objective"], **CLOSE)
    if layout != "nested":
        assert found("aot", data_for("aot", layout)).any()


TWO, THREE = [[0, 1], [2, 3, 4, 5]], [[4, 5], [2, 3], [0, 1]]


@pytest.mark.parametrize(
    ("name", "hyper", "layout", "split"),
    [
        ("kto", {"beta": 0.4, "desirable_weight": 1.4}, "padded", TWO),
        ("bco", {"beta": 0.4}, "lazy", THREE),
        ("bco_pair", {"beta": 0.4, "weighting": "aligned"}, "padded", THREE),
        ("aot", {"beta": 0.4}, "lazy", TWO),
        ("cpo", {"nll_aggregation": "token-mean"}, "padded", THREE),
        ("orpo", {}, "padded", TWO),
        ("simpo", {}, "lazy", THREE),
        ("dpo", {"f_divergence": "js_divergence", "ld_alpha": 0.4, "weighting": "probability"}, "padded", TWO),
    ],
)
def test_parts_of_pairs_add_up(model: Any, reference: Any, name: str, hyper: Any, layout: Any, split: Any) -> None:
    """Without ``batch_inputs`` they do not add up."""
    compares = "ref_log_prob" in PolicyLoss(model, name, **hyper).objective.needs
    loss = PolicyLoss(model, name, reference=reference if compares else None, **hyper)
    data = loss.count(loss.batch_inputs(data_for(name, layout)))
    out = loss(data)
    whole = gradients(total(out), loss)
    assert_close(sum(total(loss(data[torch.tensor(some)])) for some in split).detach(), total(out).detach(), **CLOSE)
    assert_same(sum_of_parts(loss, data, split), whole)
    if name in ("bco", "bco_pair", "aot"):
        bare = loss.count(data_for(name))
        found, whole = sum_of_parts(loss, bare, TWO), gradients(total(loss(bare)), loss)
        assert not all(torch.allclose(found[key], whole[key], rtol=1e-3, atol=1e-5) for key in whole)


@pytest.mark.parametrize(("mode", "layout"), [*zip(MODES, ["padded", "lazy"] * 2, strict=True)])
def test_micro_batches_of_a_counted_batch_add_up(model: nn.Module, mode: str, layout: str) -> None:
    loss, data = reduced(model, mode), batch(layout=layout)
    split = [[0, 5], [1], [2, 3, 4]] if layout == "padded" else [[4, 1, 0, 2, 3], [5]]
    whole, uncounted = gradients(total(loss(data)), loss), sum_of_parts(loss, data, split)
    assert not all(torch.allclose(uncounted[name] / len(split), whole[name], rtol=1e-3) for name in whole)
    loss.count(data)
    assert_same(gradients(total(loss(data)), loss), whole)
    assert_same(sum_of_parts(loss, data, split), whole)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum-norm"])
def test_micro_batches_of_a_critic_add_up(mode: str) -> None:
    critic = TokenCritic(tiny_model(seed=2).model)
    nn.init.normal_(critic.head.weight, std=0.1)
    loss, data = ValueLoss(critic, aggregation=mode, max_len=longest(mode)), batch()
    data["value_target"] = torch.linspace(-1, 1, 54).reshape(6, 9)
    whole = gradients(total(loss(data)), loss)
    assert_same(sum_of_parts(loss, loss.count(data.copy()), [[0, 5], [1], [2, 3, 4]]), whole)
    with pytest.warns(UserWarning, match="the mask is empty"):
        out = loss(data.exclude("denominators").set("loss_mask", torch.zeros(6, dtype=torch.bool)))
    assert all((g == 0).all() for g in gradients(out["loss_critic"], loss).values())


def test_terms_have_denominators_of_their_own(model: nn.Module) -> None:
    """Two sequences of experts have 3 and 2 tokens. A micro-batch may hold only experts."""
    data = batch().set("expert_mask", torch.tensor([False, True, False, False, True, False]))
    loss = reduced(model, "token-mean", "mix", mu=0.25)
    whole = gradients(total(loss(data)), loss)
    loss.count(data)
    counts = {name.split("/")[0]: x.unique().item() for name, x in data["denominators"].exclude("batch").items()}
    assert counts == {"usual": 15, "expert": 5, "kl_to_ref": 20, "entropy": 20}
    assert_same(sum_of_parts(loss, data, [[1, 4], [0, 2], [3, 5]]), whole)


def test_rows_counted_apart_or_for_another_loss_are_refused(model: nn.Module) -> None:
    loss, twins, data = reduced(model, "token-mean"), reduced(model, "seq-mean-token-sum"), batch()
    parts = [loss.count(data[rows].clone()) for rows in (slice(2), slice(2, 6))]
    with pytest.raises(ValueError, match=r"rows of 2 batches that were counted apart \(.*\[8.0, 12.0\]"):
        loss(torch.cat(parts))
    with pytest.raises(ValueError, match="not for objective/seq-mean-token-sum"):
        twins(parts[0])
    assert total(twins(twins.count(parts[0]))).isfinite()
    equal = torch.cat([twins.count(data[rows].clone()) for rows in ([0, 1], [2, 3])])
    with pytest.raises(ValueError, match=r"rows of 2 batches .* \(\[2.0\] of objective"):
        twins(equal)
    del parts[1]["denominators", "entropy/token-mean"]
    with pytest.raises(ValueError, match=r"was counted for kl_to_ref/token-mean, .* not for entropy/token-mean"):
        PolicyLoss(model, terms=[EntropyBonus(0.1)])(parts[1])


def test_a_split_must_keep_matches_together(model: nn.Module) -> None:
    loss = PolicyLoss(model, "aot_unpaired", beta=0.4)
    data = loss.count(loss.batch_inputs(data_for("aot_unpaired")))
    match = data["match_id"]
    assert_same(sum_of_parts(loss, data, (match == 1, match != 1)), gradients(total(loss(data)), loss))
    with pytest.raises(ValueError, match=r"match_id . has . chosen and . rejected rows, expected one of each"):
        loss(data[:3])


def test_the_storage_of_a_replay_buffer_is_not_changed(model: nn.Module) -> None:
    buffer = ReplayBuffer(storage=LazyStackStorage(6), collate_fn=lambda x: x)
    buffer.extend(labelled("lazy"))
    loss = PolicyLoss(model, "bco")
    sample = loss.count(loss.batch_inputs(buffer[torch.arange(4)]))
    assert {"reference_point", "denominators"} <= set(sample.keys())
    assert not {"reference_point", "denominators"} & set(buffer[torch.arange(4)].keys())
    loss = PolicyLoss(model, "dpo")
    assert loss.once is None
    assert set(loss.batch_inputs(batch()).keys(True, True)) == set(batch().keys(True, True))
    assert PolicyLoss(model, lambda inputs: get_objective("sft")(inputs)).once is None


def test_errors_of_batch_inputs(model: nn.Module) -> None:
    loss, data = PolicyLoss(model, "kto"), labelled()
    with pytest.raises(ValueError, match=r"kto scores mismatched .* pass it as reference=, or store 'reference_po"):
        loss.batch_inputs(data)
    with pytest.raises(KeyError, match=r"kto needs reference_point.*batch_inputs\(batch\) computes it from a whole b"):
        loss(data)
    with pytest.raises(ValueError, match="process group has not been initialized"):
        PolicyLoss(model).count(batch(), all_ranks=True)
    data["reference_point"] = torch.tensor([0.0, 0.0, torch.nan, 0.0, 0.0, 0.0])
    with pytest.raises(ValueError, match=r"reference_point \('reference_point'\) is nan at sequence 2"):
        loss(data)
    assert loss(data.set("loss_mask", torch.arange(6) != 2))["loss_objective"].isfinite()


@pytest.mark.parametrize("kind", ["module", "scorer", "functional"])
def test_aligned_weights_use_the_policys_own_distribution(kind: str) -> None:
    """``log p - log sum p^2`` of each token, at the temperature of the loss."""
    model = tiny_model(seed=0)
    rows = responses(model, batch(), temperature=0.8)
    aligned = [(row["log_prob"] - (2 * row["all"]).logsumexp(-1)).mean() for row in rows]
    weight = torch.stack(aligned).exp().detach().view(-1, 2).prod(-1)
    ratio = torch.stack([(row["log_prob"] - row["ref_log_probs"]).sum() for row in rows])
    want = (weight * -nn.functional.logsigmoid(0.3 * (ratio[::2] - ratio[1::2]))).mean()
    settings = {} if kind == "scorer" else {"options": ScoreOptions(Sampling(0.8)), "functional": kind == "functional"}
    actor = LogProbScorer(model, temperature=0.8) if kind == "scorer" else model
    loss = PolicyLoss(actor, "dpo", beta=0.3, weighting="aligned", **settings)
    assert "sharp_log_prob" not in loss.in_keys
    out = loss(batch())
    assert_close(out["loss_objective"], want, **CLOSE)
    assert_close(out["weight_mean"], weight.mean(), **CLOSE)
    if kind != "functional":
        assert_loss(out["loss_objective"], want, model, **CLOSE)


@pytest.mark.parametrize(
    ("prompts", "answers", "expected"),
    [
        ([[1, 2], [3], [4, 5, 6]], [[7], [8, 8], [9, 9, 9]], [[1, 2, 9, 9, 9], [3, 7], [4, 5, 6, 8, 8]]),
        # past the neighbours of their own prompt
        ([[1], [1], [2], [2]], [[5], [6], [7], [8]], [[1, 7], [1, 8], [2, 5], [2, 6]]),
        ([[1], [1], [2]], [[5], [6], [7]], [[1, 7], [1, 5], [2, 6]]),  # no shift is better
        ([[1]], [[5]], [[1, 5]]),
        # Where the prompt of a sequence without an answer ends is unknown: all of it may be one that ``loss_mask`` leaves out.
        ([[1, 2], [3], [4]], [[], [8, 8], [9]], [[1, 2], [3, 9], [4, 8, 8]]),
    ],
)
def test_mismatch_moves_answers_to_other_prompts(prompts: Any, answers: Any, expected: list[list[int]]) -> None:
    pairs = [*zip(prompts, answers, strict=True)]
    marks = torch.tensor([flag for p, a in pairs for flag in [False] * len(p) + [True] * len(a)])
    tokens, mask = mismatch(Ragged.from_list([torch.tensor(p + a) for p, a in pairs]), marks)
    assert [row.tolist() for row in tokens.to_list()] == expected
    lengths = [len(row) - len(prompt) for row, prompt in zip(expected, prompts, strict=True)]
    assert [int(row.sum()) for row in tokens.like(mask).to_list()] == lengths
