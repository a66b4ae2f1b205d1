"""Equality with the peers where they are right, and the deliberate differences.

Runs where TORCHRL_LLM_KL_PEERS names a folder with unpacked wheels (see ``peers.py``).
"""

from __future__ import annotations

import importlib
import itertools
from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import peers
from by_hand import own_names
from objective_cases import random_batch
from torchrl_llm_kl.losses import aggregate, count, get_objective, mu_schedule

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


@pytest.mark.parametrize(
    ("mode", "name", "module", "peer", "hyper"),
    [
        ("token-mean", "sft", "sft_loss", "SFTLossFn", {}),
        ("seq-mean-token-sum", "sft", "sft_loss", "SFTLossFn", {}),
        ("seq-mean-token-mean", "sft_is", "chord_policy_loss", "SFTISLossFn", {}),
        ("token-mean", "sft_phi", "chord_policy_loss", "SFTPhiLossFn", {}),
        ("seq-mean-token-mean", "sft_phi", "chord_policy_loss", "SFTPhiLossFn", {"cutoff_prob": 0.35}),
    ],
)
def test_imitation_is_trinitys(
    monkeypatch: pytest.MonkeyPatch, mode: str, name: str, module: str, peer: str, hyper: dict[str, float]
) -> None:
    batch = random_batch(21)
    function = getattr(trinity(monkeypatch, module), peer)(loss_agg_mode=mode, **hyper)
    agree(ours(name, batch, mode, **hyper), theirs(function, batch))


@pytest.mark.parametrize(("dynamic", "experts"), [(False, "some"), (True, "some"), (True, "none"), (False, "all")])
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


