"""A remote scorer returns the top k, moments and replays of kept tokens, also in transforms and losses."""

import asyncio
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close

from closeness import assert_near
from load import job_of, record_of
from remote_models import model
from torchrl_llm_kl import (
    KLRewardTransform,
    LogProbScorer,
    PolicyLoss,
    Ragged,
    RememberedModel,
    RetrieveKL,
    Sampling,
    ScoreOptions,
)
from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.losses import KLToReference
from torchrl_llm_kl.rollouts import write_kept
from torchrl_llm_kl.scoring import ScoreRequest
from torchrl_llm_kl.service._core import ScoringCore
from torchrl_llm_kl.service._remote import cut
from torchrl_llm_kl.service.engines._engine import TransformersEngine
from toy_models import tiny_model

VOCAB = 97
WHOLE = Sampling(0.8, top_p=0.8)
KEPT = Sampling(0.8, top_p=0.8, reference="kept")
ROWS = [[3, 4, 5, 6, 7], [8], [], [9, 10, 11]]
SOME = [[False, True, False, True, True], [False], [], [False, False, True]]


def assert_local(found, expected):
    """The numbers equal the local scorer's. A service sends all but log-probs and entropies in float32.

    Parts of a call are forwards of other shapes, which round differently in float32.
    """
    assert found.per_token.keys() == expected.per_token.keys()
    for name, values in expected.per_token.items():
        same = name == "log_prob" or values.values.dtype != torch.float64
        assert_close(found.per_token[name].values, values.values, atol=2e-6, rtol=5e-6, check_dtype=same)


@pytest.mark.parametrize(("k", "dtype"), [(1, torch.float64), (5, torch.float32), (97, torch.float64)])
def test_the_top_k_equals_that_of_the_local_scorer(loop, k, dtype):
    made = model().to(dtype)
    scorer = loop.serve(made).make_scorer()
    for mask, entropy in ((None, True), (SOME, False)):
        found = scorer.evaluate(ROWS, mask, top_k=k, entropy=entropy)
        assert_local(found, LogProbScorer(made).evaluate(ROWS, mask, top_k=k, entropy=entropy))
    assert found.top_log_probs.values.dtype == torch.float32
    if k == 97:
        assert found.tail_log_prob.values[found.log_prob.values != 0].isneginf().all()
    empty = scorer.evaluate([[3], []], top_k=4).top_indices.values
    assert (empty.shape, empty.dtype) == ((1, 4), torch.int64)


def records_of(made):
    """Experts that the model did not choose, and ids at each token, one of them padding."""
    count = sum(map(len, ROWS))
    chosen = LogProbScorer(made).evaluate(ROWS, record_routing=True).routing.values
    top_ids = (torch.arange(6 * count).view(count, 3, 2) * 7) % VOCAB
    top_ids[:, 1, 0] = -1
    return {"top_ids": top_ids, "routing": torch.where(chosen < 0, chosen, 5 - chosen)}


@pytest.mark.parametrize("mask", [None, SOME], ids=["all", "some"])
def test_moments_outcomes_and_routing_equal_those_of_the_local_scorer(loop, mask):
    made = tiny_model("mixtral")
    records, local, there = records_of(made), LogProbScorer(made), loop.serve(made).make_scorer()
    for given, moments in (({}, True), *(({name: value}, False) for name, value in records.items()), (records, True)):
        request = ScoreRequest.of(ROWS, mask, **given)
        found = there.evaluate(request, moments=moments)
        assert_local(found, local.evaluate(request, moments=moments))
    assert found.outcomes.values.shape == (9, 3, 3)
    own = local.score(ROWS, mask).values
    assert float((found.log_prob.values - own).abs().max()) > 1e-3, "other experts"
    assert_close(there.score(ROWS, mask).values, own, atol=2e-6, rtol=0)


HERE = "is not supported by a service: it sends scores of single tokens. Score the transformers model in this process"
REFUSED = {
    "98.*97": {"top_k": 98},
    "top_k must .* got -1": {"top_k": -1},
    f"record_routing=True {HERE}": {"record_routing": True},
    f"return_kept=True {HERE}": {"return_kept": True},
    f"grad=True {HERE}, .* most probable tokens, top_k=": {"grad": True},
}


