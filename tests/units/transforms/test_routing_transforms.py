"""Recorded routing in transforms, losses and algorithms: the entries, and equal replays everywhere."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.testing import assert_close

from closeness import assert_near
from group_rollouts import assert_ratios
from layouts import at_responses, joined, tokens
from routed_by_hand import perturbed, routers
from torchrl_llm_kl import (
    AfterPrompt,
    LogProbScorer,
    PolicyLoss,
    Ragged,
    RetrieveKL,
    RetrieveLogProb,
    RoutedExperts,
    ScoreRequest,
    make_algorithm,
)
from torchrl_llm_kl.losses import KLToReference
from torchrl_llm_kl.ragged import read_ragged
from torchrl_llm_kl.rollouts import MissingEntryError, read_routing
from toy_models import FORWARD, tiny_model
from toy_rollouts import flat, make_model, make_policy, steps

PROMPTS, RESPONSES = [[3, 4], [9, 8, 7], [3, 4]], [[5, 6, 7, 8], [6, 5], [11, 12, 13]]
TOKENS = Ragged.from_list([torch.tensor(row) for row in joined(PROMPTS, RESPONSES)])
SCORED = [torch.arange(len(p) + len(r)) >= len(p) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
MASK = torch.cat(SCORED)
ADVANTAGE = torch.tensor([[1.0], [-1.0], [0.5]])
KEY, FULL, REF, ATTENTION = "routed_experts", ("log_probs", "full"), ("ref_log_probs", "full"), "all_attention_mask"


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model("mixtral")


@pytest.fixture(scope="module")
def later(model: nn.Module) -> nn.Module:
    """The policy with changed routers."""
    return perturbed(model)


def make_data(layout: str = "padded", **entries: list[Tensor]) -> TensorDictBase:
    """The answers in a layout, with further entries. Padding is left of prompts (3) and right of responses (4)."""
    return tokens(layout, PROMPTS, RESPONSES, masks__all_assistant_mask=SCORED, advantage=ADVANTAGE, **entries)


def random_record(seed: int = 0) -> list[Tensor]:
    """Two of six experts in three layers, at each token."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(len(row), 3, 6, generator=generator).argsort(-1)[..., :2] for row in SCORED]


RECORD = random_record()


def replayed(model: nn.Module, record: Any = None, **options: Any) -> Tensor:
    """The log-probs at the scored tokens under a record, or with the model's own routing."""
    return LogProbScorer(model).score(ScoreRequest.of(TOKENS, MASK, routing=record), **options).values[MASK]


def scored(td: TensorDictBase, key: Any = FULL) -> Tensor:
    """The values of an entry at the scored tokens, in any layout."""
    return torch.cat(at_responses(td, key, PROMPTS, RESPONSES))


def recorded(td: TensorDictBase) -> Tensor:
    """The experts of all tokens."""
    return read_ragged(td, KEY, ("masks", ATTENTION)).values


def test_a_record_is_replayed(layout: str, model: nn.Module) -> None:
    transform = RetrieveLogProb(model, extras=[RoutedExperts(KEY)])
    found = scored(transform(make_data(layout, routed_experts=[row.to(torch.int16) for row in RECORD])))
    assert_near(found, replayed(model, RECORD), **FORWARD)
    plain = scored(RetrieveLogProb(model)(make_data(layout)))
    assert float((plain - found).abs().max()) > 0.1
    assert torch.equal(scored(transform(make_data(layout))), plain)  # nothing was recorded


@pytest.mark.parametrize("layout", ["padded", "lazy"])
def test_a_first_scoring_is_recorded(layout: str, model: nn.Module, later: nn.Module) -> None:
    """Later scorings use the recorded experts and record the same ones."""
    td = RetrieveLogProb(model, extras=[RoutedExperts(KEY, record=True)])(make_data(layout))
    want = LogProbScorer(model).evaluate(TOKENS, MASK, record_routing=True).routing
    assert recorded(td).dtype == torch.int8
    assert torch.equal(recorded(td), want.values)
    again = RetrieveLogProb(later, extras=[RoutedExperts(KEY, record=True)])(td)
    assert_near(scored(again), replayed(later, want), **FORWARD)
    assert torch.equal(recorded(again), want.values)


def responses_of(row: TensorDictBase) -> Tensor:
    """The mask of the response tokens, without padding."""
    return row["masks", ATTENTION] & (torch.arange(len(row["tokens", "full"])) >= len(row["tokens", "prompt"]))


