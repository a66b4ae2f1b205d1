"""A replay of kept tokens over the wire: the numbers of the local scorer and of masked softmaxes, in transforms and losses."""

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close

from closeness import assert_near
from remote_models import model
from torchrl_llm_kl import KLRewardTransform, LogProbScorer, PolicyLoss, Ragged, RememberedModel, RetrieveKL, Sampling
from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.losses import KLToReference
from torchrl_llm_kl.rollouts import write_kept
from torchrl_llm_kl.service._wire import Reply, Request, Settings
from torchrl_llm_kl.service.client import _remote
from torchrl_llm_kl.service.engines._engine import TransformersEngine
from torchrl_llm_kl.service.replica._core import ScoringCore
from torchrl_llm_kl.transforms import RetrieveKL as LocalKL

VOCAB = 97
WHOLE = Sampling(0.8, top_p=0.8)
KEPT = Sampling(0.8, top_p=0.8, reference="kept")
CPUS = {"num_cpus": 0.1}


def rows_of(seed=0, count=7):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (n,), generator=rng) for n in torch.randint(1, 12, (count,), generator=rng).tolist()]


def record_of(rows, seed=0, most=9):
    """Up to ``most`` distinct tokens for each token, its own among them, in any order."""
    rng = torch.Generator().manual_seed(seed)
    ids = []
    for token in torch.cat(rows).tolist():
        others = torch.randperm(VOCAB, generator=rng)[: int(torch.randint(most, (), generator=rng))]
        some = torch.tensor(sorted({token, *others.tolist()}))
        ids.append(some[torch.randperm(len(some), generator=rng)])
    return Kept(torch.cat(ids), torch.tensor([0, *map(len, ids)]).cumsum(0))


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


# ------------------------------------------------------------------ the scorer


@pytest.mark.parametrize(("dtype", "masked"), [(torch.float32, True), (torch.float64, False)])
def test_scores_equal_masked_softmaxes_and_the_local_scorer(loop, dtype, masked):
    made, rows = model().to(dtype), rows_of()
    kept = record_of(rows)
    settings = {"sampling": Sampling(0.7, top_k=4)}
    mask = None
    if masked:
        mask = [[i > 0 and (i + j) % 3 > 0 for i in range(len(row))] for j, row in enumerate(rows)]
    found = loop.serve(made).make_scorer(**settings).evaluate(rows, mask, kept=kept, entropy=True)
    local = LogProbScorer(made, **settings).evaluate(rows, mask, kept=kept, entropy=True)
    log_prob, entropy = by_hand(made, rows, kept, 0.7)
    scored = local.log_prob.values != 0
    assert scored.sum() > 10
    for got, want, exact in (
        (found.log_prob.values, local.log_prob.values, log_prob),
        (found.entropy.values, local.entropy.values, entropy),
    ):
        assert_close(got, want, atol=1e-6, rtol=1e-6, check_dtype=False)
        assert_close(got[scored].double(), exact[scored], atol=2e-5 if dtype == torch.float32 else 1e-9, rtol=0)
    assert torch.equal(
        loop.serve(made).make_scorer(**settings).score(rows, mask, kept=kept).values, found.log_prob.values
    )


def request(rows, kept, caller, **settings):
    lengths = torch.tensor([len(row) for row in rows])
    given = {"version": None, "caller": caller, "kept": kept}
    return Request.of(torch.cat(rows), lengths, None, Settings(**settings), **given)


def test_a_batch_of_requests_with_and_without_a_record():
    """Equal settings, other settings, and records that are not of the tokens: each has the answer that it has alone."""
    core = ScoringCore(TransformersEngine(model().double()))
    rows = [rows_of(seed, 3) for seed in range(6)]
    wrong = record_of(rows[4])._replace(ids=torch.full_like(record_of(rows[4]).ids, 5))
    batch = [
        request(rows[0], record_of(rows[0]), "a", keep_top_p=0.5),
        request(rows[1], None, "b", keep_top_p=0.5),
        request(rows[2], record_of(rows[2], 1), "c", keep_top_p=0.5),
        request(rows[3], record_of(rows[3], 2), "d", temperature=0.6, entropy=True),
        request(rows[4], wrong, "e", keep_top_p=0.5),
        request(rows[5], None, "f"),
    ]
    for one, found in zip(batch, core.score(batch), strict=True):
        alone = core.score([one])[0]
        if one.caller == "e":
            assert isinstance(found, ValueError)
            assert "is not among the" in str(found) == str(alone)
            continue
        assert isinstance(found, Reply), found
        assert_close(found.log_prob, alone.log_prob, atol=1e-12, rtol=0)
    answers = core.score(batch)
    for i, temperature in ((0, 1.0), (2, 1.0), (3, 0.6)):
        found = answers[i]
        kept = record_of(rows[i], {0: 0, 2: 1, 3: 2}[i])
        want, _ = by_hand(core.engine.model, rows[i], kept, temperature)
        assert_close(torch.from_numpy(found.log_prob), want[batch[i].flat_mask()], atol=1e-9, rtol=0)


