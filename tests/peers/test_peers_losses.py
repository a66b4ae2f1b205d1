"""Losses compared with Trinity-RFT 0.6.0, verl 0.9.1 and TRL 1.16: equal values and gradients, and known differences.

Runs where ``TORCHRL_LLM_KL_PEERS`` names a folder with their unpacked wheels; see peers.py. What TRL's trainers are given
by a configuration is compared in ``tests/units/algorithms/test_elsewhere_trl.py``.
"""

import itertools
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import peers
from by_hand import called
from elsewhere_batches import OneDevice
from objective_cases import random_batch
from peers import load, sampled, verl as corrections_of_verl
from project import tables
from seeded import columns_of
from torchrl_llm_kl import losses
from torchrl_llm_kl.diagnostics import measure
from torchrl_llm_kl.losses import ScheduledCoefficient, get_objective, importance_weights, mismatch_metrics

Result = tuple[Tensor, Tensor]
CLIP = {"clip_range_low": 0.15, "clip_range_high": 0.3}
#: Our name of an objective and Trinity's hyper-parameters; our name, verl's, our hyper-parameters and its settings.
CASES, VERL = (tables(__file__)[peer] for peer in ("trinity", "verl"))


def leaf(batch: dict[str, Tensor]) -> Tensor:
    return batch["log_prob"].clone().requires_grad_()


def of(loss: Tensor, log_prob: Tensor) -> Result:
    """Loss and gradient."""
    return loss.detach(), torch.autograd.grad(loss, log_prob)[0]


def agree(found: Result, expected: Result, rtol: float = 1e-6, atol: float = 1e-8) -> None:
    """Check that results are equal up to 1e-8, since Trinity and verl divide by counts + 1e-8."""
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, rtol=rtol, atol=atol)


OURS = {"clip_range": "clip_low clip_high", "clip_range_low": "clip_low", "clip_range_high": "clip_high"}
OURS |= {f"mask_clip_range_{side}": f"mask_clip_{side}" for side in ("low", "high")}
OURS |= {"grpo_loss_agg_mode": "usual_aggregation", "sft_loss_agg_mode": "expert_aggregation"}
OURS["f_divergence_type"] = "f_divergence"


def own_names(hyper: dict[str, Any]) -> dict[str, Any]:
    """Translate Trinity's and TRL's names. A bound of one side replaces a bound of both."""
    out: dict[str, Any] = {}
    for name in sorted(hyper, key=lambda name: -len(OURS.get(name, name).split())):
        out |= dict.fromkeys(OURS.get(name, name).split(), hyper[name])
    return out


def ours(name: str, batch: dict[str, Tensor], mode: str, **hyper: Any) -> Result:
    log_prob, function, loss = leaf(batch), get_objective(name), torch.zeros(())
    for term in called(function, **{**batch, "log_prob": log_prob}, **own_names(hyper)):
        how = term.aggregation or mode
        whole = losses.count(term.mask, how)
        loss = loss + term.weight * losses.aggregate(term.value, term.mask, how, denominator=whole)
    return of(loss, log_prob)


# ------------------------------------------------------------------ Trinity-RFT
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
    "sft": ("sft_loss", "SFTLossFn"),
    "sft_is": ("chord_policy_loss", "SFTISLossFn"),
    "sft_phi": ("chord_policy_loss", "SFTPhiLossFn"),
    "mix": ("mix_policy_loss", "MIXPolicyLossFn"),
    "mix_chord": ("chord_policy_loss", "MIXCHORDPolicyLossFn"),
    "dpo": ("dpo_loss", "DPOLossFn"),
}
MEANS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
#: REC has no choice; another than its paper's GSPO announces through a logger that is not there.
MODES = {"rec": MEANS[:1], "gspo": MEANS[1:2]}
SIZES = {"ppo_mini_batch_size": 6, "ppo_micro_batch_size_per_gpu": 6}


def batch_of(seed: int) -> dict[str, Tensor]:
    return random_batch(seed, rows=8, width=7)