def test_in_an_env(lab: Any) -> None:
    """Each turn in an env writes its own record, and later scorings replay it."""
    policy_model = make_model(lab.tokenizer, 0, "deepseek_v3")
    transform = RetrieveLogProb(policy_model, extras=[RoutedExperts(KEY, record=True)])
    torch.manual_seed(0)
    td = lab.env(transform, turns=2).rollout(2, make_policy(policy_model, lab.tokenizer, pad_output=True))
    scorer = LogProbScorer(policy_model)
    for step in steps(td):
        ids, record, real = step["tokens", "full"], step["next", KEY], step["masks", ATTENTION]
        assert (record.shape, record.dtype) == ((len(ids), 2, 2), torch.int8)
        want = scorer.evaluate([ids[real]], record_routing=True).routing
        assert torch.equal(record[real][:-1], want.values[:-1])
    found = RetrieveLogProb(policy_model, extras=[RoutedExperts(KEY)])(flat(td))
    for row, step in zip(found.unbind(0), steps(td), strict=True):
        assert_near(row["next", "log_probs", "full"], step["next", "log_probs", "full"], **FORWARD)
    # The loss replays the record below "next". The root has the record of the previous turn.
    later = perturbed(policy_model)
    by_step = RetrieveLogProb(later, extras=[RoutedExperts(KEY)])(flat(td))
    log_probs = torch.cat([row["next", "log_probs", "full"][responses_of(row)] for row in steps(by_step)])
    assert_near(PolicyLoss(later, "sft")(flat(td))["loss_objective"], -log_probs.mean(), **FORWARD)


@pytest.mark.parametrize("estimator", ["k1", "exact"])
def test_kl(estimator: Any, model: nn.Module, later: nn.Module) -> None:
    """The policy replays the record. The reference uses its own routing, or its own entry."""
    other = random_record(1)

    def kl(policy: nn.Module = later, reference: nn.Module = model, **kwargs: Any) -> TensorDictBase:
        td = make_data(routed_experts=RECORD, of_reference=other)
        return RetrieveKL(policy, reference, estimator=estimator, **kwargs)(td)

    assert_near(scored(kl()), replayed(later, RECORD), **FORWARD)
    assert_near(scored(kl(), REF), replayed(model), **FORWARD)
    theirs = RoutedExperts("of_reference", of="reference")
    assert_near(scored(kl(extras=[theirs]), REF), replayed(model, other), **FORWARD)
    same = kl(later, later, extras=[RoutedExperts(of="reference")])["kl_penalty"]
    assert_near(same, torch.zeros_like(same), **FORWARD)
    assert_near(scored(kl(extras=[RoutedExperts(None)])), replayed(later), **FORWARD)
    found = RetrieveKL(later, model, estimator=estimator, extras=[RoutedExperts(record=True)])(make_data())[KEY]
    assert (found.shape, found.dtype) == ((3, 7, 3, 2), torch.int8)


def forms() -> dict[str, TensorDictBase]:
    """The same record in the forms that engines and users store."""
    response = [row[mask] for row, mask in zip(RECORD, SCORED, strict=True)]
    padded = make_data(routed_experts=RECORD)[KEY]
    found = {
        "without the last token": [row[:-1] for row in RECORD],
        "response": response,
        "response without the last token": [row[:-1] for row in response],
        "uint8 without the last token": [row[:-1].to(torch.uint8) for row in RECORD],
    }
    entries = {
        "padded, without the last slot": padded[:, :-1],
        "padded response": padded[:, 3:],
        "padded response without the last slot": padded[:, 3:-1],
        "nested beside padded tokens": torch.nested.as_nested_tensor(RECORD, layout=torch.strided),
    }
    out = {name: tokens("lazy", PROMPTS, RESPONSES, routed_experts=rows) for name, rows in found.items()}
    out |= {name: make_data().set(KEY, value) for name, value in entries.items()}
    return {**out, "in next": make_data().set("next", TensorDict({KEY: padded}, batch_size=[3]))}


@pytest.mark.parametrize("name", list(forms()))
def test_forms_of_a_record(name: str) -> None:
    td = forms()[name]
    found = read_routing(td, KEY, read_ragged(td, ("tokens", "full"), ("masks", ATTENTION)), MASK)
    want = torch.cat(RECORD)
    if "response" in name:
        want[~MASK] = -1
    if "last token" in name:
        want[TOKENS.offsets[1:] - 1] = -1
    if "slot" in name:  # the last slot is a token of the first answer alone
        want[6 - 1] = -1
    assert torch.equal(found.long(), want)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (torch.zeros(3, 7, 3, 2), r"integers \[layers, experts\] for each token, found \[3, 2\] of torch.float32"),
        (torch.zeros(3, 7, 3).long(), r"for each token, found \[3\] of torch.int64"),
        (torch.zeros(3, 5, 3, 2).long(), "a row for each token but the last: sequence 0 has 5 rows and 7 tokens"),
        (torch.zeros(3, 9, 3, 2).long(), "sequence 0 has 9 rows and 7 tokens"),
    ],
)
def test_records_of_other_shapes(entry: Tensor, message: str, model: nn.Module) -> None:
    with pytest.raises(ValueError, match=message):
        RetrieveLogProb(model, extras=[RoutedExperts(KEY)])(make_data().set(KEY, entry))


