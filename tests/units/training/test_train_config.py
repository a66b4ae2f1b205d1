"""A configuration is read with its types, and each error names the key and what to change."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("omegaconf")
from torchrl_llm_kl import training
from torchrl_llm_kl.training import (
    ConfigError,
    DataConfig,
    ModelConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
    read_config,
)
from torchrl_llm_kl.training._config import differences

LEAST: dict[str, Any] = {"model": {"name": "m"}, "data": {"prompts": "p.jsonl"}, "reward": "r.py:f"}


def test_defaults_and_overrides_which_survive_yaml(tmp_path: Path) -> None:
    changes = [
        "optimizer.lr=1e-5",
        "algorithm.args.clip_high=0.28",
        "lora.r=4",
        "lora.targets=[q_proj]",
        "kl.target=0.5",
    ]
    config = read_config(LEAST, [*changes, "evaluation.greedy=false", "run.seed=7"])
    assert (config.model.name, config.data.prompts, config.reward.functions) == ("m", "p.jsonl", "r.py:f")
    assert (config.optimizer.lr, config.optimizer.betas) == (1e-5, [0.9, 0.999])
    assert (config.algorithm.name, config.algorithm.args) == ("grpo", {"clip_high": 0.28})
    assert config.lora is not None
    assert (config.lora.r, config.lora.alpha, config.kl.target) == (4, 32.0, 0.5)
    file = tmp_path / "run.yaml"
    file.write_text(config.to_yaml())
    assert read_config(file) == read_config(config.to_dict()) == config
    file.write_text(
        "model: {name: m}\ndata: {prompts: p.jsonl, num_prompts: 3}\nreward:\n  functions:\n    a: r.py:f\n"
        "optimizer: {lr: 1e-4}\nrun: {out: 'runs/${model.name}'}\n"
    )  # what it holds is kept, and a later override wins
    changes = ["optimizer.lr=1e-5", "optimizer.lr=2e-5", "reward.functions.b={function: r.py:g, weight: 2}"]
    config = read_config(file, changes)
    assert (config.data.num_prompts, config.optimizer.lr, config.run.out) == (3, 2e-5, "runs/m")
    assert config.reward.functions == {"a": "r.py:f", "b": {"function": "r.py:g", "weight": 2}}


def test_braces_empty_a_setting_and_a_value_in_braces_is_added() -> None:
    held = {"place": "reward", "target": 0.5, "controller_args": {"proportional": 2.0}}
    source = {**LEAST, "kl": held, "algorithm": {"args": {"clip_low": 0.1, "advantage_args": {"std": "batch"}}}}

    def args(*overrides: str) -> tuple[Any, Any]:
        found = read_config(source, overrides)
        return found.kl.controller_args, found.algorithm.args

    plain = source["algorithm"]["args"]
    assert args() == ({"proportional": 2.0}, plain)
    assert args("kl.controller_args={}") == ({}, plain)
    assert args("kl.controller_args={integral: 0.1}") == ({"proportional": 2.0, "integral": 0.1}, plain)
    assert args("kl.controller_args={}", "kl.controller_args.integral=0.1") == ({"integral": 0.1}, plain)
    assert args("kl.controller_args.integral=0.1", "kl.controller_args={}") == ({}, plain)
    assert args("algorithm.args.advantage_args={}")[1] == {"clip_low": 0.1, "advantage_args": {}}
    assert held["controller_args"] == {"proportional": 2.0}, "the caller's own"


def test_the_example_holds_every_setting_and_its_default(tmp_path: Path) -> None:
    file = tmp_path / "example.yaml"
    file.write_text(training.example_config())
    config = read_config(file)
    assert config.lora is None
    reward = RewardConfig("rewards.py:correct")
    defaults = TrainConfig(model=ModelConfig(name="m"), data=DataConfig(prompts="p.jsonl"), reward=reward)
    assert read_config(file, ["model.name=m", "data.prompts=p.jsonl"]) == defaults
    with_lora = training.example_config().replace("lora: null", "lora:").replace("\n#  ", "\n  ")
    file.write_text(with_lora)
    assert read_config(file).lora is not None
    for section in fields(TrainConfig):
        assert f"\n{section.name}:" in training.example_config()
    assert training.settings_table().count("\n") > 60
    assert max(map(len, training.example_config().splitlines())) <= 120


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.learning_rate=1e-5", "unknown key optimizer.learning_rate: did you mean optimizer.lr?"),
        ("optimzer.lr=1", "unknown key optimzer: did you mean optimizer?"),
        ("data.num_generations=4", "did you mean data.group_size?"),
        ("lr=1e-5", "unknown key lr: did you mean optimizer.lr?"),
        ("lora.rank=8", "unknown key lora.rank: did you mean lora.r?"),
        ("run.stps=3", "did you mean run.steps?"),
        ("foo.bar=1", "there are model, lora, reference,"),
        ("optimizer.foo=1", "optimizer has name, lr, critic_lr"),
        ("optimizer=3", "optimizer is 3: expected a section with name, lr"),
        ("optimizer.lr=fast", "optimizer.lr is 'fast': expected a number."),
        ("run.steps=1.5", "run.steps is 1.5: expected a whole number."),
        ("evaluation.greedy=maybe", "evaluation.greedy is 'maybe': expected true or false."),
        ("logging.loggers=csv", "logging.loggers is 'csv': expected a list, each text."),
        ("algorithm.args=3", "algorithm.args is 3: expected names with values."),
        ("optimizer.lr", "'optimizer.lr' is no change of a setting: write it as key=value"),
        ("optimizer.lr=0", "optimizer.lr is 0: expected more than 0."),
        ("optimizer.lr=inf", "optimizer.lr is inf: expected a finite number."),
        ("sampler.top_p=1.5", "sampler.top_p is 1.5: expected at most 1."),
        ("data.group_size=0", "data.group_size is 0: expected at least 1."),
        ("kl.place=los", "choose one of preset, loss, reward, none. Did you mean 'loss'?"),
        ("optimizer.betas=[0.9]", "expected two numbers"),
        ("logging.loggers=[csv,foo]", "logging.loggers has the unknown logger 'foo'"),
        ("model.name=${nothing.there}", "nothing.there"),
        ("reference.name=base", "reference.name=base is the model without its adapters"),
        ("reference.every=3", "set reference.decay"),
        ("optimizer.warmup_steps=100", "expected fewer than run.steps"),
        ("kl.controller_args={integral: 0.1}", "set kl.target"),
        ("optimizer.betas[0]=0.8", "give the whole list"),
        ("run.seed=9223372036854775808", "run.seed is 9.22337e+18: expected at most"),
        ("logging.loggers=[csv,csv]", "'csv' more than once"),
        ("reward.functions=[]", "reward.functions is []: expected module.py:function"),
        ("reward=null", "reward.functions is None: expected module.py:function"),
        (f"run.steps={'9' * 400}", "run.steps is a whole number of 1329 bits: expected one of at most 64."),
        (f"run.steps=-{'9' * 400}", "run.steps is a whole number of 1329 bits"),
        (f"run.steps={'9' * 5000}", "99... has a value that cannot be read (Exceeds the limit"),
        (f"optimizer.lr={'9' * 400}", "optimizer.lr is a whole number of 1329 bits"),
        (f"optimizer.betas=[0.9, {'9' * 400}]", "optimizer.betas is a whole number of 1329 bits"),
        ("reward.functions={a: {function: f, weight: %s}}" % ("9" * 400), "functions.a.weight is a whole number"),
        ("run.steps=inf", "run.steps is 'inf': expected a whole number."),
        ("run.steps=1e400", "run.steps is inf: expected a whole number."),
        ("optimizer.lr=1e400", "optimizer.lr is inf: expected a finite number."),
        ("optimizer.lr=.nan", "optimizer.lr is nan: expected a finite number."),
        ("optimizer.betas=[.nan, 0.9]", "optimizer.betas is nan: expected a finite number."),
        ("algorithm.args.clip_high=.nan", "algorithm.args.clip_high is nan: expected a finite number."),
        ("run.threads=100000000000", "run.threads is 1e+11: expected at most 4096."),
        (
            "run.steps=!!python/object/apply:os.system [ls]",
            "'run.steps=!!python/object/apply:os.system [ls]' has a value that cannot be read (could not determine a "
            "constructor for the tag 'tag:yaml.org,2002:python/object/apply:os.system' (line 1, column 1)): expected YAML",
        ),
        ("run.out=!!timestamp 2020-01-01", "(Value 'date' is not a supported primitive type): expected YAML"),
        ("run.out=[", "'run.out=[' has a value that cannot be read (expected the node content"),
        ("run.out=a\0b", "has a value that cannot be read (special characters are not allowed): expected YAML"),
        ("run.out=*x", "has an alias (*name)"),
        ("run.out=${", "'run.out=${' has a value that cannot be read"),
        ("algorithm.args={null: 2}", "'algorithm.args={null: 2}' has a value that cannot be read"),
        ("algorithm.args=&a {x: *a}", "has an alias (*name)"),
        (f"algorithm.args.a={'[' * 400}{']' * 400}", "cannot be read (it is nested too deeply"),
        (f"algorithm.args.a={'[' * 30}{']' * 30}", "args.a is nested too deeply: expected at most 20 levels."),
        (f"algorithm.args.{'a.' * 90}b=1", "is nested too deeply: expected a key such as optimizer.lr."),
        ("run.out=${run.out}", "run.out is '${run.out}': Recursive interpolation detected."),
        ("lora.targets={a: b}", "lora.targets is {'a': 'b'}: expected a list, each text."),
        ("kl.place=none; kl.target=0.5", "choose loss or reward, or drop the target"),
        ("reference.name=none; kl.place=loss", "no KL to charge"),
        ("lora.r=4; reference.decay=0.9", "train without lora"),
        ("reference.name=base; lora.r=4; reference.service=shared", "holds a model of its own"),
        ("reference.service=shared; reference.decay=0.9", "for all runs that share it"),
        ("checkpoints.final=best; evaluation.every=0", "evaluate, or take last"),
        (f"run.steps={'a' * 5000}", f"run.steps is '{'a' * 96}...: expected a whole number."),
    ],
)
def test_what_is_wrong_is_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_config(LEAST, override.split("; "))
    assert message in str(error.value)


def test_all_unknown_keys_and_what_is_missing_are_named() -> None:
    with pytest.raises(ConfigError) as error:
        read_config({**LEAST, "run": {"stps": 3, "sed": 1}, "optim": {}})
    assert all(key in str(error.value) for key in ("run.stps", "run.sed", "optim:"))
    message = r"data\.prompts is missing: set it in the file, or pass data\.prompts=\.\.\."
    with pytest.raises(ConfigError, match=message):
        read_config({"model": {"name": "m"}, "reward": "r.py:f"})
    with pytest.raises(ConfigError, match=r"model\.name is missing"):
        TrainConfig()
    # numbers that no setting can hold, also where no YAML is read
    sections = {"model": ModelConfig("m"), "data": DataConfig("p.jsonl"), "reward": RewardConfig("r.py:f")}
    with pytest.raises(ConfigError, match=r"run\.steps is a whole number of 33220 bits: expected one of at most 64\."):
        TrainConfig(run=RunConfig(steps=10**10_000), **sections)
    with pytest.raises(ConfigError, match=r"algorithm\.args\.a is nan: expected a finite number\."):
        read_config({**LEAST, "algorithm": {"args": {"a": [1.0, float("nan")]}}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [", r"is no YAML of sections .*: .*\(line 1, column 5\)\.$"),
        (b"- a\n", "holds a list: expected sections"),
        (b"3", "is no YAML of sections"),
        (b"just text", "unknown key just text; there are model"),
        (b"run: {steps: 3}\nrun: {steps: 4}", "is no YAML of sections .*duplicate key run"),
        (b"run: {out: !!python/name:os.system }", "is no YAML of sections .*could not determine a constructor"),
        (b"run: {steps: " + b"9" * 400 + b"}", r"^run\.steps is a whole number of 1329 bits"),
        (b"run: {steps: " + b"9" * 5000 + b"}", "is no YAML of sections .*Exceeds the limit"),
        (b"run: {out: " + b"[" * 400 + b"]" * 400 + b"}", "is no YAML of sections .*nested too deeply"),
        (b"algorithm: {args: " + b"{a: " * 30 + b"1" + b"}" * 31, r"^algorithm\.args\.a.* is nested too deeply"),
        (b"algorithm: {args: &a {x: *a}}", "has an alias"),
        (b"\x80\x02}q\x00.", "is no YAML, nor text"),
        (b"a\0b", "is no YAML of sections .*special characters"),
        (b" " * (1 << 20) + b" ", "has 1,048,577 bytes, more than a configuration can have"),
        (b"", r"model\.name is missing"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        read_config(file, ["model.dtype=auto"])
    assert len(str(error.value)) < 400, "no excerpt of the file"


def test_what_is_no_file_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_config(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        read_config(tmp_path)
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match=r"pipe\.yaml is no regular file"):
        read_config(tmp_path / "pipe.yaml")


def test_only_some_settings_may_change_on_resuming() -> None:
    old = read_config(LEAST).to_dict()
    allowed = ["run.steps=200", "logging.loggers=[csv]", "checkpoints.keep=5", "kl.stop_above=3", "run.out=elsewhere"]
    assert differences(old, read_config(LEAST, allowed)) == []
    changed = read_config(LEAST, ["optimizer.lr=1e-5", "algorithm.args.clip_high=0.3", "lora.r=4", "run.steps=7"])
    found = differences(old, changed)
    assert "optimizer.lr: 1e-06, now 1e-05" in found
    assert "algorithm.args.clip_high: None, now 0.3" in found
    assert any(each.startswith("lora.r: ") for each in found)
    assert not any("run.steps" in each for each in found)


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = read_config(LEAST, ["model.name=~/m", "data.prompts=~/p.jsonl", "run.out=~/runs/x", "reference.name=~/m"])
    assert (config.model.name, config.data.prompts) == ("/home/me/m", "/home/me/p.jsonl")
    assert (config.run.out, config.reference.name) == ("/home/me/runs/x", "/home/me/m")
    assert config.model.tokenizer is None