def test_equal_requests_with_other_records_are_different():
    rows = rows_of()
    digests = {request(rows, kept, "a").digest() for kept in (None, record_of(rows), record_of(rows, 1))}
    assert len(digests) == 3


def test_what_cannot_be_replayed(loop):
    rows = [torch.tensor([1, 2]), torch.tensor([3, 4, 5])]
    scorer, right = loop.serve(model()).make_scorer(), record_of(rows)
    other = Kept(torch.tensor([1, 2, 3, 4, 9]), torch.arange(6))
    with pytest.raises(ValueError, match="token 5 at sequence 1, position 2 is not among the 1 that were recorded"):
        scorer.evaluate(rows, kept=other)
    with pytest.raises(ValueError, match=r"kept\.offsets must hold 6 numbers"):
        scorer.evaluate(rows, kept=other._replace(offsets=torch.arange(5)))
    with pytest.raises(ValueError, match=r"kept\.ids holds token ids from -4 to 5"):
        scorer.evaluate(rows, kept=Kept(torch.tensor([1, 2, 3, 4, 5, -4]), torch.tensor([0, 1, 2, 3, 4, 6])))
    with pytest.raises(ValueError, match="to 97; expected 0 to 96"):
        scorer.evaluate(rows, kept=Kept(torch.tensor([1, 2, 3, 4, 5, 97]), torch.tensor([0, 1, 2, 3, 4, 6])))
    with pytest.raises(ValueError, match="most probable of all tokens"):
        scorer.evaluate(rows, kept=right, top_k=3)
    with pytest.raises(ValueError, match="deterministic=True with kept="):
        loop.serve(model().float()).make_scorer(deterministic=True).evaluate(rows, kept=right)

    class Plain(TransformersEngine):
        def evaluate(self, sequences, mask, settings):
            return super().evaluate(sequences, mask, settings)

    loop.cores["model"] = ScoringCore(Plain(model()))
    with pytest.raises(ValueError, match="Plain cannot score over recorded tokens: its evaluate"):
        scorer.evaluate(rows, kept=right)
    assert scorer.evaluate(rows).log_prob.values.shape == (5,)


def test_requests_are_divided_by_what_is_sent(monkeypatch):
    """Kept tokens count: a call whose tokens are few is more than one request if its record is large."""
    rows = [torch.tensor([1, 2, 3])] * 8
    kept = record_of(rows, most=30)
    monkeypatch.setattr(_remote, "_MOST_TOKENS", 60)
    part = _remote.Part(request(rows, kept, "a"), torch.tensor([False, True, True] * 8))
    parts = part.divided(_remote.Router(), [0])
    assert len(parts) > 2
    assert [int(i) for one in parts for i in one.elements] == part.elements.tolist()
    for one in parts:
        assert one.request.num_tokens + len(one.request.replay.ids) < 60 + 3 + 60
    whole = [one.request.replay.ids.tolist() for one in parts if one.request.replay is not None]
    assert [i for some in whole for i in some] == part.request.replay.ids.tolist()
    plain = _remote.Part(request(rows, None, "a"), part.mask)
    assert len(plain.divided(_remote.Router(), [0])) == 1


# ------------------------------------------------------------------ transforms and losses


def data(seed=0, *, recorded=True):
    """Three rollouts with prompts of four tokens, the log-probs of their sampler, and what it kept."""
    rng = torch.Generator().manual_seed(seed)
    full = torch.randint(VOCAB, (3, 10), generator=rng)
    mask = torch.arange(10).expand(3, 10) >= 4
    td = TensorDict(
        tokens=TensorDict(full=full, prompt=full[:, :4].clone(), batch_size=[3]),
        masks=TensorDict(all_attention_mask=torch.ones_like(mask), all_assistant_mask=mask, batch_size=[3]),
        log_probs=TensorDict(full=torch.where(mask, -torch.rand(3, 10, generator=rng), 0.0), batch_size=[3]),
        next=TensorDict(reward=torch.zeros(3, 1), batch_size=[3]),
        batch_size=[3],
    )
    if not recorded:
        return td
    kept = record_of(list(full), seed)
    counts = torch.where(mask.flatten(), kept.offsets.diff(), 0)
    ids = kept.take(mask.flatten().nonzero().squeeze(-1)).ids
    return write_kept(td, "kept", Ragged.from_padded(full), ids, counts)


