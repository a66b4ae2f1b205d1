"""A head sharded over the vocabulary gives the values and gradients of the whole head."""

import tempfile
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from distributed.cases import RATE, STEPS, VOCAB, batch, difference, expected, make_loss, share, total
from head_reference import OPTIONS, PAIR, REF_OPTIONS, at, entropy_of, kl_of, make_head, pair_of, plain
from refused import refusal
from torchrl_llm_kl import LogProbScorer
from torchrl_llm_kl.head import linear_log_prob, linear_outcomes, linear_pair, linear_top_k
from torchrl_llm_kl.scoring import ScoreRequest
from toy_models import tiny_model

# ---------------------------------------------------------------------- each rank
POSITIONS = 7


def head(seed, vocab, *, impossible=False):
    """Hidden states, weight and bias. With ``impossible``, the first half of the vocabulary is ruled out."""
    hidden, weight, bias = (2 * t for t in make_head(seed, n=POSITIONS, h=5, v=vocab))
    if impossible:
        bias[: vocab // 2 + 1] = -torch.inf
    return [hidden, weight, bias]


def targets_of(vocab):
    """The first and the last token of the vocabulary, and some between."""
    inner = torch.randint(vocab, (POSITIONS - 2,), generator=torch.Generator().manual_seed(9))
    return torch.cat([torch.tensor([0, vocab - 1]), inner])


def distribute(tensors, grad):
    """The hidden states as they are, with sharded weight and bias."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    out = [tensors[0].detach().clone(), *(distribute_tensor(t.detach().clone(), mesh, [Shard(0)]) for t in tensors[1:])]
    return [t.detach().requires_grad_(grad) for t in out]


def compare(found, want, sharded, whole):
    """The largest difference in values, and in gradients of a random weighted sum of the values."""
    rng = torch.Generator().manual_seed(4)
    weights = [torch.randn(t.shape, generator=rng, dtype=t.dtype) for t in want]
    sum((w * t).sum() for w, t in zip(weights, found, strict=True)).backward()
    sum((w * t).sum() for w, t in zip(weights, want, strict=True)).backward()
    got = [t.grad.full_tensor() if hasattr(t, "full_tensor") else t.grad for t in sharded]
    pairs = [*zip(found, want, strict=True), *zip(got, (t.grad for t in whole), strict=True)]
    for a, b in pairs:
        assert a.shape == b.shape
        assert bool(b.isfinite().all())
    return max(float((a - b).abs().max().detach()) for a, b in pairs)


def one_head(vocab):
    whole, targets = [t.requires_grad_() for t in head(0, vocab)], targets_of(vocab)
    sharded = distribute(whole, grad=True)
    hidden, weight, bias = sharded
    out = linear_log_prob(hidden, weight, targets, bias=bias, entropy=True, chunk=(3, 4), **OPTIONS)
    log_p = plain(*whole, **OPTIONS)
    want = [at(log_p, targets), entropy_of(log_p)]
    return compare([out.log_prob, out.entropy], want, sharded, whole)


def two_heads(vocab, direction, ref_whole):
    whole, targets = [t.requires_grad_() for t in head(0, vocab)], targets_of(vocab)
    ref = [t.requires_grad_(not ref_whole) for t in head(1, vocab)]
    sharded = distribute(whole, grad=True)
    ref_sharded = [t.detach() for t in ref] if ref_whole else distribute(ref, grad=True)
    options = {**PAIR, "bias": sharded[2], "ref_bias": ref_sharded[2], "direction": direction, "entropy": True}
    out = linear_pair(*sharded[:2], *ref_sharded[:2], targets, chunk=(3, 4), **options)
    want = list(pair_of(plain(*whole, **OPTIONS), plain(*ref, **REF_OPTIONS), targets, direction=direction))
    more, more_whole = ([], []) if ref_whole else (ref_sharded, ref)
    return compare(list(out), want, sharded + more, whole + more_whole)


def top(vocab, k, impossible=False):
    whole = head(0, vocab, impossible=impossible)
    options = {**OPTIONS, "soft_cap": None} if impossible else OPTIONS  # a soft cap makes every token possible
    hidden, weight, bias = distribute(whole, grad=False)
    targets = targets_of(vocab)
    out = linear_top_k(hidden, weight, k, targets, bias=bias, chunk=(3, 4), **options)
    log_p = plain(*whole, **options)
    chosen = at(log_p, targets)
    assert out.log_prob.isneginf().equal(chosen.isneginf())
    log_probs, indices = log_p.topk(k)
    assert out.indices.equal(indices)
    tail = log_p.scatter(1, indices, -torch.inf).logsumexp(-1)
    assert out.tail_log_prob.isneginf().equal(tail.isneginf())
    both = [(out.log_probs, log_probs), (out.tail_log_prob.nan_to_num(), tail.nan_to_num())]
    both.append((out.log_prob.nan_to_num(neginf=0.0), chosen.nan_to_num(neginf=0.0)))
    return max(float((a - b).abs().max()) for a, b in both)


def for_each_k(score, vocab, ks):
    return max(globals()[score](vocab, k) for k in ks)


def outcomes(vocab, k):
    """Differences in values and gradients for two lists of ids. The second list has one id less."""
    whole, targets = [t.requires_grad_() for t in head(0, vocab)], targets_of(vocab)
    sharded = distribute(whole, grad=True)
    rng = torch.Generator().manual_seed(5)
    ids = torch.stack([torch.randperm(vocab, generator=rng)[:k] for _ in range(2 * len(targets))]).reshape(-1, 2, k)
    ids[:, 1, -1] = -1
    out = linear_outcomes(*sharded[:2], targets, ids, bias=sharded[2], entropy=True, chunk=(3, 4), **OPTIONS)
    log_p = plain(*whole, **OPTIONS)
    listed = torch.zeros(len(targets), 2, vocab, dtype=torch.bool)
    listed[:, 0].scatter_(1, ids[:, 0], value=True)
    listed[:, 1].scatter_(1, ids[:, 1, :-1], value=True)
    others = log_p.unsqueeze(1).masked_fill(listed, -1e30).logsumexp(-1)
    found = log_p.unsqueeze(1).expand(-1, 2, -1).gather(2, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)
    want = torch.cat([found, others.unsqueeze(-1)], -1)
    impossible = torch.cat([ids < 0, listed.all(-1, keepdim=True)], -1)
    assert out.outcomes.isneginf().equal(impossible)
    got = out.outcomes.masked_fill(impossible, 0.0)
    expected = [at(log_p, targets), entropy_of(log_p)]
    flat = [(x.masked_fill(impossible, 0.0) * torch.arange(1, k + 2)).flatten(1).sum(-1) for x in (got, want)]
    return compare([out.log_prob, out.entropy, flat[0]], [*expected, flat[1]], sharded, whole)


def impossible_slice(vocab):
    """A slice without a possible token: log-probs there, and the differences of other log-probs, entropy and KL."""
    whole, ref, targets = head(0, vocab, impossible=True), head(1, vocab), targets_of(vocab)
    hidden, weight, bias = distribute(whole, grad=False)
    options = {"temperature": 1.7, "scale": 0.6}
    out = linear_pair(hidden, weight, ref[0], ref[1], targets, bias=bias, ref_bias=ref[2], entropy=True, **options)
    p, q = plain(*whole, **options), plain(*ref, temperature=1.7, scale=1.0)
    want = at(p, targets)
    forward = linear_pair(hidden, weight, *ref[:2], bias=bias, ref_bias=ref[2], direction="forward", **options)
    assert forward.kl.isposinf().all()  # the reference gives a probability to tokens that the policy rules out
    assert top(vocab, 3, impossible=True) < 1e-12
    assert out.log_prob.isneginf().equal(want.isneginf())
    assert want.isneginf().any()
    return [
        float((out.log_prob - want).nan_to_num().abs().max()),
        float((out.entropy - entropy_of(p)).abs().max()),
        float((out.kl - kl_of(p, q)).abs().max()),
    ]


def refusals():
    """The message of each unsupported head, or plan of a model."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    hidden, weight, _ = head(0, 10)
    rows, columns = (distribute_tensor(weight, mesh, [Shard(dim)]) for dim in (0, 1))
    targets = targets_of(10)
    calls = {
        "hidden size": lambda: linear_log_prob(hidden, columns, targets),
        "mixture": lambda: linear_pair(hidden, rows, hidden, rows, direction="jensen_shannon"),
        "policy whole": lambda: linear_pair(hidden, weight, hidden, rows),
        "trained reference": lambda: linear_pair(hidden, rows, hidden, weight.clone().requires_grad_()),
        "k": lambda: linear_top_k(hidden, rows, 11),
        "sequence parallel of torch": lambda: LogProbScorer(sequence_parallel("torch")),
        "sequence parallel of transformers": lambda: LogProbScorer(sequence_parallel("transformers")),
    }
    return {case: refusal(call, error=ValueError) for case, call in calls.items()}


def sequence_parallel(library):
    """A model whose last norm is sequence parallel."""
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    model = tiny_model("qwen2", seed=3, vocab_size=VOCAB).double()
    if library == "transformers":
        return load(model, {"lm_head": "colwise_gather_output", "model.norm": "sequence_parallel"})
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"model.norm": SequenceParallel()})