def test_the_schedule_is_trinitys(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = trinity(monkeypatch, "chord_policy_loss").mu_schedule_function
    for (warmup, decay), step in itertools.product([(0, 0), (0, 9), (5, 0), (4, 8)], range(16)):
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


def trainer_of(name: str) -> Any:
    """A trainer's class, from the installed TRL if it is the one in the folder of peers, whose trainers need all of it."""
    peers.folder("trl")
    trl = pytest.importorskip("trl", minversion="1.16")
    modules = {"cpo": "trl.experimental.cpo", "orpo": "trl.experimental.orpo"}
    module = importlib.import_module(modules[name]) if name in modules else trl
    return getattr(module, f"{name.upper()}Trainer")


def sharp_of(batch: dict[str, Tensor]) -> Tensor:
    return 0.8 * batch["log_prob"].detach() - 0.1


def trl_loss(kind: str, batch: dict[str, Tensor], **hyper: Any) -> tuple[Tensor, Tensor]:
    """TRL's trainer around log-probs that are there already. Its rows are all chosen ones, then all rejected ones."""
    trl = trainer_of("dpo")
    order = torch.cat([torch.arange(0, 6, 2), torch.arange(1, 6, 2)])
    mask = batch["mask"][order]
    log_prob = batch["log_prob"].clone().requires_grad_()
    seen = torch.where(mask, log_prob[order], 0)
    zeros = torch.zeros_like(seen)
    # Of the sum of squares of the distribution: log_prob at half the temperature is 2 log_prob less it.
    squares = 2 * seen.detach() - torch.where(mask, sharp_of(batch)[order], 0)
    outputs = SimpleNamespace(
        log_probs=seen, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(), log_sum_sq_probs=squares
    )
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
    ref = torch.where(mask, batch["ref_log_prob"][order], 0)
    if hyper.get("ld_alpha") is not None:  # TRL's own reference, whose lengths are those of the pairs
        reference = SimpleNamespace(log_probs=ref)
        trainer.precompute_ref_logps, trainer.ref_model.return_value = False, reference
    ref = ref.sum(-1)
    inputs = {
        "input_ids": torch.zeros(6, 6, dtype=torch.long),
        # The first token of a sequence has no log-prob.
        "completion_mask": torch.cat([torch.zeros(6, 1, dtype=torch.long), mask.long()], -1),
        "ref_chosen_logps": ref[:3],
        "ref_rejected_logps": ref[3:],
    }
    loss = trl._compute_loss(trainer, model, inputs, False)
    return loss.detach(), torch.autograd.grad(loss, log_prob)[0]


ALIGNED = [("dpo", "sigmoid"), ("apo_zero", "apo_zero"), ("nca_pair", "nca_pair")]


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
        ("exo_pair", "exo_pair", {"beta": 0.4, "label_smoothing": 0.05}, {}),
        ("nca_pair", "nca_pair", {"beta": 0.55}, {}),
        ("apo_down", "apo_down", {"beta": 0.65}, {}),
        ("aot", "aot", {"beta": 0.75, "label_smoothing": 0.1}, {}),
        ("bco_pair", "bco_pair", {"beta": 0.35}, {"reference_point": torch.zeros(6)}),
        ("aot_unpaired", "aot_unpaired", {"beta": 0.75, "label_smoothing": 0.1}, {"chosen": torch.arange(6) % 2 == 0}),
        ("dpo", "sigmoid", {"beta": 0.3, "ld_alpha": 0.4}, {}),
        ("apo_zero", "apo_zero", {"beta": 0.3, "ld_alpha": 0.0}, {}),
        ("dpo", "sigmoid", {"beta": 0.3, "f_divergence_type": "js_divergence"}, {}),
        ("dpo", "sigmoid", {"beta": 0.3, "f_divergence_type": "forward_kl"}, {}),
        ("dpo", "sigmoid_norm", {"beta": 0.3, "f_divergence_type": "forward_kl"}, {"length_normalised": True}),
        ("hinge", "hinge", {"beta": 0.3, "f_divergence_type": "forward_kl"}, {}),
        ("robust", "robust", {"beta": 0.3, "f_divergence_type": "js_divergence", "label_smoothing": 0.2}, {}),
        ("exo_pair", "exo_pair", {"beta": 0.3, "f_divergence_type": "forward_kl", "label_smoothing": 0.1}, {}),
        ("discopop", "discopop", {"beta": 0.3, "args": SimpleNamespace(discopop_tau=0.2)}, {"discopop_tau": 0.2}),
        *((name, kind, {"beta": 0.3, "use_weighting": True}, {"weighting": "aligned"}) for name, kind in ALIGNED),
    ],
)
def test_preferences_are_trls(name: str, kind: str, hyper: dict[str, Any], own: dict[str, Any]) -> None:
    batch = random_batch(26)
    tensors = {key: value for key, value in own.items() if isinstance(value, Tensor)}
    tensors |= {"sharp_log_prob": sharp_of(batch)} if "weighting" in own else {}
    names = {key: value for key, value in {**hyper, **own}.items() if key not in (*tensors, "args", "use_weighting")}
    agree(ours(name, {**batch, **tensors}, "seq-mean-token-sum", **names), trl_loss(kind, batch, **hyper))


