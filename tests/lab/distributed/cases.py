"""Functions for each rank: wrap a model as scripts do, train it on the rank's share, compare with one process."""

import contextlib
import re
from functools import cache, partial

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel as FSDP, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from checkpointed import enable
from torchrl_llm_kl import PolicyLoss
from torchrl_llm_kl.losses import EntropyBonus, KLToReference
from toy_models import tiny_model

_PREFIXES = re.compile(r"\b(_fsdp_wrapped_|_checkpoint_wrapped_)?module\.")
VOCAB, STEPS, RATE = 96, 3, 0.5
PACK = 32  # tokens of a pack: the batch of one rank needs several packs, another rank's batch needs one
#: Tokens of (prompt, response) of each sequence. Sequences 1, 3, 5 share a prompt longer than a pack.
SHAPES = [(5, 31), (40, 20), (7, 38), (40, 33), (5, 30), (40, 27), (6, 2), (9, 3), (4, 1), (8, 2)]


def batch():
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
    entries = {
        "tokens": {"full": full},
        "masks": {"all_attention_mask": real, "all_assistant_mask": response},
        "advantage": torch.randn(len(SHAPES), generator=rng, dtype=torch.float64),
        "next": {"log_probs": {"full": numbers[0]}, "ref_log_probs": {"full": numbers[1]}},
    }
    return TensorDict(entries, batch_size=[len(SHAPES)])


def build(dtype=torch.float64, *, lora=False, checkpoint="", seed=3, **config):
    """The same weights on each rank and in one process."""
    model = tiny_model("qwen2", seed=seed, vocab_size=VOCAB, max_position_embeddings=128, **config).to(dtype).train()
    for module in list(model.modules()):
        for name, norm in list(module.named_children()):
            # This norm computes in float32, where rounding depends on the order of sums.
            if type(norm).__name__ == "Qwen2RMSNorm":
                own = nn.RMSNorm(norm.weight.shape[0], eps=norm.variance_epsilon, dtype=dtype)
                own.load_state_dict(norm.state_dict())
                setattr(module, name, own)
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(5)
        adapters = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)
        model = get_peft_model(model, adapters).to(dtype)
    if checkpoint == "transformers":
        enable(model)
    elif checkpoint == "torch":
        apply_activation_checkpointing(model, check_fn=set(layers_of(model)).__contains__)
    return model


def make_loss(model, **options):
    """PPO with an entropy bonus and a KL term (exact with ``reference``): all kinds of scores that need the head."""
    terms = [EntropyBonus(0.01), KLToReference(0.1, "exact" if "reference" in options else "k2")]
    return PolicyLoss(model, "ppo", terms=terms, masking_strategy="rlhf", tokens_per_batch=PACK, **options)


def total(out):
    return sum(value for name, value in out.items() if name.startswith("loss_"))


@cache
def expected(dtype=torch.float64, steps=STEPS, rate=RATE, clip=None, exact=False, config=()):
    """Parameters of one process after the steps."""
    model = build(dtype, **dict(config))
    loss = make_loss(model, **{"reference": build(dtype, seed=4)} if exact else {})
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=rate)
    for _ in range(steps):
        total(loss(loss.count(batch(), all_ranks=False))).backward()
        if clip is not None:
            norm = torch.stack([p.grad.square().sum() for p in trained]).sum().sqrt()
            assert norm > clip, "clipping must have an effect"
            for p in trained:
                p.grad.mul_(clip / (norm + 1e-6))
        optimizer.step(), optimizer.zero_grad()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def layers_of(model):
    return list(model.get_decoder().layers)


def shard(model, *, keep=False, groups=False, by_layer=True, **options):
    """Apply FSDP2 to the layers, then to the rest of the model."""
    if by_layer:
        for layer in layers_of(model):
            fully_shard(layer, reshard_after_forward=not keep, **options)
    ends = [model.get_decoder().norm, model.get_output_embeddings()]
    if groups and model.config.tie_word_embeddings:  # a parameter can be in only one group
        fully_shard([model.get_input_embeddings(), *ends], **options)
    elif groups:
        fully_shard(model.get_input_embeddings(), **options)
        fully_shard(ends, **options)
    return fully_shard(model, reshard_after_forward=not keep, **options)


def _fsdp2_loss(model, make):
    for layer in layers_of(model):
        fully_shard(layer)
    return fully_shard(make(model))


def _fsdp1(model, *, flat=False):
    policy = ModuleWrapPolicy({type(layers_of(model)[0])})
    return FSDP(model, auto_wrap_policy=policy, use_orig_params=not flat, device_id=torch.device("cpu"))