#: Where the logits are -> the plan of transformers.
PLANS = {"gathered": "auto", "sharded": {"lm_head": "colwise"}}


def load(model, plan, **sizes):
    """The model as transformers loads it with a tensor parallel plan, over all ranks."""
    from transformers.distributed import DistributedConfig

    with tempfile.TemporaryDirectory() as folder:
        name = [folder]
        dist.broadcast_object_list(name)
        if dist.get_rank() == 0:
            model.save_pretrained(folder)
        dist.barrier()
        config = DistributedConfig(tp_plan=plan, **sizes)
        loaded = type(model).from_pretrained(name[0], distributed_config=config, dtype=next(model.parameters()).dtype)
        dist.barrier()
    return loaded


def score(logits, tp, vocab):
    """Score name -> largest difference from one process, for all scores of a sharded policy and reference."""
    models = [tiny_model("qwen2", seed=seed, vocab_size=vocab, num_key_value_heads=tp).double() for seed in (3, 4)]
    sizes = {"tp_size": tp, "fsdp_size": dist.get_world_size() // tp}
    sharded = [load(model, PLANS[logits], **sizes) for model in models]
    rows = torch.randint(vocab, (4, 12), generator=torch.Generator().manual_seed(1))
    rows[1, :7] = rows[0, :7]
    options, mask = {"entropy": True, "top_k": 5, "moments": True}, torch.ones_like(rows)
    request = ScoreRequest.of(rows, attention_mask=mask, top_ids=torch.arange(6).expand(rows.numel(), 6))
    whole, scorer = (LogProbScorer(policy, tokens_per_batch=16) for policy in (models[0], sharded[0]))
    want = whole.evaluate(request, reference=LogProbScorer(models[1]), **options)
    found = scorer.evaluate(request, reference=LogProbScorer(sharded[1]), **options)
    assert (scorer.path, scorer.shares_prefixes) == ("head", True)
    given = [name for name, values in want._asdict().items() if values is not None]
    pairs = {name: (getattr(found, name).values, getattr(want, name).values) for name in given}
    for _ in range(2):  # the second call reads the memory
        again = scorer.score(rows, attention_mask=mask, remember=True)
        assert again.values.equal(found.log_prob.values) or (again.values - want.log_prob.values).abs().max() < 1e-12
    return {name: float((a - b).abs().max()) for name, (a, b) in pairs.items()}


def _norm(module, hidden):
    return F.rms_norm(hidden, hidden.shape[-1:], module.weight, module.variance_epsilon)


def train(logits, tp, **config):
    """The largest difference from one process after three steps. Each data parallel rank trains on its share."""
    data = dist.get_world_size() // tp
    want = expected(config=tuple(sorted(config.items())))
    whole = tiny_model("qwen2", seed=3, vocab_size=VOCAB, max_position_embeddings=128, **config).double()
    model = load(whole, PLANS[logits], tp_size=tp, fsdp_size=data).train()
    for norm in model.modules():  # transformers' own computes in float32
        if type(norm).__name__.endswith("RMSNorm"):
            norm.forward = partial(_norm, norm)
    loss = make_loss(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, foreach=False)
    for _ in range(STEPS):
        rows = batch() if data == 1 else share("uneven", dist.get_rank() // tp, data)
        total(loss(loss.count(rows))).backward()
        optimizer.step(), optimizer.zero_grad()
    return difference(loss, want)


# ---------------------------------------------------------------------- all ranks
CASES = __name__
OF_LOGITS = pytest.mark.parametrize("logits", [pytest.param("gathered", marks=pytest.mark.slow), "sharded"])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("function", "settings"),
    [
        *(("one_head", {"vocab": vocab}) for vocab in (8, 23)),  # 23: slices of 12 and 11; 6, 6, 6 and 5
        *(
            ("two_heads", {"direction": d, "ref_whole": whole})
            for d in ("reverse", "forward")
            for whole in (False, True)
        ),
        ("for_each_k", {"score": "top", "ks": [1, 3, 9, 22, 23]}),  # 9: more than a slice of four ranks; 23: no tail
        ("for_each_k", {"score": "outcomes", "ks": [1, 5, 23]}),
        ("impossible_slice", {"vocab": 24}),
    ],
)
def test_scores_of_a_head(pool, ranks, function, settings):
    """Log-prob and entropy, the exact KL, the top k, outcomes, and a slice without a possible token."""
    found = pool.run(f"{CASES}:{function}", ranks=ranks, **{"vocab": 23, **settings})
    assert torch.tensor(found).max() < 1e-12


def test_unsupported_heads_and_plans_are_refused_on_all_ranks(pool):
    """A plan with sequence parallel norms is refused at construction, before a forward that would wait for other ranks."""
    expected = {
        "hidden size": ["Shard(0), the vocabulary"],
        "mixture": ["needs whole rows"],
        "policy whole": ["shard both over the same ranks"],
        "trained reference": ["shard both over the same ranks"],
        "k": ["expected 1 to 10"],
        "sequence parallel of torch": ["norm of ", "is sequence parallel"],
        "sequence parallel of transformers": ["norm of ", "is sequence parallel"],
    }
    for messages in pool.run(f"{CASES}:refusals"):
        assert messages.keys() == expected.keys()
        for case, texts in expected.items():
            assert all(text in messages[case] for text in texts), (case, messages[case])


@OF_LOGITS
@pytest.mark.parametrize(
    ("tp", "ranks", "vocab"), [(2, 2, 96), pytest.param(4, 4, 95, marks=pytest.mark.slow), (2, 4, 96)]
)
def test_scores_of_a_model_in_packs(pool, logits, tp, ranks, vocab):
    """transformers' tensor parallel plan, also together with FSDP2. A vocabulary of 95 has uneven slices."""
    for worst in pool.run(f"{CASES}:score", ranks=ranks, logits=logits, tp=tp, vocab=vocab):
        assert worst.keys() > {"log_prob", "entropy", "ref_log_prob", "kl", "top_log_probs", "collision"}
        assert max(worst.values()) < 1e-12


@OF_LOGITS
@pytest.mark.parametrize("ranks", [2, 4])
def test_three_steps_equal_one_process(pool, logits, ranks):
    assert max(pool.run(f"{CASES}:train", ranks=ranks, logits=logits, tp=2)) < 1e-12