def trinity(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    module, cls = TRINITY[name]
    return getattr(load(monkeypatch, "trinity", f"trinity.algorithm.policy_loss_fn.{module}"), cls)


def trinitys(function: Any, batch: dict[str, Tensor], **more: Any) -> Result:
    log_prob = leaf(batch)
    inputs = {"action_mask": batch["mask"], "advantages": batch["advantage"], "old_logprob": batch["old_log_prob"]}
    inputs |= {"ref_logprob": batch["ref_log_prob"], "expert_mask": batch["expert_mask"][:, 0], **more}
    return of(function(log_prob, **inputs)[0], log_prob)


@pytest.mark.parametrize(("name", "hyper"), CASES)
def test_trinitys_losses(monkeypatch: pytest.MonkeyPatch, name: str, hyper: dict[str, Any]) -> None:
    modes = MODES.get(name, MEANS)
    for mode, seed in [(modes[seed % len(modes)], seed) for seed in range(6)]:
        theirs = trinity(monkeypatch, name)(**hyper, **({} if name == "rec" else {"loss_agg_mode": mode}))
        agree(ours(name, batch_of(seed), mode, **hyper), trinitys(theirs, batch_of(seed)))


def test_trinitys_sapo_has_our_gate_but_not_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """SAPO is not compared above, because Trinity detaches the gate and multiplies it with the log-prob."""
    theirs, batch = trinity(monkeypatch, "sapo")(tau_pos=1.2, tau_neg=1.7), batch_of(0)
    gate = theirs.soft_gate_function((batch["log_prob"] - batch["old_log_prob"]).exp(), batch["advantage"])
    (term,) = called(get_objective("sapo"), **batch, tau_pos=1.2, tau_neg=1.7)
    assert_close(torch.where(batch["mask"], term.value, 0), torch.where(batch["mask"], -batch["advantage"] * gate, 0))


@pytest.mark.parametrize(("dynamic", "experts"), [(False, "some"), (True, "some"), (True, "none"), (False, "all")])
def test_mix_equals_trinitys_if_its_configured_sizes_are_right(monkeypatch: Any, dynamic: bool, experts: str) -> None:
    batch = random_batch(22)
    if experts != "some":
        batch["expert_mask"] = torch.full_like(batch["mask"], experts == "all")
    number = int(batch["expert_mask"][:, 0].sum())
    sizes = {**SIZES, "train_batch_size_usual": max(6 - number, 1), "train_batch_size_expert": max(number, 1)}
    hyper = {"mu": 0.35, **CLIP, "grpo_loss_agg_mode": "token-mean", "sft_loss_agg_mode": "seq-mean-token-sum"}
    function = trinity(monkeypatch, "mix")(**hyper, use_dynamic_bsz=dynamic, **sizes)
    agree(ours("mix", batch, "none", **hyper), trinitys(function, batch))


def scheduled(step: int, peak: float, valley: float, **steps: int) -> torch.Tensor:
    """The weight of experts at a step."""
    coefficient = ScheduledCoefficient(peak, valley, **steps)
    coefficient.update(steps=step)
    return coefficient()


def test_mix_chord_equals_trinitys_except_for_a_batch_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a batch of experts the loss is finite here, but NaN in Trinity."""
    sizes = {**SIZES, "train_batch_size_usual": 4, "train_batch_size_expert": 2}
    for phi in (False, True):
        batch, more = random_batch(23), {**CLIP, "enable_phi_function": phi}
        schedule = {"mu_warmup_steps": 2, "mu_decay_steps": 7, "mu_peak": 0.8, "mu_valley": 0.15}
        function = trinity(monkeypatch, "mix_chord")(**more, **schedule, **sizes)
        mu = scheduled(5, 0.8, 0.15, warmup=2, decay=7)
        theirs = trinitys(function, batch, step=torch.full((6,), 5))
        agree(ours("mix_chord", batch, "token-mean", mu=mu, **more), theirs)
    batch["expert_mask"] = torch.ones_like(batch["mask"])
    function = trinity(monkeypatch, "mix_chord")(**CLIP, **SIZES, loss_agg_mode="seq-mean-token-mean")
    assert trinitys(function, batch, step=torch.zeros(6))[0].isnan()
    assert ours("mix_chord", batch, "seq-mean-token-mean", **CLIP)[0].isfinite()
    schedule = load(monkeypatch, "trinity", "trinity.algorithm.policy_loss_fn.chord_policy_loss").mu_schedule_function
    for (warmup, decay), step in itertools.product([(0, 0), (0, 9), (5, 0), (4, 8)], range(16)):
        expected = schedule(step, warmup, decay, 0.9, 0.05)
        found = float(scheduled(step, 0.9, 0.05, warmup=warmup, decay=decay))
        assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_dpo_equals_trinitys_only_for_one_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trinity adds up the differences of several pairs as if they were one pair."""
    hyper = {"beta": 0.3, "label_smoothing": 0.15}
    function, one, several = trinity(monkeypatch, "dpo")(**hyper), random_batch(25, rows=2), random_batch(25)
    agree(ours("dpo", one, "seq-mean-token-sum", **hyper), trinitys(function, one), atol=1e-7)
    assert not torch.isclose(ours("dpo", several, "seq-mean-token-sum", **hyper)[0], trinitys(function, several)[0])


# ------------------------------------------------------------------ verl
@pytest.mark.parametrize(("name", "theirs", "hyper", "config"), VERL)
def test_verls_losses(monkeypatch: Any, name: str, theirs: str, hyper: dict[str, Any], config: dict[str, Any]) -> None:
    core = load(monkeypatch, "verl", "verl.trainer.ppo.core_algos", stubs=("omegaconf",))
    values = {"clip_ratio": 0.2, "clip_ratio_low": 0.15, "clip_ratio_high": 0.3, "global_batch_info": {}, **config}
    values["policy_loss"] = type("PolicyLoss", (), config)
    values["get"] = lambda self, key, default: getattr(self, key, default)
    settings, mode = type("Settings", (core.ActorConfig,), values)(), losses.spec_of(get_objective(name)).aggregation
    for batch in map(batch_of, range(5)):
        log_prob = leaf(batch)
        inputs = {"old_log_prob": batch["old_log_prob"], "log_prob": log_prob, "advantages": batch["advantage"]}
        more = {"response_mask": batch["mask"].double(), "loss_agg_mode": mode, "config": settings}
        agree(ours(name, batch, mode, **hyper), of(core.get_policy_loss_fn(theirs)(**inputs, **more)[0], log_prob))


BOUND = {"token_k1": "0.6_1.5", "seq_sum_k1": "0.4_2", "seq_mean_k1": "0.8_1.3"}
BOUND |= {"token_k2": 0.1, "seq_sum_k2": 0.3, "seq_mean_k2": 0.08, "seq_max_k2": 0.2}
BOUND |= {"token_k3": 0.08, "seq_sum_k3": 0.3, "seq_mean_k3": 0.06, "seq_max_k3": 0.3}


def our_corrections(inputs: tuple[Tensor, Tensor, Tensor], **settings: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The product of all weights, and the metrics of each."""
    weights, metrics = torch.ones_like(inputs[0]), {}
    for part in losses.rollout_corrections(**settings):
        old, sampler, mask = inputs
        each, seen = part(losses.LossInputs(old, mask, old_log_prob=old, sampler_log_prob=sampler))
        weights, metrics = weights * each, {**metrics, **seen}
    return weights, metrics


SEVERAL = {"token_k1,seq_max_k2": "0.6_1.5,0.2", "seq_mean_k3,token_k3,seq_sum_k1": "0.1,0.2,3"}


@pytest.mark.parametrize(("options", "threshold"), [*BOUND.items(), *SEVERAL.items()])
def test_rejection_masks_equal_verls(monkeypatch: pytest.MonkeyPatch, options: str, threshold: Any) -> None:
    """The masks, and the shares rejected by each criterion and by all of them."""
    helper, rejected = corrections_of_verl(monkeypatch), 0
    for seed in range(5):
        old, sampler, mask = sampled(seed)
        kept, theirs = helper.compute_rollout_rejection_mask(old - sampler, mask.double(), options, threshold)
        weights, seen = our_corrections((old, sampler, mask), rollout_rs=options, rollout_rs_threshold=threshold)
        assert torch.equal(weights, kept)
        all_of_them = losses.correction_metrics(weights, mask)
        seen |= {f"{x}masked_fraction": all_of_them[f"rejected_{x}fraction"] for x in ("", "seq_")}
        found = {f"rollout_rs_{name}": value.item() for name, value in seen.items()}
        assert found == pytest.approx({name: theirs[name] for name in found}, abs=1e-6)
        rejected += int((mask & (weights == 0)).sum())
    assert 0 < rejected < 5 * 7 * 6 * 0.7


@pytest.mark.parametrize(("level", "threshold"), list(itertools.product(("token", "sequence"), (1.3, "0.3_2.5"))))
def test_importance_weights_equal_verls(monkeypatch: pytest.MonkeyPatch, level: Any, threshold: Any) -> None:
    """Compares weights without a mask, and with a mask as in verl's trainer."""
    helper, seen = corrections_of_verl(monkeypatch), []
    monkeypatch.setattr(helper.DataProto, "from_dict", lambda tensors: seen.extend(tensors.values()), raising=False)
    settings = {"rollout_is": level, "rollout_is_threshold": threshold}
    both = {**settings, "rollout_rs": "token_k3", "rollout_rs_threshold": 0.1}
    for seed in range(5):
        old, sampler, mask = sampled(seed)
        theirs, metrics = helper.compute_rollout_correction_weights(old - sampler, mask.double(), level, threshold)
        weights, own = our_corrections((old, sampler, mask), **settings)
        assert_close(weights, theirs)
        if level == "token":  # verl weights sequences by their length
            size = metrics["rollout_is_eff_sample_size"]
            assert own["effective_sample_size"].item() == pytest.approx(size, rel=1e-6)
        _, kept, _ = helper.compute_rollout_correction_and_rejection_mask(old, sampler, mask.double(), **both)
        assert_close(our_corrections((old, sampler, mask), **both)[0], seen[-1] * kept)
    assert called(importance_weights, old, sampler, mask, high=1.3)[0].max() == 1.3


#: verl's metric -> a loss's, and the doctor's.
NAMES = {"kl": ("mismatch_k1", "k1"), "k3_kl": ("mismatch_k3", "k3")}
PLACES = {"training": "trainer", "rollout": "sampler"}
NAMES |= {f"{theirs}_{x}": (f"{ours}_{x}",) * 2 for theirs, ours in PLACES.items() for x in ("log_ppl", "ppl")}


def test_mismatch_metrics_equal_verls(monkeypatch: pytest.MonkeyPatch) -> None:
    helper = corrections_of_verl(monkeypatch)
    for seed in range(5):
        old, sampler, mask = sampled(seed)
        theirs = helper.compute_offpolicy_metrics(old, sampler, mask.double())
        found = {name: value.item() for name, value in mismatch_metrics(old, sampler, mask).items()}
        wanted = {NAMES.get(name, (name,))[0]: value for name, value in theirs.items()}
        assert found == pytest.approx(wanted, rel=1e-6, abs=1e-7)
        both = {"old_log_prob": old.tolist(), "sampler_log_prob": sampler.tolist()}
        measured = measure(columns_of(mask.long().tolist(), **both))
        wanted = {f"mismatch/{NAMES.get(name, (name,))[-1]}": value for name, value in theirs.items()}
        _, seen = helper.compute_rollout_correction_weights(old - sampler, mask.double(), "token", 1e30)
        wanted["mismatch/ess_token"] = seen["rollout_is_eff_sample_size"]
        assert {name: measured[name] for name in wanted} == pytest.approx(wanted, rel=1e-6, abs=1e-7)
    # The row of docs/differences.md: verl counts empty rows, with a perplexity of 1 and a ratio of 1.
    expected = mismatch_metrics(old, sampler, mask)["sampler_ppl"]
    old, sampler, mask = (torch.cat([x, torch.full_like(x, v)]) for x, v in ((old, -1.0), (sampler, -1.0), (mask, 0)))
    assert_close(mismatch_metrics(old, sampler, mask)["sampler_ppl"], expected)
    theirs = helper.compute_offpolicy_metrics(old, sampler, mask.double())["rollout_ppl"]
    assert theirs == pytest.approx((expected.item() + 1) / 2, rel=1e-6)


# ------------------------------------------------------------------ TRL
def trainer_of(name: str) -> Any:
    """A trainer's class from the installed TRL, because its trainers need the whole package."""
    peers.folder("trl")
    return getattr(pytest.importorskip("trl", minversion="1.16"), f"{name.upper()}Trainer")


def sharp_of(batch: dict[str, Tensor]) -> Tensor:
    return 0.8 * batch["log_prob"].detach() - 0.1


def trls(name: str, order: Tensor, batch: dict[str, Tensor], inputs: dict[str, Any], **state: Any) -> Result:
    """Run TRL's trainer on given log-probs, with rows in this order."""
    log_prob, mask = leaf(batch), batch["mask"][order]
    seen, ref = (torch.where(mask, x[order], 0) for x in (log_prob, batch["ref_log_prob"]))
    zeros = torch.zeros_like(seen)
    # Of the sum of squares of the distribution: log_prob at half the temperature is 2 log_prob less it.
    squares = 2 * seen.detach() - torch.where(mask, sharp_of(batch)[order], 0)
    outputs = {"log_probs": seen, "entropy": zeros, "mean_logits": zeros, "is_top1": zeros.bool()}
    trainer = MagicMock(**vars(OneDevice(precompute_ref_logps=True)), **state)
    trainer.model = model = MagicMock(training=False, return_value=SimpleNamespace(**outputs, log_sum_sq_probs=squares))
    if state.get("ld_alpha") is not None:  # TRL's own reference, whose lengths are the pairs'
        trainer.precompute_ref_logps, trainer.ref_model.return_value = False, SimpleNamespace(log_probs=ref)
    chosen, rejected = ref.sum(-1).chunk(2)
    inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected, "ref_logps": ref.sum(-1)}
    # The first token of a sequence has no log-prob.
    inputs["completion_mask"] = torch.cat([torch.zeros(6, 1, dtype=torch.long), mask.long()], -1)
    inputs |= {"input_ids": torch.zeros(6, 6, dtype=torch.long), "attention_mask": torch.ones(6, 6)}
    return of(trainer_of(name)._compute_loss(trainer, model, inputs, False), log_prob)


ALIGNED = [("dpo", "sigmoid"), ("apo_zero", "apo_zero"), ("nca_pair", "nca_pair")]
FORWARD, JS = {"f_divergence_type": "forward_kl"}, {"f_divergence_type": "js_divergence"}


@pytest.mark.parametrize(
    ("name", "kind", "hyper", "own"),
    [
        # The others of one divergence: test_elsewhere_trl.py.
        ("aot", "aot", {"beta": 0.75, "label_smoothing": 0.1}, {}),
        ("bco_pair", "bco_pair", {"beta": 0.35}, {"reference_point": torch.zeros(6)}),
        ("aot_unpaired", "aot_unpaired", {"beta": 0.75, "label_smoothing": 0.1}, {"chosen": torch.arange(6) % 2 == 0}),
        ("apo_zero", "apo_zero", {"ld_alpha": 0.0}, {}),
        ("dpo", "sigmoid_norm", FORWARD, {"length_normalised": True}),
        ("hinge", "hinge", FORWARD, {}),
        ("robust", "robust", {**JS, "label_smoothing": 0.2}, {}),
        ("exo_pair", "exo_pair", {**FORWARD, "label_smoothing": 0.1}, {}),
        *((name, kind, {"use_weighting": True}, {"weighting": "aligned"}) for name, kind in ALIGNED),
    ],
)
def test_preference_losses_equal_trls(name: str, kind: str, hyper: dict[str, Any], own: dict[str, Any]) -> None:
    batch, hyper = random_batch(26), {"beta": 0.3, **hyper}
    tensors = {key: value for key, value in own.items() if isinstance(value, Tensor)}
    tensors |= {"sharp_log_prob": sharp_of(batch)} if "weighting" in own else {}
    names = {key: value for key, value in {**hyper, **own}.items() if key not in (*tensors, "use_weighting")}
    state = dict(ld_alpha=None, f_divergence_type="reverse_kl", use_weighting=False, label_smoothing=0.0) | hyper
    order = torch.cat([torch.arange(0, 6, 2), torch.arange(1, 6, 2)])  # all chosen ones, then all rejected ones
    theirs = trls("dpo", order, batch, {}, loss_types=[kind], loss_weights=[1.0], **state)
    agree(ours(name, {**batch, **tensors}, "seq-mean-token-sum", **names), theirs, atol=1e-7)


@pytest.mark.parametrize(("kind", "point"), [("kto", None), ("kto", -0.8), ("apo_zero_unpaired", 0.0)])
def test_kto_equals_trls(kind: str, point: float | None) -> None:
    """``point`` is the mean log-ratio of mismatched pairs. With None, the log-ratios of the batch take their place."""
    batch, labels = random_batch(30), torch.tensor([True, False, False, True, True, True])
    ratios = torch.where(batch["mask"], batch["log_prob"] - batch["ref_log_prob"], 0).sum(-1)
    mismatched = ratios if point is None else torch.full((6,), point).double()
    settings = {"beta": 0.4, "desirable_weight": 1.3, "undesirable_weight": 0.7}
    state = {**settings, "loss_type": kind, "calculate_KL": kind == "kto", "_compute_kl_logps.return_value": mismatched}
    given = {"label": labels, "ref_KL_logps": torch.zeros(6, dtype=torch.float64)}
    theirs = trls("kto", torch.arange(6), batch, given, **state)
    given = {**batch, "chosen": labels, "reference_point": mismatched.mean().clamp(min=0).expand(6)}
    agree(ours("kto", given, "seq-mean-token-sum", **settings), theirs, atol=1e-7)
