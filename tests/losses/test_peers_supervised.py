"""Equality with the peers where they are right, and the deliberate differences.

Runs where TORCHRL_LLM_KL_PEERS names a folder with unpacked wheels (see ``peers.py``).
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import peers
import pytest
import torch
from by_hand import own_names
from objective_cases import random_batch
from torch import Tensor
from torch.testing import assert_close

from torchrl_llm_kl.losses import aggregate, count, get_objective, mu_schedule
from torchrl_llm_kl.losses.corrections import importance_weights, off_policy_sequence_mask, top_entropy_mask

HYPER = {"clip_range_low": 0.15, "clip_range_high": 0.3}


def trinity(monkeypatch: pytest.MonkeyPatch, module: str) -> Any:
    return peers.load(monkeypatch, "trinity", f"trinity.algorithm.policy_loss_fn.{module}")


def ours(name: str, batch: dict[str, Tensor], mode: str, **hyper: Any) -> tuple[Tensor, Tensor]:
    log_prob = batch["log_prob"].clone().requires_grad_()
    loss: Any = 0
    function = get_objective(name)
    for term in function(**{**batch, "log_prob": log_prob}, **own_names(function, **hyper)):
        how = term.aggregation or mode
        loss = loss + term.weight * aggregate(term.value, term.mask, how, denominator=count(term.mask, how))
    return loss.detach(), torch.autograd.grad(loss, log_prob)[0]


def theirs(function: Any, batch: dict[str, Tensor], **inputs: Any) -> tuple[Tensor, Tensor]:
    log_prob = batch["log_prob"].clone().requires_grad_()
    loss, _ = function(
        log_prob,
        action_mask=batch["mask"],
        old_logprob=batch["old_log_prob"],
        ref_logprob=batch["ref_log_prob"],
        advantages=batch["advantage"],
        expert_mask=batch["expert_mask"][:, 0],
        **inputs,
    )
    return loss.detach(), torch.autograd.grad(loss, log_prob)[0]


def agree(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize(
    ("name", "module", "peer", "hyper"),
    [
        ("sft", "sft_loss", "SFTLossFn", {}),
        ("sft_is", "chord_policy_loss", "SFTISLossFn", {}),
        ("sft_phi", "chord_policy_loss", "SFTPhiLossFn", {}),
        ("sft_phi", "chord_policy_loss", "SFTPhiLossFn", {"cutoff_prob": 0.35}),
    ],
)
def test_imitation_is_trinitys(
    monkeypatch: pytest.MonkeyPatch, mode: str, name: str, module: str, peer: str, hyper: dict[str, float]
) -> None:
    batch = random_batch(21)
    function = getattr(trinity(monkeypatch, module), peer)(loss_agg_mode=mode, **hyper)
    agree(ours(name, batch, mode, **hyper), theirs(function, batch))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("experts", ["some", "none", "all"])
def test_mix_is_trinitys_when_its_sizes_say_what_the_batch_is(
    monkeypatch: pytest.MonkeyPatch, dynamic: bool, experts: str
) -> None:
    batch = random_batch(22)
    if experts != "some":
        batch["expert_mask"] = torch.full_like(batch["mask"], experts == "all")
    number = int(batch["expert_mask"][:, 0].sum())
    sizes = {
        "use_dynamic_bsz": dynamic,
        "ppo_mini_batch_size": 6,
        "ppo_micro_batch_size_per_gpu": 6,
        "train_batch_size_usual": max(6 - number, 1),
        "train_batch_size_expert": max(number, 1),
    }
    modes = {"grpo_loss_agg_mode": "token-mean", "sft_loss_agg_mode": "seq-mean-token-sum"}
    function = trinity(monkeypatch, "mix_policy_loss").MIXPolicyLossFn(mu=0.35, **HYPER, **sizes, **modes)
    agree(ours("mix", batch, "none", mu=0.35, **HYPER, **modes), theirs(function, batch))


@pytest.mark.parametrize("phi", [False, True])
def test_mix_chord_is_trinitys(monkeypatch: pytest.MonkeyPatch, phi: bool) -> None:
    batch = random_batch(23)
    sizes = {"ppo_mini_batch_size": 6, "ppo_micro_batch_size_per_gpu": 6}
    sizes |= {"train_batch_size_usual": 4, "train_batch_size_expert": 2}
    hyper = {"mu_warmup_steps": 2, "mu_decay_steps": 7, "mu_peak": 0.8, "mu_valley": 0.15, "enable_phi_function": phi}
    function = trinity(monkeypatch, "chord_policy_loss").MIXCHORDPolicyLossFn(**hyper, **HYPER, **sizes)
    found = theirs(function, batch, step=torch.full((6,), 5))
    agree(ours("mix_chord", batch, "token-mean", step=5, **hyper, **HYPER), found)


def test_a_batch_of_experts_is_a_number_here_and_none_in_trinity(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = random_batch(24)
    batch["expert_mask"] = torch.ones_like(batch["mask"])
    sizes = {"ppo_mini_batch_size": 6, "ppo_micro_batch_size_per_gpu": 6}
    modes = {"loss_agg_mode": "seq-mean-token-mean"}
    function = trinity(monkeypatch, "chord_policy_loss").MIXCHORDPolicyLossFn(**HYPER, **sizes, **modes)
    assert theirs(function, batch, step=torch.zeros(6))[0].isnan()
    assert ours("mix_chord", batch, "seq-mean-token-mean", **HYPER)[0].isfinite()


@pytest.mark.parametrize(("warmup", "decay"), [(0, 0), (0, 9), (5, 0), (4, 8)])
def test_the_schedule_is_trinitys(monkeypatch: pytest.MonkeyPatch, warmup: int, decay: int) -> None:
    schedule = trinity(monkeypatch, "chord_policy_loss").mu_schedule_function
    for step in range(16):
        expected = schedule(step, warmup, decay, 0.9, 0.05)
        assert_close(mu_schedule(step, warmup, decay, 0.9, 0.05), expected)
        assert_close(float(mu_schedule(torch.tensor(step), warmup, decay, 0.9, 0.05)), expected, rtol=1e-6, atol=1e-7)


def test_dpo_is_trinitys_on_one_pair_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    hyper = {"beta": 0.3, "label_smoothing": 0.15}
    function = trinity(monkeypatch, "dpo_loss").DPOLossFn(**hyper)
    one = random_batch(25, rows=2)
    agree(ours("dpo", one, "seq-mean-token-sum", **hyper), theirs(function, one))
    # It adds up what several pairs differ by, as if they were one.
    several = random_batch(25, rows=6)
    assert not torch.isclose(ours("dpo", several, "seq-mean-token-sum", **hyper)[0], theirs(function, several)[0])


def trl_loss(kind: str, batch: dict[str, Tensor], **hyper: Any) -> tuple[Tensor, Tensor]:
    """TRL's trainer around log-probs that are there already. Its rows are all chosen ones, then all rejected ones."""
    trl = pytest.importorskip("trl")
    order = torch.cat([torch.arange(0, 6, 2), torch.arange(1, 6, 2)])
    mask = batch["mask"][order]
    log_prob = batch["log_prob"].clone().requires_grad_()
    seen = torch.where(mask, log_prob[order], 0)
    zeros = torch.zeros_like(seen)
    outputs = SimpleNamespace(log_probs=seen, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    settings = {
        "ld_alpha": None,
        "precompute_ref_logps": True,
        "f_divergence_type": "reverse_kl",
        "loss_types": [kind],
        "loss_weights": [1.0],
        "use_weighting": False,
        "aux_loss_enabled": False,
        "label_smoothing": 0.0,
        "accelerator": accelerator,
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
    }
    trainer = MagicMock(**{**settings, **hyper})
    model = MagicMock(training=False, return_value=outputs)
    trainer.model = model
    ref = torch.where(mask, batch["ref_log_prob"][order], 0).sum(-1)
    inputs = {
        "input_ids": torch.zeros(6, 6, dtype=torch.long),
        # The first token of a sequence has no log-prob.
        "completion_mask": torch.cat([torch.zeros(6, 1, dtype=torch.long), mask.long()], -1),
        "ref_chosen_logps": ref[:3],
        "ref_rejected_logps": ref[3:],
    }
    loss = trl.DPOTrainer._compute_loss(trainer, model, inputs, False)
    return loss.detach(), torch.autograd.grad(loss, log_prob)[0]


@pytest.mark.parametrize(
    ("name", "kind", "hyper", "own"),
    [
        ("dpo", "sigmoid", {"beta": 0.3}, {}),
        ("dpo", "sigmoid_norm", {"beta": 0.3}, {"length_normalised": True}),
        ("robust", "robust", {"beta": 0.4, "label_smoothing": 0.2}, {}),
        ("hinge", "hinge", {"beta": 0.6}, {}),
        ("ipo", "ipo", {"beta": 0.35}, {"length_normalised": True}),
        ("apo_zero", "apo_zero", {"beta": 0.45}, {}),
        ("sppo_hard", "sppo_hard", {"beta": 0.25}, {}),
    ],
)
def test_preferences_are_trls(name: str, kind: str, hyper: dict[str, float], own: dict[str, bool]) -> None:
    peers.folder("trinity")
    batch = random_batch(26)
    agree(ours(name, batch, "seq-mean-token-sum", **hyper, **own), trl_loss(kind, batch, **hyper))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("bounds", "threshold"), [({"high": 1.3}, 1.3), ({"mode": "mask", "low": 0.7, "high": 1.6}, "0.7_1.6")]
)
def test_importance_weights_are_verls(
    monkeypatch: pytest.MonkeyPatch, level: str, bounds: dict[str, Any], threshold: Any
) -> None:
    verl = peers.load(monkeypatch, "verl", "verl.trainer.ppo.rollout_corr_helper", ["verl.workers.config.actor"])
    batch = random_batch(27)
    old, sampler, mask = batch["old_log_prob"], batch["ref_log_prob"], batch["mask"]
    weights, metrics = importance_weights(old, sampler, mask, level=level, **bounds)
    expected, seen = verl.compute_rollout_correction_weights(
        old - sampler, mask.double(), rollout_is=level, rollout_is_threshold=threshold
    )
    assert_close(weights, expected)
    if level == "token":
        size = metrics["effective_sample_size"].item()
        assert_close(size, seen["rollout_is_eff_sample_size"], rtol=1e-5, atol=1e-6)


