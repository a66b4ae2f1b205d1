"""Settings that change in the middle of a run: the configuration with which it resumes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("omegaconf")
from torchrl_llm_kl import FixedKLCoefficient, PIKLCoefficient, make_algorithm
from torchrl_llm_kl.training import Checkpoints, ConfigError, TrainConfig, read_config
from torchrl_llm_kl.training._changes import Change, changed_state, prompts_used, resume_with

LEAST: dict[str, Any] = {"model": {"name": "m"}, "data": {"prompts": "p.jsonl"}, "reward": "r.py:f"}


def config_of(*changes: str) -> TrainConfig:
    return read_config(LEAST, ["optimizer.lr=1e-3", "sampler.end=[x]", "algorithm.args.clip=1", *changes])


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    """A run with a checkpoint after step 5."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    with checkpoints.writing(5, {"config": config_of().to_dict()}) as folder:
        (folder / "weights").write_text("1")
    return checkpoints


def resumed(
    checkpoints: Checkpoints, config: TrainConfig, *changes: str
) -> tuple[TrainConfig, list[Change], list[str]]:
    """Resume, and write a checkpoint two steps later, as a run does."""
    config, saved, said = resume_with(config, changes, checkpoints)
    assert saved is not None
    recorded: Any = saved.numbers.get("changes", [])
    with checkpoints.writing(saved.step + 2, {"config": config.to_dict(), "changes": recorded}) as folder:
        (folder / "weights").write_text("2")
    return config, recorded, said


def test_changes_persist_and_are_recorded(checkpoints: Checkpoints) -> None:
    config, changes, said = resumed(checkpoints, config_of(), "optimizer.lr=1e-5", "sampler.end=[]")
    assert (config.optimizer.lr, config.sampler.end) == (1e-5, [])
    assert sorted(changes, key=lambda each: each["key"]) == [
        {"step": 5, "key": "optimizer.lr", "before": 1e-3, "now": 1e-5},
        {"step": 5, "key": "sampler.end", "before": ["x"], "now": []},
    ]
    assert "from step 5 on, optimizer.lr is 1e-05 instead of 0.001." in said
    # The original command, the changed file, and the same command again.
    for given, words in ((config_of(), ()), (config, ()), (config_of(), ("optimizer.lr=1e-5",))):
        again, later, said = resumed(checkpoints, given, *words)
        assert (again, later) == (config, changes)
        named = "optimizer.lr is 1e-05 since step 5, by --change. The configuration has 0.001." in said
        assert named == (given != config)
    config, later, _ = resumed(checkpoints, config_of("optimizer.lr=1e-5"), "optimizer.lr=1e-7")
    assert config.optimizer.lr == 1e-7
    assert later == [*changes, {"step": 13, "key": "optimizer.lr", "before": 1e-5, "now": 1e-7}]
    for given in (config_of(), config_of("optimizer.lr=1e-5"), config_of("optimizer.lr=1e-7")):
        assert resumed(checkpoints, given)[0] == config


def test_names_inside_of_a_setting_come_and_go(checkpoints: Checkpoints) -> None:
    config, changes, _ = resumed(checkpoints, config_of(), "algorithm.args={}", "algorithm.args.high=2", "lora=null")
    assert config.algorithm.args == {"high": 2}
    assert [(each["key"], each["before"], each["now"]) for each in changes] == [
        ("algorithm.args.high", None, 2),
        ("algorithm.args.clip", 1, None),
    ]
    assert resumed(checkpoints, config_of())[0].algorithm.args == {"high": 2}


