"""Parts of a loss: required inputs, several devices, and inputs that would silently give a wrong loss."""

import copy
import dataclasses
import functools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from by_hand import called
from objective_cases import raises_without, random_batch
from policy_batches import batch
from refused import refused
from torchrl_llm_kl import AdaptiveKLCoefficient, ScoreOptions, losses
from torchrl_llm_kl.estimators import available_estimators, corrected_k3, get_estimator, k2
from torchrl_llm_kl.losses._objective import dummy_inputs

NAN = float("nan")
MASK = torch.ones(2, 2, dtype=torch.bool)
OLD = torch.tensor([[-1.0, -2.0], [-0.5, -1.0]], dtype=torch.float64)
ONES = torch.ones(2, 2, dtype=torch.float64)
PAIR = torch.tensor([0.1, 0.5])


def needed(part: Any) -> set[str]:
    data = random_batch(0)
    data |= {**dict.fromkeys(("entropy", "kl"), -data["log_prob"]), "sampler_log_prob": data["old_log_prob"]}
    return raises_without(part, data)


CORRECTED = (functools.partial(corrected_k3, ratio_max=3.0), get_estimator("corrected_k3+"))
ESTIMATORS = [*(name for name in available_estimators() if name != "exact"), k2, corrected_k3, *CORRECTED]


@pytest.mark.filterwarnings("ignore:KL estimator")
@pytest.mark.parametrize("leave_out_experts", [False, True])
def test_terms_need_what_they_state(leave_out_experts: bool) -> None:
    parts = [losses.KLToReference(0.1, each, leave_out_experts=leave_out_experts) for each in [*ESTIMATORS, "exact"]]
    parts += [losses.KLToSampler(0.1, each, leave_out_experts=leave_out_experts) for each in ESTIMATORS]
    for part in [*parts, losses.EntropyBonus(0.1, leave_out_experts=leave_out_experts)]:
        assert set(part.needs) == needed(part), part
        assert ("expert_mask" in part.needs) == leave_out_experts


def test_corrections_and_functions_need_the_inputs_that_they_read() -> None:
    weights = losses.ImportanceWeights(level="sequence")
    for part in (weights, losses.OffPolicySequenceMask(), losses.TotalVariationMask(0.1), losses.TopEntropyMask(0.3)):
        assert set(part.needs) == needed(part)

    def mine(inputs: losses.LossInputs, *, scale: float) -> Any:
        return (losses.LossTerm("mine", scale * inputs.advantage * inputs.log_prob, inputs.mask),)

    parts = losses.TermPart(mine, scale=1.0), losses.TermPart(functools.partial(mine, scale=1.0))
    assert [part.needs for part in parts] == [{"advantage"}] * 2
    # Copies of the inputs are watched too, and a changed input is not read from the data.
    for replaced in (lambda x: dataclasses.replace(x, kl=x.log_prob), lambda x: x.replace(kl=x.log_prob)):
        part = losses.TermPart(lambda inputs, copy=replaced: mine(copy(inputs), scale=copy(inputs).get("kl").mean()))
        assert part.reads() == ({"advantage"}, set())


def test_keys_follow_changed_hyper_parameters(model: nn.Module) -> None:
    """Only a clip mode needs old log-probs. Names of metrics and inputs of terms follow changes as well."""
    loss = losses.PolicyLoss(model, "rec", clip_mode="one-side")
    data = batch().exclude(("next", "sampler_log_probs"), ("next", "ref_log_probs"))
    old, bare = loss.tensor_keys.old_log_prob, data.exclude(("next", "log_probs"))
    for _ in range(2):
        assert old in loss.in_keys
        with pytest.raises(KeyError, match="rec needs old_log_prob"):
            loss(bare)
        loss.clip_mode = "none"
        assert old not in loss.in_keys
        assert "ESS" not in loss.out_keys
        fresh = losses.PolicyLoss(model, "rec")
        out = loss(bare)
        assert_close(out["loss_objective"], fresh(bare)["loss_objective"])
        assert set(loss.out_keys) == set(fresh.out_keys) == set(out.keys())
        loss.clip_mode = "one-side"
    loss = losses.PolicyLoss(model)
    loss.enable_sequence_masking, loss.clip_ratio_c = True, None
    assert "sequence_masked_fraction" in loss.out_keys
    assert set(loss(data).keys()) == set(loss.out_keys)
    loss.out_keys = ["loss_objective"]
    assert loss.out_keys == ["loss_objective"]
    loss.out_keys = None
    assert set(loss(data).keys()) == set(loss.out_keys)
    loss = losses.PolicyLoss(model, "gpg", terms=[losses.KLToReference(0.1)])
    assert "expert_mask" not in loss.in_keys
    loss.kl_to_ref_leave_out_experts = True
    assert "expert_mask" in loss.in_keys
    with pytest.raises(KeyError, match="needs expert_mask"):
        loss(batch())