def test_options_that_a_service_lacks_are_refused(loop):
    scorer = loop.serve(model()).make_scorer()
    for message, options in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            scorer.evaluate(ROWS, **options)
        with pytest.raises(ValueError, match=message):
            asyncio.run(scorer.ascore(ROWS, **options))
    with pytest.raises(ValueError, match=f"reference=... {HERE}"):
        scorer.evaluate(ROWS, reference=LogProbScorer(model()))
    with pytest.raises(ValueError, match="has no router of Mixtral"):
        scorer.evaluate(ScoreRequest.of(ROWS, routing=torch.zeros(9, 1, 1, dtype=torch.int8)))


class Plain(TransformersEngine):
    """An engine without distributions, which does not score over recorded tokens."""

    def __init__(self, made):
        super().__init__(made)
        self.offers, self.place, self.instead = frozenset({"temperature"}), "Plain", "ask for less"


def test_an_engine_without_distributions(loop):
    remote = loop.serve(model())
    core = remote.connection.core = ScoringCore(Plain(model()))
    plain, top = core.score([job_of([[3, 4, 5]], **each) for each in ({}, {"top_k": 2})])
    assert plain["columns"].keys() == {"log_prob"}
    assert (type(top), str(top)) == (ValueError, "top_k=2 is not supported by Plain: ask for less.")
    scorer = remote.make_scorer()
    with pytest.raises(ValueError, match=r"kept=... is not supported by Plain: ask for less"):
        scorer.evaluate(ScoreRequest.of([[3, 4, 5]], kept=record_of([torch.tensor([3, 4, 5])])))
    assert scorer.evaluate([[3, 4, 5]]).log_prob.values.shape == (3,)


def rows_of(seed=0, count=7):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (n,), generator=rng) for n in torch.randint(1, 12, (count,), generator=rng).tolist()]


def by_hand(made, rows, kept, temperature):
    """Log-probs and entropies over the kept tokens of all but the first tokens, 0 at the first."""
    log_probs, entropies, at = [], [], 0
    for row in rows:
        logits = made(input_ids=row[None]).logits[0].double() / temperature
        for i, token in enumerate(row.tolist()):
            some = kept.ids[kept.offsets[at] : kept.offsets[at + 1]]
            log_p = logits[i - 1, some].log_softmax(-1) if i else torch.zeros(len(some)).double()
            log_probs.append(log_p[some == token][0] if i else log_p.new_zeros(()))
            entropies.append(-(log_p.exp() * log_p).sum())
            at += 1
    return torch.stack(log_probs), torch.stack(entropies)


@pytest.mark.parametrize(("dtype", "masked"), [(torch.float32, True), (torch.float64, False)])
def test_scores_equal_masked_softmaxes_and_the_local_scorer(loop, dtype, masked):
    made, rows, settings = model().to(dtype), rows_of(), {"sampling": Sampling(0.7, top_k=4)}
    kept = record_of(rows)
    mask = [[i > 0 and (i + j) % 3 > 0 for i in range(len(row))] for j, row in enumerate(rows)] if masked else None
    scorer = loop.serve(made).make_scorer(**settings)
    found = scorer.evaluate(ScoreRequest.of(rows, mask, kept=kept), entropy=True)
    local = LogProbScorer(made, **settings).evaluate(ScoreRequest.of(rows, mask, kept=kept), entropy=True)
    scored = local.log_prob.values != 0
    assert scored.sum() > 10
    for name, exact in zip(("log_prob", "entropy"), by_hand(made, rows, kept, 0.7), strict=True):
        got, want = getattr(found, name).values, getattr(local, name).values
        assert_close(got, want, atol=1e-6, rtol=5e-6, check_dtype=False)
        assert_close(got[scored].double(), exact[scored], atol=2e-5 if dtype == torch.float32 else 1e-9, rtol=0)
    assert torch.equal(scorer.score(ScoreRequest.of(rows, mask, kept=kept)).values, found.log_prob.values)


