"""Functions for each rank beyond plain training: mixed precision, references, other libraries, errors, saving."""

import copy
import os
import time

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from checkpointed import enable
from distributed import cases
from distributed.cases import RATE, STEPS, batch, build, difference, expected, make_loss, shard, step, total, wrapped
from refused import refusal
from scoring_reference import plain_log_probs, random_sequences
from torchrl_llm_kl import LogProbScorer, Ragged, RetrieveKL
from toy_models import stateful_model, tiny_model


def _mixture(checkpoint=""):
    model = tiny_model("mixtral", vocab_size=cases.VOCAB, max_position_embeddings=128).double().train()
    model.set_experts_implementation("eager")  # the default implementation does not support float64
    if checkpoint:
        enable(model)
    return model


def replayed_routing(wrap, checkpoint="", split="uneven"):
    """Make a step over recorded experts. Returns relative differences from one process, with and without the record."""

    def recorded(rows):
        rng = torch.Generator().manual_seed(1)
        record = torch.rand(*batch()["tokens", "full"].shape, 3, 6, generator=rng).argsort(-1)[..., :2]
        owner = {tuple(row.tolist()): i for i, row in enumerate(batch()["tokens", "full"])}
        mine = [owner[tuple(row.tolist())] for row in rows["tokens", "full"]]
        return rows.set("routed_experts", record[mine])

    before = {name: p.detach().clone() for name, p in _mixture().named_parameters()}
    after = []
    for prepare in (recorded, TensorDict.copy):
        model = _mixture()
        loss = make_loss(model)
        total(loss(loss.count(prepare(batch()), all_ranks=False))).backward()
        after.append({name: before[name] - RATE * p.grad for name, p in model.named_parameters()})
    run, loss = wrapped(wrap, _mixture(checkpoint))
    optimizer = torch.optim.SGD(run.parameters(), lr=RATE)
    step(run, loss, recorded(cases.mine(split)))
    optimizer.step()
    size = max(float((after[0][name] - before[name]).abs().max()) for name in before)
    return difference(loss, after[0]) / size, difference(loss, after[1]) / size


SMALL = 0.01  # with larger steps, rounding errors grow from step to step