def test_masks_of_sequences_are_trls() -> None:
    peers.folder("trinity")
    trl = pytest.importorskip("trl")
    batch = random_batch(28)
    log_prob, old, advantage, mask = (batch[key] for key in ("log_prob", "old_log_prob", "advantage", "mask"))
    old = old + 0.2
    kept = trl.GRPOTrainer.get_off_policy_mask(advantage, log_prob, old, mask.double(), 0.05)
    weights, _ = off_policy_sequence_mask(log_prob, old, advantage, mask, delta=0.05)
    assert_close(weights, kept * mask)
    assert 0 < weights.sum() < mask.sum()


def test_the_tokens_of_most_entropy_are_trls_but_for_its_interpolation() -> None:
    """TRL interpolates the quantile between two tokens: it keeps the same tokens if the fraction is a whole number."""
    peers.folder("trinity")
    trl = pytest.importorskip("trl")
    entropy = random_batch(29)["log_prob"].abs()
    mask = torch.ones_like(entropy, dtype=torch.bool)
    accelerator = SimpleNamespace(pad_across_processes=lambda x, **_: x, gather=lambda x: x)
    kept = trl.GRPOTrainer.get_high_entropy_mask(SimpleNamespace(accelerator=accelerator), entropy, mask, 1 - 0.2)
    assert torch.equal(top_entropy_mask(entropy, mask, fraction=0.2)[0].bool(), kept)
