"""Values and gradients against Trinity-RFT 0.6.0, verl 0.9.1 and TRL 1.16, where their code follows their documentation.

Runs where ``TORCHRL_LLM_KL_PEERS`` names a folder with their unpacked wheels; see peers.py.
"""

from __future__ import annotations

import collections
import itertools
import math
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from by_hand import own_names
from objective_cases import random_batch
from peers import load, sampled, verl as corrections_of_verl
from torchrl_llm_kl.losses import (
    AdaptiveEntropyCoefficient,
    aggregate,
    correction_metrics,
    get_objective,
    importance_weights,
    mismatch_metrics,
    off_policy_sequence_mask,
    rollout_corrections,
    spec_of,
    top_entropy_mask,
    vespo,
)

# Both divide by counts + 1e-8.
CLOSE = {"rtol": 1e-6, "atol": 1e-8}
CLIP = {"clip_range_low": 0.15, "clip_range_high": 0.3}
REC = {"epsilon_low": 0.15, "epsilon_high": 0.25, "epsilon_low_prime": 0.35, "epsilon_high_prime": 0.45, "temp": 1.5}

# our name -> (Trinity's module, its class); the arguments of its call beside the log-probs come from the batch.
TRINITY = {
    "ppo": ("ppo_policy_loss", "PPOPolicyLossFn"),
    "gspo": ("gspo_policy_loss", "GSPOLossFn"),
    "cispo": ("cispo_policy_loss", "CISPOPolicyLossFn"),
    "topr": ("topr_policy_loss", "TOPRPolicyLossFn"),
    "opmd": ("opmd_policy_loss", "OPMDPolicyLossFn"),
    "sppo": ("sppo_loss_fn", "sPPOPolicyLossFn"),
    "sapo": ("sapo_policy_loss", "SAPOPolicyLossFn"),
    "rec": ("rec_policy_loss", "RECPolicyLossFn"),
    "importance_sampling": ("importance_sampling_policy_loss", "ImportanceSamplingLossFn"),
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("ppo", CLIP),
    ("ppo", {"clip_range": 0.2, "clip_ratio_c": 1.4}),
    ("ppo", {**CLIP, "enable_sequence_masking": True, "delta_sequence_masking": 0.05}),
    ("ppo", {**CLIP, "fallback_to_policy_gradient": True}),
    ("gspo", CLIP),
    ("gspo", {"clip_range_low": 3e-4, "clip_range_high": 4e-4}),
    ("cispo", {}),
    ("cispo", CLIP),
    ("cispo", {**CLIP, "enable_mask_clip": True, "mask_clip_range_low": 0.4, "mask_clip_range_high": 0.5}),
    ("topr", {}),
    ("topr", {"advantage_threshold": 0.3}),
    ("opmd", {}),
    ("opmd", {"tau": 0.3}),
    ("sppo", {}),
    ("sppo", {"epsilon": 0.5}),
    ("importance_sampling", {}),
    *[
        ("rec", {**REC, "clip_mode": mode, "weight": weight, "regularizer": regularizer, "regularizer_coef": 0.3})
        for mode, weight, regularizer in (
            # Trinity has the sequence weight with the sequence clip only: UnboundLocalError.
            ("none", "importance_sampling", "forward-kl"),
            ("none", "advantage", "none"),
            ("one-side", "none", "k2"),
            ("one-side", "importance_sampling", "none"),
            ("two-side", "advantage", "forward-kl"),
            ("two-side", "none", "none"),
            ("ring", "importance_sampling", "k2"),
            ("ring", "none", "forward-kl"),
            ("gspo-one-side", "gspo_importance_sampling", "none"),
            ("gspo-one-side", "advantage", "k2"),
        )
    ],
]


def batch_of(seed: int) -> dict[str, Tensor]:
    return random_batch(seed, rows=8, width=7)


