"""Parts of a loss as modules: a function together with its hyper-parameters. Objectives, terms and corrections are parts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar, cast, get_args, get_origin

import torch
from torch import Tensor, nn

from torchrl_llm_kl._numerics import Scalar
from torchrl_llm_kl._registry import members_of, signature_of
from torchrl_llm_kl.estimators import WideBuffers, check_placement
from torchrl_llm_kl.losses._objective import (
    INPUTS,
    OF_SAMPLER,
    KLLevel,
    LossInputs,
    Reads,
    Terms,
    Weights,
    dummy_inputs,
    name_of,
    reads_of,
)
from torchrl_llm_kl.losses.corrections import (
    Divergence,
    Level,
    Ratio,
    importance_weights,
    off_policy_sequence_mask,
    rejection_mask,
    staleness_mask,
    top_entropy_mask,
    total_variation_mask,
)
from torchrl_llm_kl.losses.objectives._supervised import Distribution
from torchrl_llm_kl.losses.terms import Estimator, divergence_to_teacher, entropy_bonus, kl_to_ref, kl_to_sampler

#: A weight: a number, or a module that returns one.
Coefficient = Scalar | nn.Module
R_co = TypeVar("R_co", covariant=True)


class Part(WideBuffers, Generic[R_co]):
    """A function of one record of inputs together with its hyper-parameters.

    Hyper-parameters that are numbers are buffers. They are saved and moved with the module, and assignment changes them in
    place. Modules, such as an :class:`~torchrl_llm_kl.AdaptiveKLCoefficient`, are called for their value. All other
    hyper-parameters are stored unchanged.

    Args:
        function: takes the inputs, and its hyper-parameters as keywords.
        hyper: the hyper-parameters. The function's defaults are used for the others.

    Raises:
        ValueError: if the function rejects a hyper-parameter, or one is a tensor with grad.
        TypeError: if it has no such hyper-parameter.
    """

    def __init__(self, function: Callable[..., R_co], /, **hyper: object) -> None:
        super().__init__()
        _, *parameters = signature_of(function).values()
        self.function = function
        self.settings: dict[str, object] = {}
        # A dry run takes milliseconds and would be needed in every forward, so its results are cached by available inputs.
        self._reads: dict[frozenset[str], Reads] = {}
        self._reads_of: list[tuple[int, int]] = []
        self._floats = frozenset(x.name for x in parameters if isinstance(x.default, float) or _is_scalar(x))
        defaults = {x.name: x.default for x in parameters if x.default is not x.empty}
        hyper = {name: self._number(name, value) for name, value in hyper.items()}
        for name, value in {**defaults, **hyper}.items():
            self._store(name, value)
        self._check(hyper)

    def run(self, inputs: object) -> R_co:
        """Call the function."""
        # Kernels of every device accept a 0-dim CPU tensor. A tensor on another device must be moved to the inputs.
        device = next(x.device for x in vars(inputs).values() if isinstance(x, Tensor))
        hyper = self.hyper
        hyper |= {name: x.to(device) for name, x in hyper.items() if isinstance(x, Tensor) and x.device.type != "cpu"}
        return self.function(inputs, **hyper)

    def dummy(self, hyper: Mapping[str, object]) -> object:
        """Inputs of a few tokens, on which the function is run to check its hyper-parameters."""
        return dummy_inputs(teachers=number_of_teachers(hyper) or 1, device=device_of(self))

    def reads(self, there: Collection[str] = INPUTS) -> Reads:
        """The inputs that the function reads with its current hyper-parameters, if the data holds those of ``there``."""
        if not str(getattr(self.function, "__module__", "")).startswith("torchrl_llm_kl."):
            # A user's function may branch on a number that was assigned, loaded or updated since the last dry run.
            numbers = [(id(x), 0 if x.is_inference() else x._version) for x in self.buffers()]
            if numbers != self._reads_of:
                self._reads.clear()
                self._reads_of = numbers
        key = frozenset(there)
        if key not in self._reads:
            self._reads[key] = reads_of(self.run, cast("LossInputs", self.dummy(self.hyper)), key)
        return self._reads[key]

    @property
    def name(self) -> str:
        """The name of the function."""
        return name_of(self.function)

    @property
    def needs(self) -> frozenset[str]:
        """The inputs that the function requires with its current hyper-parameters, except ``log_prob`` and ``mask``."""
        return self.reads().required

    @property
    def leaves_out_experts(self) -> bool:
        """Whether the function reads only ``log_prob`` at experts' tokens."""
        return "expert_mask" in self.needs

    @property
    def hyper(self) -> dict[str, Any]:
        """The hyper-parameters as passed to the function. Numbers are 0-dim tensors."""
        return {name: value() if isinstance(value, nn.Module) else value for name, value in self.stored.items()}

    @property
    def stored(self) -> dict[str, object]:
        """The hyper-parameters as they are stored: the buffer of a number, a module, or the value itself."""
        return {**self.settings, **self._buffers, **self._modules}

    def put(self, name: str, value: object) -> None:
        """Set a hyper-parameter. A number that is already a buffer changes in place.

        Raises:
            KeyError: if the hyper-parameter is a module. Change it through its own methods.
            ValueError: if the function rejects the value. Tensors are not checked, because that would need a host sync.
        """
        value = self._number(name, value)
        if not isinstance(value, Tensor):
            self._check({**self.hyper, name: value})
        self._reads.clear()
        buffer = self._buffers.get(name)
        if buffer is not None and isinstance(value, (int, float, Tensor)):
            buffer.copy_(torch.as_tensor(value))
            return
        self._buffers.pop(name, None)
        self.settings.pop(name, None)
        self._store(name, value)

    def _number(self, name: str, value: object) -> object:
        """Convert a hyper-parameter that is a number to a float or a 0-dim tensor."""
        if name not in self._floats or value is None or isinstance(value, nn.Module):
            return value
        if isinstance(value, Tensor):
            if value.requires_grad:
                raise ValueError(f"{name} requires grad but would be copied: pass a module that returns it.")
            return value.reshape(())
        if isinstance(value, bool):
            raise TypeError(f"{name} must be a number, got {value}.")
        return float(value)  # type: ignore[arg-type]

    def _store(self, name: str, value: object) -> None:
        if isinstance(value, nn.Module):
            self.add_module(name, value)
        elif isinstance(value, Tensor) or type(value) is float:
            # Clones, because the caller's tensor must not change when the hyper-parameter does.
            self.register_buffer(name, torch.as_tensor(value, dtype=torch.float32).clone())
        else:
            self.settings[name] = value

    def _check(self, hyper: Mapping[str, object]) -> None:
        """Run the function to check hyper-parameters. It checks numbers but not buffers, so CPU tensors become numbers."""
        values = {name: value() if isinstance(value, nn.Module) else value for name, value in hyper.items()}
        for name, value in hyper.items():
            if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:  # no host sync
                values[name] = value.item()
        with torch.no_grad():
            self.function(self.dummy(values), **values)

    def __setattr__(self, name: str, value: Any) -> None:
        # nn.Module refuses a number in place of a buffer. __dict__ is empty until its __init__ has run.
        if name in self.__dict__.get("_buffers", {}) or name in self.__dict__.get("settings", {}):
            self.put(name, value)
        else:
            super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """Name and hyper-parameters."""
        shown = {name: repr(value) for name, value in self.settings.items()}
        shown |= {name: f"{float(value):g}" for name, value in self._buffers.items() if value is not None}
        return ", ".join([self.name, *(f"{key}={value}" for key, value in shown.items())])


