"""The doctor on answers of a pre-trained model: it is silent on clean data, and names the cause of each fault.

A batch is sampled once per sampling setting. Faults of prompts, precision and weights change what is recorded, or the policy.
"""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from real_model import Answers, RealModel
from torchrl_llm_kl import Diagnosis, Sampling, diagnose

Rows = Sequence[Tensor]
#: The number of answers that are diagnosed. A forward of the model over more of them takes many seconds.
FEW, MORE = 6, 8


@torch.no_grad()
def recorded(model: Any, prompts: Rows, answers: Rows) -> list[Tensor]:
    """The log-probs of answers as the model computes them after these prompts."""
    out = []
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = model(input_ids=torch.cat([prompt, answer])[None], logits_to_keep=len(answer) + 1).logits[0, :-1]
        out.append(logits.float().log_softmax(-1).gather(-1, answer[:, None])[:, 0])
    return out


def batch_of(prompts: Rows, answers: Rows, log_probs: Rows) -> TensorDictBase:
    """A batch of answers after stored prompts, with the sampler's log-probs."""
    rows = [
        (p, torch.cat([p, a]), torch.cat([p * 0.0, x])) for p, a, x in zip(prompts, answers, log_probs, strict=True)
    ]
    prompt, full, stored = (torch.nested.nested_tensor(list(column)) for column in zip(*rows, strict=True))
    return TensorDict(
        tokens=TensorDict(prompt=prompt, full=full, batch_size=[len(rows)]),
        log_probs=TensorDict(full=stored, batch_size=[len(rows)]),
        batch_size=[len(rows)],
    )


def sampled(real: RealModel, **sampling: Any) -> Answers:
    """One answer to each of the first prompts."""
    return real.sampled(Sampling(**sampling), prompts=MORE, answers=1, tokens=32)


def parts_of(answers: Answers, number: int = FEW) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The prompts, the answers, and the log-probs that the sampler recorded."""
    rows = list(zip(answers.rows, answers.prompts, strict=True))[:number]
    return [row[:start] for row, start in rows], [row[start:] for row, start in rows], answers.recorded[:number]


@pytest.fixture(scope="module")
def clean(real: RealModel) -> Answers:
    return sampled(real)


def named(diagnosis: Diagnosis, cause: str, least: float = 0.8) -> dict[str, Any]:
    """The evidence of the most certain fault, which has this cause."""
    assert diagnosis.worst is not None
    assert diagnosis.worst.cause == cause, diagnosis
    assert diagnosis.worst.confidence > least, diagnosis
    return diagnosis.worst.evidence


def test_clean_answers_raise_no_alarm(real: RealModel, clean: Answers) -> None:
    diagnosis = diagnose(batch_of(*parts_of(clean)), policy=real.model, tokenizer=real.tokenizer)
    assert diagnosis.faults == (), diagnosis
    assert diagnosis.measures["mismatch/rms"] < 1e-3


@pytest.mark.parametrize(
    ("sampling", "cause", "value", "tolerance"),
    [({"temperature": 0.7}, "wrong_temperature", 0.7, 0.01), ({"top_k": 20}, "top_k", 20, 0)],
    ids=["temperature", "top_k"],
)
def test_sampling_settings_are_named_with_their_values(
    real: RealModel, sampling: dict[str, Any], cause: str, value: float, tolerance: float
) -> None:
    evidence = named(
        diagnose(batch_of(*parts_of(sampled(real, **sampling))), policy=real.model, tokenizer=real.tokenizer), cause
    )
    name = "temperature_of_log_probs" if cause == "wrong_temperature" else cause
    assert evidence[name] == pytest.approx(value, abs=tolerance)


@pytest.mark.parametrize(("name", "tokenizer"), [("more", True), ("less", False)])
def test_a_second_bos_token_on_one_side(real: RealModel, clean: Answers, name: str, tokenizer: bool) -> None:
    prompts, answers, _ = parts_of(clean)
    twice = [torch.cat([prompt[:1], prompt]) for prompt in prompts]
    seen, stored = (twice, prompts) if name == "more" else (prompts, twice)
    batch = batch_of(stored, answers, recorded(real.model, seen, answers))
    given = {"tokenizer": real.tokenizer} if tokenizer else {}
    evidence = named(diagnose(batch, policy=real.model, **given), "chat_template")
    assert evidence["sampler_s_prompt"] == f"one beginning-of-text token {name}"


def test_a_template_with_other_markers(real: RealModel, clean: Answers) -> None:
    """The data has ChatML's markers, the sampler saw Gemma's. The tokenizer has no template of its own."""
    answers, questions = parts_of(clean)[1], real.prompts[:FEW]
    chatml = [f"<|im_start|>user\n{each}<|im_end|>\n<|im_start|>assistant\n" for each in questions]
    gemma = [f"<start_of_turn>user\n{each}<end_of_turn>\n<start_of_turn>model\n" for each in questions]
    stored, seen = ([torch.tensor(real.tokenizer(text).input_ids) for text in texts] for texts in (chatml, gemma))
    batch = batch_of(stored, answers, recorded(real.model, seen, answers))
    evidence = named(diagnose(batch, policy=real.model, tokenizer=real.tokenizer), "chat_template")
    assert evidence["sampler_s_prompt"] == "Gemma"


def test_a_bfloat16_sampler(real: RealModel, clean: Answers) -> None:
    prompts, answers, _ = parts_of(clean, MORE)
    log_probs = recorded(copy.deepcopy(real.model).bfloat16(), prompts, answers)
    named(diagnose(batch_of(prompts, answers, log_probs), policy=real.model), "low_precision", least=0.7)


def test_changes_of_the_size_of_adapters_are_stale_weights(real: RealModel, clean: Answers) -> None:
    """The policy has random changes of rank 8, of 2 percent of the size of the weights."""
    policy, rng = copy.deepcopy(real.model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                rows, columns = weight.shape
                change = torch.randn(rows, 8, generator=rng) @ torch.randn(8, columns, generator=rng)
                weight += change * (0.02 * weight.std() / change.std())
    diagnosis = diagnose(batch_of(*parts_of(clean)), policy=policy)
    assert named(diagnosis, "stale_weights", least=0.6)["kl_of_weights"] > 0
