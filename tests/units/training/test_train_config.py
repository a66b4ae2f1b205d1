"""Tests of configurations. Errors are raised before weights are loaded or files of an earlier run are moved."""

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch

pytest.importorskip("omegaconf")
from torchrl_llm_kl import Sampling, training
from torchrl_llm_kl.tasks import PromptOrder, make_env
from torchrl_llm_kl.training import ConfigError, TrainConfig, load_inputs, make_sampler, read_config, train
from torchrl_llm_kl.training._config import (
    DataConfig,
    LoraConfig,
    ModelConfig,
    RewardConfig,
    RewardPart,
    TurnsConfig,
    differences,
)
from torchrl_llm_kl.training._models import export_policy, load_policy, save_policy
from toy_rollouts import make_model, make_tokenizer
from toy_tokenizer import build_tokenizer
from train_lab import build_lab, go, settings

LEAST: dict[str, Any] = {"model": {"name": "m"}, "data": {"prompts": "p.jsonl"}, "reward": "r.py:f"}


def test_defaults_overrides_and_yaml(tmp_path, monkeypatch):
    changes = ["optimizer.lr=1e-5", "algorithm.args.objective_args.clip_high=0.28", "lora.r=4", "lora.targets=[q_proj]"]
    config = read_config(LEAST, [*changes, "kl.target=0.5", "evaluation.greedy=false", "run.seed=7"])
    assert (config.model.name, config.data.prompts, config.reward.function) == ("m", "p.jsonl", "r.py:f")
    assert (config.optimizer.lr, config.optimizer.betas) == (1e-5, [0.9, 0.999])
    assert (config.algorithm.name, config.algorithm.args) == ("grpo", {"objective_args": {"clip_high": 0.28}})
    assert (config.lora.r, config.lora.alpha, config.kl.target) == (4, 32.0, 0.5)
    file = tmp_path / "run.yaml"
    file.write_text(config.to_yaml())
    assert read_config(file) == read_config(config.to_dict()) == config
    text = "model: {name: m}\ndata: {prompts: p.jsonl, num_prompts: 3}\nreward:\n  functions:\n    a: r.py:f\n"
    file.write_text(text + "optimizer: {lr: 1e-4}\nrun: {out: 'runs/${model.name}'}\n")
    # what it holds is kept, and a later override wins
    changes = ["optimizer.lr=1e-5", "optimizer.lr=2e-5", "reward.functions.b={function: r.py:g, weight: 2}"]
    config = read_config(file, changes)
    assert (config.data.num_prompts, config.optimizer.lr, config.run.out) == (3, 2e-5, "runs/m")
    assert config.reward.parts == {"a": RewardPart("r.py:f"), "b": RewardPart("r.py:g", weight=2.0)}
    monkeypatch.setenv("HOME", "/home/me")
    config = read_config(LEAST, ["model.name=~/m", "data.prompts=~/p.jsonl", "run.out=~/runs/x", "reference.name=~/m"])
    assert (config.model.name, config.data.prompts) == ("/home/me/m", "/home/me/p.jsonl")
    assert (config.run.out, config.reference.name) == ("/home/me/runs/x", "/home/me/m")
    assert config.model.tokenizer is None
    example = training.example_config()
    file.write_text(example)
    reward = RewardConfig("rewards.py:correct")
    defaults = TrainConfig(model=ModelConfig(name="m"), data=DataConfig(prompts="p.jsonl"), reward=reward)
    assert defaults.lora is None
    assert read_config(file, ["model.name=m", "data.prompts=p.jsonl"]) == defaults
    written = example.replace("lora: null", "lora:").replace("turns: null", "turns:")
    file.write_text(written.replace("\n#  ", "\n  "))
    assert (read_config(file).lora, read_config(file).turns) == (LoraConfig(), TurnsConfig())
    assert all(f"\n{section.name}:" in example for section in fields(TrainConfig))
    assert max(map(len, example.splitlines())) <= 120


