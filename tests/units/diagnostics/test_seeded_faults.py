"""Seeded faults are named first, and clean batches raise no alarm.

Thresholds were chosen on seeds from 100 on; these tests and the table of ``docs/doctor.md`` use seeds below.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from seeded import FAMILIES, FAULTS, Seeded, clean_batches, make_model, make_prompts, make_tokenizer, sample
from torchrl_llm_kl import Sampling, diagnose
from torchrl_llm_kl.diagnostics._rescored import Top
from torchrl_llm_kl.scoring import truncate
from toy_tokenizer import CHATML

#: One way to seed each of the twelve faults.
TWELVE = [name for name in FAULTS if "raw log-probs" not in name.partition(",")[2]]
#: What the evidence says of the sampler's setting: its name, value and tolerance.
ESTIMATES = {
    "1 raw log-probs": ("temperature_of_log_probs", 1.0, 0.0),
    "2 wrong temperature": ("temperature_of_log_probs", 0.8, 0.001),
    "2 wrong temperature, raw log-probs": ("temperature_of_tokens", 0.8, 0.1),
    "3 top-p": ("top_p", 0.9, 0.005),
    "3 top-p, raw log-probs": ("top_p", 0.9, 0.02),
    "4 top-k": ("top_k", 10, 0),
    "4 top-k, raw log-probs": ("top_k", 10, 0),
    "8 off by one": ("shift", 1, 0),
}


def named(fault: str, family: str, seed: int) -> None:
    seed_it, causes = FAULTS[fault]
    batch, given = seed_it(family, seed)
    before = {key: str(value) for key, value in batch.items(True, True)}
    diagnosis = diagnose(batch, tokenizer=make_tokenizer(), **given)
    assert diagnosis.worst is not None, diagnosis
    assert diagnosis.worst.cause in causes, diagnosis
    assert diagnosis.worst.confidence >= 0.6
    assert diagnosis.exit_code == 1
    if fault in ESTIMATES:
        name, value, tolerance = ESTIMATES[fault]
        assert diagnosis.worst.evidence[name] == pytest.approx(value, abs=tolerance), diagnosis
    assert {key: str(value) for key, value in batch.items(True, True)} == before


def test_twelve_faults() -> None:
    assert len({name.split()[0].rstrip("ab") for name in TWELVE}) == 12


@pytest.mark.parametrize("fault", TWELVE)
def test_a_seeded_fault_is_named_first(fault: str) -> None:
    named(fault, FAMILIES[list(FAULTS).index(fault) % len(FAMILIES)], 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_named_first_in_every_family(fault: str, seed: int) -> None:
    named(fault, FAMILIES[seed], seed)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_clean_batch_raises_no_alarm(family: str) -> None:
    for batch, given in clean_batches(family, 0, 2):
        assert diagnose(batch, tokenizer=make_tokenizer(), **given).faults == ()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_alarm_in_many_clean_batches(family: str) -> None:
    """40 of each family: 200 in all."""
    batches = list(clean_batches(family, 1, 40))
    assert len(batches) == 40
    for batch, given in batches:
        diagnosis = diagnose(batch, tokenizer=make_tokenizer(), **given)
        assert diagnosis.faults == (), diagnosis


def rollout(temperature: float = 1.0, *, precise: bool = True, template: str = CHATML, **settings: Any) -> Seeded:
    """A policy of one family, and what it samples in its own precision or in bfloat16."""
    model = make_model("llama", 0)
    sampler = model if precise else copy.deepcopy(model).bfloat16()
    found = sample(sampler, make_prompts(12, 0, template), 0, temperature=temperature, **settings)
    prompts = [p for p in make_prompts(12, 0) for _ in range(8)]
    return replace(found, prompts=prompts).batch(), {"policy": model}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_answers_of_another_model_are_of_no_temperature(family: str) -> None:
    """Without its log-probs, as data has none; answers of the policy itself at a temperature have one."""
    policy, prompts = make_model(family, 0), make_prompts(12, 0)
    causes = []
    for model, temperature in ((make_model(family, 5), 1.0), (policy, 1.3)):
        batch = sample(model, prompts, 0, temperature=temperature).batch().exclude("log_probs")
        (found,) = diagnose(batch, policy=policy, tokenizer=make_tokenizer()).faults
        causes.append(found.cause)
    assert causes == ["other_sampling", "wrong_temperature"]


#: How an engine samples, how its tokens are scored, and what is found: its log-probs are raw in all cases, as vLLM's are.
RECORDED: dict[str, tuple[dict[str, Any], Sampling, str | None]] = {
    "T = 1": ({}, Sampling(), None),
    "T = 0.7": ({"temperature": 0.7}, Sampling(0.7), "raw_log_probs"),
    "T = 1.5": ({"temperature": 1.5}, Sampling(1.5), "raw_log_probs"),
    "top-p 0.8": ({"top_p": 0.8}, Sampling(top_p=0.8), "raw_log_probs"),
    "top-k 20": ({"top_k": 20}, Sampling(top_k=20), "raw_log_probs"),
    "T = 0.8, top-k 20, top-p 0.9": (
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9}, Sampling(0.8, top_k=20, top_p=0.9), "raw_log_probs"
    ),
    "top-k 20, scored plainly": ({"top_k": 20}, Sampling(), "top_k"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "seed"), [(name, 3 * (i % 2)) for i, name in enumerate(RECORDED)])
def test_what_an_engine_records_by_default(name: str, seed: int) -> None:
    """Raw log-probs say nothing of what was sampled, so they are no reason to sample or to score at 1."""
    sampled, scored, cause = RECORDED[name]
    model = make_model(FAMILIES[seed], seed)
    prompts = make_prompts(12 if cause == "top_k" else 2, seed)  # a truncation of the tokens alone needs many of them
    batch = sample(model, prompts, seed, raw=True, **sampled).batch()
    diagnosis = diagnose(batch, policy=model, tokenizer=make_tokenizer(), sampling=scored)
    assert (None if diagnosis.worst is None else diagnosis.worst.cause) == cause, diagnosis
    assert len(diagnosis.faults) == (cause is not None), diagnosis
    if cause == "raw_log_probs":
        assert diagnosis.worst is not None
        assert diagnosis.worst.evidence["temperature_of_log_probs"] == 1.0
        assert "processed_logprobs" in diagnosis.worst.remedy


def test_both_causes_are_named_where_tokens_cannot_decide() -> None:
    """24 tokens are as likely at 1 as at 0.95: raw log-probs come first, since their remedy does no harm."""
    model = make_model("llama", 1)
    for sampled in (0.95, 1.0):
        batch = sample(model, make_prompts(2, 1), 1, temperature=sampled, raw=True).batch(slice(0, 1))
        diagnosis = diagnose(batch, policy=model, temperature=0.95)
        causes = [each.cause for each in diagnosis.findings if each.severity == "fault"]
        assert causes == ["raw_log_probs", "wrong_temperature"], diagnosis
        assert diagnosis.worst is diagnosis.findings[0]
        assert [each.cause for each in diagnosis.faults] == ["raw_log_probs"]


#: How raw log-probs are sampled and scored, and what the tokens tell.
OVERRULED: dict[str, tuple[dict[str, Any], Sampling, set[str]]] = {
    "a temperature": ({}, Sampling(0.7), {"wrong_temperature"}),
    "top-p": ({}, Sampling(top_p=0.8), {"scored_truncation"}),
    "top-k": ({}, Sampling(top_k=20), {"scored_truncation"}),
    "both": ({}, Sampling(0.7, top_p=0.9), {"wrong_temperature", "scored_truncation"}),
    "one of both": ({"temperature": 0.6}, Sampling(0.6, top_p=0.8), {"scored_truncation", "raw_log_probs"}),
}


@pytest.mark.filterwarnings("ignore::torchrl_llm_kl.SamplerMismatchWarning")
@pytest.mark.parametrize("name", OVERRULED)
def test_tokens_alone_overrule_raw_log_probs(name: str) -> None:
    """The same records of tokens that were *not* sampled as they are scored."""
    sampled, scored, causes = OVERRULED[name]
    model = make_model("qwen2", 2)
    batch = sample(model, make_prompts(6, 2), 2, raw=True, **sampled).batch()
    diagnosis = diagnose(batch, policy=model, sampling=scored)
    assert {each.cause for each in diagnosis.faults} - {"other_sampling"} == causes, diagnosis
    assert diagnosis.worst is not None
    assert diagnosis.worst.confidence > 0.9


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(top_k=3), Sampling(top_p=0.7), Sampling(min_p=0.2), Sampling(top_k=6, top_p=0.8),
        Sampling(top_p=0.9, min_p=0.1), Sampling(top_k=8, top_p=0.9, min_p=0.1), Sampling(),
    ],
)  # fmt: skip
def test_what_truncations_keep_together(sampling: Sampling) -> None:
    """Beside the logits of the scorer, token by token."""
    logits = 2 * torch.randn(40, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids = torch.arange(40) % 12
    log_probs = logits.log_softmax(-1)
    kept = truncate(logits, sampling).isfinite()
    top = Top(log_probs.gather(-1, ids[:, None])[:, 0], log_probs.sort(-1, descending=True).values, True)
    mass, inside = top.kept(sampling)
    torch.testing.assert_close(mass, (log_probs.exp() * kept).sum(-1))
    assert torch.equal(inside, kept.gather(-1, ids[:, None])[:, 0])


UNKNOWN = "{% for m in messages %}{{ '@@' + m['role'] + '@@ ' + m['content'] + ' %% ' }}{% endfor %}{{ '@@bot@@ ' }}"
#: How it is sampled, how it is scored, and what is found, the most certain first.
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "min-p": ({"min_p": 0.1}, {}, ["min_p"]),
    "greedy": ({"top_k": 1}, {}, ["top_k"]),
    "another top-p": ({"top_p": 0.95}, {"sampling": Sampling(top_p=0.9)}, ["top_p"]),
    "raw log-probs of a temperature and top-p": (
        {"temperature": 0.7, "top_p": 0.9, "raw": True}, {"temperature": 0.7}, ["raw_log_probs", "top_p"]
    ),
    "a temperature that is not sampled": ({}, {"temperature": 0.7}, ["wrong_temperature"]),
    "a truncation that is not sampled": ({}, {"sampling": Sampling(top_p=0.8)}, ["scored_truncation", "other_sampling"]),
    "top-k in bfloat16": ({"top_k": 10, "precise": False}, {}, ["top_k"]),
    "a temperature in bfloat16": ({"temperature": 0.8, "precise": False}, {}, ["wrong_temperature"]),
    "a template that is not known": ({"template": UNKNOWN}, {}, ["chat_template"]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchrl_llm_kl.SamplerMismatchWarning")
@pytest.mark.parametrize("name", OTHERS)
def test_other_faults_and_two_at_once(name: str) -> None:
    sampled, scored, causes = OTHERS[name]
    batch, given = rollout(**sampled)
    diagnosis = diagnose(batch, tokenizer=make_tokenizer(), **given, **scored)
    assert [each.cause for each in diagnosis.faults] == causes, diagnosis


@pytest.mark.slow
def test_a_difference_is_a_fault_if_two_causes_are_as_likely() -> None:
    """In 24 tokens the likelihood does not tell a wrong temperature from raw log-probs."""
    model = make_model("gpt2", 300)
    rollout = sample(model, make_prompts(2, 304), 304, temperature=0.8)
    found = diagnose(rollout.batch(slice(0, 1)), policy=model)
    assert found.exit_code == 1
    assert {"mismatch", "wrong_temperature"} <= {each.cause for each in found.findings}


def test_older_weights_are_further_away() -> None:
    sizes = []
    for fault in ("5 weights of 1 step ago", "6 weights of 10 steps ago"):
        batch, given = FAULTS[fault][0]("gpt2", 0)
        worst = diagnose(batch, **given).worst
        assert worst is not None
        sizes.append(worst.evidence["kl_of_weights"])
    assert sizes[1] > 4 * sizes[0] > 0  # type: ignore[operator]