def test_no_gradient_flows_into_data() -> None:
    """Log-probs, targets and weights are constants, even if they are computed from the trained values."""
    log_prob = OLD.clone().requires_grad_()
    for term, expected in [
        (losses.ppo(losses.LossInputs(log_prob, MASK, old_log_prob=log_prob, advantage=3 * ONES)), -3 * ONES),
        (losses.kl_to_ref(losses.LossInputs(log_prob, MASK, ref_log_prob=log_prob - 0.5)), 0.5 * ONES),
        (losses.value_error(losses.ValueInputs(log_prob, MASK, log_prob + 2.0)), -2 * ONES),
        (losses.apply_correction([losses.LossTerm("objective", log_prob * 2, MASK)], log_prob.exp()), 2 * OLD.exp()),
    ]:
        assert_close(torch.autograd.grad(term[0].value.sum(), log_prob)[0], expected)


NARROW = MASK[:, :1]
TERM = losses.LossTerm("objective", ONES[:, :1], NARROW)
BOOLEAN = r"must hold numbers, got a boolean tensor: pass \w+\.float\(\)"
ONE_NUMBER = r"must be one number, got a tensor of shape \(2,\)"
test_inputs_and_numbers_that_would_broadcast_or_mean_something_else = refused(
    lambda call: call(),
    (lambda: losses.LossInputs(OLD, MASK, advantage=MASK), TypeError, BOOLEAN),
    (lambda: losses.ValueInputs(OLD, MASK.float(), OLD), TypeError, "mask must be boolean"),
    (lambda: losses.opmd(losses.LossInputs(OLD, MASK, advantage=ONES), tau=PAIR), f"tau {ONE_NUMBER}"),
    (lambda: losses.LossTerm("objective", OLD, MASK, weight=PAIR), f"weight {ONE_NUMBER}"),
    (lambda: losses.aggregate(OLD, MASK, denominator=PAIR), f"denominator {ONE_NUMBER}"),
    (lambda: losses.aggregate(OLD, MASK, "none", denominator=3), "'none' has no denominator, got 3"),
    (lambda: losses.ImportanceWeights(high=True), TypeError, "high must be a number, got True"),
    (lambda: losses.value_error(losses.ValueInputs(OLD, MASK, OLD, OLD), clip_value=PAIR), f"clip_value {ONE_NUMBER}"),
    (lambda: losses.apply_correction([TERM], ONES, MASK.float()), TypeError, "mask must be boolean"),
    (lambda: losses.apply_correction([TERM], ONES, NARROW), r"weights has shape \(2, 2\) but mask has shape \(2, 1\)"),
    (lambda: called(losses.top_entropy_mask, -OLD, MASK, threshold=NAN), "threshold must be a number, got nan"),
    (lambda: losses.EntropyBonus(NAN), "coeff must be a number, got nan"),
)


def test_every_kind_of_number_is_a_checked_buffer() -> None:
    for value in (3, np.float32(3), np.float64(3), np.int64(3), torch.tensor(3), torch.tensor([3.0])):
        part = losses.TermPart(losses.dapo, clip_ratio_c=value)
        assert part.state_dict()["clip_ratio_c"].item() == 3.0
        assert part.clip_ratio_c.shape == ()
    part.clip_ratio_c = 4
    assert part.state_dict()["clip_ratio_c"].item() == 4.0
    for part in (losses.ImportanceWeights(low=1, high=2), losses.RejectionMask("token_k1", low=-1, high=2)):
        assert set(part.state_dict()) == {"low", "high"}
    assert repr(part) == "RejectionMask(rejection_mask, ratio='both', divergence='token_k1', low=-1, high=2)"


def test_a_number_is_checked_when_it_is_given_and_when_it_changes() -> None:
    grad = torch.tensor(0.1, requires_grad=True)
    for value, message in ((grad, "requires grad but"), (np.float32(-5), "at least 0")):
        with pytest.raises(ValueError, match=f"clip_high .*{message}"):
            losses.TermPart(losses.ppo, clip_high=value)
        part = losses.TermPart(losses.ppo)
        with pytest.raises(ValueError, match=f"clip_high .*{message}"):
            part.clip_high = value
        assert_close(part.clip_high, torch.tensor(0.2))


