"""Scores beside log-probs: the exact KL, the top k, and the sampler's own log-probs."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torch.testing import assert_close
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.modules.llm.policies.common import LogProbs

from closeness import assert_near
from head_reference import collapse, gkd_of
from layouts import PROMPTS, RESPONSES, at_responses, tokens
from torchrl_llm_kl import RetrieveKL, make_algorithm
from torchrl_llm_kl.scoring import RememberedModel
from torchrl_llm_kl.transforms import Entropy, ExactKL, KLComputation, RetrieveLogProb, SamplerLogProbs, TopK
from toy_models import BACKWARD, FORWARD, VOCAB_SIZE, tiny_model
from toy_rollouts import OUTCOMES, flat, make_model, plain_log_probs, response_log_probs, steps


# ------------------------------------------------------------------ the exact KL
def exact(model: Any, ref: Any, step: TensorDictBase) -> Tensor:
    """The KL by a sum over the vocabulary at each response token, 0 elsewhere. Differentiable in the policy."""
    full, attention = step["tokens", "full"], step["masks", "all_attention_mask"]
    p, q = (m(input_ids=full[attention][None]).logits[0, :-1].log_softmax(-1) for m in (model, ref))
    kl = torch.cat([torch.zeros(1), (p.exp() * (p - q.detach())).sum(-1)])
    kl = torch.zeros(len(full)).masked_scatter(attention, kl)
    return torch.where(torch.arange(len(full)) < len(step["tokens", "prompt"]), 0.0, kl)


def assert_exact(data: TensorDictBase, model: Any, ref: Any, coeff: float) -> None:
    for i, step in enumerate(steps(data)):
        want = exact(model, ref, step).detach()
        assert float(want.sum()) > 0.1
        assert_near(step["next", "kl_penalty"], want, **FORWARD)
        assert_near(step["next", "reward"].sum(), OUTCOMES[i] - coeff * want.sum(), **FORWARD)


@pytest.mark.parametrize(
    ("place", "padded"), [("env", True), ("env", False), ("on sample", False)], indirect=["padded"]
)
def test_retrieve_kl(lab: Any, padded: bool, place: str) -> None:
    transform = RetrieveKL(*lab.wrapped(padded), estimator="exact", coeff=0.3, extras=[Entropy(("entropy", "full"))])
    data = flat(lab.collect(*([transform] if place == "env" else []), pad_output=padded))
    if place == "on sample":
        buffer = ReplayBuffer(storage=LazyStackStorage(8), batch_size=2, transform=transform)
        buffer.extend(data)
        data = buffer[:]
    assert_exact(data, lab.gen_model, lab.ref_model, 0.3)
    for step in steps(data):
        entropy = step["next", "entropy", "full"]
        assert entropy.shape == step["tokens", "full"].shape
        assert float(entropy.sum()) > 0.1


def test_two_transforms_and_an_entry_between_them(lab: Any) -> None:
    both = RetrieveLogProb(lab.gen_model, extras=[ExactKL(lab.ref_model)])
    other = RetrieveLogProb(lab.ref_model, log_probs_full_key=("ref_log_probs", "full"))
    data = flat(lab.collect(both, other, KLComputation(estimator="exact", coeff=0.3)))
    assert_exact(data, lab.gen_model, lab.ref_model, 0.3)


def test_an_attached_penalty_has_the_gradient_of_the_kl(lab: Any) -> None:
    data, ref_model, model = flat(lab.collect()), lab.ref_model, make_model(lab.tokenizer, seed=0)
    out = RetrieveKL(model, ref_model, estimator="exact", detach=False, add_to_reward=False)(data)
    parameters = list(model.parameters())
    got = torch.autograd.grad(sum(step["next", "kl_penalty"].sum() for step in steps(out)), parameters)
    want = torch.autograd.grad(sum(exact(model, ref_model, step).sum() for step in steps(data)), parameters)
    assert_near(list(got), list(want), **BACKWARD)


def test_references_that_are_refused(policy_model: Any, ref_model: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="RememberedModel returns log-probs only"):
        RetrieveKL(policy_model, RememberedModel(ref_model, tmp_path), estimator="exact")
    with pytest.raises(ValueError, match="compares with its ref_model, use estimator='exact'"):
        RetrieveKL(policy_model, ref_model, extras=[ExactKL(ref_model)])


# ------------------------------------------------------------------ the top k: a teacher for distillation
K = 5
IDS, LOG_PROBS, REST = ("top_k", "ids"), ("top_k", "log_probs"), ("top_k", "rest_log_prob")


def data(*, dense: bool = True) -> TensorDictBase:
    """Two rows with prompts of two tokens, dense or ragged in a lazy stack."""
    full = torch.randint(VOCAB_SIZE, (2, 6), generator=torch.Generator().manual_seed(0)).tolist()
    rows = full if dense else [full[0], full[1][:4]]
    return tokens("padded" if dense else "lazy", [row[:2] for row in rows], [row[2:] for row in rows])


@pytest.mark.parametrize(("k", "dense"), [(1, True), (K, False), (VOCAB_SIZE, True)])
def test_against_the_whole_distribution(k: int, dense: bool) -> None:
    model = tiny_model(seed=0)
    found = RetrieveLogProb(model, extras=[TopK(k)])(data(dense=dense))
    wide = tiny_model(seed=0).double()
    for step, given in zip(found.unbind(0), data(dense=dense).unbind(0), strict=True):
        with torch.no_grad():
            log_p = wide(given["tokens", "full"][None]).logits[0, 1:-1].log_softmax(-1)
        expected, ids = log_p.sort(-1, descending=True)
        assert step[IDS].dtype == torch.int64
        assert torch.equal(step[IDS][2:], ids[:, :k])
        assert_close(step[LOG_PROBS][2:], expected[:, :k].float(), atol=1e-4, rtol=0)
        # The reference is accurate where one minus a float32 sum would round to 0.
        assert_close(step[REST][2:].double(), expected[:, k:].logsumexp(-1), atol=1e-4, rtol=0, check_dtype=False)
        assert step[REST][2:].isneginf().tolist() == [k == VOCAB_SIZE] * len(ids)
        for key in (IDS, LOG_PROBS, REST):
            assert not step[key][:2].any()
            assert not step[key].requires_grad


def test_nothing_is_written_by_default() -> None:
    transform = RetrieveLogProb(tiny_model(seed=0))
    assert "top_k" not in transform(data())
    transform.extras = [TopK(K, ("teacher", "top"))]
    assert transform(data())["teacher", "top", "ids"].shape == (2, 6, K)
    entries = [("teacher", "top", x) for x in ("ids", "log_probs", "rest_log_prob")]
    assert set(transform.out_keys) == {("log_probs", "full"), *entries}


def test_beside_the_log_probs_of_a_policy() -> None:
    """TorchRL's policies write a tensorclass under ``"log_probs"``, which accepts no other entries."""
    rows = data(dense=False)
    for step in rows.tensordicts:
        step["log_probs"] = LogProbs(full=torch.zeros(len(step["tokens", "full"])))
    found = RetrieveLogProb(tiny_model(seed=0), extras=[TopK(K)])(rows)
    copy = lazy_stack([step.clone() for step in found.unbind(0)]).clone()
    assert copy[1][LOG_PROBS].shape == (4, K)
    assert copy[1]["log_probs", "full"].ne(0).sum() == 2


