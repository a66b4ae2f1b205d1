"""Ranks that forward each sequence together give the scores, losses and gradients of one process."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from distributed.cases import RATE, STEPS, batch, build, difference, expected, shard, share, total
from refused import refusal
from torchrl_llm_kl import LogProbScorer, PolicyLoss, Sampling
from torchrl_llm_kl.scoring import ScoreRequest
from toy_models import stateful_model, tiny_model

PACK = 8  # tokens of a rank in a stage
VOCAB = 96


# ---------------------------------------------------------------------- each rank
def rows_of(seed=0):
    """Answers to two prompts of which one continues the other, a sequence of its own, and one of two tokens."""
    rng = torch.Generator().manual_seed(seed)

    def some(count):
        return torch.randint(3, VOCAB, (count,), generator=rng).tolist()

    first = some(30)
    second = first + some(12)
    rows = [first + some(n) for n in (5, 9, 3)] + [second + some(n) for n in (6, 14)] + [some(21), some(2)]
    return [torch.tensor(row) for row in rows]


def _norm(module, hidden):
    """transformers' norms compute in float32, where rounding depends on the order of sums."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    scale = module.weight + 1 if "Gemma" in type(module).__name__ else module.weight
    return F.rms_norm(hidden, hidden.shape[-1:], eps=eps) * scale


def model_of(family, seed=0, **config):
    settings = {"vocab_size": VOCAB, "initializer_range": 0.1, **config}
    model = tiny_model(family, seed=seed, **settings).double()
    if "num_experts_per_tok" in vars(model.config):
        model.set_experts_implementation("eager")  # the default has no float64
    for norm in model.modules():
        if type(norm).__name__.endswith("RMSNorm"):
            norm.forward = partial(_norm, norm)
    return model


def numbers(scorer, rows, reference=None, **changes):
    """The scores, and the gradient of a weighted sum of those that have one."""
    scores = scorer.evaluate(rows, reference=reference, **changes).per_token
    out = {name: each.values.detach() for name, each in scores.items()}
    if changes.get("grad"):
        weights = torch.linspace(-1, 1, len(scores["log_prob"].values), dtype=torch.float64)
        sum(
            (weights * scores[name].values).sum() for name in ("log_prob", "entropy", "kl") if name in scores
        ).backward()
        for name, parameter in scorer.model.named_parameters():
            if parameter.grad is not None:
                out[name], parameter.grad = parameter.grad, None
    return out


def compare(family, *, grad=False, exact=False, pack=PACK, rows=None, **config):
    """The largest difference of any score or gradient from one process."""
    lengths, changes, dtype = config.pop("lengths", None), config.pop("changes", {}), config.pop("dtype", torch.float64)
    rows = rows_of() if lengths is None else [torch.arange(3, 3 + n) for n in lengths]
    # With ``last``, only the last tokens of each row are scored, so a rank may have none.
    last = config.pop("last", None)
    mask = None if last is None else [torch.arange(len(row)) >= len(row) - last for row in rows]
    rows = rows if mask is None else ScoreRequest.of(rows, mask)
    model = model_of(family, **config).train(grad).to(dtype)
    ref = model_of(family, seed=7, **config).to(dtype) if exact else None
    changes = {"entropy": True, **({"grad": True} if grad else {"top_k": 4}), **changes}

    def of(**ranks):
        make = partial(LogProbScorer, tokens_per_batch=pack, **ranks)
        return numbers(make(model), rows, None if ref is None else make(ref), **changes)

    want, got = of(), of(context_parallel=dist.group.WORLD)
    assert got.keys() == want.keys()
    if grad:
        for name, parameter in model.named_parameters():
            if name in got:
                dist.all_reduce(got[name])
                got[name] /= dist.get_world_size()
            else:
                assert not parameter.requires_grad or want.get(name) is None
    return max(float((got[name] - want[name]).abs().max()) for name in want)


def stored(pack):
    """The keys and values that this rank stores for later stages, in tokens, beside those of one process."""
    from torchrl_llm_kl.scoring._packs import PackedPass

    rows, most = [torch.arange(3, 67)], []
    make = partial(LogProbScorer, model_of("qwen2"), tokens_per_batch=pack)
    spread, alone = make(context_parallel=dist.group.WORLD), make()
    run = PackedPass._run

    def counted(self, *args):
        states = run(self, *args)
        kept = {id(pairs): pairs for past in self._pasts.values() for pairs in past}.values()
        most.append(sum(pairs[0][0].shape[2] for pairs in kept if pairs[0][0].numel()))
        return states

    PackedPass._run = counted
    try:
        spread.score(rows)
        here = max(most)
        most.clear()
        alone.score(rows)
    finally:
        PackedPass._run = run
    return here, max(most)