CONTROLLER = """
import torch


class Halving(torch.nn.Module):
    def __init__(self, init, target, factor=0.5):
        super().__init__()
        self.register_buffer("value", torch.tensor(float(init)))
        self.target, self.factor = target, factor

    def forward(self):
        return self.value

    def update(self, kl, n=1):
        self.value.mul_(self.factor)
"""


def test_a_controller_of_a_file(lab: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CONTROLLER)
    place = f"{tmp_path / 'mine.py'}:Halving"
    given = {
        "place": "reward",
        "target": 0.5,
        "coefficient": 0.8,
        "controller": place,
        "controller_args": {"factor": 0.25},
    }
    result, _ = go(lab, tmp_path / "out", "run.steps=3", "evaluation.every=0", kl=given)
    assert [row["coefficient"] for row in result.rows] == pytest.approx([0.8, 0.2, 0.05])
    with pytest.raises(ConfigError, match=r"kl\.controller is .*:Halving.*unexpected keyword argument 'speed'"):
        load_inputs(settings(lab, tmp_path / "other", kl={**given, "controller_args": {"speed": 1}}))


def test_a_checkpoint_of_an_earlier_version_has_the_defaults_of_later_settings() -> None:
    now = read_config(LEAST, ["sampler.max_weight=2.0"]).to_dict()
    old: Any = {name: dict(section) if isinstance(section, dict) else section for name, section in now.items()}
    for key in ("engine", "command", "max_weight"):
        del old["sampler"][key]
    del old["turns"]
    assert differences(old, now) == {}
    other = read_config(LEAST, ["sampler.max_weight=3.0", "turns.max=3", "turns.reply=r.py:f"]).to_dict()
    found = differences(old, other)
    assert found["sampler.max_weight"] == (2.0, 3.0)
    assert found["turns"] == (None, other["turns"])
    assert set(found) == {"sampler.max_weight", "turns"}


