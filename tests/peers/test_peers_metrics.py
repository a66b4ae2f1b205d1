"""Metrics of the mismatch of sampler and trainer beside verl's."""

from __future__ import annotations

import pytest

from peers import sampled, verl
from seeded import columns_of
from torchrl_llm_kl.diagnostics import measure


def test_verls_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    helper = verl(monkeypatch)
    names = {"training_log_ppl": "trainer_log_ppl", "rollout_log_ppl": "sampler_log_ppl", "training_ppl": "trainer_ppl"}
    names |= {"rollout_ppl": "sampler_ppl", "kl": "k1", "k3_kl": "k3"}
    for seed in range(5):
        old, sampler, mask = sampled(seed)
        theirs = helper.compute_offpolicy_metrics(old, sampler, mask.double())
        _, seen = helper.compute_rollout_correction_weights(old - sampler, mask.double(), "token", 1e30)
        found = measure(columns_of(mask.long().tolist(), old_log_prob=old.tolist(), sampler_log_prob=sampler.tolist()))
        for name, value in theirs.items():
            assert found[f"mismatch/{names.get(name, name)}"] == pytest.approx(value, rel=1e-6, abs=1e-7), name
        assert found["mismatch/ess_token"] == pytest.approx(seen["rollout_is_eff_sample_size"], rel=1e-6)