def train(wrap, *, data=1, split="uneven", checkpoint="", exact=False, lora=False):
    """Three steps, on the whole batch or on the share of this rank's group."""
    plain = (("lora", True),) if lora else ()
    want = expected(torch.float64, STEPS, RATE, None, exact, plain)
    ranks = dist.get_world_size() // data
    mesh = init_device_mesh("cpu", (data, ranks), mesh_dim_names=("data", "context"))
    group = mesh["context"]
    model = build(lora=lora, checkpoint=checkpoint)
    make = partial(LogProbScorer, tokens_per_batch=PACK, context_parallel=group)
    run = make(wrap(model))
    loss = make_loss_of(run, make(build(seed=4)) if exact else None)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    rows = batch() if data == 1 else share(split, mesh.get_local_rank("data"), data)
    for _ in range(STEPS):
        total(loss(loss.count(rows))).backward()
        if run.model is model and not hasattr(model, "reshard"):
            for parameter in model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
        optimizer.step(), optimizer.zero_grad()
    return difference(loss, want)


def make_loss_of(scorer, reference):
    from torchrl_llm_kl.losses import EntropyBonus, KLToReference

    terms = [EntropyBonus(0.01), KLToReference(0.1, "k2" if reference is None else "exact")]
    options = {} if reference is None else {"reference": reference}
    return PolicyLoss(scorer, "ppo", terms=terms, masking_strategy="rlhf", **options)