def test_empty_braces_replace_a_dict_and_other_braces_are_merged() -> None:
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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.learning_rate=1e-5", "unknown key optimizer.learning_rate: did you mean optimizer.lr?"),
        ("optimzer.lr=1", "unknown key optimzer.lr: did you mean optimizer.lr?"),
        ("run.stps=3", "did you mean run.steps?"),
        ("foo.bar=1", "a configuration has model, lora, reference,"),
        ("optimizer.foo=1", "optimizer has name, lr, critic_lr"),
        ("optimizer=3", "optimizer is a section: expected the names name, lr"),
        ("optimizer.lr=fast", "optimizer.lr is 'fast': Value 'fast' of type 'str' could not be converted to Float."),
        ("logging.loggers=csv", "logging.loggers is 'csv': Invalid value"),
        ("algorithm.args=3", "algorithm.args is 3: "),
        ("run.steps=3; run.steps.a=1", "run.steps is 3: "),
        (
            "reward.functions={a: {function: f, weight: x}}",
            "reward.functions is {'a': {'function': 'f', 'weight': 'x'}}: ",
        ),
        ("reward.functions={a: {weight: 1}}", "reward.functions.a.function is missing"),
        ("reward.functions={a: f}", "reward.function and reward.functions are both set"),
        ("reward=null", "reward.function is missing: set it to module.py:function"),
        ("optimizer.lr", "'optimizer.lr' changes no setting: expected key=value"),
        ("optimizer.betas[0]=0.8", "changes no setting: expected key=value, such as optimizer.betas=[0.9, 0.95]"),
        ("optimizer.lr=0", "optimizer.lr must be greater than 0, got 0.0."),
        ("optimizer.lr=1e400", "optimizer.lr is inf: expected a finite number."),
        ("sampler.top_p=1.5", "sampler.top_p must be greater than 0 and at most 1, got 1.5."),
        (
            "kl.place=los",
            "kl.place has the unknown value 'los'. Did you mean 'loss'? Known: preset, loss, reward, none.",
        ),
        ("run.seed=9223372036854775808", "run.seed must be at least 0 and at most"),
        (f"optimizer.lr={'9' * 400}", "int too large to convert to float"),
        ("run.steps=!!python/object/apply:os.system [ls]", "python/object/apply:os.system' (line 1, column 1)."),
        ("run.out=!!timestamp 2020-01-01", "is not YAML: Value 'date' is not a supported primitive type."),
        (
            "model.name=${nothing.there}",
            "model.name is '${nothing.there}': Interpolation key 'nothing.there' not found.",
        ),
        ("run.out=${run.out}", "run.out is '${run.out}': Recursive interpolation detected."),
        ('sampler.end=["\\n", ""]', "sampler.end has an empty text"),
        ("logging.loggers=[csv,foo]", "logging.loggers has the unknown logger 'foo'"),
        ("reference.name=base", "reference.name=base is the model without its adapters"),
        ("reference.every=3", "set reference.decay"),
        ("optimizer.warmup_steps=100", "expected less than run.steps"),
        ("kl.controller_args={integral: 0.1}", "set kl.target"),
        ("reference.name=none; kl.stop_above=1", "leaves no KL to charge or watch"),
        ("optimizer.betas=[0.9]", "expected two numbers"),
        ("logging.loggers=[csv,csv]", "loggers is ['csv', 'csv']: name each once"),
        ("algorithm.minibatches=65", "algorithm.minibatches is 65: a step has only 64 answers."),
        ("kl.place=none; kl.target=0.5", "choose loss or reward, or drop kl.target"),
        ("reference.name=none; kl.place=loss", "leaves no KL to charge"),
        ("checkpoints.final=best; evaluation.every=0", "set it, or take last"),
        ("lora.r=4; reference.decay=0.9", "need a separate model"),
        ("reference.name=base; lora.r=4; reference.service=shared", "shares a fixed model"),
        ("reference.service=shared; reference.decay=0.9", "shares a fixed model"),
    ],
)
def test_errors_name_the_setting(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_config(LEAST, override.split("; "))
    assert message in str(error.value)


def test_unknown_missing_and_changed_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)(?=.*run\.stps)(?=.*run\.sed)(?=.*optim:)"):
        read_config({**LEAST, "run": {"stps": 3, "sed": 1}, "optim": {}})
    message = r"data\.prompts is missing: set it in the file, or pass data\.prompts=\.\.\."
    with pytest.raises(ConfigError, match=message):
        read_config({"model": {"name": "m"}, "reward": "r.py:f"})
    with pytest.raises(ConfigError, match=r"model\.name is missing"):
        TrainConfig()
    taught = {**LEAST, "reward": None, "algorithm": {"name": "gkd", "teacher": "t"}}
    assert read_config(taught).reward.parts == {}
    with pytest.raises(ConfigError, match=r"^data\.held_out needs a reward"):
        read_config(taught, ["data.held_out=h.jsonl"])
    old = read_config(LEAST).to_dict()
    allowed = ["run.steps=200", "logging.loggers=[csv]", "checkpoints.keep=5", "kl.stop_above=3", "run.out=elsewhere"]
    assert differences(old, read_config(LEAST, allowed).to_dict()) == {}
    del old["sampler"]["end"]  # as in checkpoints of before it was a setting
    assert differences(old, read_config(LEAST).to_dict()) == {}
    assert differences(old, read_config(LEAST, ["sampler.end=[x]"]).to_dict()) == {"sampler.end": ([], ["x"])}
    changed = read_config(LEAST, ["optimizer.lr=1e-5", "algorithm.args.clip_high=0.3", "lora.r=4", "run.steps=7"])
    different = differences(old, changed.to_dict())
    lora = {key: pair for key, pair in different.items() if "lora" in key}
    others = {"optimizer.lr": (1e-6, 1e-5), "algorithm.args.clip_high": (None, 0.3)}
    assert different == {**lora, **others}
    assert lora["lora"] == (None, changed.to_dict()["lora"]), "a section that appears is one difference"
    with pytest.raises(FileNotFoundError, match=r"nothing\.yaml"):
        read_config(tmp_path / "nothing.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [", r"is not YAML: .*\(line 1, column 5\)\. Expected sections such as"),
        (b"- a\n", "holds a list: expected sections"),
        (b"run: {steps: 3}\nrun: {steps: 4}", "is not YAML: .*duplicate key run"),
        (b"run: {steps: " + b"9" * 5000 + b"}", "is not YAML: .*Exceeds the limit"),
        (b"\x80\x02}q\x00.", "is not YAML: .*can't decode"),
        (b"a\0b", "is not YAML: .*special characters"),
        (b"", r"model\.name is missing"),
    ],
)
def test_invalid_files(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        read_config(file, ["model.dtype=auto"])
    assert len(str(error.value)) < 400, "no excerpt of the file"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_lab(tmp_path_factory.mktemp("lab"))


HYPER = {
    "{advantage_args: {std: bacth}}": "std must be one of 'group', 'batch', got 'bacth'",
    "{aggregation: token_mean}": "'token_mean'",
    "{objective_args: {clip_low: 1.5}}": "clip_low must be",
    "{objective_args: {clip_low: x}}": "clip_low",
}


@pytest.mark.parametrize("change", HYPER)
def test_invalid_hyper_parameters_stop_a_run_before_files_are_moved(lab: Path, tmp_path: Path, change: str) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")  # of an earlier run
    config = settings(lab, tmp_path, f"algorithm.args={change}")
    with pytest.raises(ConfigError, match=r"algorithm.args is .*" + HYPER[change]):
        load_inputs(config)
    with pytest.raises(ConfigError, match=HYPER[change]):
        train(config, fresh=True)
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == ["metrics.jsonl"]


@pytest.mark.parametrize("change", ["name=dr_grpo", "args={aggregation: seq-mean-token-sum-norm}", "name=dapo"])
def test_losses_that_divide_by_the_longest_answer_take_the_limit_of_the_sampler(
    lab: Path, tmp_path: Path, change: str
) -> None:
    assert load_inputs(settings(lab, tmp_path, f"algorithm.{change}"))


def test_a_reference_with_another_vocabulary_is_refused(lab: Path, tmp_path: Path) -> None:
    shutil.copytree(lab / "model", other := tmp_path / "other")
    model = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**model, "vocab_size": 777}))
    with pytest.raises(ConfigError, match=r"vocabulary of 777"):
        load_inputs(settings(lab, tmp_path / "out", f"reference.name={other}"))