def test_a_setting_that_differs_without_a_change_is_named(checkpoints: Checkpoints) -> None:
    resumed(checkpoints, config_of(), "optimizer.lr=1e-5")
    with pytest.raises(ConfigError) as error:
        resume_with(config_of("optimizer.lr=0.5", "sampler.temperature=0.7"), [], checkpoints)
    for part in ("optimizer.lr: 1e-05, now 0.5", "--change optimizer.lr=0.5", "--change sampler.temperature=0.7"):
        assert part in str(error.value)
    # A change covers its own setting only, also if the file has the new value already.
    with pytest.raises(ConfigError, match=r"other settings \(sampler\.temperature: 1\.0, now 0\.7\)"):
        resume_with(config_of("optimizer.lr=0.5", "sampler.temperature=0.7"), ["optimizer.lr=0.5"], checkpoints)
    assert resume_with(config_of("optimizer.lr=0.5"), ["optimizer.lr=0.5"], checkpoints)[0].optimizer.lr == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "model.name=n",
            r"model.name cannot change in the middle of a run: .*model.name=.*step-000005/model and another",
        ),
        ("model.dtype=bfloat16", "weights of this model"),
        ("lora.r=4", "adapters of this shape"),
        ("optimizer.name=sgd", "state of this optimiser"),
        ("reference.name=n", "different references"),
        ("reference.decay=0.9", "different references"),
        ("algorithm.name=dapo", "state of this algorithm"),
        ("algorithm.args.use_critic=true", "a critic only if"),
        ("data.held_out_share=0.1", "on which it has trained"),
        ("run.seed=1", "state of the random numbers"),
        ("run.steps=200", "run.steps may differ in a resumed run: pass it as KEY=VALUE, without --change"),
        ("logging.loggers=[csv]", "logging.loggers may differ"),
        ("optimizer.lr=0", "must be greater than 0"),
        ("optimizer.rl=1", "did you mean optimizer.lr"),
    ],
)
def test_changes_that_no_run_can_make(checkpoints: Checkpoints, change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resume_with(
            read_config({**config_of("reference.name=r").to_dict(), "reference": {"name": "start"}}),
            [change],
            checkpoints,
        )


def test_a_change_needs_a_checkpoint(tmp_path: Path) -> None:
    nothing = Checkpoints(tmp_path / "checkpoints")
    assert resume_with(config_of(), [], nothing) == (config_of(), None, [])
    with pytest.raises(
        ConfigError, match=r"has no checkpoint to change: pass optimizer\.lr=1 run\.steps=3 without --change"
    ):
        resume_with(config_of(), ["optimizer.lr=1", "run.steps=3"], nothing)


def test_new_numbers_of_a_checkpoint_leave_its_files(checkpoints: Checkpoints) -> None:
    _, saved, _ = resume_with(config_of(), ["optimizer.lr=1e-5"], checkpoints)
    assert saved is not None
    checkpoints.renumber(saved)
    last = checkpoints.latest()
    assert last == saved
    assert (last.folder / "weights").read_text() == "1"
    assert resume_with(config_of(), [], checkpoints)[0].optimizer.lr == 1e-5


def test_the_prompts_of_steps_of_different_size() -> None:
    """By hand: two steps of 8 prompts, three of 2, one of 4."""
    changes: Any = [
        {"step": 2, "key": "data.num_prompts", "before": 8, "now": 2},
        {"step": 2, "key": "optimizer.lr", "before": 3, "now": 5},
        {"step": 5, "key": "data.num_prompts", "before": 2, "now": 4},
    ]
    assert prompts_used(6, 4, changes) == 2 * 8 + 3 * 2 + 4
    assert (prompts_used(5, 4, changes), prompts_used(6, 4, [])) == (22, 24)


def state_after(saved: nn.Module, now: nn.Module, *keys: str, **args: Any) -> dict[str, float]:
    """The state with which a run continues. Both coefficients charge the KL in the loss."""
    old, new = (
        make_algorithm("grpo", nn.Embedding(9, 9), reference=nn.Embedding(9, 9), kl_loss_coeff=each, **given)
        for each, given in ((saved, {}), (now, args))
    )
    state = changed_state(old.state_dict(), new, now, set(keys))
    new.load_state_dict(state)
    names = ("value", "average", "warmup_left", "clip_high")
    return {
        name: float(x)
        for key, x in state.items()
        for name in names
        if key.startswith("loss.") and key.endswith(f".{name}") and isinstance(x, torch.Tensor)
    }


def adaptive(init: float, target: float = 1.0) -> PIKLCoefficient:
    return PIKLCoefficient(init, target, warmup=4)


def test_state_continues_and_numbers_of_the_settings_change() -> None:
    used = adaptive(0.2)
    used.update(3.0, n=1)
    value = used().item()
    assert value != pytest.approx(0.2)
    kept = {"average": 3.0, "warmup_left": 0.0, "clip_high": pytest.approx(0.2)}
    assert state_after(used, adaptive(0.1, 5.0), "kl.target") == {**kept, "value": pytest.approx(value)}
    assert state_after(used, adaptive(0.1), "kl.coefficient") == {**kept, "value": pytest.approx(0.1)}
    wide = state_after(
        used, adaptive(0.1), "algorithm.args.objective_args.clip_high", objective_args={"clip_high": 0.4}
    )
    assert wide == {**kept, "value": pytest.approx(value), "clip_high": pytest.approx(0.4)}
    # A first target: the coefficient continues from the fixed one, unless that is 0.
    for fixed, begins in ((0.03, 0.03), (0.0, 0.1)):
        got = state_after(FixedKLCoefficient(fixed), adaptive(0.1), "kl.target")
        assert got == {**kept, "average": 0.0, "warmup_left": 4.0, "value": pytest.approx(begins)}
    assert state_after(used, FixedKLCoefficient(0.07), "kl.target")["value"] == pytest.approx(0.07)
    assert state_after(FixedKLCoefficient(0.3), FixedKLCoefficient(0.5), "kl.coefficient")["value"] == 0.5
