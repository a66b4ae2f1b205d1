"""Seeded faults are named first, and clean batches raise no alarm.

Thresholds were chosen on seeds from 100 on; these tests and the figures of ``docs/doctor.md`` use seeds below.
"""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from seeded import FAMILIES, FAULTS, clean, clean_batches, make_model, make_prompts, make_tokenizer, sample, trained
from torchrl_llm_kl import Sampling, diagnose
from torchrl_llm_kl.diagnostics._rescored import Top
from torchrl_llm_kl.scoring import truncate
from toy_tokenizer import CHATML

#: One way to seed each of the twelve faults.
TWELVE = [name for name in FAULTS if "raw log-probs" not in name.partition(",")[2]]
assert len({name.split()[0].rstrip("ab") for name in TWELVE}) == 12
#: Fault -> name, value and tolerance of the sampler's setting in the evidence.
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


@pytest.mark.parametrize(
    ("fault", "family", "seed"),
    [
        *((fault, FAMILIES[(i - 1) % len(FAMILIES)], 0) for i, fault in enumerate(FAULTS) if fault in TWELVE),
        *(pytest.param(x, FAMILIES[i], i, marks=pytest.mark.slow) for i in range(len(FAMILIES)) for x in FAULTS),
    ],
)
def test_a_seeded_fault_is_named_first(fault: str, family: str, seed: int) -> None:
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


