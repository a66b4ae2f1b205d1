"""What each rank does: wrap a model as a training script would, train it on this rank's share, compare with one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from torchrl_llm_kl import LogProbScorer, PolicyLoss, Ragged, ReferenceUpdater
from torchrl_llm_kl.losses import EntropyBonus, KLToReference
from toy_models import tiny_model

VOCAB, STEPS, RATE = 96, 3, 0.5
PACK = 32  # tokens of a pack: a batch of one rank needs several, another's one
#: Tokens of (prompt, response) of each sequence. Sequences 1, 3, 5 share a prompt longer than a pack.
SHAPES = [(5, 31), (40, 20), (7, 38), (40, 33), (5, 30), (40, 27), (6, 2), (9, 3), (4, 1), (8, 2)]


def batch() -> TensorDict:
    """Padded rollouts: tokens, masks, advantage, log-probs of sampler and reference."""
    rng = torch.Generator().manual_seed(0)
    shared = torch.randint(3, VOCAB, (40,), generator=rng)
    longest = max(map(sum, SHAPES))
    full = torch.zeros(len(SHAPES), longest, dtype=torch.long)
    real, response = torch.zeros_like(full, dtype=torch.bool), torch.zeros_like(full, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(SHAPES):
        tokens = torch.randint(3, VOCAB, (prompt + answer,), generator=rng)
        full[row, : prompt + answer] = torch.cat([shared, tokens[40:]]) if prompt == 40 else tokens
        real[row, : prompt + answer] = response[row, prompt : prompt + answer] = True
    noise = torch.randn(2, len(SHAPES), longest, generator=rng, dtype=torch.float64)
    numbers = torch.where(response, noise.mul(0.1) - 4.5, 0)
    size = [len(SHAPES)]
    following = TensorDict(
        log_probs=TensorDict(full=numbers[0], batch_size=size),
        ref_log_probs=TensorDict(full=numbers[1], batch_size=size),
        batch_size=size,
    )
    return TensorDict(
        tokens=TensorDict(full=full, batch_size=size),
        masks=TensorDict(all_attention_mask=real, all_assistant_mask=response, batch_size=size),
        advantage=torch.randn(len(SHAPES), generator=rng, dtype=torch.float64),
        next=following,
        batch_size=size,
    )


def build(dtype: torch.dtype = torch.float64, *, lora: bool = False, **config: Any) -> nn.Module:
    """The same weights on each rank and in one process."""
    model = tiny_model("qwen2", seed=3, vocab_size=VOCAB, max_position_embeddings=128, **config).to(dtype).train()
    for module in list(model.modules()):
        for name, norm in list(module.named_children()):
            if (
                type(norm).__name__ == "Qwen2RMSNorm"
            ):  # computes in float32, whose rounding depends on the order of sums
                own = nn.RMSNorm(norm.weight.shape[0], eps=norm.variance_epsilon, dtype=dtype)
                own.load_state_dict(norm.state_dict())
                setattr(module, name, own)
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(5)
        adapters = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)
        model = get_peft_model(model, adapters).to(dtype)
    return model


def make_loss(model: Any, **options: Any) -> PolicyLoss:
    """PPO with an entropy bonus and a KL term: every kind of score that needs the head."""
    terms = [EntropyBonus(0.01), KLToReference(0.1, "k2")]
    return PolicyLoss(model, "ppo", terms=terms, masking_strategy="rlhf", tokens_per_batch=PACK, **options)


def total(out: Any) -> Tensor:
    return sum(value for name, value in out.items() if name.startswith("loss_"))


# ------------------------------------------------------------------ one process


@cache
def _expected(dtype: torch.dtype, lora: bool, config: tuple[tuple[str, Any], ...]) -> dict[str, Tensor]:
    model = build(dtype, lora=lora, **dict(config))
    loss = make_loss(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    for _ in range(STEPS):
        total(loss(loss.count(batch(), all_ranks=False))).backward()
        optimizer.step(), optimizer.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# ------------------------------------------------------------------ ways to wrap


def _layers(model: nn.Module) -> list[nn.Module]:
    return list(model.get_decoder().layers)


def _fsdp2(model: nn.Module, *, keep: bool = False, groups: bool = False, by_layer: bool = True, **options: Any) -> Any:
    if by_layer:
        for layer in _layers(model):
            fully_shard(layer, reshard_after_forward=not keep, **options)
    if groups:
        fully_shard(model.get_input_embeddings(), **options)
        fully_shard([model.get_decoder().norm, model.get_output_embeddings()], **options)
    fully_shard(model, reshard_after_forward=not keep, **options)
    return make_loss(model)


def _fsdp2_loss(model: nn.Module) -> Any:
    for layer in _layers(model):
        fully_shard(layer)
    return fully_shard(make_loss(model))


def _fsdp1(model: nn.Module, *, flat: bool) -> Any:
    policy = ModuleWrapPolicy({type(_layers(model)[0])})
    return make_loss(FSDP(model, auto_wrap_policy=policy, use_orig_params=not flat, device_id=torch.device("cpu")))


WRAPS: dict[str, Callable[[nn.Module], Any]] = {
    "DDP(loss)": lambda model: DDP(make_loss(model)),
    "loss(DDP)": lambda model: make_loss(DDP(model)),
    "fsdp2": _fsdp2,
    "fsdp2, kept after forward": lambda model: _fsdp2(model, keep=True),
    "fsdp2, own groups": lambda model: _fsdp2(model, groups=True),
    "fsdp2, root alone": lambda model: _fsdp2(model, by_layer=False),
    "fsdp2(loss)": _fsdp2_loss,
    "fsdp1, original parameters": lambda model: _fsdp1(model, flat=False),
    "fsdp1, flat parameters": lambda model: _fsdp1(model, flat=True),
}

# ------------------------------------------------------------------ ways to share the batch


def share(split: str, rank: int, ranks: int) -> TensorDict:
    """This rank's rows: many tokens for some and few for others, none with a response, or no row at all."""
    rows = batch()
    if split == "uneven":  # 475 tokens against 35, on two ranks
        bounds = {2: [0, 6, 10], 4: [0, 4, 6, 8, 10]}[ranks]
        return rows[bounds[rank] : bounds[rank + 1]]
    last = rank == ranks - 1
    others = torch.arange(len(SHAPES)).tensor_split(ranks - 1)[min(rank, ranks - 2)]
    if split == "no rows":
        return rows[:0] if last else rows[others]
    if split == "no response":
        if not last:
            return rows[others]
        rows["loss_mask"] = torch.zeros_like(rows["masks", "all_assistant_mask"])
        return rows[:2]
    rng = torch.Generator().manual_seed(int(split))  # a random split
    owner = torch.randint(ranks, (len(SHAPES),), generator=rng)
    return rows[owner == rank]


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters, under the names of the model that is not wrapped."""
    with contextlib.ExitStack() as stack:
        if any(isinstance(module, FSDP) for module in model.modules()):
            stack.enter_context(FSDP.summon_full_params(model))
        return {
            name.replace("_fsdp_wrapped_module.", "").replace("module.", ""): (
                p.full_tensor() if isinstance(p, DTensor) else p
            )
            .detach()
            .clone()
            for name, p in model.named_parameters()
        }


def train(
    wrap: str,
    *,
    split: str | Sequence[str] = "uneven",
    dtype: torch.dtype = torch.float64,
    lora: bool = False,
    micro_batches: int = 1,
    **config: Any,
) -> float:
    """Three steps on this rank's share; the largest difference from one process with the whole batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    want = _expected(dtype, lora, tuple(sorted(config.items())))
    model = build(dtype, lora=lora, **config)
    run = WRAPS[wrap](model)
    loss = run.module if isinstance(run, DDP) else run
    synced = run if isinstance(run, DDP) else loss.actor_network
    optimizer = torch.optim.SGD([p for p in run.parameters() if p.requires_grad], lr=RATE)
    splits = [split] * STEPS if isinstance(split, str) else split
    for step in splits:
        rows = loss.count(share(step, rank, ranks))
        for i, part in enumerate(rows.chunk(micro_batches) if micro_batches > 1 else [rows]):
            hold = i < micro_batches - 1 and hasattr(synced, "no_sync")
            with synced.no_sync() if hold else contextlib.nullcontext():
                total(run(part)).backward()
        optimizer.step(), optimizer.zero_grad()
    got = parameters_of(loss.actor_network)
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    return max(float((got[name] - want[name]).abs().max()) for name in want)


