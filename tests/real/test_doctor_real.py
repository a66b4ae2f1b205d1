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

from torchrl_llm_kl import Diagnosis, diagnose

Rows = Sequence[Tensor]
#: The number of answers that are diagnosed. A forward of the model over more of them takes many seconds.
FEW, MORE = 6, 8


def rows_of(batch: TensorDictBase) -> tuple[list[Tensor], list[Tensor]]:
    """The prompts and answers of a batch."""
    prompts, full = (list(batch["tokens", name].unbind(0)) for name in ("prompt", "full"))
    return prompts, [row[len(prompt) :] for row, prompt in zip(full, prompts, strict=True)]


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


def few(batch: TensorDictBase) -> TensorDictBase:
    """The first answers of a batch, with the log-probs that the sampler recorded."""
    prompts, answers = rows_of(batch)
    stored = [row[len(p) :] for row, p in zip(batch["log_probs", "full"].unbind(0), prompts, strict=True)]
    return batch_of(prompts[:FEW], answers[:FEW], stored[:FEW])


@pytest.fixture(scope="module")
def clean(real: Any) -> TensorDictBase:
    return real.sampled()


def named(diagnosis: Diagnosis, cause: str, least: float = 0.8) -> dict[str, Any]:
    """The evidence of the most certain fault, which has this cause."""
    assert diagnosis.worst is not None
    assert diagnosis.worst.cause == cause, diagnosis
    assert diagnosis.worst.confidence > least, diagnosis
    return diagnosis.worst.evidence


def test_clean_answers_raise_no_alarm(real: Any, clean: TensorDictBase) -> None:
    diagnosis = diagnose(few(clean), policy=real.model, tokenizer=real.tokenizer)
    assert diagnosis.faults == (), diagnosis
    assert diagnosis.measures["mismatch/rms"] < 1e-3


@pytest.mark.parametrize(
    ("sampling", "cause", "value", "tolerance"),
    [({"temperature": 0.7}, "wrong_temperature", 0.7, 0.01), ({"top_k": 20}, "top_k", 20, 0)],
    ids=["temperature", "top_k"],
)
def test_sampling_settings_are_named_with_their_values(
    real: Any, sampling: dict[str, Any], cause: str, value: float, tolerance: float
) -> None:
    evidence = named(diagnose(few(real.sampled(**sampling)), policy=real.model, tokenizer=real.tokenizer), cause)
    name = "temperature_of_log_probs" if cause == "wrong_temperature" else cause
    assert evidence[name] == pytest.approx(value, abs=tolerance)


@pytest.mark.parametrize(("name", "tokenizer"), [("more", True), ("less", False)])
def test_a_second_bos_token_on_one_side(real: Any, clean: TensorDictBase, name: str, tokenizer: bool) -> None:
    prompts, answers = (rows[:FEW] for rows in rows_of(clean))
    twice = [torch.cat([prompt[:1], prompt]) for prompt in prompts]
    seen, stored = (twice, prompts) if name == "more" else (prompts, twice)
    batch = batch_of(stored, answers, recorded(real.model, seen, answers))
    given = {"tokenizer": real.tokenizer} if tokenizer else {}
    evidence = named(diagnose(batch, policy=real.model, **given), "chat_template")
    assert evidence["sampler_s_prompt"] == f"one beginning-of-text token {name}"


def test_a_template_with_other_markers(real: Any, clean: TensorDictBase) -> None:
    """The data has ChatML's markers, the sampler saw Gemma's. The tokenizer has no template of its own."""
    answers, questions = rows_of(clean)[1][:FEW], real.prompts[:FEW]
    chatml = [f"<|im_start|>user\n{each}<|im_end|>\n<|im_start|>assistant\n" for each in questions]
    gemma = [f"<start_of_turn>user\n{each}<end_of_turn>\n<start_of_turn>model\n" for each in questions]
    stored, seen = ([torch.tensor(real.tokenizer(text).input_ids) for text in texts] for texts in (chatml, gemma))
    batch = batch_of(stored, answers, recorded(real.model, seen, answers))
    evidence = named(diagnose(batch, policy=real.model, tokenizer=real.tokenizer), "chat_template")
    assert evidence["sampler_s_prompt"] == "Gemma"


def test_a_bfloat16_sampler(real: Any, clean: TensorDictBase) -> None:
    prompts, answers = (rows[:MORE] for rows in rows_of(clean))
    log_probs = recorded(copy.deepcopy(real.model).bfloat16(), prompts, answers)
    named(diagnose(batch_of(prompts, answers, log_probs), policy=real.model), "low_precision", least=0.7)


def test_changes_of_the_size_of_adapters_are_stale_weights(real: Any, clean: TensorDictBase) -> None:
    """The policy has random changes of rank 8, of 2 percent of the size of the weights."""
    policy, rng = copy.deepcopy(real.model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                rows, columns = weight.shape
                change = torch.randn(rows, 8, generator=rng) @ torch.randn(8, columns, generator=rng)
                weight += change * (0.02 * weight.std() / change.std())
    diagnosis = diagnose(few(clean), policy=policy)
    assert named(diagnosis, "stale_weights", least=0.6)["kl_of_weights"] > 0