@pytest.mark.filterwarnings("ignore:the top k below")
@pytest.mark.parametrize(
    ("name", "beta", "padded"), [("gkd", 0.0, True), ("on_policy_distill", 1.0, False)], indirect=["padded"]
)
def test_a_distillation_from_an_env(lab: Any, name: str, beta: float, padded: bool) -> None:
    """The root holds the top k of the previous turn, and nothing in the first turn."""
    wide, teacher = copy.deepcopy(lab.gen_model).double(), copy.deepcopy(lab.ref_model).double()
    settings = {"objective_args": {"beta": beta}} if name == "gkd" else {}
    parts = make_algorithm(name, lab.gen_model, reference=lab.ref_model, top_k=K, **settings)
    rollout = lab.collect(parts.kl_transform, pad_output=padded, turns=2)
    batch, values = flat(rollout), []
    for step in steps(rollout):
        real = step["masks", "all_attention_mask"]
        ids, answer = step["tokens", "full"][real][None], int(real[len(step["tokens", "prompt"]) :].sum())
        with torch.no_grad():
            log_q, log_p = (m(ids).logits[0, -answer - 1 : -1].log_softmax(-1) for m in (wide, teacher))
        top = log_p.topk(K, -1).indices
        values.append(gkd_of(*(collapse(x, top) for x in (log_q, log_p)), beta))
    want = torch.cat(values).mean()
    assert len(values) == 4
    assert_near(parts.loss(parts.prepare(batch))["loss_objective"], want.float(), **FORWARD)