def test_a_batch_of_requests_with_and_without_a_record():
    """Requests with equal options, other options and wrong records each get the answer that they get by themselves."""
    core = ScoringCore(TransformersEngine(model().double()))
    rows = [rows_of(seed, 3) for seed in range(6)]
    records = [record_of(rows[0]), None, record_of(rows[2], 1), record_of(rows[3], 2), record_of(rows[4]), None]
    options = [{"sampling": Sampling(top_p=0.5)}] * 5 + [{}]
    options[3] = {"temperature": 0.6, "entropy": True}
    batch = [job_of(rows[i], records={"kept": records[i]}, **options[i]) for i in range(6)]
    wrong = records[4]._replace(ids=torch.full_like(records[4].ids, 5))  # the client refuses it
    batch[4] = replace(batch[4], request=replace(batch[4].request, kept=wrong))
    for i, (one, answer) in enumerate(zip(batch, core.score(batch), strict=True)):
        alone = core.score([one])[0]
        if i == 4:
            assert isinstance(answer, ValueError)
            assert "log-prob is -inf" in str(answer) == str(alone)
            continue
        for name, values in answer["columns"].items():
            assert_close(values, alone["columns"][name], atol=1e-12, rtol=0)
        if records[i] is not None:
            want, _ = by_hand(core.engine.model, rows[i], records[i], options[i].get("temperature", 1.0))
            found = torch.from_numpy(answer["columns"]["log_prob"])
            assert_close(found, want[one.request.mask], atol=1e-9, rtol=0)


def test_wrong_records_are_refused(loop):
    rows = [torch.tensor([1, 2]), torch.tensor([3, 4, 5])]
    scorer, right = loop.serve(model()).make_scorer(), record_of(rows)
    other = Kept(torch.tensor([1, 2, 3, 4, 9]), torch.arange(6))
    last = torch.tensor([0, 1, 2, 3, 4, 6])
    for message, options in {
        "kept at sequence 1, position 2 lacks the scored token 5": {"kept": other},
        "kept needs ids of at least 0": {"kept": Kept(torch.tensor([1, 2, 3, 4, 5, -4]), last)},
        "to 97: expected 0 to 96": {"kept": Kept(torch.tensor([1, 2, 3, 4, 5, 97]), last)},
        "need whole distributions: leave out sampling= and kept=": {
            "kept": right,
            "top_ids": torch.ones(5, 1, dtype=torch.long),
        },
    }.items():
        with pytest.raises(ValueError, match=message):
            scorer.evaluate(ScoreRequest.of(rows, **options))
    with pytest.raises(ValueError, match="top_k= needs all tokens"):
        scorer.evaluate(ScoreRequest.of(rows, kept=right), top_k=3)
    with pytest.raises(ValueError, match="deterministic=True excludes images, kept="):
        loop.serve(model().float()).make_scorer(deterministic=True).evaluate(ScoreRequest.of(rows, kept=right))


def test_the_size_of_a_part_counts_its_records():
    """Records count: a call whose tokens are few is more than one request if they are large."""
    rows = [torch.tensor([1, 2, 3])] * 8
    for records in ({"kept": record_of(rows, most=30)}, {"top_ids": torch.arange(24 * 12).view(24, 12)}):
        whole = ScoreRequest.of(rows, **records)
        parts = cut(whole, 60)
        assert len(parts) > 2
        assert all(int(part.sizes().sum()) < 60 + 3 + 60 for part in parts)
        again = ScoreRequest.concat(parts).to_arrays()
        assert again.keys() == whole.to_arrays().keys()
        for name, array in whole.to_arrays().items():
            assert (again[name] == array).all()
    assert len(cut(ScoreRequest.of(rows), 60)) == 1
    assert [part.tokens.lengths.tolist() for part in cut(ScoreRequest.of([[1] * 9, [], [2], [3]]), 4)] == [
        [9],
        [0, 1, 1],
    ]


def data(seed=0, *, recorded=True):
    """Three rollouts with prompts of four tokens, and the log-probs and kept tokens of their sampler."""
    rng = torch.Generator().manual_seed(seed)
    full = torch.randint(VOCAB, (3, 10), generator=rng)
    mask = torch.arange(10).expand(3, 10) >= 4
    found = {
        "tokens": {"full": full, "prompt": full[:, :4].clone()},
        "masks": {"all_attention_mask": torch.ones_like(mask), "all_assistant_mask": mask},
        "log_probs": {"full": torch.where(mask, -torch.rand(3, 10, generator=rng), 0.0)},
        "next": TensorDict({"reward": torch.zeros(3, 1)}, [3]),
    }
    if not recorded:
        return TensorDict(found, [3])
    kept = record_of(list(full), seed)
    counts = torch.where(mask.flatten(), kept.offsets.diff(), 0)
    ids = kept.take(mask.flatten().nonzero().squeeze(-1)).ids
    return write_kept(TensorDict(found, [3]), "kept", Ragged.from_padded(full), ids, counts)