def test_a_misspelt_attribute_is_refused(model: nn.Module) -> None:
    loss = losses.PolicyLoss(model, terms=[losses.KLToReference(0.1)])
    for name, near in (("clip_hihg", "clip_high"), ("kl_coeff", "kl_to_ref_coeff")):
        with pytest.raises(AttributeError, match=rf"PolicyLoss has no '{name}' to set.*Did you mean '{near}'"):
            setattr(loss, name, 0.3)
    loss.options = ScoreOptions(entropy=True)
    assert "entropy" in loss.out_keys
    loss.note = "anything else"  # type: ignore[assignment]
    loss._clip_hihg = True  # a name of torch's, as torch.compile sets


def test_masks_other_than_0_and_1_are_refused(model: nn.Module) -> None:
    half, advice = torch.full((6, 1), 0.5), "is a mask: expected only 1 and 0"
    for value in (half, 2 * torch.ones(6, 1).long(), torch.full((6, 1), NAN)):
        with pytest.raises(ValueError, match=f"'loss_mask' {advice}"):
            losses.PolicyLoss(model)(batch().set("loss_mask", value))
    with pytest.raises(ValueError, match=f"'expert_mask' {advice}"):
        losses.PolicyLoss(model, "mix")(batch().set("expert_mask", half))
    rows = torch.tensor([1, 0, 1, 0, 1, 1]).unsqueeze(-1)
    one, two, three = (losses.PolicyLoss(model)(batch().set("loss_mask", x)) for x in (rows, rows.float(), rows == 1))
    assert one["loss_objective"] == two["loss_objective"] == three["loss_objective"]
    with pytest.raises(TypeError, match="advantage must hold numbers"):
        losses.PolicyLoss(model)(batch().set("advantage", torch.ones(6, 1) == 1))


def test_an_optional_entry_under_another_key_must_be_there(model: nn.Module) -> None:
    optional = {"loss_mask": "ppo", "sampler_log_prob": "ppo", "selected": "clip_cov", "pair_id": "dpo"}
    for name, objective in optional.items():
        loss = losses.PolicyLoss(model, objective)
        loss(batch())
        loss.set_keys(**{name: "misspelt"})
        with pytest.raises(KeyError, match=rf"{name}.*expected 'misspelt' in the TensorDict.*set_keys\({name}="):
            loss(batch())


def test_responses_longer_than_the_limit(model: nn.Module) -> None:
    """The longest response has five tokens."""
    assert losses.PolicyLoss(model, "dr_grpo", max_len=5)(batch())["loss_objective"].isfinite()
    loss = losses.PolicyLoss(model, "dr_grpo", max_len=4)
    for call in (loss, loss.count):
        with pytest.raises(ValueError, match=r"max_len=4, but a sequence has 5 trained tokens"):
            call(batch())


def test_a_correction_is_a_function_or_a_part(model: nn.Module) -> None:
    both = losses.importance_weights, losses.ImportanceWeights()
    plain, part = (losses.PolicyLoss(model, corrections=[x])(batch()) for x in both)
    assert_close(plain["loss_objective"], part["loss_objective"])


# ---------------------------------------------------------------------- two devices
aten = torch.ops.aten
# Arithmetic and comparisons take a 0-dim tensor of the CPU beside one of an accelerator; these do not.
STRICT = (aten.clamp.Tensor, aten.lerp.Tensor, aten.addcmul.default, aten.addcdiv.default)


