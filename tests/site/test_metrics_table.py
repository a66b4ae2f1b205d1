"""Every metric that a loss, a correction or a replica reports is described, and the page is up to date."""

from __future__ import annotations

import importlib.util
from typing import get_args

import pytest
import torch
from tensordict import TensorDict

from project import PROJECT
from torchrl_llm_kl.diagnostics import METRICS, describe_metric
from torchrl_llm_kl.losses import (
    ImportanceWeights,
    OffPolicySequenceMask,
    RejectionMask,
    TopEntropyMask,
    available_objectives,
    get_objective,
    mismatch_metrics,
    value_error,
)
from torchrl_llm_kl.losses._parts import TermPart, dummy_inputs
from torchrl_llm_kl.losses._policy_loss import common_metrics
from torchrl_llm_kl.losses.corrections import Divergence, correction_metrics
from torchrl_llm_kl.service.replica._stats import ReplicaStats
from torchrl_llm_kl.tasks import reward_metrics

SCRIPT = PROJECT / "docs" / "build_metrics_table.py"
# Settings that report more than the defaults do.
SETTINGS = {
    "ppo": [{"enable_sequence_masking": True}],
    "cispo": [{"enable_mask_clip": True}],
    "rec": [{"clip_mode": "two-side"}],
    "dpo": [{"weighting": "probability"}],
    "mix_chord": [{"mu_decay_steps": 10}],
}
CORRECTIONS = [
    ImportanceWeights(mode="truncate"),
    ImportanceWeights(mode="mask", low=0.5, high=5.0),
    *(RejectionMask(name, high=0.5) for name in get_args(Divergence)),
    OffPolicySequenceMask(delta=0.1),
    TopEntropyMask(),
]
# Counters without a normal value.
COUNTERS = {"uptime", "requests", "tokens", "batches", "largest_batch", "busy"}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("build_metrics_table", SCRIPT)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    return module


def reported() -> dict[str, set[str]]:
    """Names of all metrics, by who reports them."""
    found: dict[str, set[str]] = {}
    for name in available_objectives():
        for hyper in [{}, *SETTINGS.get(name, [])]:
            part = TermPart(get_objective(name), **hyper)
            terms = part(dummy_inputs(part))
            found.setdefault(name, set()).update(*(term.metrics for term in terms))
    for correction in CORRECTIONS:
        label = f"{type(correction).__name__}({correction.extra_repr()})"
        found[label] = set(correction(dummy_inputs(correction))[1])
    zeros = torch.zeros(1, 2)
    mask = zeros == 0
    found["the product of weights"] = set(correction_metrics(zeros, mask))
    found["mismatch"] = set(mismatch_metrics(zeros, zeros, mask))
    inputs = dict.fromkeys(("log_prob", "old_log_prob", "sampler_log_prob", "ref_log_prob", "entropy"), zeros)
    found["all losses"] = set(common_metrics({**inputs, "mask": mask}))
    (critic,) = value_error(zeros, mask, value_target=zeros, old_value=zeros)
    found["critic"] = set(critic.metrics)
    found["task"] = set(reward_metrics(TensorDict(next={"reward_failures": torch.zeros(1, 1)}, batch_size=[1])))
    found["replica"] = set(ReplicaStats().snapshot()) - COUNTERS
    return found


def test_every_reported_metric_is_described() -> None:
    missing = {
        who: sorted(name for name in names if describe_metric(name) is None) for who, names in reported().items()
    }
    assert not {who: names for who, names in missing.items() if names}


def test_every_described_metric_is_reported() -> None:
    names = set().union(*reported().values())
    described = {known for known in METRICS if "<" not in known and METRICS[known].origin != "service"}
    assert described <= names, sorted(described - names)


def test_the_page_is_up_to_date(script) -> None:
    assert script.PAGE.read_text(encoding="utf-8") == script.render(), "run `make docs`"


def test_a_number_at_the_end_is_that_of_a_second_correction() -> None:
    assert describe_metric("weight_max_2") is METRICS["weight_max"]
    assert describe_metric("seq_mean_k3_seq_masked_fraction") is METRICS["<divergence>_seq_masked_fraction"]
    assert describe_metric("token_k4_masked_fraction") is None