def recurrent(checkpoint):
    """The largest relative difference of a gradient from one process, for a recurrent model under FSDP2."""
    prompts, ends = random_sequences(40, 35).to_list(), random_sequences(5, 3, 7, 4, 6, 9, seed=1).to_list()
    rows = [torch.cat([prompts[i // 3], end]) for i, end in enumerate(ends)]
    plain, model = stateful_model("qwen3_5_text"), stateful_model("qwen3_5_text").train()
    plain_log_probs(plain, Ragged.from_list(rows)).square().sum().div(2).backward()
    want = {name: p.grad for name, p in plain.named_parameters()}
    if checkpoint == "torch":
        cases.apply_activation_checkpointing(model, check_fn=set(cases.layers_of(model)).__contains__)
    else:
        enable(model)
    scorer = LogProbScorer(shard(model))
    own = rows if dist.get_rank() == 0 else [rows[0][:1]]
    scorer.score(own, grad=True).values.square().sum().backward()
    named = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}
    found = {name: p.grad.full_tensor() for name, p in named.items()}
    return max(float((found[name] - want[name]).abs().max() / want[name].abs().max()) for name in want)


def _in_bfloat16():
    """Train in one process, with float32 weights and a bfloat16 copy that computes."""
    master = build(torch.float32)
    narrow = copy.deepcopy(master)
    for parameter in narrow.parameters():  # not the buffers
        parameter.data = parameter.data.bfloat16()
    loss = make_loss(narrow)
    for _ in range(STEPS):
        total(loss(loss.count(batch(), all_ranks=False))).backward()
        with torch.no_grad():
            for own, cast in zip(master.parameters(), narrow.parameters(), strict=True):
                own -= SMALL * cast.grad.float()
                cast.copy_(own)
                cast.grad = None
    return {name: p.detach() for name, p in master.named_parameters()}


def mixed_precision(by_layer):
    """Relative errors of the change by three small steps, compared with float32: on ranks, and in one bfloat16 process."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    before = {name: p.detach().clone() for name, p in build(torch.float32).named_parameters()}
    model = shard(build(torch.float32), by_layer=by_layer, mp_policy=policy)
    loss = make_loss(model)
    cases.steps(loss, loss, rate=SMALL)
    one, wide = _in_bfloat16(), expected(torch.float32, rate=SMALL)

    def change(after):
        return torch.cat([(after[name] - before[name]).flatten() for name in before])

    truth = change(wide)
    return tuple(float((change(found) - truth).norm() / truth.norm()) for found in (cases.parameters_of(model), one))


WRITTEN = (("log_probs", "full"), ("ref_log_probs", "full"), "kl_penalty", "reward")


def retrieve(wrap, estimator, split):
    """Compute KL and log-probs with a sharded reference before and after steps. Returns the largest difference."""
    plain, reference = build(), build(seed=4)
    run, loss = wrapped(wrap, build())
    rows = rewarded(cases.mine(split))
    transform = RetrieveKL(loss.actor_network, shard(build(seed=4)), estimator=estimator, coeff=0.5)
    worst = 0.0
    for after in (False, True):
        if after:
            cases.steps(run, loss)
            plain.load_state_dict(expected(), strict=False)
        got = transform(rows.clone())
        whole = rows if len(rows) else rewarded(batch())
        want = RetrieveKL(plain, reference, estimator=estimator, coeff=0.5)(whole.clone())
        for key in WRITTEN:
            ours, theirs = got["next"].get(key), want["next"].get(key)
            assert theirs.abs().sum() > 0
            assert ours.shape == (len(rows), *theirs.shape[1:])
            if len(rows):
                worst = max(worst, float((ours - theirs).abs().max()))
    return worst


def rewarded(rows):
    rows["next", "reward"] = torch.ones(len(rows), 1, dtype=torch.float64)
    return rows


def accelerate(what, steps):
    """``accelerator.prepare`` of the loss or of the model, with its own accumulation over ``steps`` micro-batches."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    local = os.environ["WORLD_SIZE"]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", LOCAL_WORLD_SIZE=local, OMP_NUM_THREADS="1")
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    held, optimizer = accelerator.prepare(make_loss(model) if what == "loss" else model, optimizer)
    run = held if what == "loss" else make_loss(held)
    loss = accelerator.unwrap_model(run) if what == "loss" else run
    for _ in range(STEPS):
        rows = loss.count(cases.mine())
        for i in torch.arange(len(rows)).tensor_split(steps):
            with accelerator.accumulate(held):
                accelerator.backward(total(run(rows[i])) * steps)  # accelerate divides by the steps
                optimizer.step(), optimizer.zero_grad()
    return difference(loss, expected())


def refuse(wrap, kind):
    """Give rank 1 a bad token or a NaN weight. Returns the seconds until the error, its text, and the final difference."""
    run, loss = wrapped(wrap, build())
    rows, optimizer = cases.mine(), torch.optim.SGD(run.parameters(), lr=RATE)
    last = dist.get_rank() == 1
    bad = rows.clone()
    weight = next(p for p in loss.actor_network.parameters() if p.numel() and p.requires_grad)
    weight = weight.to_local() if isinstance(weight, DTensor) else weight
    before = weight.detach().clone()
    if kind == "token" and last:
        bad["tokens", "full"][0, 0] = 10_000
    if kind == "weight" and last:
        weight.detach().fill_(torch.nan)
    start = time.monotonic()
    text = refusal(step, run, loss, bad, error=Exception)
    seconds = time.monotonic() - start
    weight.detach().copy_(before)
    for _ in range(STEPS):
        optimizer.zero_grad()
        step(run, loss, rows)
        optimizer.step()
    return seconds, text, difference(loss, expected())


def out_of_memory(wrap, where, room):
    """Let part of the model on rank 1 run out of memory. Returns the final token budget and the difference."""
    from torchrl_llm_kl.scoring._scores import HeadReading

    model = build()

    def check(tokens):
        if tokens > room and dist.get_rank() == 1:
            raise torch.OutOfMemoryError(f"{tokens} tokens")

    decoder = model.get_decoder()
    modules = {"embedding": decoder.embed_tokens, "layer": cases.layers_of(model)[1].mlp, "norm": decoder.norm}
    if where in modules:
        modules[where].register_forward_pre_hook(lambda _, args: check(args[0].shape[1]))
    plain_read = HeadReading.columns

    def read(reading):
        if where == "head" and len(reading.targets) and loss.scorer.tokens_per_batch > room:
            check(room + 1)
        return plain_read(reading)

    run, loss = wrapped(wrap, model)
    assert loss.scorer.shares_prefixes  # its probe is done
    HeadReading.columns = read
    try:
        cases.steps(run, loss)
    finally:
        HeadReading.columns = plain_read
    return loss.scorer.tokens_per_batch, difference(loss, expected())


def state(wrap):
    """Compare keys and values of the whole state dict after a step with a model of one process."""
    run, loss = wrapped(wrap, build())
    step(run, loss, cases.mine())
    found = get_model_state_dict(loss.actor_network, options=StateDictOptions(full_state_dict=True))
    want = build().state_dict()
    if dist.get_rank() == 0 or found:
        assert found.keys() == want.keys(), found.keys() ^ want.keys()
        return max(float((found[name] - want[name]).abs().max()) for name in want)
    return 0.0


def scored_before():
    """Score a model before it is sharded, then train it."""
    model = build()
    loss = make_loss(model)
    step(loss, loss, cases.mine())
    for parameter in model.parameters():
        parameter.grad = None
    shard(model)
    cases.steps(loss, loss)
    return difference(loss, expected())