def _is_scalar(parameter: inspect.Parameter) -> bool:
    """Whether a hyper-parameter is annotated as a number that may also be a tensor."""
    # The annotation of a user's function may be a text that cannot be evaluated.
    members = members_of(parameter.annotation)
    kinds = {get_args(each)[0] if get_origin(each) is Annotated else each for each in members}
    return Scalar in kinds or {float, Tensor} <= kinds or str(parameter.annotation).startswith("Scalar")


def number_of_teachers(hyper: Mapping[str, object]) -> int | None:
    """The number of teachers that the weights of a distillation are for. None without weights."""
    weights = cast("Sequence[float] | None", hyper.get("teacher_weights"))
    return len(weights) if weights else None


def device_of(*parts: Part[object]) -> torch.device | None:
    """The device of the parts' hyper-parameters. None for the CPU."""
    return next((x.device for part in parts for x in part.buffers() if x.device.type != "cpu"), None)


# ------------------------------------------------------------------ terms


class TermPart(Part[Terms]):
    """A function that returns loss terms, together with its hyper-parameters, which are checked at construction.

    Example:
        >>> from torchrl_llm_kl.losses import ppo
        >>> part = TermPart(ppo, clip_high=0.28)
        >>> part.clip_high, sorted(part.needs)
        (tensor(0.2800), ['advantage', 'old_log_prob'])
    """

    def forward(self, inputs: LossInputs) -> Terms:
        """The terms for these inputs."""
        terms = self.run(inputs)
        # A scheduled weight is logged, because it cannot be seen in the terms that it multiplies.
        mu = self._modules.get("mu")
        if mu is not None:
            terms = *terms[:-1], terms[-1].replace(metrics={**terms[-1].metrics, "mu": mu().detach()})
        return terms


