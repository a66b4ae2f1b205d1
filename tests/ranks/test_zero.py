"""DeepSpeed's ZeRO gives the parameters of one process. It computes in float32, whatever the model's dtype."""

import os

import pytest
import torch
import torch.distributed as dist

from distributed.cases import RATE, STEPS, build, expected, make_loss, mine, total
from distributed.features import WRITTEN, rewarded
from refused import refusal
from torchrl_llm_kl import LogProbScorer, ReferenceUpdater, RetrieveKL


# ---------------------------------------------------------------------- each rank
def engine_of(module, stage, accumulate=1):
    """Call ``deepspeed.initialize`` like a script. A frozen module has no optimizer. DeepSpeed computes in float32."""
    import deepspeed
    from deepspeed.runtime.zero import parameter_offload, partition_parameters
    from deepspeed.utils import groups

    trained = [p for p in module.parameters() if p.requires_grad]
    # Each case has other ranks and its own process group, and DeepSpeed remembers groups and numbers of modules.
    if trained:
        deepspeed.comm.comm.cdb = None
        deepspeed.comm.torch.build_shm_op = lambda: None  # needs a compiler, and keeps the number of ranks
        for name, value in vars(groups).items():
            if name.startswith("_") and name.isupper():
                setattr(groups, name, {} if isinstance(value, dict) else None)
        partition_parameters.Init.param_id = 0
        parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", DS_ACCELERATOR="cpu")
        deepspeed.init_distributed("gloo", verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": 0.0,  # by default 1
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "overlap_comm": False, "stage3_param_persistence_threshold": 0},
    }
    optimizer = torch.optim.SGD(trained, lr=RATE) if trained else None
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


def _difference(model):
    """The difference of a parameter from one process in float64 after three steps."""
    from deepspeed import zero

    want, worst = expected(), 0.0
    for name, parameter in model.named_parameters():
        with zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            worst = max(worst, float((parameter.detach() - want[name]).abs().max()))
    return worst


def _steps(engine, run, loss, split, micro_batches=1):
    for _ in range(STEPS):
        rows = loss.count(mine(split))
        for i in torch.arange(len(rows)).tensor_split(micro_batches):
            engine.backward(total(run(rows[i])) * micro_batches)  # DeepSpeed divides by the number of micro-batches
            engine.step()


def train(what, stage, split="uneven", micro_batches=1):
    """The largest difference from one process after three steps."""
    model = build()
    engine = engine_of(make_loss(model) if what == "loss" else model, stage, micro_batches)
    run = engine if what == "loss" else make_loss(engine)
    loss = engine.module if what == "loss" else run
    _steps(engine, run, loss, split, micro_batches)
    return _difference(model)


def retrieve(stage):
    """Differences of the KL to a sharded reference, before and after three steps, with and without the prefix cache."""
    policy = build()
    engine = engine_of(policy, stage)
    loss = make_loss(engine)
    reference = engine_of(build(seed=4).requires_grad_(False), 3) if stage == 3 else build(torch.float32, seed=4)
    transform = RetrieveKL(engine, reference, coeff=0.5)
    plain = build()
    one = RetrieveKL(plain, build(seed=4), coeff=0.5)
    rows = rewarded(mine("no rows"))
    scorer, ids = LogProbScorer(engine), [[3, 5, 7, 11, 13]]
    worst = []
    for after in (False, True):
        if after:
            _steps(engine, loss, loss, "uneven")
            plain.load_state_dict(expected(), strict=False)
        got, want = transform(rows.clone()), one(rows.clone()) if len(rows) else None
        cached = scorer.score(ids, remember=True).values - LogProbScorer(plain).score(ids).values
        worst.append(float(cached.abs().max()))
        pairs = [(got["next"].get(key), want["next"].get(key)) for key in WRITTEN] if want is not None else []
        worst += [float((a - b).abs().max()) for a, b in pairs]
    return worst


def refuse(case):
    """The message for an unsupported setting, or for a bad token on rank 1, followed by three steps."""
    model = build()
    engine = engine_of(make_loss(model) if case == "loss" else model, 2 if case == "token, ZeRO-2" else 3)
    rows = mine()
    loss = engine.module if case == "loss" else make_loss(engine)
    if case.startswith("token") and dist.get_rank() == 1:
        rows["tokens", "full"][0, 0] = 10_000
    if case == "updater":
        text = refusal(ReferenceUpdater, build(), engine, decay=0.5)
    else:
        text = refusal(lambda: (engine if case == "loss" else loss)(loss.count(rows)), error=Exception)
    if case.startswith("token"):
        _steps(engine, loss, loss, "uneven")
        assert _difference(model) < 2e-6
    return text


# ---------------------------------------------------------------------- all ranks
pytest.importorskip("deepspeed", reason="deepspeed is not installed")
CASES = __name__


@pytest.mark.parametrize(
    ("what", "stage", "ranks", "micro_batches"),
    [("model", 1, 2, 1), ("model", 2, 4, 3), ("loss", 2, 2, 1), ("model", 3, 2, 1), ("model", 3, 4, 3)],
)
def test_three_steps_equal_one_process(pool, what, stage, ranks, micro_batches):
    """Uneven tokens and numbers of packs. With accumulation, some micro-batches are empty."""
    found = pool.run(f"{CASES}:train", ranks=ranks, what=what, stage=stage, micro_batches=micro_batches)
    assert max(found) < 2e-6


@pytest.mark.parametrize(
    ("what", "stage", "split"), [("model", 2, "no rows"), ("loss", 2, "no response"), ("model", 3, "no rows")]
)
def test_a_rank_without_data_takes_part(pool, what, stage, split):
    assert max(pool.run(f"{CASES}:train", ranks=4, what=what, stage=stage, split=split)) < 2e-6


@pytest.mark.parametrize("stage", [2, 3])
def test_kl_in_the_reward(pool, stage):
    """Before and after three steps; with ZeRO-3 of policy and reference, and the cache of an env."""
    assert max(map(max, pool.run(f"{CASES}:retrieve", stage=stage))) < 1e-4  # sums over a response of float32 rounding


@pytest.mark.parametrize("case", ["token, ZeRO-2", "token, ZeRO-3"])
def test_bad_data_on_one_rank_is_an_error_on_all(pool, case):
    """The next steps are right."""
    first, second = pool.run(f"{CASES}:refuse", case=case)
    assert "token id 10000" in second
    assert first.startswith("RankError: another rank refused")


@pytest.mark.parametrize(
    ("case", "advice"), [("loss", "PolicyLoss(deepspeed.initialize(model=model, ...)[0])"), ("updater", "FSDP2")]
)
def test_zero3_refuses_a_wrapped_loss_and_an_updater_on_all_ranks(pool, case, advice):
    for message in pool.run(f"{CASES}:refuse", case=case):
        assert message.startswith("ValueError")
        assert advice in message
