"""What a run refuses before it loads weights or moves an earlier run; masks of what it samples; what the doctor says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch

pytest.importorskip("omegaconf")
from torchrl_llm_kl import Sampling
from torchrl_llm_kl.tasks import make_env
from torchrl_llm_kl.training import ConfigError, load_inputs, make_sampler, train
from toy_rollouts import make_model, make_tokenizer
from toy_tokenizer import build_tokenizer
from train_lab import build_lab, settings


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_lab(tmp_path_factory.mktemp("lab"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("algorithm.args={std: bacth}", "std must be one of 'group', 'batch', got 'bacth'"),
        ("algorithm.args={aggregation: token_mean}", "'token_mean'"),
        ("algorithm.args={clip_low: 1.5}", "clip_low must be"),
        ("algorithm.args={clip_low: x}", "clip_low"),
    ],
)
def test_hyper_parameters(lab: Path, tmp_path: Path, change: str, message: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "metrics.jsonl").write_text("{}\n")  # of an earlier run
    config = settings(lab, out, change)
    with pytest.raises(ConfigError, match=r"algorithm.args is .*" + message):
        load_inputs(config)
    with pytest.raises(ConfigError, match=message):
        train(config, fresh=True)
    assert [path.name for path in out.iterdir() if path.name != ".lock"] == ["metrics.jsonl"]


def test_a_reference_of_another_vocabulary(lab: Path, tmp_path: Path) -> None:
    model = json.loads((lab / "model" / "config.json").read_text())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").touch()
    (tmp_path / "other" / "config.json").write_text(json.dumps({**model, "vocab_size": 777}))
    with pytest.raises(ConfigError, match=r"vocabulary of 777"):
        load_inputs(settings(lab, tmp_path / "out", f"reference.name={tmp_path / 'other'}"))


def test_a_folder_that_cannot_be(lab: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for run in (load_inputs, train):
        with pytest.raises(ConfigError, match=rf"run.out is .*, and {tmp_path}/file is a file"):
            run(settings(lab, tmp_path / "file" / "x"))
    with pytest.raises(ConfigError, match="which cannot be made"):
        train(settings(lab, Path("/proc/x")))


@pytest.mark.parametrize("pad_is_end", [True, False])
def test_each_sampled_token_is_in_the_mask(pad_is_end: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torchrl's own mask, ``tokens != pad``, no answer has an end where the padding token is the end token."""
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
        env = make_env(["hi", "a longer one"], lambda q, a, m: 0.0, tokenizer, num_prompts=2, group_size=2, seed=None)
        sampler = make_sampler(model, tokenizer, max_new_tokens=4, sampling=Sampling())
        batch = env.rollout(1, sampler).reshape(-1)
    width = batch["tokens", "prompt"].shape[-1]
    mask = batch["masks", "all_attention_mask"]
    assert mask[:, width:].int().tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    short, long = (len(tokenizer(text).input_ids) for text in batch["text", "prompt"][1:3])
    assert mask[:, :width].sum(-1).tolist() == [short, short, long, long]


def test_the_doctor_finds_no_fault_in_a_truncated_sampler(lab: Path, tmp_path: Path) -> None:
    """torchrl's wrapper would record log-probs of temperature 1, over all tokens, and none of an answer's first token."""
    changes = (
        "sampler.temperature=0.7",
        "sampler.top_k=5",
        "logging.doctor_every=1",
        "evaluation.every=0",
        "run.steps=2",
    )
    for row in train(settings(lab, tmp_path, *changes), say=lambda line: None).rows:
        assert not [name for name in row if name.startswith("doctor/fault/")]
        assert row["doctor/surprisal/entropy"] < 1.7, "of five tokens at most"  # log 5 = 1.609
    report = (tmp_path / "diagnosis.txt").read_text()
    assert "no fault" in report
    assert "nan:" not in report