def follow(wrap: str, *, whole: bool = False, lora: bool = False) -> tuple[float, float, float]:
    """Three steps; a reference is averaged, averaged, and reset.

    Returns the largest difference of its weights from averages of the whole parameters, of its cached scores from fresh ones,
    and the largest KL after the reset.
    """
    policy, reference = build(lora=lora), build(lora=lora)
    loss, of_reference = WRAPS[wrap](policy), make_loss(reference) if whole else WRAPS[wrap](reference)
    trained, frozen = loss.actor_network, of_reference.actor_network
    optimizer = torch.optim.SGD([p for p in loss.parameters() if p.requires_grad], lr=RATE)
    updater = ReferenceUpdater(frozen, trained, decay=0.75, reset_every=3)
    scorers = [LogProbScorer(model, tokens_per_batch=PACK) for model in (trained, frozen)]
    rng = torch.Generator().manual_seed(dist.get_rank())
    rows = Ragged.from_list([torch.randint(3, VOCAB, (n,), generator=rng) for n in (12, 30)])
    weights, scores = 0.0, 0.0
    want = {name: value.clone() for name, value in parameters_of(frozen).items()}
    for step in range(STEPS):
        total(loss(loss.count(share("uneven", dist.get_rank(), dist.get_world_size())))).backward()
        optimizer.step(), optimizer.zero_grad()
        updater.step()
        now = parameters_of(trained)
        want = now if step == 2 else {name: 0.75 * want[name] + 0.25 * value for name, value in now.items()}
        got = parameters_of(frozen)
        assert any(not torch.equal(got[name], value) for name, value in now.items()) or step == 2
        weights = max(weights, *(float((got[name] - want[name]).abs().max()) for name in want))
        cached, fresh = (scorers[1].score(rows, remember=remember).values for remember in (True, False))
        scores = max(scores, float((cached - fresh).abs().max()))
    kl = scorers[0].evaluate(rows, reference=scorers[1]).kl
    assert kl is not None
    return weights, scores, float(kl.values.abs().max())
