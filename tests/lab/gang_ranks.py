"""Functions for each rank of a gang without Ray: shard a model, score, take weights, and compare with one process.

Also the factories of gangs, which their actors import.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import refused
from load import sequences
from remote_models import slowed
from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.scoring import Sampling, ScoreOptions, ScoreRequest
from torchrl_llm_kl.service.engines._engine import TransformersEngine
from torchrl_llm_kl.service.engines._gang import RankEngine, may_split, shard_model, split
from toy_models import tiny_model


def build(seed=0, dtype="float64", family="qwen2", **config):
    return tiny_model(family, seed=seed, **config).to(getattr(torch, dtype))


def by_hand(model, mesh):
    """A function for ``shard=`` that shards only the root."""
    fully_shard(model, mesh=mesh)


def share_of(made, request):
    """This rank's sequences, and the slice of its tokens among all tokens."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if may_split(made) else (1, 0)
    shares = split(request, ranks)
    start = sum(len(each.mask) for each in shares[:rank])
    return shares[rank], slice(start, start + len(shares[rank].mask))


def largest(pairs, where):
    return max(float((one.values - other.values[where]).abs().max()) for one, other in pairs)


def difference(shard, dtype="float64"):
    """Largest differences of log-probs and entropies from one process, before and after whole and partial updates."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    how = by_hand if shard == "by_hand" else shard
    whole = TransformersEngine(build(0, dtype), tokens_per_batch=16)
    made = shard_model(build(0, dtype), how, mesh)
    engine, options = RankEngine(made, tokens_per_batch=16), ScoreOptions(Sampling(1.3), entropy=True)
    request, found = ScoreRequest.of(sequences(3, 8)), []
    mine, where = share_of(made, request)

    def compare():
        want, got = whole.run(request, options), engine.run(mine, options)
        pairs = [(got.log_prob, want.log_prob), (got.entropy, want.entropy)]
        again = whole.run(request, ScoreOptions()).log_prob
        # The second call reads the cache.
        pairs += [(engine.run(mine, ScoreOptions(remember=True)).log_prob, again) for _ in range(2)]
        found.append(largest(pairs, where))

    compare()
    new = build(1, dtype).state_dict()
    for weights in (new, {"lm_head.weight": build(2, dtype).state_dict()["lm_head.weight"]}):
        engine.update_weights(weights)
        whole.update_weights(weights)
        compare()
    for wrong in (torch.zeros(2), torch.full_like(new["lm_head.weight"], torch.nan)):
        assert refused.refusal(engine.update_weights, {**new, "lm_head.weight": wrong}), "the weights do not fit"
    compare()
    return found


def replayed(shard):
    """The difference from one process over recorded tokens, the tensors, and our names for a wrapper's names of weights."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = TransformersEngine(build())
    made = shard_model(build(), shard, mesh)
    engine = RankEngine(made)
    rows = sequences(3, 8)
    counts = rows.values % 5 + 1
    ids = torch.cat([(token + torch.arange(int(n)) * 7) % 97 for token, n in zip(rows.values, counts, strict=True)])
    kept = Kept(ids, torch.nn.functional.pad(counts.cumsum(0), (1, 0)))
    request, options = ScoreRequest.of(rows, kept=kept), ScoreOptions(Sampling(1.3, top_k=3), entropy=True)
    mine, where = share_of(made, request)
    want, got = whole.run(request, options), engine.run(mine, options)
    found = largest([(got.log_prob, want.log_prob), (got.entropy, want.entropy)], where)
    wrapped = [f"model.{name}" for name in build().state_dict()]
    return found, engine.tensors(), engine.own_names(wrapped)


def refusal(shard, **config):
    """The message for a model that cannot be sharded in this way."""
    return refused.refusal(shard_model, build(**config), shard, init_device_mesh("cpu", (dist.get_world_size(),)))


def recorded(folder, pause=0.0):
    """:func:`build` with a slower forward. Leaves a file named after rank and process in ``folder``."""
    (Path(folder) / f"{dist.get_rank()}-{os.getpid()}").touch()
    return slowed(build(), pause)


def broken_on_one_rank():
    if dist.get_rank() == 1:
        raise OSError("no such checkpoint: /nowhere")
    return build()


def pids(folder, rank):
    """All processes that ran this rank, oldest first, including ended ones."""
    marks = sorted(folder.glob(f"{rank}-*"), key=lambda path: path.stat().st_mtime_ns)
    return [int(path.name.split("-")[1]) for path in marks]


def alive(pid):
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
