"""What each rank does: DeepSpeed's ZeRO trains the model or the loss."""

import os

import torch
import torch.distributed as dist

from distributed.cases import RATE, STEPS, build, expected, make_loss, mine, total
from distributed.features import WRITTEN, rewarded
from torchrl_llm_kl import LogProbScorer, ReferenceUpdater, RetrieveKL


def engine_of(module, stage, accumulate=1):
    """``deepspeed.initialize`` as a script calls it; a frozen module has no optimizer. DeepSpeed computes in float32."""
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
    """Of a parameter, from the parameters of one process in float64 after three steps."""
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
            engine.backward(total(run(rows[i])) * micro_batches)  # which divides by them
            engine.step()


def train(what, stage, split="uneven", micro_batches=1):
    """Three steps; the largest difference from one process."""
    model = build()
    engine = engine_of(make_loss(model) if what == "loss" else model, stage, micro_batches)
    run = engine if what == "loss" else make_loss(engine)
    loss = engine.module if what == "loss" else run
    _steps(engine, run, loss, split, micro_batches)
    return _difference(model)


def retrieve(stage):
    """KL to a sharded reference, before and after three steps, with and without the prefix cache: differences."""
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
    """The message of what is not supported; or of a bad token on rank 1, and then three steps."""
    model = build()
    engine = engine_of(make_loss(model) if case == "loss" else model, 2 if case == "token, ZeRO-2" else 3)
    rows = mine()
    loss = engine.module if case == "loss" else make_loss(engine)
    text = "nothing was refused"
    if case.startswith("token") and dist.get_rank() == 1:
        rows["tokens", "full"][0, 0] = 10_000
    try:
        if case == "updater":
            ReferenceUpdater(build(), engine, decay=0.5)
        else:
            (engine if case == "loss" else loss)(loss.count(rows))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    if case.startswith("token"):
        _steps(engine, loss, loss, "uneven")
        assert _difference(model) < 2e-6
    return text