class KLToReference(TermPart):
    """The KL to the reference as a term of the loss: :func:`~torchrl_llm_kl.losses.kl_to_ref`.

    Args:
        coeff: weight of the term, dimensionless. A number of at least 0, or a coefficient such as
            :class:`~torchrl_llm_kl.AdaptiveKLCoefficient`.
        estimator: a name of :func:`~torchrl_llm_kl.get_estimator`, ``"exact"`` (the loss then requires the reference model), or
            a function with the same signature. ``docs/estimators.md`` compares the estimators.

    Keyword Args:
        leave_out_experts: leave out the experts' tokens.
        level: ``"sequence"`` for the KL of whole sequences, which is unbiased off-policy. The estimator is then ``"exact"``,
            ``"k1"`` or ``"k3"``.
        ratio_max: upper bound of the ratio of ``level="sequence"``.

    Warns:
        KLPlacementWarning: if the estimator's gradient in a loss is not the reverse KL's.

    Example:
        >>> sorted(KLToReference(0.01, "exact").needs)
        ['kl']
    """

    def __init__(
        self,
        coeff: Coefficient = 1e-3,
        estimator: Estimator = "k2",
        *,
        leave_out_experts: bool = False,
        level: KLLevel = "token",
        ratio_max: float | Tensor | None = None,
    ) -> None:
        if level == "token":  # the ratio of whole sequences gives its estimators the gradient of the reverse KL
            check_placement(estimator, "loss", stacklevel=2)
        own = {"leave_out_experts": leave_out_experts, "level": level, "ratio_max": ratio_max}
        super().__init__(kl_to_ref, coeff=coeff, estimator=estimator, **own)


class KLToSampler(TermPart):
    """The KL to the sampling policy, a soft trust region: :func:`~torchrl_llm_kl.losses.kl_to_sampler`.

    Args:
        coeff: weight of the term, as in :class:`KLToReference`. 0 only logs.
        estimator: as in :class:`KLToReference`. With ``"exact"`` the ``reference`` of the loss must be a copy of the sampler.

    Keyword Args:
        leave_out_experts: leave out the experts' tokens.

    Warns:
        KLPlacementWarning: if the estimator's gradient in a loss is not the reverse KL's.

    Example:
        >>> one = torch.ones(1, 1)
        >>> KLToSampler(0.1)(LossInputs(-one, one == 1, old_log_prob=-2 * one))[0].value
        tensor([[0.5000]])
    """

    def __init__(
        self, coeff: Coefficient = 1e-3, estimator: Estimator = "k2", *, leave_out_experts: bool = False
    ) -> None:
        check_placement(estimator, "loss", stacklevel=2)
        super().__init__(kl_to_sampler, coeff=coeff, estimator=estimator, leave_out_experts=leave_out_experts)


class DivergenceToTeacher(TermPart):
    """A divergence to a teacher's distribution: :func:`~torchrl_llm_kl.losses.divergence_to_teacher`.

    Args:
        coeff: weight of the term, dimensionless. A number of at least 0, or a module that returns it.
        beta: the teacher's share of the mixture. 0 for the forward KL, 1 for the reverse KL.

    Keyword Args:
        distribution: ``"top_k"`` for the teacher's top k in the data. ``"exact"`` for the whole vocabulary: the loss's
            ``reference`` is then the teacher.
        teacher_weights: one number for each teacher, see :func:`~torchrl_llm_kl.losses.distill`.

    Example:
        >>> sorted(DivergenceToTeacher(0.1, beta=0.0).needs)
        ['outcomes', 'teacher_outcomes']
    """

    def __init__(
        self,
        coeff: Coefficient = 1.0,
        beta: Coefficient = 0.5,
        *,
        distribution: Distribution = "top_k",
        teacher_weights: Sequence[float] | None = None,
    ) -> None:
        own = {"distribution": distribution, "teacher_weights": teacher_weights}
        super().__init__(divergence_to_teacher, coeff=coeff, beta=beta, **own)