def assert_equal(found, want, *keys):
    """Entries below ``"next"``."""
    for key in keys:
        assert_close(found["next"][key], want["next"][key], atol=1e-6, rtol=1e-6)
        assert torch.count_nonzero(found["next"][key]) > 10, key


KINDS = [("reference", WHOLE, True), ("reference", KEPT, False), ("both", WHOLE, False), ("both", KEPT, True)]
KINDS += [("remembered", KEPT, True), ("remembered", WHOLE, False)]


@pytest.mark.parametrize(("served", "sampling", "recorded"), KINDS, ids=str)
def test_a_kl_to_a_served_reference(loop, served, sampling, recorded, tmp_path):
    """Over all tokens, and over those that the policy keeps: recorded, or found by a policy that is scored here."""
    policy, reference = model().double(), model(1).double()
    there = loop.serve(reference)
    ref = RememberedModel(there, tmp_path, fingerprint="x") if served == "remembered" else there
    gen = loop.serve(policy) if served == "both" else policy
    batch = data(recorded=recorded).exclude("log_probs")

    def transformed(*models, sampling=sampling):
        return RetrieveKL(*models, options=ScoreOptions(sampling), coeff=0.3, estimator="k3")(batch.clone())["next"]

    want = transformed(policy, reference)
    other = transformed(policy, reference, sampling=KEPT if sampling is WHOLE else WHOLE)
    keys = [("log_probs", "full"), ("ref_log_probs", "full"), "kl_penalty", "reward"]
    assert_equal({"next": transformed(gen, ref)}, {"next": want}, *keys)
    assert float((other["ref_log_probs", "full"] - want["ref_log_probs", "full"]).abs().max()) > 0.1


def test_a_policy_behind_a_service_needs_the_kept_tokens(loop):
    transform = RetrieveKL(loop.serve(model()), loop.serve(model(1)), options=ScoreOptions(KEPT))
    with pytest.raises(KeyError, match="needs the tokens that the sampler kept"):
        transform(data(recorded=False).exclude("log_probs"))


def test_a_reward_transform_with_a_record(loop):
    """The policy's log-probs are in the data. The reference scores over all tokens, or over the recorded ones."""
    reference = model(1).double()
    there, full = loop.serve(reference), data()["tokens", "full"]

    def transformed(ref, sampling, recorded=True):
        return KLRewardTransform(ref, coef=0.3, options=ScoreOptions(sampling))(data(recorded=recorded))

    log_p = (reference(input_ids=full).logits[:, 3:-1] / 0.8).log_softmax(-1)
    over_all = log_p.gather(-1, full[:, 4:, None]).squeeze(-1)
    over_kept = by_hand(reference, list(full), record_of(list(full)), 0.8)[0].view(3, 10)[:, 4:]
    for sampling, exact in ((WHOLE, over_all), (KEPT, over_kept)):
        found = transformed(there, sampling)
        assert_equal(found, transformed(reference, sampling), "ref_log_probs", "kl_penalty", "reward")
        assert_near(found["next", "ref_log_probs"][:, 4:, 0].double(), exact, size=16, dtype=torch.float32)
    with pytest.raises(KeyError, match="needs the tokens that the sampler kept"):
        transformed(there, KEPT, recorded=False)
    plain = transformed(reference, Sampling(0.8), recorded=False)
    assert_equal(transformed(there, WHOLE, recorded=False), plain, "ref_log_probs")


@pytest.mark.parametrize(("sampling", "recorded"), [(KEPT, True), (KEPT, False), (Sampling(0.7), False)], ids=str)
def test_a_loss_with_a_served_reference(loop, sampling, recorded):
    """Values and gradients equal those of a local reference. At most 16 of 30 tokens are scored at once."""
    reference, found = model(1).double(), []
    settings = {"terms": [KLToReference(0.1, "k2")], "options": ScoreOptions(sampling), "tokens_per_batch": 16}
    for ref in (loop.serve(reference), reference):
        policy, batch = model().double(), data(recorded=recorded)
        batch["advantage"] = torch.tensor([[1.0], [-1.0], [0.5]])
        out = PolicyLoss(policy, "gpg", reference=ref, **settings)(batch)
        out.total_loss.backward()
        found.append((out["kl_to_ref"].double(), policy.lm_head.weight.grad))
    assert_close(found[0], found[1], atol=1e-6, rtol=1e-5)
    assert float(found[0][0]) > 0.01
