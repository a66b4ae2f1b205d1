"""Every token that a run samples is in its mask, and the doctor has no complaint about a run that is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch

from torchrl_llm_kl import Sampling
from torchrl_llm_kl.tasks import make_env
from torchrl_llm_kl.training import make_sampler, train
from toy_rollouts import make_model, make_tokenizer
from toy_tokenizer import build_tokenizer
from train_lab import build_lab, settings


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_lab(tmp_path_factory.mktemp("lab"))


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
    config = settings(
        lab, tmp_path, "sampler.temperature=0.7", "sampler.top_k=5", "logging.doctor_every=1", "evaluation.every=0",
        "run.steps=2",
    )  # fmt: skip
    for row in train(config, say=lambda line: None).rows:
        assert not [name for name in row if name.startswith("doctor/fault/")]
        assert row["doctor/surprisal/entropy"] < 1.7, "of five tokens at most"  # log 5 = 1.609
    report = (tmp_path / "diagnosis.txt").read_text()
    assert "no fault" in report
    assert "nan:" not in report