class EntropyBonus(TermPart):
    """Entropy bonus: minus the policy's entropy over the whole vocabulary. See :func:`~torchrl_llm_kl.losses.entropy_bonus`.

    Args:
        coeff: weight of the term, dimensionless. A number (below 0 for less entropy), or a coefficient such as
            :class:`~torchrl_llm_kl.AdaptiveEntropyCoefficient`.

    Keyword Args:
        leave_out_experts: leave out the experts' tokens, as Trinity's ``mix`` does.

    Example:
        >>> one = torch.ones(1, 1)
        >>> EntropyBonus(0.01)(LossInputs(-one, one == 1, entropy=2 * one))[0].value
        tensor([[-2.]])
    """

    def __init__(self, coeff: Coefficient = 1e-3, *, leave_out_experts: bool = False) -> None:
        super().__init__(entropy_bonus, coeff=coeff, leave_out_experts=leave_out_experts)


# ------------------------------------------------------------------ corrections


class Correction(Part[Weights]):
    """A function that returns one weight per token and metrics. The weights multiply the objective, but not the other terms.

    Example:
        >>> halved = Correction(lambda inputs, factor=0.5: (factor * inputs.mask, {}))
        >>> halved(LossInputs(torch.zeros(1, 2), torch.tensor([[True, False]])))[0]
        tensor([[0.5000, 0.0000]])
    """

    def forward(self, inputs: LossInputs) -> Weights:
        """The weights and metrics for these inputs."""
        return self.run(inputs)

    @property
    def leaves_out_experts(self) -> bool:
        """Whether it corrects for the sampler. No policy sampled the experts' tokens, so they are not corrected."""
        return not frozenset(OF_SAMPLER).isdisjoint(self.needs | self.reads().optional)


class ImportanceWeights(Correction):
    """Truncated or masked importance weights, for a sampler whose log-probs differ from the trainer's.

    It needs ``sampler_log_prob`` and ``old_log_prob``, and for one cause of their ratio ``behavior_log_prob`` instead of one of
    them. The arguments are as in :func:`~torchrl_llm_kl.losses.importance_weights`.

    Example:
        >>> sorted(ImportanceWeights(high=3.0).needs)
        ['old_log_prob', 'sampler_log_prob']
    """

    def __init__(
        self,
        *,
        level: Level = "token",
        mode: Literal["truncate", "mask"] = "truncate",
        low: float | None = None,
        high: float | None = 2.0,
        ratio: Ratio = "both",
    ) -> None:
        super().__init__(importance_weights, level=level, mode=mode, low=low, high=high, ratio=ratio)


class RejectionMask(Correction):
    """Leave out tokens or sequences on which sampler and trainer disagree too much.

    It needs ``sampler_log_prob`` and ``old_log_prob``. The arguments are as in
    :func:`~torchrl_llm_kl.losses.rejection_mask`.

    Example:
        >>> sorted(RejectionMask("seq_max_k3", high=0.1).needs)
        ['old_log_prob', 'sampler_log_prob']
    """

    def __init__(
        self,
        divergence: Divergence,
        *,
        low: float | None = None,
        high: float | None = None,
        ratio: Ratio = "both",
    ) -> None:
        super().__init__(rejection_mask, divergence=divergence, low=low, high=high, ratio=ratio)


class StalenessMask(Correction):
    """Leave out tokens that older weights sampled, or let their weight fall with their age.

    It needs the entry ``age``, which :func:`~torchrl_llm_kl.drop_stale` writes. The arguments are as in
    :func:`~torchrl_llm_kl.losses.staleness_mask`.

    Example:
        >>> age = torch.tensor([[0.0, 3.0]])
        >>> StalenessMask(2)(LossInputs(-age, age >= 0, age=age))[0]
        tensor([[1., 0.]])
    """

    def __init__(self, max_age: float | None = None, *, decay: float = 1.0) -> None:
        super().__init__(staleness_mask, max_age=max_age, decay=decay)


class OffPolicySequenceMask(Correction):
    """Leave out tokens with a negative advantage in sequences that have become unlikely.

    Args:
        delta: nats per token, see :func:`~torchrl_llm_kl.losses.off_policy_sequence_mask`.

    Example:
        >>> sorted(OffPolicySequenceMask().needs)
        ['advantage', 'old_log_prob']
    """

    def __init__(self, delta: float = 0.1) -> None:
        super().__init__(off_policy_sequence_mask, delta=delta)