def refuse_one_group():
    """Data of different ranks in one of two groups: all four ranks must raise an error."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    model, rank = shard(build()), dist.get_rank()
    scorer = LogProbScorer(model, tokens_per_batch=PACK, context_parallel=mesh["context"])
    copied = copy.deepcopy(LogProbScorer(build(), context_parallel=mesh["context"]))
    rows = [row.clamp(max=VOCAB - 2) + (rank == 3) for row in rows_of()]
    error = refusal(scorer.score, rows, error=Exception)
    loss = make_loss_of(LogProbScorer(build(), context_parallel=mesh["context"]), None)
    run, bad = DDP(loss), share("uneven", mesh.get_local_rank("data"), 2)
    if rank > 1:
        bad["tokens", "full"] = bad["tokens", "full"] + 1000
    return error, refusal(lambda: run(loss.count(bad)), error=Exception), copied.context == scorer.context


def train_plain(**settings):
    return train(lambda model: model, **settings)


def train_ddp(**settings):
    return train(DDP, **settings)


def train_fsdp(**settings):
    return train(shard, **settings)


def refusals():
    """The messages of calls that ranks cannot share, and the score of a call that needs no packs of its own."""
    rows, group = rows_of(), dist.group.WORLD
    model = model_of("qwen2")
    scorer = LogProbScorer(model, context_parallel=group)
    other = [row + dist.get_rank() if i == 2 else row for i, row in enumerate(rows)]
    masks = [torch.arange(len(row)) > dist.get_rank() for row in rows]
    cut = Sampling(top_k=3)
    return {
        "data": refusal(scorer.score, other),
        "masks": refusal(scorer.score, rows, masks),
        "temperature": refusal(scorer.score, rows, temperature=1.0 + dist.get_rank()),
        "pack": refusal(LogProbScorer(model, tokens_per_batch=8 + dist.get_rank(), context_parallel=group).score, rows),
        "group": refusal(partial(LogProbScorer, model), context_parallel=True),
        "deterministic": refusal(scorer.score, rows, deterministic=True),
        "kept": refusal(scorer.score, rows, sampling=cut, return_kept=True),
        "recompute": refusal(scorer.score, rows, grad=True, recompute=True),
        "reference": refusal(scorer.evaluate, rows, reference=LogProbScorer(model_of("qwen2", seed=1))),
        "state": refusal(LogProbScorer(stateful_model("qwen3_5_text"), context_parallel=group).score, rows),
        "padded": refusal(LogProbScorer(model, share_prefixes=False, context_parallel=group).score, rows),
        "explain": refusal(scorer.explain, rows, 0, 3),
        "one rank": refusal(scorer.score, [row - 200 * dist.get_rank() for row in rows], error=Exception),
    }


def broken():
    """A layer fails on rank 1, inside of FSDP2."""
    model = shard(build())
    scorer = LogProbScorer(model, context_parallel=dist.group.WORLD)
    if dist.get_rank() == 1:
        model.get_decoder().layers[0].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    scorer.score(rows_of())


# ---------------------------------------------------------------------- all ranks
CASES = __name__


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "settings",
    [
        {"family": "qwen2"},
        {"family": "qwen2", "grad": True, "exact": True},
        {"family": "qwen2", "grad": True, "pack": 1024},  # one stage
        {"family": "qwen2", "grad": True, "pack": 3},
        {"family": "qwen2", "grad": True, "lengths": [2]},  # fewer tokens than ranks
        {"family": "qwen2", "changes": {"remember": True, "sampling": Sampling(0.7, top_p=0.9), "top_k": 0}},
        # The first ranks have no scored token.
        {"family": "qwen2", "exact": True, "lengths": [40], "last": 3, "pack": 5},
        {"family": "qwen2", "exact": True, "lengths": [40], "last": 3, "pack": 5, "grad": True},
        {
            "family": "qwen2",
            "lengths": [40],
            "last": 3,
            "pack": 5,
            "changes": {"sampling": Sampling(0.7, top_k=5, top_p=0.9), "top_k": 0},
        },
        {"family": "mistral", "grad": True},  # a sliding window
        {"family": "gemma2", "grad": True},  # soft-capped scores
        {"family": "gpt2", "grad": True},
        {"family": "mixtral", "grad": True},
        {"family": "gpt_oss", "grad": True},  # sinks
        {"family": "deepseek_v3", "grad": True},  # keys and values of different sizes
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_scores_and_gradients_equal_those_of_one_process(pool, ranks, settings):
    routed = settings["family"] in ("mixtral", "gpt_oss", "deepseek_v3")  # routers compute in float32
    assert max(pool.run(f"{CASES}:compare", ranks=ranks, **settings)) < (1e-6 if routed else 1e-12)


@pytest.mark.parametrize(
    ("function", "ranks", "settings"),
    [
        ("train_plain", 2, {}),
        ("train_plain", 4, {"exact": True}),
        ("train_plain", 2, {"lora": True}),
        ("train_plain", 2, {"checkpoint": "transformers"}),
        ("train_ddp", 2, {"checkpoint": "torch"}),
        ("train_fsdp", 2, {}),
        ("train_fsdp", 4, {"data": 2, "checkpoint": "torch"}),
        ("train_fsdp", 4, {"data": 2, "split": "no rows"}),
    ],
)
def test_three_steps_equal_one_process(pool, function, ranks, settings):
    """PPO with an entropy bonus and a KL. With ``data``, groups of ranks train on other sequences."""
    assert max(pool.run(f"{CASES}:{function}", ranks=ranks, **settings)) < 1e-12


def test_an_error_in_one_group_is_raised_in_all(pool):
    for rank, (sharded, wrapped, shares) in enumerate(pool.run(f"{CASES}:refuse_one_group", ranks=4)):
        assert ("ValueError: context_parallel" if rank > 1 else "RankError") in sharded
        assert ("ValueError: token id" if rank > 1 else "RankError") in wrapped
        assert shares


@pytest.mark.parametrize(("ranks", "pack", "own", "whole"), [(2, 4, 28, 60), (4, 4, 12, 60), (2, 24, 16, 48)])
def test_a_rank_stores_only_its_own_keys(pool, ranks, pack, own, whole):
    """After the last but one stage of 63 tokens. Two ranks take them in stages of 16 each, though a pack has room for 24."""
    assert pool.run(f"{CASES}:stored", ranks=ranks, pack=pack) == [(own, whole)] * ranks


def test_calls_that_ranks_cannot_share_are_refused_on_all(pool):
    texts = {
        "data": "different sequences, masks, records, options or tokens_per_batch",
        "masks": "different sequences, masks, records, options or tokens_per_batch",
        "temperature": "different sequences, masks, records, options or tokens_per_batch",
        "pack": "different sequences, masks, records, options or tokens_per_batch",
        "group": "a process group of this rank or a mesh of one dimension, got True",
        "deterministic": "deterministic=True needs whole sequences",
        "kept": "return_kept=True needs whole sequences",
        "recompute": "with context_parallel",
        "reference": "pass one group to both",
        "state": "needs packs, which Qwen3_5ForCausalLM cannot run",
        "padded": "needs packs, which Qwen2ForCausalLM cannot run",
        "explain": "needs a whole model in this process",
    }
    for rank, messages in enumerate(pool.run(f"{CASES}:refusals")):
        assert ["RankError: another rank", "ValueError: token id"][rank] in messages.pop("one rank")
        assert messages.keys() == texts.keys()
        for name, text in texts.items():
            assert text in messages[name], (name, messages[name])


def test_an_error_inside_a_forward_is_raised_at_once(pool):
    """The other rank waits until the launcher ends it."""
    with pytest.raises(AssertionError, match=r"rank 1:(.|\n)*ZeroDivisionError"):
        pool.run(f"{CASES}:broken")