def test_trls_coefficient_of_the_alpha_divergence_is_1_less_the_papers() -> None:
    batch = {key: x.float() if x.is_floating_point() else x for key, x in random_batch(26).items()}
    settings = {"beta": 0.3, "f_divergence_type": "alpha_divergence"}
    theirs = trl_loss("sigmoid", batch, **settings, f_alpha_divergence_coef=0.7)
    for a, b in zip(ours("dpo", batch, "seq-mean-token-sum", **settings, f_alpha=0.3), theirs, strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert not torch.isclose(ours("dpo", batch, "seq-mean-token-sum", **settings, f_alpha=0.7)[0], theirs[0])


# ---------------------------------------------------------------------- TRL's other trainers


@pytest.mark.parametrize(("kind", "point"), [("kto", None), ("kto", -0.8), ("apo_zero_unpaired", 0.0)])
def test_kto_is_trls(kind: str, point: float | None) -> None:
    """``point``: the mean log-ratio of mismatched pairs; None: whatever the batch's own rows have, in the place of those."""
    trl, batch = trainer_of("kto"), random_batch(30)
    mask, labels = batch["mask"], torch.tensor([True, False, False, True, True, True])
    log_prob = batch["log_prob"].clone().requires_grad_()
    seen, ref = (torch.where(mask, x, 0) for x in (log_prob, batch["ref_log_prob"]))
    mismatched = (seen - ref).sum(-1).detach() if point is None else torch.full((6,), point).double()
    expected = mismatched.mean().clamp(min=0)
    zeros = torch.zeros_like(seen)
    trainer = MagicMock(
        loss_type=kind,
        beta=0.4,
        desirable_weight=1.3,
        undesirable_weight=0.7,
        calculate_KL=kind == "kto",
        precompute_ref_logps=True,
        aux_loss_enabled=False,
        accelerator=SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
    )
    trainer._compute_kl_logps.return_value = mismatched
    model = MagicMock(return_value=SimpleNamespace(log_probs=seen, entropy=zeros, mean_logits=zeros))
    trainer.model = SimpleNamespace(training=False)
    inputs = {
        "input_ids": torch.zeros(6, 6, dtype=torch.long),
        "completion_mask": torch.cat([torch.zeros(6, 1, dtype=torch.long), mask.long()], -1),
        "attention_mask": torch.ones(6, 6),
        "label": labels,
        "ref_logps": ref.sum(-1),
        "ref_KL_logps": torch.zeros(6, dtype=torch.float64),
    }
    loss = trl._compute_loss(trainer, model, inputs, False)
    theirs = loss.detach(), torch.autograd.grad(loss, log_prob)[0]
    given = {**batch, "chosen": labels, "reference_point": expected.expand(6)}
    weights = {"desirable_weight": 1.3, "undesirable_weight": 0.7}
    agree(ours("kto", given, "seq-mean-token-sum", beta=0.4, **weights), theirs)


def halves(batch: dict[str, Tensor], *, average: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The leaf, log-probs of chosen and of rejected answers, and the mean over tokens of the chosen ones."""
    log_prob = batch["log_prob"].clone().requires_grad_()
    seen, counts = torch.where(batch["mask"], log_prob, 0), batch["mask"].sum(-1)
    summed = seen.sum(-1) / counts if average else seen.sum(-1)
    return log_prob, summed[::2], summed[1::2], seen[::2].sum() / counts[::2].sum()


@pytest.mark.parametrize(
    ("name", "kind", "own", "hyper"),
    [
        ("cpo", "sigmoid", {"cpo_alpha": 0.6, "nll_aggregation": "token-mean"}, {"cpo_alpha": 0.6}),
        ("simpo", "simpo", {"simpo_gamma": 0.5}, {"simpo_gamma": 0.5, "cpo_alpha": 0.0}),
    ],
)
def test_cpo_and_simpo_are_trls(name: str, kind: str, own: dict[str, Any], hyper: dict[str, float]) -> None:
    batch, trl = random_batch(31), trainer_of("cpo")
    trainer = SimpleNamespace(
        loss_type=kind, beta=0.7, label_smoothing=0.1, alpha=0.0, accelerator=SimpleNamespace(device="cpu"), **hyper
    )
    log_prob, chosen, rejected, likelihood = halves(batch, average=kind == "simpo")
    losses, _, _ = trl.cpo_loss(trainer, chosen, rejected)
    loss = losses.mean() - trainer.cpo_alpha * likelihood
    theirs = loss.detach(), torch.autograd.grad(loss, log_prob)[0]
    agree(ours(name, batch, "seq-mean-token-sum", beta=0.7, label_smoothing=0.1, **own), theirs)


def test_orpo_is_trls_but_for_the_prompt() -> None:
    """TRL's likelihood is of the prompt too; its loss of the odds is in float32."""
    batch, trl = random_batch(32), trainer_of("orpo")
    trainer = SimpleNamespace(beta=0.3, accelerator=SimpleNamespace(device="cpu"))
    log_prob, chosen, rejected, likelihood = halves(batch, average=True)
    loss = -likelihood - trl.odds_ratio_loss(trainer, chosen, rejected)[0].mean()
    theirs = loss.detach(), torch.autograd.grad(loss, log_prob)[0]
    found = ours("orpo", batch, "seq-mean-token-sum", beta=0.3, nll_aggregation="token-mean")
    for a, b in zip(found, theirs, strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-6)