def test_a_bad_top_k_is_refused() -> None:
    for k in (-1, 0):
        with pytest.raises(ValueError, match=r"^k must be .*at least 1, got"):
            RetrieveLogProb(tiny_model(seed=0), extras=[TopK(k)])
    with pytest.raises(ValueError, match=r"98.*97"):
        RetrieveLogProb(tiny_model(seed=0), extras=[TopK(VOCAB_SIZE + 1)])(data())


class OfReference(Entropy):
    of = "reference"


def test_an_extra_of_the_reference_is_written_or_refused() -> None:
    gen, ref = tiny_model(), tiny_model(seed=1)
    data = tokens("padded")
    extra = OfReference(("ref", "entropy"))
    found = RetrieveKL(gen, ref, extras=[extra])(data.clone())["ref", "entropy"]
    want = RetrieveLogProb(ref, log_probs_full_key=("x", "full"), extras=[Entropy()])(data.clone())["entropy"]
    assert torch.count_nonzero(want)
    assert_near(found, want, **FORWARD)
    with pytest.raises(ValueError, match=r"estimator='exact' runs both models side by side, .* of the reference"):
        RetrieveKL(gen, ref, estimator="exact", extras=[extra])


# ------------------------------------------------------------------ the sampler's log-probs, each in its own entry
FULL, SAMPLER = ("log_probs", "full"), ("sampler_log_probs", "full")
STORED = [[-1.0, -2.0], [-0.5, -1.5, -2.5, -3.5], [-4.0]]
NAN = float("nan")


def rollout(layout: str, name: str = "full", stored: list[list[float]] = STORED) -> TensorDictBase:
    """Three sequences with log-probs of the whole sequence (9 at prompts) or the response, and 7 in padding."""
    values = [[9.0] * len(p) * (name == "full") + x for p, x in zip(PROMPTS, stored, strict=True)]
    return tokens(layout, fill=7.0, **{f"log_probs__{name}": values})


def responses(data: TensorDictBase, key: Any) -> list[list[float]]:
    return [row.tolist() for row in at_responses(data, key)]


