"""The doctor on rounding (noise of bfloat16 weights, a bfloat16 sampler) and on beginnings and ends of texts.

Thresholds were chosen on seeds from 100 on, and with a pre-trained model.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from seeded import clean, make_model, make_prompts, make_tokenizer, sample
from torchrl_llm_kl import LogProbScorer, diagnose
from toy_rollouts import make_model as make_bos_model, plain_log_probs
from toy_tokenizer import CHATML, build_bos_tokenizer


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bfloat16_noise_is_not_reported_as_older_weights(family: str) -> None:
    """With twelve layers, the decode of transformers and the packs differ by 0.05 nats on newer processors.

    Older processors have no bfloat16 products and round equally in all shapes.
    """
    model = make_model(family, 2, num_hidden_layers=12).to(torch.bfloat16)
    batch = sample(model, make_prompts(2, 2), 2).batch()
    diagnosis = diagnose(batch, policy=model, tokenizer=make_tokenizer())
    assert diagnosis.faults == (), diagnosis
    assert diagnosis.forwards == (3 if diagnosis.measures["mismatch/rms"] > 0.04 else 0)


@pytest.mark.parametrize("common", [0.25, 0.0])
def test_a_bfloat16_sampler_whose_kernels_round_differently(common: float) -> None:
    """Both engines share a quarter of the rounding. Without a shared part, a difference of this size means other weights."""
    model, rollout = clean("llama", 3)
    rows = [torch.cat(pair) for pair in zip(rollout.prompts, rollout.answers, strict=True)]
    masks = [torch.arange(len(r)) >= len(p) for r, p in zip(rows, rollout.prompts, strict=True)]

    def scored(dtype: torch.dtype) -> Tensor:
        scores = LogProbScorer(make_model("llama", 3).to(dtype)).score(rows, masks)
        return scores.values[torch.cat(masks)].double()

    exact = scored(torch.float32)
    own = scored(torch.bfloat16) - exact
    other = own[torch.randperm(len(own), generator=torch.Generator().manual_seed(0))]
    recorded = exact + common * own + (1 - common**2) ** 0.5 * other
    lengths = [len(answer) for answer in rollout.answers]
    batch = replace(rollout, log_probs=list(recorded.split(lengths))).batch()
    diagnosis = diagnose(batch, policy=model, tokenizer=make_tokenizer())
    assert diagnosis.worst is not None
    assert diagnosis.worst.cause == ("low_precision" if common else "stale_weights"), diagnosis
    if common:
        assert 0.1 < diagnosis.worst.evidence["correlation"] < 0.4
        assert diagnosis.worst.evidence["size_of_rounding"] == pytest.approx(1, abs=0.1)


# ------------------------------------------------------------------ beginnings


def bos_batch(tokenizer: Any, model: Any, sampled: int, stored: int, template: str | None) -> TensorDict:
    """A batch that stores ``stored`` BOS tokens per prompt, with the log-probs after ``sampled`` BOS tokens."""
    rng, rows, log_probs, bos = torch.Generator().manual_seed(4), [], [], tokenizer.bos_token_id
    for i in range(12):
        question = "abcdefghijkl"[: 3 + i]
        if template is not None:
            messages = [{"role": "user", "content": question}]
            question = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(question, add_special_tokens=False)
        answer = torch.randint(262, 286, (12,), generator=rng).tolist()
        seen = plain_log_probs(model, torch.tensor([bos] * sampled + prompt + answer))[sampled:]
        rows.append((torch.tensor([bos] * stored + prompt), torch.tensor([bos] * stored + prompt + answer)))
        log_probs.append(torch.cat([torch.zeros(stored + len(prompt)), seen[len(prompt) :]]))
    prompts, full = zip(*rows, strict=True)
    out, nested = TensorDict(batch_size=[len(rows)]), torch.nested.nested_tensor
    out["tokens", "prompt"], out["tokens", "full"] = nested(list(prompts)), nested(list(full))
    out["log_probs", "full"] = nested(log_probs)
    return out


@pytest.mark.parametrize("template", [None, CHATML], ids=["text", "chatml"])
@pytest.mark.parametrize(
    ("sampled", "stored", "name"), [(2, 1, "more"), (1, 2, "less"), (1, 0, "more"), (0, 1, "less")]
)
def test_an_additional_or_missing_bos_is_named(sampled: int, stored: int, name: str, template: str | None) -> None:
    tokenizer = build_bos_tokenizer(template)
    model = make_bos_model(tokenizer, 0)
    batch = bos_batch(tokenizer, model, sampled, stored, template)
    diagnosis = diagnose(batch, policy=model, tokenizer=tokenizer)
    assert diagnosis.worst is not None
    assert diagnosis.worst.cause == "chat_template", diagnosis
    assert diagnosis.worst.evidence["sampler_s_prompt"] == f"one beginning-of-text token {name}"


# ------------------------------------------------------------------ ends


@pytest.mark.parametrize(
    ("lengths", "cause"), [([5, 6, 7, 8, 8], "no_end_tokens"), ([8, 8, 8, 8, 6], "truncated_answers")]
)
def test_short_answers_without_end_tokens_are_not_truncated(lengths: list[int], cause: str) -> None:
    """No answer ends with an end token. 2 or 4 of the 5 answers are as long as the longest one."""
    full = [torch.arange(10, 12 + n) for n in lengths]
    tokens = {"prompt": torch.nested.nested_tensor([row[:2] for row in full]), "full": torch.nested.nested_tensor(full)}
    diagnosis = diagnose(TensorDict({"tokens": tokens}, batch_size=[5]), tokenizer=build_bos_tokenizer())
    found = {each.cause: each for each in diagnosis.findings}
    assert set(found) & {"no_end_tokens", "truncated_answers"} == {cause}
    assert found[cause].evidence["answers/truncated"] == 1
    assert ("padding token" in found[cause].remedy) == (cause == "no_end_tokens")