#: Name -> a function of a model and of a constructor of the loss. It returns the module that a script trains.
WRAPS = {
    "DDP(loss)": lambda model, make: DDP(make(model)),
    "loss(DDP)": lambda model, make: make(DDP(model)),
    "fsdp2": lambda model, make: make(shard(model)),
    "fsdp2, kept after forward": lambda model, make: make(shard(model, keep=True)),
    "fsdp2, own groups": lambda model, make: make(shard(model, groups=True)),
    "fsdp2, root alone": lambda model, make: make(shard(model, by_layer=False)),
    "fsdp2(loss)": _fsdp2_loss,
    "fsdp1, original parameters": lambda model, make: make(_fsdp1(model)),
    "fsdp1, flat parameters": lambda model, make: make(_fsdp1(model, flat=True)),
}


def share(split, rank, ranks):
    """This rank's rows. Shares differ: many or few tokens, rows without a response, or no rows."""
    rows = batch()
    if split == "uneven":  # 475 tokens against 35, on two ranks
        bounds = {2: [0, 6, 10], 4: [0, 4, 6, 8, 10]}[ranks]
        return rows[bounds[rank] : bounds[rank + 1]]
    if split not in ("no rows", "no response"):
        rng = torch.Generator().manual_seed(int(split))  # a random split
        return rows[torch.randint(ranks, (len(SHAPES),), generator=rng) == rank]
    if rank < ranks - 1:
        return rows[torch.arange(len(SHAPES)).tensor_split(ranks - 1)[rank]]
    if split == "no rows":
        return rows[:0]
    rows["loss_mask"] = torch.zeros_like(rows["masks", "all_assistant_mask"])
    return rows[:2]


def mine(split="uneven"):
    return share(split, dist.get_rank(), dist.get_world_size())


def parameters_of(model):
    """Unsharded parameters, under the names of the unwrapped model."""
    with contextlib.ExitStack() as stack:
        if any(isinstance(module, FSDP) for module in model.modules()):
            stack.enter_context(FSDP.summon_full_params(model))
        named = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
        return {_PREFIXES.sub("", name): p.detach().clone() for name, p in named.items()}


def held_back(run, loss):
    """A context for all micro-batches but the last, in which gradients stay on this rank."""
    for module in (run, loss.actor_network):
        if hasattr(module, "no_sync"):
            return module.no_sync()
    stack = contextlib.ExitStack()
    sharded = run if isinstance(run, FSDPModule) else loss.actor_network
    sharded.set_requires_gradient_sync(False)
    stack.callback(sharded.set_requires_gradient_sync, True)
    return stack


def wrapped(wrap, model, **options):
    """Return the module that a script calls, and the loss inside it."""
    run = WRAPS[wrap](model, partial(make_loss, **options))
    return run, run.module if isinstance(run, DDP) else run


def step(run, loss, rows, micro_batches=1):
    """Run forward and backward of this rank's share of a step. Micro-batches may be empty."""
    rows = loss.count(rows)
    parts = [rows] if micro_batches == 1 else [rows[i] for i in torch.arange(len(rows)).tensor_split(micro_batches)]
    for i, part in enumerate(parts):
        with held_back(run, loss) if i < len(parts) - 1 else contextlib.nullcontext():
            total(run(part)).backward()


def difference(loss, want):
    """The largest difference of any parameter from the expected ones."""
    got = parameters_of(loss.actor_network)
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    return max(float((got[name] - want[name]).abs().max()) for name in want)


def steps(run, loss, splits=("uneven",) * STEPS, *, micro_batches=1, rate=RATE, clip=None):
    """Make a step on this rank's share of each split."""
    optimizer = torch.optim.SGD([p for p in run.parameters() if p.requires_grad], lr=rate)
    for split in splits:
        step(run, loss, mine(split), micro_batches)
        if clip is not None and isinstance(loss.actor_network, FSDP):
            loss.actor_network.clip_grad_norm_(clip)
        elif clip is not None:
            nn.utils.clip_grad_norm_(run.parameters(), clip)
        optimizer.step(), optimizer.zero_grad()


def train(wrap, *, split="uneven", dtype=torch.float64, micro_batches=1, rate=RATE, clip=None, exact=False, **config):
    """Train on this rank's share. Returns the largest difference from one process with the whole batch."""
    splits = [split] * STEPS if isinstance(split, str) else split
    plain = {name: value for name, value in config.items() if name != "checkpoint"}
    want = expected(dtype, len(splits), rate, clip, exact, tuple(sorted(plain.items())))
    run, loss = wrapped(wrap, build(dtype, **config), **{"reference": shard(build(dtype, seed=4))} if exact else {})
    steps(run, loss, splits, micro_batches=micro_batches, rate=rate, clip=clip)
    return difference(loss, want)