@pytest.mark.parametrize(
    ("layout", "name"), [("padded", "full"), ("padded", "response"), ("nested", "full"), ("lazy", "response")]
)
def test_the_samplers_log_probs_are_moved_and_replaced(layout: str, name: str) -> None:
    model = tiny_model(seed=0)
    found = RetrieveLogProb(model, extras=[SamplerLogProbs(SAMPLER)])(rollout(layout, name))
    assert responses(found, SAMPLER) == STORED
    own = [plain_log_probs(model, torch.tensor(p + r))[len(p) :] for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    assert_near(at_responses(found, FULL), own, **FORWARD)
    # a second pass, with a trainer that has moved, leaves the sampler's
    again = RetrieveLogProb(tiny_model(seed=1), extras=[SamplerLogProbs(SAMPLER)])(found)
    assert responses(again, SAMPLER) == STORED
    assert responses(again, FULL) != responses(RetrieveLogProb(model)(rollout(layout, name)), FULL)


def test_a_first_token_that_was_not_scored_is_nan() -> None:
    stored = [[0.0, -2.0], [0.0, -1.5, 0.0, -3.5], [0.0]]
    found = RetrieveLogProb(tiny_model(seed=0), extras=[SamplerLogProbs(SAMPLER)])(rollout("lazy", stored=stored))
    expected = [[NAN, -2.0], [NAN, -1.5, 0.0, -3.5], [NAN]]  # of the last, the others show that 0 is not a score
    assert_close(at_responses(found, SAMPLER), list(map(torch.tensor, expected)), equal_nan=True, rtol=0, atol=0)


def test_below_next_and_through_retrieve_kl() -> None:
    """The policy writes at the root and the transform below "next". An earlier score below "next" is not the sampler's."""
    data = rollout("nested", "response")
    earlier = torch.nested.as_nested_tensor([torch.full((n,), 8.0) for n in (5, 5, 3)])
    data["next"] = TensorDict({"reward": torch.ones(3, 1), FULL: earlier}, [3])
    model = tiny_model(seed=0)
    transform = RetrieveKL(model, tiny_model(seed=1), extras=[SamplerLogProbs(SAMPLER)])
    found = transform(data)
    assert responses(found, ("next", *SAMPLER)) == STORED
    assert [row.tolist() for row in found["log_probs", "response"].unbind()] == STORED
    assert SAMPLER in transform[0].out_keys
    assert transform.extras == (SamplerLogProbs(SAMPLER),)
    transform.extras = []
    assert SAMPLER not in transform[0].out_keys
    data = rollout("nested")
    data["next"] = rollout("nested", "response", [[8.0] * len(row) for row in STORED]).select("log_probs")
    found = RetrieveLogProb(model, extras=[SamplerLogProbs(SAMPLER)])(data)
    assert responses(found, ("next", *SAMPLER)) == STORED


def test_missing_or_conflicting_sampler_log_probs_are_refused() -> None:
    model = tiny_model(seed=0)
    with pytest.raises(KeyError, match=r"moves the sampler's log-probs: expected them under \('log_probs', 'full'\)"):
        RetrieveLogProb(model, extras=[SamplerLogProbs(SAMPLER)])(rollout("lazy").exclude("log_probs"))
    with pytest.raises(ValueError, match=r"SamplerLogProbs and log_probs_full_key are both \('log_probs', 'full"):
        RetrieveLogProb(model, extras=[SamplerLogProbs(FULL)])


@pytest.mark.parametrize(("padded", "turns"), [(True, 3), (False, 2)], indirect=["padded"])
def test_in_an_env(lab: Any, padded: bool, turns: int) -> None:
    """Each turn keeps the log-probs that the policy stored in that turn."""
    transform = RetrieveLogProb(lab.gen_model, tokenizer=lab.tokenizer, extras=[SamplerLogProbs(SAMPLER)])
    data = lab.collect(transform, pad_output=padded, turns=turns)
    assert data.shape == (2, turns)
    for step in steps(data):
        start = len(step["tokens", "prompt"])
        stored = step["log_probs", "response"][step["masks", "all_attention_mask"][start:]]
        found, own = step["next"][SAMPLER], response_log_probs(lab.gen_model, step)
        assert found.shape == step["tokens", "full"].shape
        assert not found[:start].any()
        assert found[start].isnan()
        scored = slice(start + 1, start + len(stored))
        assert_close(found[scored], stored[1:], rtol=0, atol=0)
        # the policy samples at temperature 1: both are scores of one model
        assert_close(step["next"][FULL], own, atol=1e-4, rtol=0)
        assert_close(found[scored], own[scored], atol=1e-4, rtol=0)
    spec = lab.env(transform.clone()).observation_spec
    assert spec[SAMPLER].shape == spec[FULL].shape == (2, -1)