@pytest.mark.parametrize(("seed", "number"), [(0, 2), pytest.param(1, 40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_clean_batch_raises_no_alarm(family: str, seed: int, number: int) -> None:
    batches = list(clean_batches(family, seed, number))
    assert len(batches) == number
    for batch, given in batches:
        diagnosis = diagnose(batch, tokenizer=make_tokenizer(), **given)
        assert diagnosis.faults == (), diagnosis


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_answers_of_another_model_fit_no_temperature(family: str) -> None:
    """The batch has no log-probs, as data has none. Answers of the policy itself at a temperature do fit one."""
    for seed, temperature, cause in ((5, 1.0, "other_sampling"), (0, 1.3, "wrong_temperature")):
        answers = sample(make_model(family, seed), make_prompts(6, 0), 0, temperature=temperature)
        batch = answers.batch().exclude("log_probs")
        (found,) = diagnose(batch, policy=make_model(family, 0), tokenizer=make_tokenizer()).faults
        assert found.cause == cause


#: Sampling settings of an engine with raw log-probs, as in vLLM. The tokens are scored with the same settings.
RECORDED = [{"temperature": 0.7}, {"temperature": 1.5}, {"top_p": 0.8}, {"top_k": 20}]
RECORDED += [{"temperature": 0.8, "top_k": 20, "top_p": 0.9}]


@pytest.mark.parametrize(
    ("sampled", "cause", "seed"),
    [
        ({}, None, 0),
        *((sampled, "raw_log_probs", 3 - 3 * (i % 2)) for i, sampled in enumerate(RECORDED)),
        ({"top_k": 20}, "top_k", 0),  # scored plainly
    ],
)
def test_raw_log_probs_that_engines_record_by_default(sampled: dict[str, Any], cause: str | None, seed: int) -> None:
    """Raw log-probs do not show the sampling settings, so they are no reason to sample or to score at temperature 1."""
    scored = Sampling() if cause == "top_k" else Sampling(**sampled)
    model = make_model(FAMILIES[seed], seed)
    prompts = make_prompts(12 if cause == "top_k" else 2, seed)  # finding a truncation from tokens needs many of them
    batch = sample(model, prompts, seed, raw=True, **sampled).batch()
    diagnosis = diagnose(batch, policy=model, tokenizer=make_tokenizer(), sampling=scored)
    assert (None if diagnosis.worst is None else diagnosis.worst.cause) == cause, diagnosis
    assert len(diagnosis.faults) == (cause is not None), diagnosis
    if cause == "raw_log_probs":
        assert diagnosis.worst.evidence["temperature_of_log_probs"] == 1.0
        assert "processed_logprobs" in diagnosis.worst.remedy


def test_both_causes_are_named_where_tokens_cannot_decide() -> None:
    """24 tokens are about as likely at 1 as at 0.95. Raw log-probs come first, since their remedy does no harm."""
    model = make_model("llama", 1)
    for sampled in (0.95, 1.0):
        batch = sample(model, make_prompts(2, 1), 1, temperature=sampled, raw=True).batch(slice(0, 1))
        diagnosis = diagnose(batch, policy=model, temperature=0.95)
        causes = [each.cause for each in diagnosis.findings if each.severity == "fault"]
        assert causes == ["raw_log_probs", "wrong_temperature"], diagnosis
        assert diagnosis.worst is diagnosis.findings[0]
        assert [each.cause for each in diagnosis.faults] == ["raw_log_probs"]


@pytest.mark.filterwarnings("ignore::torchrl_llm_kl.SamplerMismatchWarning")
@pytest.mark.parametrize(
    ("temperature", "scored", "causes"),
    [
        (1.0, Sampling(0.7), {"wrong_temperature"}),
        (1.0, Sampling(top_p=0.8), {"scored_truncation"}),
        (1.0, Sampling(top_k=20), {"scored_truncation"}),
        (1.0, Sampling(0.7, top_p=0.9), {"wrong_temperature", "scored_truncation"}),
        (0.6, Sampling(0.6, top_p=0.8), {"scored_truncation", "raw_log_probs"}),
    ],
)
def test_only_the_tokens_decide_about_raw_log_probs(temperature: float, scored: Sampling, causes: set[str]) -> None:
    """The log-probs are raw as above, but the tokens were *not* sampled as they are scored."""
    model = make_model("qwen2", 2)
    batch = sample(model, make_prompts(6, 2), 2, raw=True, temperature=temperature).batch()
    diagnosis = diagnose(batch, policy=model, sampling=scored)
    assert {each.cause for each in diagnosis.faults} - {"other_sampling"} == causes, diagnosis
    assert diagnosis.worst.confidence > 0.9


TRUNCATIONS = [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.8}]
TRUNCATIONS += [{"top_p": 0.9, "min_p": 0.1}, {"top_k": 8, "top_p": 0.9, "min_p": 0.1}]


@pytest.mark.parametrize("settings", TRUNCATIONS, ids=str)
def test_combined_truncations_keep_the_tokens_that_the_scorer_keeps(settings: dict[str, Any]) -> None:
    """Compares mass and membership with the truncated logits of the scorer, token by token."""
    sampling = Sampling(**settings)
    logits = 2 * torch.randn(40, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    log_probs, kept = logits.log_softmax(-1), truncate(logits, sampling).isfinite()
    drawn = torch.arange(40), torch.arange(40) % 12
    mass, inside = Top(log_probs[drawn], log_probs.sort(-1, descending=True).values, True).kept(sampling)
    torch.testing.assert_close(mass, (log_probs.exp() * kept).sum(-1))
    assert torch.equal(inside, kept[drawn])


UNKNOWN = "{% for m in messages %}{{ '@@' + m['role'] + '@@ ' + m['content'] + ' %% ' }}{% endfor %}{{ '@@bot@@ ' }}"
RAW = {"temperature": 0.7, "top_p": 0.9, "raw": True}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchrl_llm_kl.SamplerMismatchWarning")
@pytest.mark.parametrize(
    ("sampled", "scored", "causes"),  # the most certain first
    [
        ({"min_p": 0.1}, {}, ["min_p"]),
        ({"top_k": 1}, {}, ["top_k"]),
        ({"top_p": 0.95}, {"sampling": Sampling(top_p=0.9)}, ["top_p"]),
        (RAW, {"temperature": 0.7}, ["raw_log_probs", "top_p"]),
        ({}, {"temperature": 0.7}, ["wrong_temperature"]),
        ({}, {"sampling": Sampling(top_p=0.8)}, ["scored_truncation", "other_sampling"]),
        ({"top_k": 10, "precise": False}, {}, ["top_k"]),
        ({"temperature": 0.8, "precise": False}, {}, ["wrong_temperature"]),
        ({"template": UNKNOWN}, {}, ["chat_template"]),
    ],
)
def test_other_faults_and_two_at_once(sampled: dict[str, Any], scored: dict[str, Any], causes: list[str]) -> None:
    """The sampler runs in the policy's own precision or in bfloat16."""
    model, settings = make_model("llama", 0), {"precise": True, "template": CHATML, **sampled}
    sampler = model if settings.pop("precise") else copy.deepcopy(model).bfloat16()
    found = sample(sampler, make_prompts(12, 0, settings.pop("template")), 0, **settings)
    batch = replace(found, prompts=[p for p in make_prompts(12, 0) for _ in range(8)]).batch()
    diagnosis = diagnose(batch, tokenizer=make_tokenizer(), policy=model, **scored)
    assert [each.cause for each in diagnosis.faults] == causes, diagnosis


def test_older_weights_have_a_larger_kl() -> None:
    model, rollout = clean("gpt2", 0)
    found = [diagnose(rollout.batch(slice(32)), policy=trained(model, rollout, steps, 0)).worst for steps in (1, 10)]
    assert [worst.cause for worst in found] == ["stale_weights"] * 2
    one, ten = (worst.evidence["kl_of_weights"] for worst in found)
    assert ten > 4 * one > 0