@pytest.mark.parametrize("layout", ["padded", "lazy"])
def test_a_loss_replays(layout: str, model: nn.Module, later: nn.Module) -> None:
    """The first ratio is 1. Log-probs and gradients of a later policy use the recorded experts."""
    td = RetrieveLogProb(model, extras=[RoutedExperts(KEY, record=True)])(make_data(layout))
    assert_ratios(PolicyLoss(model, "ppo")(td))
    loss = PolicyLoss(later, "gpg")
    found = loss(td).total_loss
    record = LogProbScorer(model).evaluate(TOKENS, MASK, record_routing=True).routing
    want = -(ADVANTAGE[TOKENS.sequence_ids, 0][MASK] * replayed(later, record, grad=True)).mean()
    assert_near(found, want, **FORWARD)
    assert float((loss(td.exclude(KEY)).total_loss - want).detach().abs()) > 1e-3
    weights = [router.weight for router in routers(later)]
    for a, b in zip(*(torch.autograd.grad(x, weights) for x in (found, want)), strict=True):
        assert float(b.abs().max()) > 1e-4
        assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_a_reference_in_the_loss_routes_by_itself(model: nn.Module, later: nn.Module) -> None:
    d = replayed(model) - replayed(later, RECORD)
    for estimator in ("k2", "exact"):
        loss = PolicyLoss(later, "gpg", terms=[KLToReference(0.1, estimator)], reference=model)
        found = loss(make_data(routed_experts=RECORD))["kl_to_ref"]
        assert_close(found, (d.exp() - 1 - d).mean(), atol=1e-4, rtol=1e-4)


def test_a_loss_with_another_key(model: nn.Module) -> None:
    loss = PolicyLoss(model, "gpg")
    want = loss(make_data(routed_experts=RECORD)).total_loss
    loss.set_keys(routed_experts="mine")
    assert_close(loss(make_data(mine=RECORD)).total_loss, want)
    with pytest.raises(MissingEntryError, match="a replay of routing: expected 'mine'"):
        loss(make_data(routed_experts=RECORD))


def test_make_algorithm(model: nn.Module, later: nn.Module) -> None:
    """Old log-probs and the loss replay the sampler's record, so the first ratio is 1. The reference does not replay."""
    for kl, reference in (("none", {}), ("k3", {"reference": model})):
        parts = make_algorithm("reinforce_plus_plus", later, kl_reward="none", kl_loss=kl, **reference)
        batch = parts.prepare(make_data(routed_experts=RECORD, next__reward=ADVANTAGE))
        assert_near(scored(batch["next"]), replayed(later, RECORD), **FORWARD)
        assert_ratios(parts.loss(batch))
        if reference:
            assert_near(scored(batch["next"], REF), replayed(model), **FORWARD)


def test_settings_follow_or_are_refused(model: nn.Module, later: nn.Module) -> None:
    transform = RetrieveKL(later, model)
    assert [part.extras for part in transform.transforms[:2]] == [(), ()]
    theirs = RoutedExperts("mine", of="reference")
    transform.extras = [RoutedExperts(record=True), theirs]
    assert KEY in transform[0].out_keys
    assert transform[1].extras == (theirs,)
    dense = tiny_model()
    with pytest.raises(ValueError, match="Qwen2ForCausalLM has no router"):
        RetrieveLogProb(dense, extras=[RoutedExperts(KEY, record=True)])
    with pytest.raises(ValueError, match="needs a place for the record: pass 'routed_experts'"):
        RetrieveLogProb(model, extras=[RoutedExperts(None, record=True)])
    with pytest.raises(ValueError, match="needs a model in this process, got NoneType"):
        RetrieveLogProb("from_collector", extras=[RoutedExperts(KEY, record=True)])
    td = make_data(routed_experts=RECORD).set("other", torch.ones(3, 2).long())
    for score in (RetrieveLogProb(dense, extras=[RoutedExperts(KEY)]), PolicyLoss(dense, "gpg")):
        with pytest.raises(ValueError, match="Qwen2ForCausalLM has no router"):
            score(td)
    with pytest.raises(ValueError, match="routing was recorded for the sampled prompt"):
        RetrieveLogProb(model, extras=[RoutedExperts(KEY), AfterPrompt("other")])(td)