class Accelerator(TorchDispatchMode):
    """Tensors on the device "meta" stand for tensors on an accelerator. They cannot be read, but can be copied back."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._to_copy.default:
            source, device = args[0], torch.device(kwargs.get("device") or args[0].device).type
            if source.device.type == "meta" and device == "cpu":
                return next(value for there, value in self.copied if there is source).clone()
            out = func(*args, **kwargs)
            self.copied.append((out, source))
            return out
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        here = [x for x in given if x.device.type == "cpu"]
        if len(here) < len(given) and here and (func in STRICT or any(x.ndim for x in here)):
            raise RuntimeError(f"Expected all tensors to be on the same device, found two in {func}.")
        return func(*args, **kwargs)


PLAIN = (
    "a3po",
    "fipo",
    "ctpo",
    "sdar",
    "dapo",
    "dr_grpo",
    "gspo",
    "luspo",
    "gmpo",
    "cispo",
    "sapo",
    "clip_cov",
    "kl_cov",
    "dppo",
    "vespo",
)
RING = {"clip_mode": "ring", "weight": "importance_sampling", "regularizer": "k2", "regularizer_coef": 0.1}
OBJECTIVES = {"rec": RING, "ppo": {"clip_ratio_c": 3.0, "enable_sequence_masking": True}}
OBJECTIVES |= {name: {} for name in (*PLAIN, "topr", "sppo", "dro", "mix", "distill")}
MAKE: dict[str, Callable[[], Any]] = {
    **{name: functools.partial(losses.TermPart, losses.get_objective(name), **x) for name, x in OBJECTIVES.items()},
    "adaptive": lambda: losses.KLToReference(AdaptiveKLCoefficient(0.1, target=1.0, horizon=10)),
    "kl_to_sampler": lambda: losses.KLToSampler(0.1, "corrected_k3"),
    "entropy": lambda: losses.EntropyBonus(0.1),
    "weights": lambda: losses.ImportanceWeights(low=0.5, high=2.0, mode="mask"),
    "geometric": lambda: losses.ImportanceWeights(level="geometric", high=2.0),
    "rejection": lambda: losses.RejectionMask("seq_max_k1", low=-0.1, high=0.1),
    "sequences": lambda: losses.OffPolicySequenceMask(0.1),
    "distance": lambda: losses.TotalVariationMask(0.1),
    "top_entropy": lambda: losses.TopEntropyMask(0.5),
    "threshold": lambda: losses.TopEntropyMask(threshold=0.5),
}


def leaves(result: Any) -> list[Tensor]:
    """The tensors of terms (values, weights, metrics) or of a correction (weights, metrics)."""
    terms = [[x.value, x.weight, dict(x.metrics)] if isinstance(x, losses.LossTerm) else x for x in result]
    return [x for x in tree_leaves(terms) if isinstance(x, Tensor)]


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.filterwarnings("ignore:KL estimator")
def test_tokens_and_numbers_on_two_devices(name: str) -> None:
    """Hyper-parameters on the CPU work with tokens on an accelerator, without a copy per call, and the reverse works too."""
    part, rng = MAKE[name](), torch.Generator().manual_seed(0)
    inputs = {name: x for name, x in dummy_inputs().given.items() if name not in ("pair_id", "chosen")}
    given = {key: x - torch.rand(x.shape, generator=rng) if x.is_floating_point() else x for key, x in inputs.items()}
    expected = leaves(part.run(losses.LossInputs(**given)))
    with Accelerator():
        found = leaves(part.run(losses.LossInputs(**{key: x.to("meta") for key, x in given.items()})))
    assert [x.shape for x in found] == [x.shape for x in expected]
    assert all(x.device.type == "meta" for x in found if x.ndim)
    if name != "adaptive":
        with Accelerator():
            part.to("meta")
            found = leaves(part.run(losses.LossInputs(**given)))
        assert_close(found, expected)


def test_clean_inputs_are_not_copied() -> None:
    """``replace`` cleans only the changed inputs. ``within`` cleans all of them."""
    clean = losses.LossInputs.of_clean(log_prob=-ONES, mask=MASK, ref_log_prob=-2 * ONES)
    kept = clean.replace(advantage=ONES)
    assert kept.ref_log_prob.data_ptr() == clean.ref_log_prob.data_ptr()
    narrower = clean.within(MASK.triu())
    assert narrower.ref_log_prob.tolist() == [[-2, -2], [0, -2]]
    assert losses.KLToReference(1.0)(narrower)[0].value.tolist() == [[0.5, 0.5], [0, 0.5]]


def test_an_input_that_was_left_out() -> None:
    inputs = losses.LossInputs(OLD, MASK, advantage=ONES)
    assert (inputs.get("kl"), sorted(inputs.given)) == (None, ["advantage", "log_prob", "mask"])
    assert repr(inputs).startswith("LossInputs(log_prob=tensor([[-1.")
    assert hasattr(inputs, "advantage")
    assert not hasattr(inputs, "kl")
    assert dataclasses.replace(inputs, advantage=2 * ONES).given.keys() == inputs.given.keys()
    for read, missing in ((lambda: inputs.kl, "kl"), (lambda: inputs.log_ratio, "old_log_prob")):
        with pytest.raises(losses.MissingInputError, match=f"the loss needs {missing}: pass {missing}= to LossInputs"):
            read()
    with pytest.raises(AttributeError, match="LossInputs has no input 'advantages'"):
        inputs.advantages  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(copy.deepcopy(inputs), "anything")
    assert pickle.loads(pickle.dumps(inputs)).given.keys() == inputs.given.keys()