def trinity(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    module, cls = TRINITY[name]
    return getattr(load(monkeypatch, "trinity", f"trinity.algorithm.policy_loss_fn.{module}"), cls)


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Loss and gradient."""
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, **CLOSE)


def ours(name: str, batch: dict[str, Tensor], mode: str, hyper: dict[str, Any]) -> tuple[Tensor, Tensor]:
    log_prob = batch["log_prob"].clone().requires_grad_()
    function = get_objective(name)
    (term,) = function(**{**batch, "log_prob": log_prob}, **own_names(function, **hyper))
    loss = aggregate(term.value, term.mask, term.aggregation or mode)
    return loss.detach(), torch.autograd.grad(loss, log_prob)[0]


#: REC has no choice; another than its paper's GSPO announces through a logger that is not there.
MODES = {"rec": ["token-mean"], "gspo": ["seq-mean-token-mean"]}
ALL_MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]


@pytest.mark.parametrize(("name", "hyper"), CASES)
def test_trinity(monkeypatch: pytest.MonkeyPatch, name: str, hyper: dict[str, Any]) -> None:
    modes = MODES.get(name, ALL_MODES)
    for mode, seed in [(modes[seed % len(modes)], seed) for seed in range(6)]:
        theirs = trinity(monkeypatch, name)(**hyper, **({} if name == "rec" else {"loss_agg_mode": mode}))
        batch = batch_of(seed)
        log_prob = batch["log_prob"].clone().requires_grad_()
        inputs = (batch["mask"], batch["advantage"])
        loss, _ = theirs(log_prob, *(inputs if name == "opmd" else (batch["old_log_prob"], *inputs)))
        assert_same(ours(name, batch, mode, hyper), (loss.detach(), torch.autograd.grad(loss, log_prob)[0]))


@pytest.mark.parametrize("name", TRINITY)
def test_trinitys_defaults_are_ours(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Passing what Trinity takes by default changes nothing, under its own names."""
    hyper = trinity(monkeypatch, name).default_args()
    hyper.pop("loss_agg_mode", None)
    batch = batch_of(11)
    if name == "gspo":  # ratios near its narrow bounds
        batch["old_log_prob"] = batch["log_prob"] + (batch["old_log_prob"] - batch["log_prob"]) * 1e-3
    for got, want in zip(ours(name, batch, "token-mean", {}), ours(name, batch, "token-mean", hyper), strict=True):
        assert_close(got, want)


def test_trinitys_sapo_has_our_gate_but_not_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason why SAPO is not compared above: its gate is detached and multiplied with the log-prob."""
    theirs = trinity(monkeypatch, "sapo")(tau_pos=1.2, tau_neg=1.7)
    batch = batch_of(0)
    gate = theirs.soft_gate_function((batch["log_prob"] - batch["old_log_prob"]).exp(), batch["advantage"])
    (term,) = get_objective("sapo")(**batch, tau_pos=1.2, tau_neg=1.7)
    assert_close(torch.where(batch["mask"], term.value, 0), torch.where(batch["mask"], -batch["advantage"] * gate, 0))


def verl(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load(monkeypatch, "verl", "verl.trainer.ppo.core_algos", stubs=("omegaconf",))


def verl_result(
    core: ModuleType, name: str, batch: dict[str, Tensor], mode: str, **config: Any
) -> tuple[Tensor, Tensor]:
    values = {"clip_ratio": 0.2, "clip_ratio_low": 0.15, "clip_ratio_high": 0.3, "global_batch_info": {}, **config}
    values["get"] = lambda self, key, default: getattr(self, key, default)
    settings = type("Settings", (core.ActorConfig,), values)()
    log_prob = batch["log_prob"].clone().requires_grad_()
    loss, _ = core.get_policy_loss_fn(name)(
        old_log_prob=batch["old_log_prob"],
        log_prob=log_prob,
        advantages=batch["advantage"],
        response_mask=batch["mask"].double(),
        loss_agg_mode=mode,
        config=settings,
    )
    return loss.detach(), torch.autograd.grad(loss, log_prob)[0]


BOUNDS = {"clip_low": 0.15, "clip_high": 0.3}
VERL: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("ppo", "vanilla", {**BOUNDS, "clip_ratio_c": 1.4}, {"clip_ratio_c": 1.4}),
    ("gspo", "gspo", BOUNDS, {}),
    ("sapo", "sapo", {"tau_pos": 1.2, "tau_neg": 1.7}, {"tau_pos": 1.2, "tau_neg": 1.7}),
    ("gpg", "gpg", {}, {}),
    ("dro", "dro", {"beta": 0.6}, {"dro_beta": 0.6}),
    ("cispo", "cispo", BOUNDS, {}),
    ("dppo", "dppo_tv", {**BOUNDS, "clip_ratio_c": 1.4}, {"clip_ratio_c": 1.4}),
    ("dppo", "dppo_kl", {**BOUNDS, "divergence": "kl"}, {}),
    # Everything that may be chosen is chosen: no random numbers.
    (
        "clip_cov",
        "clip_cov",
        {**BOUNDS, "fraction": 1.0, "cov_low": 0.1, "cov_high": 0.7},
        {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 0.7},
    ),
    ("kl_cov", "kl_cov", {"fraction": 0.2, "coeff": 0.6}, {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.6}),
]


@pytest.mark.parametrize(("name", "theirs", "hyper", "config"), VERL)
def test_verl(
    monkeypatch: pytest.MonkeyPatch, name: str, theirs: str, hyper: dict[str, Any], config: dict[str, Any]
) -> None:
    core = verl(monkeypatch)
    config = {**config, "policy_loss": type("PolicyLoss", (), config)}
    mode = spec_of(get_objective(name)).aggregation
    for seed in range(5):
        batch = batch_of(seed)
        assert_same(ours(name, batch, mode, hyper), verl_result(core, theirs, batch, mode, **config))


def test_verls_geometric_mean_where_advantages_are_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    core = verl(monkeypatch)
    for seed in range(5):
        batch = batch_of(seed)
        batch["advantage"] = batch["advantage"][:, :1].expand_as(batch["mask"])
        found = ours("gmpo", batch, "seq-mean-token-mean", BOUNDS)
        assert_same(found, verl_result(core, "geo_mean", batch, "token-mean"))


def trl_result(
    trainer: Any, batch: dict[str, Tensor], *, own: SimpleNamespace | None = None, **settings: Any
) -> tuple[Tensor, Tensor]:
    """The loss of TRL's GRPOTrainer and its gradient, on log-probs in place of a model's. ``own`` is the trainer's state."""
    log_prob = batch["log_prob"].clone().requires_grad_()
    mask = batch["mask"].double()
    tokens = torch.zeros(len(mask), 0, dtype=torch.long), torch.zeros_like(mask)
    accelerator = SimpleNamespace(
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, **_: x,
        num_processes=1,
        sync_gradients=True,
    )
    own = own or SimpleNamespace()
    own.__dict__.update(
        {
            "_get_per_token_logps_and_entropies": lambda *_, **__: (log_prob, batch.get("entropy", mask), None),
            "_metrics": {"train": collections.defaultdict(list)},
            "_entropy_bonus_enabled": False,
            "aux_loss_enabled": False,
            "top_entropy_quantile": 1.0,
            "off_policy_mask_threshold": None,
            "beta": 0.0,
            "use_vllm": False,
            "model": SimpleNamespace(training=True),
            "current_gradient_accumulation_steps": 1,
            "accelerator": accelerator,
            "args": SimpleNamespace(delta=None),
            **settings,
        }
    )
    inputs = {"prompt_ids": tokens[0], "prompt_mask": tokens[0], "completion_ids": tokens[1], "completion_mask": mask}
    inputs |= {"advantages": batch["advantage"], "old_per_token_logps": batch["old_log_prob"]}
    loss = trainer._compute_loss(own, None, inputs)
    return loss.detach(), torch.autograd.grad(loss, log_prob)[0]


def test_trls_luspo(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = load(monkeypatch, "trl", "trl.trainer.grpo_trainer").GRPOTrainer
    bounds = {"epsilon_low": 0.15, "epsilon_high": 0.3}
    for seed in range(5):
        batch = batch_of(seed)
        batch["advantage"] = batch["advantage"][:, :1].expand_as(batch["mask"]).clone()  # TRL's is one per sequence
        theirs = {**batch, "advantage": batch["advantage"][:, 0]}
        settings = {"loss_type": "luspo", "importance_sampling_level": "sequence", **bounds}
        assert_same(ours("luspo", batch, "seq-mean-token-sum", BOUNDS), trl_result(trainer, theirs, **settings))


def test_trls_adaptive_entropy_coefficient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bonus that its trainer adds in each of six steps, and its coefficient after each."""
    trainer = load(monkeypatch, "trl", "trl.trainer.grpo_trainer").GRPOTrainer
    ours = AdaptiveEntropyCoefficient(0.01, target=0.4, delta=0.02, low=0.005, high=0.045)
    control: dict[str, Any] = {"entropy_coef": 0.01, "_last_world_entropy": math.inf, "_entropy_window_stats": None}
    args = {"entropy_target": 0.4, "entropy_coef_delta": 0.02, "entropy_coef_min": 0.005, "entropy_coef_max": 0.045}
    fixed = {"loss_type": "bnpo", "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2}
    seen = []
    for scale in (0.3, 0.2, 0.1, 0.5, 0.6, 0.9, 0.2):
        batch = batch_of(0)
        batch["entropy"] = scale * (1 + 0.1 * batch["log_prob"].sin())
        theirs = {**batch, "advantage": batch["advantage"][:, 0]}
        plain, _ = trl_result(trainer, theirs, **fixed)
        own, more = SimpleNamespace(**control), {"_entropy_bonus_enabled": True, "use_adaptive_entropy": True}
        settings = {**fixed, **more, "args": SimpleNamespace(delta=None, **args)}
        loss, _ = trl_result(trainer, theirs, own=own, **settings)
        control = {name: getattr(own, name) for name in control}
        entropy = batch["entropy"][batch["mask"]].mean()
        assert_close(plain - loss, ours() * entropy, **CLOSE)
        seen.append(float(ours()))
        ours.update(entropy)
        assert math.isclose(ours.value, control["entropy_coef"], rel_tol=1e-5)
    assert seen == pytest.approx([0.0, 0.03, 0.045, 0.045, 0.0, 0.0, 0.0])


def test_vespos_weights_are_trls(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = load(monkeypatch, "trl", "trl.trainer.grpo_trainer").GRPOTrainer
    batch = random_batch(3)
    log_ratio = batch["log_prob"] - batch["old_log_prob"]
    theirs = trainer.get_gamma_weights(batch["advantage"], log_ratio, batch["mask"], None)
    (term,) = vespo(**batch)
    assert_close(term.value, torch.where(batch["mask"], -batch["advantage"] * theirs * batch["log_prob"], 0))


def test_masks_of_sequences_are_trls(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = load(monkeypatch, "trl", "trl.trainer.grpo_trainer").GRPOTrainer
    batch = random_batch(28)
    log_prob, old, advantage, mask = (batch[key] for key in ("log_prob", "old_log_prob", "advantage", "mask"))
    old = old + 0.2
    kept = trainer.get_off_policy_mask(advantage, log_prob, old, mask.double(), 0.05)
    weights, _ = off_policy_sequence_mask(log_prob, old, advantage, mask, delta=0.05)
    assert_close(weights, kept * mask)
    assert 0 < weights.sum() < mask.sum()


def test_the_tokens_of_most_entropy_are_trls_but_for_its_interpolation(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL interpolates the quantile between two tokens: it keeps the same tokens if the fraction is a whole number."""
    trainer = load(monkeypatch, "trl", "trl.trainer.grpo_trainer").GRPOTrainer
    entropy = random_batch(29)["log_prob"].abs()
    mask = torch.ones_like(entropy, dtype=torch.bool)
    accelerator = SimpleNamespace(pad_across_processes=lambda x, **_: x, gather=lambda x: x)
    kept = trainer.get_high_entropy_mask(SimpleNamespace(accelerator=accelerator), entropy, mask, 1 - 0.2)
    assert torch.equal(top_entropy_mask(entropy, mask, fraction=0.2)[0].bool(), kept)


# ---------------------------------------------------------------------- verl's corrections of the sampler


BOUND = {"token_k1": "0.6_1.5", "seq_sum_k1": "0.4_2", "seq_mean_k1": "0.8_1.3"}
BOUND |= {"token_k2": 0.1, "seq_sum_k2": 0.3, "seq_mean_k2": 0.08, "seq_max_k2": 0.2}
BOUND |= {"token_k3": 0.08, "seq_sum_k3": 0.3, "seq_mean_k3": 0.06, "seq_max_k3": 0.3}


def our_corrections(inputs: tuple[Tensor, Tensor, Tensor], **settings: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The product of all weights, and the metrics of each."""
    weights, metrics = torch.ones_like(inputs[0]), {}
    for part in rollout_corrections(**settings):
        each, seen = part(dict(zip(("old_log_prob", "sampler_log_prob", "mask"), inputs, strict=True)))
        weights, metrics = weights * each, {**metrics, **seen}
    return weights, metrics


@pytest.mark.parametrize(
    ("options", "threshold"),
    [*BOUND.items(), ("token_k1,seq_max_k2", "0.6_1.5,0.2"), ("seq_mean_k3,token_k3,seq_sum_k1", "0.1,0.2,3")],
)
def test_verls_rejection(monkeypatch: pytest.MonkeyPatch, options: str, threshold: Any) -> None:
    """Masks, the share that each criterion rejects, and that of all criteria together."""
    helper, rejected = corrections_of_verl(monkeypatch), 0
    for seed in range(5):
        old, sampler, mask = sampled(seed)
        kept, theirs = helper.compute_rollout_rejection_mask(old - sampler, mask.double(), options, threshold)
        weights, seen = our_corrections((old, sampler, mask), rollout_rs=options, rollout_rs_threshold=threshold)
        assert torch.equal(weights, kept)
        all_of_them = correction_metrics(weights, mask)
        seen |= {f"{x}masked_fraction": all_of_them[f"rejected_{x}fraction"] for x in ("", "seq_")}
        found = {f"rollout_rs_{name}": value.item() for name, value in seen.items()}
        assert found == pytest.approx({name: theirs[name] for name in found}, abs=1e-6)
        rejected += int((mask & (weights == 0)).sum())
    assert 0 < rejected < 5 * 7 * 6 * 0.7


@pytest.mark.parametrize(("level", "threshold"), list(itertools.product(("token", "sequence"), (1.3, "0.3_2.5"))))
def test_verls_weights(monkeypatch: pytest.MonkeyPatch, level: Any, threshold: Any) -> None:
    helper = corrections_of_verl(monkeypatch)
    for seed in range(5):
        old, sampler, mask = sampled(seed)
        theirs, metrics = helper.compute_rollout_correction_weights(old - sampler, mask.double(), level, threshold)
        weights, seen = our_corrections((old, sampler, mask), rollout_is=level, rollout_is_threshold=threshold)
        assert_close(weights, theirs)
        if level == "token":  # verl weights sequences by their length
            size = metrics["rollout_is_eff_sample_size"]
            assert seen["effective_sample_size"].item() == pytest.approx(size, rel=1e-6)
    assert importance_weights(old, sampler, mask, high=1.3)[0].max() == 1.3


VERLS_NAMES = {
    "trainer_log_ppl": "training_log_ppl",
    "sampler_log_ppl": "rollout_log_ppl",
    "trainer_ppl": "training_ppl",
    "sampler_ppl": "rollout_ppl",
    "mismatch_k1": "kl",
    "mismatch_k3": "k3_kl",
}


def test_verls_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    helper = corrections_of_verl(monkeypatch)
    for seed in range(5):
        old, sampler, mask = sampled(seed)
        theirs = helper.compute_offpolicy_metrics(old, sampler, mask.double())
        found = {
            VERLS_NAMES.get(name, name): value.item() for name, value in mismatch_metrics(old, sampler, mask).items()
        }
        assert found == pytest.approx(theirs, rel=1e-6, abs=1e-7)


def test_verl_counts_empty_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of docs/differences.md: with a perplexity of 1 and a ratio of 1."""
    helper = corrections_of_verl(monkeypatch)
    old, sampler, mask = sampled(0)
    expected = mismatch_metrics(old, sampler, mask)["sampler_ppl"]
    pad = lambda x, value: torch.cat([x, torch.full_like(x, value)])  # noqa: E731
    old, sampler, mask = pad(old, -1.0), pad(sampler, -1.0), pad(mask, False)
    assert_close(mismatch_metrics(old, sampler, mask)["sampler_ppl"], expected)
    theirs = helper.compute_offpolicy_metrics(old, sampler, mask.double())["rollout_ppl"]
    assert theirs == pytest.approx((expected.item() + 1) / 2, rel=1e-6)


def test_verls_geometric_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's ppl_ratio of one sequence is the inverse of its geometric weight; its seq_mean_k1 the mask of that weight."""
    helper = corrections_of_verl(monkeypatch)
    for seed in range(5):
        old, sampler, mask = sampled(seed)
        free, _ = importance_weights(old, sampler, mask, level="geometric", high=None)
        cut, _ = importance_weights(old, sampler, mask, level="geometric", high=1.1)
        for i in range(7):
            one = slice(i, i + 1)
            ratio = helper.compute_offpolicy_metrics(old[one], sampler[one], mask[one].double())["ppl_ratio"]
            assert free[i][mask[i]].tolist() == pytest.approx([1 / ratio] * int(mask[i].sum()), rel=1e-6)
            assert cut[i][mask[i]].tolist() == pytest.approx([min(1.1, 1 / ratio)] * int(mask[i].sum()), rel=1e-6)
        kept, _ = helper.compute_rollout_rejection_mask(old - sampler, mask.double(), "seq_mean_k1", "0.8_1.2")
        hard, _ = importance_weights(old, sampler, mask, level="geometric", mode="mask", low=1 / 1.2, high=1 / 0.8)
        assert torch.equal(hard != 0, kept != 0)
        assert_close(hard, torch.where(kept != 0, free, 0))


def test_verls_whole_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and mask together, as verl's trainer calls them."""
    helper = corrections_of_verl(monkeypatch)
    settings: dict[str, Any] = {"rollout_is": "sequence", "rollout_is_threshold": 1.5}
    settings |= {"rollout_rs": "token_k3", "rollout_rs_threshold": 0.1}
    seen: list[Tensor] = []
    monkeypatch.setattr(helper.DataProto, "from_dict", lambda tensors: seen.extend(tensors.values()), raising=False)
    for seed in range(5):
        old, sampler, mask = sampled(seed)
        _, kept, _ = helper.compute_rollout_correction_and_rejection_mask(old, sampler, mask.double(), **settings)
        assert_close(our_corrections((old, sampler, mask), **settings)[0], seen[-1] * kept)
