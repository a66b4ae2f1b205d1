"""Scores under earlier versions of the weights, against saved copies of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from torchrl_llm_kl import LogProbScorer, Ragged, RetrieveLogProb
from torchrl_llm_kl.scoring import (
    AfterPrompt,
    PolicyVersions,
    ScoreOptions,
    ScoreRequest,
    VersionedScorer,
    VersionLostError,
    WeightHistory,
)
from torchrl_llm_kl.scoring._versions import _Change
from toy_models import tiny_model

ROWS = [torch.tensor(row) for row in ([3, 5, 7, 9, 4], [3, 5, 8], [6, 7, 8, 9])]
TOKENS = Ragged.from_list(ROWS)
#: The second row was sampled across two updates. The last token of the third row has no version.
VERSIONS = torch.tensor([1] * 5 + [1, 2, 3] + [3, 3, 2, -1])


def moved(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)


def recorded(keep: int = 3, **settings: object) -> tuple[VersionedScorer, dict[int, nn.Module]]:
    """A scorer after four versions, and a copy of the model at each. The present weights have moved on."""
    model = tiny_model("llama")
    scorer, copies = VersionedScorer(model, keep=keep, **settings), {}  # type: ignore[arg-type]
    for version in range(4):
        scorer.record(version)
        copies[version] = copy.deepcopy(model)
        moved(model, version)
    copies[-1] = copy.deepcopy(model)
    return scorer, copies


def from_copies(copies: dict[int, nn.Module], score: Callable[[LogProbScorer], Tensor]) -> Tensor:
    want = torch.zeros(len(VERSIONS))
    for version in VERSIONS.unique().tolist():
        want = torch.where(version == VERSIONS, score(LogProbScorer(copies[version], deterministic=True)), want)
    return want


def test_each_token_is_scored_by_the_weights_that_sampled_it() -> None:
    scorer, copies = recorded(deterministic=True)
    before = [weight.clone() for weight in scorer.model.parameters()]
    scores = scorer.evaluate(ScoreRequest.of(TOKENS, versions=VERSIONS), entropy=True)
    assert torch.equal(scores.log_prob.values, from_copies(copies, lambda own: own.score(TOKENS).values))
    entropy = from_copies(copies, lambda own: own.evaluate(TOKENS, entropy=True).entropy.values)  # type: ignore[union-attr]
    assert scores.entropy is not None
    assert torch.equal(scores.entropy.values, entropy)
    assert all(torch.equal(*pair) for pair in zip(before, scorer.model.parameters(), strict=True))
    now = LogProbScorer(copies[-1], deterministic=True).score(TOKENS)
    assert torch.equal(scorer.score(TOKENS).values, now.values)


def test_a_version_for_each_row_and_no_scored_token() -> None:
    scorer, copies = recorded(deterministic=True)
    by_row = scorer.score(ScoreRequest.of(TOKENS, versions=torch.tensor([1, 2, 3])))
    want = [
        LogProbScorer(copies[v], deterministic=True).score([row]).values for v, row in zip((1, 2, 3), ROWS, strict=True)
    ]
    assert torch.equal(by_row.values, torch.cat(want))
    none = scorer.score(ScoreRequest.of(TOKENS, torch.zeros(12, dtype=torch.bool), versions=VERSIONS))
    assert not none.values.any()


def test_a_version_that_is_not_held() -> None:
    scorer, _ = recorded()
    before = [weight.clone() for weight in scorer.model.parameters()]
    with pytest.raises(VersionLostError, match=r"version 0 of the weights is not held, only \[1, 2, 3\]"):
        scorer.score(ScoreRequest.of(TOKENS, versions=torch.tensor([0, 1, 2])))
    assert all(torch.equal(*pair) for pair in zip(before, scorer.model.parameters(), strict=True))
    with pytest.raises(ValueError, match="version 3 comes after version 3"):
        scorer.record(3)


@pytest.mark.parametrize("changes", [{"grad": True}, {"record_routing": True}], ids=str)
def test_scores_that_belong_to_one_version(changes: dict[str, bool]) -> None:
    scorer, _ = recorded()
    with pytest.raises(ValueError, match="versions= is for log-probs without gradient"):
        scorer.evaluate(ScoreRequest.of(TOKENS, versions=VERSIONS), **changes)  # type: ignore[arg-type]


def test_a_scorer_without_versions_refuses_them() -> None:
    with pytest.raises(ValueError, match=r"versions=\.\.\. is not supported by this scorer"):
        LogProbScorer(tiny_model("llama")).score(ScoreRequest.of(TOKENS, versions=VERSIONS))


@pytest.mark.parametrize(
    "versions",
    [torch.tensor([1, 2]), torch.ones(12), torch.ones(12, 1, dtype=torch.long)],
    ids=["few", "float", "wide"],
)
def test_versions_of_another_form(versions: Tensor) -> None:
    with pytest.raises(ValueError, match=r"versions must be integers \(12,\) or \(3,\), got"):
        ScoreRequest.of(TOKENS, versions=versions)


def test_a_graph_stays_valid_while_another_version_is_installed() -> None:
    layer = nn.Linear(2, 1, bias=False)
    history = WeightHistory(layer, keep=2)
    history.record(0)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[2.0, 3.0]]))
    x = torch.ones(1, 2, requires_grad=True)
    loss = layer(x).square().sum()
    with history.installed(0):
        assert not torch.equal(layer.weight, torch.tensor([[2.0, 3.0]]))
    loss.backward()  # 2 (2 + 3) times the weights
    assert x.grad is not None
    assert x.grad.tolist() == [[20.0, 30.0]]


# ------------------------------------------------------------------ memory


def test_frozen_weights_take_no_memory() -> None:
    model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 1, bias=False))
    model[0].requires_grad_(False)
    history = WeightHistory(model, keep=3)
    for version in range(3):
        history.record(version)
        moved(model[1], version)
    assert history.num_bytes == 3 * 100 * 4
    every = WeightHistory(model, keep=3, frozen=True)
    every.record(0)
    assert every.num_bytes == (100 * 100 + 100) * 4


def test_a_few_changed_values_are_stored_with_their_places() -> None:
    """bfloat16 weights absorb small updates: here 3 of 1000 change."""
    layer = nn.Linear(1000, 1, bias=False, dtype=torch.bfloat16)
    history, first = WeightHistory(layer, keep=2), layer.weight.detach().clone()
    history.record(0)
    with torch.no_grad():
        layer.weight[0, [5, 500, 999]] += 1
    history.record(7)
    assert history.num_bytes == 2000 + 3 * (2 + 4)
    assert torch.equal(history.at(0)["weight"], first)
    assert torch.equal(history.at(7)["weight"], layer.weight)
    assert history.versions == [0, 7]


def test_a_change_is_stored_in_the_smaller_form() -> None:
    old, new = torch.zeros(8), torch.zeros(8)
    assert _Change.between(old, new) is None
    new[:4] = 1  # 4 values of 4 bytes and 4 places of 4 bytes are as large as all 8 values
    change = _Change.between(old, new)
    assert change is not None
    assert change.places is None
    new[3] = 0
    change = _Change.between(old, new)
    assert change is not None
    assert change.places is not None
    assert torch.equal(change.undo(new), old)


def test_tied_weights_are_stored_once() -> None:
    model = tiny_model("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    history = WeightHistory(model, keep=1)
    history.record(0)
    assert history.num_bytes == sum(4 * weight.numel() for weight in model.parameters())


# ------------------------------------------------------------------ in transforms


@pytest.mark.parametrize("nested", [False, True])
def test_a_transform_reads_the_versions_of_rows(nested: bool) -> None:
    scorer, copies = recorded(keep=4)
    rows = [torch.tensor([3, 5, 7, 9]), torch.tensor([3, 5, 8, 4])]
    full = torch.nested.nested_tensor(rows, layout=torch.jagged) if nested else torch.stack(rows)
    prompt = (
        torch.nested.nested_tensor([r[:2] for r in rows], layout=torch.jagged) if nested else torch.stack(rows)[:, :2]
    )
    td = TensorDict(tokens=TensorDict(full=full, prompt=prompt, batch_size=[2]), batch_size=[2])
    td["policy_version"] = torch.tensor([[0], [2]])
    score = RetrieveLogProb(scorer, log_probs_full_key=("behavior_log_probs", "full"), extras=[PolicyVersions()])
    got = score(td)["behavior_log_probs", "full"]
    for i, (row, version) in enumerate(zip(rows, (0, 2), strict=True)):
        want = LogProbScorer(copies[version]).score([row], [torch.tensor([False, False, True, True])]).values
        torch.testing.assert_close(got[i], want)
    with pytest.raises(KeyError, match=r"PolicyVersions\('policy_version'\) reads the version of each row"):
        score(td.exclude("policy_version"))


def test_a_transform_reads_the_versions_of_tokens() -> None:
    scorer, copies = recorded(keep=4)
    ids = torch.tensor([[3, 5, 7, 9]])
    td = TensorDict(tokens=TensorDict(full=ids, prompt=ids[:, :2], batch_size=[1]), batch_size=[1])
    td["policy_version"] = torch.tensor([[0, 0, 1, 3]])
    score = RetrieveLogProb(scorer, extras=[PolicyVersions()])
    got = score(td)["log_probs", "full"][0, 2:]
    want = [
        LogProbScorer(copies[version]).score(ids, attention_mask=torch.ones_like(ids)).values[at]
        for at, version in ((2, 1), (3, 3))
    ]
    torch.testing.assert_close(got, torch.stack(want))


def test_options_of_a_scorer_are_not_lost_in_a_transform() -> None:
    scorer = VersionedScorer(tiny_model("llama"), keep=1, temperature=0.5)
    with pytest.raises(ValueError, match="set them on the transform instead"):
        scorer.make_scorer(options=ScoreOptions())
    assert scorer.make_scorer(options=scorer.options).options.temperature == 0.5


def test_weights_that_are_frozen_or_trained_later() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    model[0].requires_grad_(False)
    history = WeightHistory(model, keep=2)
    history.record(0)
    first = model[1].weight.detach().clone()
    model[1].requires_grad_(False)
    moved(model[1], 0)
    history.record(1)
    assert torch.equal(history.at(0)["1.weight"], first)
    model[0].requires_grad_(True)
    with pytest.raises(ValueError, match=r"0\.weight is trained now, and was not at the first version"):
        history.record(2)


def test_versions_move_with_the_response_after_another_prompt() -> None:
    scorer, copies = recorded(keep=4)
    ids = torch.tensor([[3, 5, 7, 9], [3, 5, 8, 4]])
    td = TensorDict(tokens=TensorDict(full=ids, prompt=ids[:, :2], batch_size=[2]), batch_size=[2])
    td["policy_version"] = torch.tensor([[0, 0, 2, 3], [1, 1, 1, 1]])
    td["other"] = torch.tensor([[6, 6, 6], [7, 6, 5]])
    score = RetrieveLogProb(scorer, extras=[PolicyVersions(), AfterPrompt("other")])
    got = score(td)["log_probs", "full"][:, 2:]
    rows = [torch.cat([td["other"][i], ids[i, 2:]]) for i in range(2)]
    for i, versions in enumerate(((2, 3), (1, 1))):
        for place, version in enumerate(versions):
            want = LogProbScorer(copies[version]).score([rows[i]]).values[3 + place]
            torch.testing.assert_close(got[i, place], want)