@pytest.mark.parametrize("pad_is_end", [True, False])
def test_the_mask_holds_each_sampled_token(pad_is_end: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrl's own mask, ``tokens != pad``, masks out the end of each answer if the padding token is the end token."""
    tokenizer = build_tokenizer(pad_token="<|im_end|>") if pad_is_end else make_tokenizer()
    model: Any = make_model(tokenizer, seed=0)
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    assert (end == pad) == pad_is_end
    model.generation_config.eos_token_id = [end, 7]
    hole = 9 if pad_is_end else pad  # a policy may sample the padding token, as any other
    answers = torch.tensor([[5, 6, end, pad], [5, 7, pad, pad], [5, hole, 6, 8], [end, pad, pad, pad]])

    def generate(input_ids: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        assert not kwargs.get("output_logits"), "[B, T, V] that nothing reads"
        return {"sequences": torch.cat([input_ids, answers], 1)}

    monkeypatch.setattr(model, "generate", generate)
    with tensordict.set_list_to_stack(True):
        two_of_two: Any = {"num_prompts": 2, "group_size": 2, "order": PromptOrder(seed=None)}
        env = make_env(["hi", "a longer one"], lambda q, a, m: 0.0, tokenizer, **two_of_two)
        sampler = make_sampler(model, tokenizer, max_new_tokens=4, sampling=Sampling())
        batch = env.rollout(1, sampler).reshape(-1)
    width = batch["tokens", "prompt"].shape[-1]
    mask = batch["masks", "all_attention_mask"]
    assert mask[:, width:].int().tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    short, long = (len(tokenizer(text).input_ids) for text in batch["text", "prompt"][1:3])
    assert mask[:, :width].sum(-1).tolist() == [short, short, long, long]


def test_the_doctor_finds_no_fault_in_a_truncated_sampler(lab, tmp_path, monkeypatch):
    """torchrl's wrapper would record log-probs of temperature 1 over all tokens, and none for the first token of an answer."""
    monkeypatch.setattr(training._report, "plot_curves", lambda *_, **__: None)
    changes = ["sampler.temperature=0.7", "sampler.top_k=5", "logging.doctor_every=1", "evaluation.every=0"]
    for row in go(lab, tmp_path, *changes, "run.steps=2")[0].rows:
        assert not [name for name in row if name.startswith("doctor/fault/")]
        assert row["doctor/surprisal/entropy"] < 1.7, "of five tokens at most"  # log 5 = 1.609
    report = (tmp_path / "diagnosis.txt").read_text()
    assert ("no fault" in report, "nan:" in report) == (True, False)


@pytest.mark.filterwarnings("error::FutureWarning")
def test_adapters_cause_no_warnings_of_other_libraries(lab: Path, tmp_path: Path) -> None:
    config = settings(lab, tmp_path / "out", "lora.r=4", "model.gradient_checkpointing=true")
    tokenizer = load_inputs(config).tokenizer
    save_policy(load_policy(config), tokenizer, tmp_path / "saved")
    export_policy(config, tmp_path / "saved", tokenizer, tmp_path / "final")
    assert (tmp_path / "final" / "config.json").exists()


def test_memory_and_disk_of_a_run_by_hand(lab: Path, tmp_path: Path) -> None:
    """Memory holds weights, gradients, Adam's two averages and a reference, a checkpoint weights and averages, in float32."""
    model = load_policy(settings(lab, tmp_path)).num_parameters()
    adapters = sum(
        each.numel() for each in load_policy(settings(lab, tmp_path, "lora.r=4")).parameters() if each.requires_grad
    )
    keep, none = (
        "checkpoints.keep=2",
        ("reference.name=none", "kl.place=none", "kl.target=null", "kl.controller_args={}"),
    )
    critic = ("algorithm.name=ppo", "evaluation.every=0")
    for changes, memory, disk in (
        ((), 5 * model, 3 * 3 * model + model + model),
        (("optimizer.name=sgd", "evaluation.every=0"), 3 * model, 3 * model + model),
        (none, 4 * model, 11 * model),
        (("lora.r=4",), model + 4 * adapters, 3 * 3 * adapters + adapters + model + adapters),
        (critic, 9 * model, 3 * 6 * model + model),
    ):
        inputs = load_inputs(settings(lab, tmp_path / "out", keep, *changes))
        assert (inputs.memory, inputs.disk) == (4 * memory, 4 * disk), changes
    half = load_inputs(settings(lab, tmp_path / "out", keep, "model.dtype=bfloat16"))
    assert half.memory == 2 * 5 * model


def test_a_change_removes_the_adapters_of_a_file() -> None:
    """Later changes count, so they may ask for adapters again."""
    source = {**LEAST, "lora": {"r": 4, "alpha": 8.0}}
    assert read_config(source, ["lora=null"]).lora is None
    again = read_config(source, ["lora=null", "lora.r=8"]).lora
    assert again is not None
    assert (again.r, again.alpha) == (8, 32.0)
    kept = read_config(source, ["lora.r=8"]).lora
    assert kept is not None
    assert (kept.r, kept.alpha) == (8, 8.0)