class TotalVariationMask(Correction):
    """Leave out tokens whose gradient leads further away from the sampler, in sequences that are far from it.

    Args:
        delta: a total variation, see :func:`~torchrl_llm_kl.losses.total_variation_mask`.

    Example:
        >>> sorted(TotalVariationMask(0.1).needs)
        ['advantage', 'old_log_prob']
    """

    def __init__(self, delta: float) -> None:
        super().__init__(total_variation_mask, delta=delta)


class TopEntropyMask(Correction):
    """Train only the tokens of highest policy entropy.

    Args:
        fraction: share of the masked-in tokens, see :func:`~torchrl_llm_kl.losses.top_entropy_mask`.

    Keyword Args:
        threshold: train tokens with at least this entropy, in nats, instead of a fraction of each batch. The losses of the
            parts of a batch then add up to the loss of the whole batch.

    Example:
        >>> entropy = torch.tensor([[0.1, 2.0, 0.3, 1.0]])
        >>> TopEntropyMask(0.5)(LossInputs(-entropy, entropy > 0, entropy=entropy))[0]
        tensor([[0., 1., 0., 1.]])
    """

    def __init__(self, fraction: float = 0.2, *, threshold: float | None = None) -> None:
        super().__init__(top_entropy_mask, fraction=fraction, threshold=threshold)


def rollout_corrections(
    *,
    rollout_is: Level | None = None,
    rollout_is_threshold: float | str = 2.0,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
) -> list[Correction]:
    """The corrections that verl's ``rollout_correction`` settings describe.

    Keyword Args:
        rollout_is: adds :class:`ImportanceWeights` of this level, also ``"geometric"``, which verl does not have. None adds
            none.
        rollout_is_threshold: ``2.0`` truncates weights there. ``"0.5_5.0"`` sets weights outside these bounds to 0.
        rollout_rs: one or more of :data:`~torchrl_llm_kl.losses.Divergence`, separated by commas. Each adds a
            :class:`RejectionMask`.
        rollout_rs_threshold: one bound for all of them, or one each, separated by commas. A bound of ``k1`` is a pair of ratios
            of sampler to trainer, such as ``"0.5_2.0"``. A single number stands for ``1 / number`` and ``number``. For the
            others it is the upper bound.

    Raises:
        ValueError: for an unknown value, or if the numbers of divergences and bounds differ.

    Example:
        >>> weights, mask = rollout_corrections(rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0")
        >>> weights.high, mask.low, mask.high
        (tensor(2.), tensor(-0.6931), tensor(0.6931))

    Source: verl 0.9.1, ``RolloutCorrectionConfig``.
    """
    out: list[Correction] = []
    if rollout_is is None and rollout_is_threshold != 2.0:
        raise ValueError(f"rollout_is_threshold={rollout_is_threshold!r} has no effect: pass rollout_is= too.")
    if rollout_rs is None and rollout_rs_threshold is not None:
        raise ValueError(f"rollout_rs_threshold={rollout_rs_threshold!r} has no effect: pass rollout_rs= too.")
    if rollout_is is not None:
        low, high = _bounds(rollout_is_threshold)
        out.append(ImportanceWeights(level=rollout_is, mode="truncate" if low is None else "mask", low=low, high=high))
    names = (part.strip() for part in (rollout_rs or "").split(","))
    chosen = cast("list[Divergence]", list(dict.fromkeys(filter(None, names))))
    each = str(rollout_rs_threshold).split(",")
    each = each * len(chosen) if len(each) == 1 else each
    if len(each) != len(chosen):
        raise ValueError(
            f"rollout_rs={rollout_rs!r}, rollout_rs_threshold={rollout_rs_threshold!r}: pass one bound each."
        )
    for option, bound in zip(chosen, each, strict=True):
        low, high = _bounds(bound)
        if option.endswith("k1"):  # verl bounds the ratio, k1 is its logarithm
            low, high = math.log(1 / high if low is None else low), math.log(high)
        out.append(RejectionMask(option, low=low, high=high))
    return out


def _bounds(value: float | str) -> tuple[float | None, float]:
    """Lower and upper bound from ``2.0``, ``"2.0"`` or ``"0.5_2.0"``."""
    low, _, high = str(value).rpartition("_")
    return (float(low) if low else None), float(high)