def assert_equal(found, want, *keys):
    """Entries below ``"next"``."""
    found, want = found["next"], want["next"]
    for key in keys:
        assert_close(found[key], want[key], atol=1e-6, rtol=1e-6)
        assert torch.count_nonzero(found[key]) > 10, key


CASES = {
    "reference, whole, recorded": ("reference", WHOLE, True),
    "reference, kept, found": ("reference", KEPT, False),
    "both, whole, found": ("both", WHOLE, False),
    "both, kept, recorded": ("both", KEPT, True),
    "remembered, kept, recorded": ("remembered", KEPT, True),
    "remembered, whole, found": ("remembered", WHOLE, False),
}


@pytest.mark.parametrize("case", CASES)
def test_a_kl_to_a_served_reference(loop, case, tmp_path):
    """Over all tokens, and over those that the policy keeps: recorded, or found by a policy that is scored here."""
    served, sampling, recorded = CASES[case]
    policy, reference = model().double(), model(1).double()
    there = loop.serve(reference)
    ref = RememberedModel(there, tmp_path, fingerprint="x") if served == "remembered" else there
    gen = loop.serve(policy, "policy") if served == "both" else policy
    options = {"sampling": sampling, "coeff": 0.3, "estimator": "k3"}
    batch = data(recorded=recorded).exclude("log_probs")
    want = RetrieveKL(policy, reference, **options)(batch.clone())
    keys = [("log_probs", "full"), ("ref_log_probs", "full"), "kl_penalty", "reward"]
    assert_equal(LocalKL(gen, ref, **options)(batch.clone()), want, *keys)
    both = RetrieveKL(policy, reference, **{**options, "sampling": KEPT if sampling is WHOLE else WHOLE})
    other = both(batch.clone())
    assert float((other["next", "ref_log_probs", "full"] - want["next", "ref_log_probs", "full"]).abs().max()) > 0.1


def test_a_policy_behind_a_service_needs_the_kept_tokens(loop):
    transform = LocalKL(loop.serve(model(), "policy"), loop.serve(model(1)), sampling=KEPT)
    with pytest.raises(KeyError, match="with a policy in another process needs the tokens that the sampler kept"):
        transform(data(recorded=False).exclude("log_probs"))


def test_a_reward_transform_with_a_record(loop):
    """The policy's log-probs are in the data; the reference's are over all tokens, or over the recorded ones."""
    reference = model(1).double()
    there = loop.serve(reference)
    for sampling in (WHOLE, KEPT):
        found = KLRewardTransform(there, coef=0.3, sampling=sampling)(data())
        want = KLRewardTransform(reference, coef=0.3, sampling=sampling)(data())
        assert_equal(found, want, "ref_log_probs", "kl_penalty", "reward")
        full = data()["tokens", "full"]
        log_p = (reference(input_ids=full).logits[:, 3:-1] / 0.8).log_softmax(-1)
        by_all = log_p.gather(-1, full[:, 4:, None]).squeeze(-1)
        if sampling is not WHOLE:
            exact, _ = by_hand(reference, list(full), record_of(list(full)), 0.8)
            by_all = exact.view(3, 10)[:, 4:]
        assert_near(found["next", "ref_log_probs"][:, 4:, 0].double(), by_all, size=16, dtype=torch.float32)
    with pytest.raises(KeyError, match="compares over the tokens that the sampler kept: expected them below 'kept'"):
        KLRewardTransform(there, sampling=KEPT)(data(recorded=False))
    assert_equal(
        KLRewardTransform(there, sampling=WHOLE)(data(recorded=False)),
        KLRewardTransform(reference, temperature=0.8)(data(recorded=False)),
        "ref_log_probs",
    )


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "found"])
def test_a_loss_with_a_served_reference(loop, recorded):
    """Values and gradients are those of a reference in this process."""
    reference = model(1).double()
    found = []
    for ref in (loop.serve(reference), reference):
        policy = model().double()
        batch = data(recorded=recorded)
        batch["advantage"] = torch.tensor([[1.0], [-1.0], [0.5]])
        loss = PolicyLoss(policy, "gpg", terms=[KLToReference(0.1, "k2")], reference=ref, sampling=KEPT)
        out = loss(batch)
        out.total_loss.backward()
        found.append((out["kl_to_ref"].double(), policy.lm_head.weight.grad))
    assert_close(found[0], found[1], atol=1e-6, rtol=1e-5)
    assert float(found[0][0]) > 0.01
