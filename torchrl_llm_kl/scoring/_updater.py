"""A reference that follows the policy, by a moving average of the weights, periodic resets, or both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, TypedDict, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchrl_llm_kl._numerics import check_not_a_name, check_range
from torchrl_llm_kl._private import WRAPPED
from torchrl_llm_kl._typing import asked
from torchrl_llm_kl.scoring._model import adapter_layers, check_has_adapters, locked
from torchrl_llm_kl.scoring._scorer import LogProbScorer, ModelOrScorer
from torchrl_llm_kl.scoring._wrapper import is_wrapper, unwrap
from torchrl_llm_kl.scoring._wrapping import is_zero3, reshard


@runtime_checkable
class Service(Protocol):
    """A model in other processes that accepts new weights, such as a :class:`~torchrl_llm_kl.service.RemoteModel`."""

    def update_weights(self, weights: Mapping[str, Tensor], /) -> object:
        """Replace the weights of the model."""


class UpdaterState(TypedDict):
    """The state of a :class:`ReferenceUpdater`."""

    steps: int
    weights: dict[str, Tensor]
    rest: dict[str, Tensor]
    start: dict[str, Tensor]


class ReferenceUpdater:
    r"""Updates a reference from the policy, by an exponential moving average, periodic resets, or both.

    Call :meth:`step` after each optimizer step. Every ``every`` steps the reference becomes
    :math:`\theta_{ref} \leftarrow d\,\theta_{ref} + (1 - d)\,\theta` with ``d = decay``. Every ``reset_every`` steps, and in
    :meth:`reset`, it becomes a bit-exact copy of the policy, so their KL is 0. The rounding error of each average is kept
    in float32 (4 bytes per weight) and added to the next one. Even a bfloat16 reference therefore follows.

    With ``bias_power`` the reference is the average plus :math:`\alpha\,(\theta - \theta_0)`, which corrects the lag of the
    average (BEMA). :math:`\theta_0` are the reference's weights at construction or at the last reset. The updater keeps a copy.
    At step :math:`t`, :math:`\alpha = (lag + t)^{-bias\_power}`.

    The weights change in place. Scorers notice the change and clear their cache.

    Args:
        reference: the reference model, a scorer of it, or a TorchRL wrapper. A scorer of the policy's own model with
            ``adapters="ref"`` updates that adapter from the policy's active one. This averages the two LoRA factors, not
            their product. Or a :class:`~torchrl_llm_kl.service.ScoringService`, which receives each change by
            ``update_weights``. Its average is held in this process and starts as the policy at construction.
        policy: the trained model, with or without a wrapper for ranks. If it is sharded (FSDP, FSDP2), the reference is
            sharded in the same way or (FSDP2) whole on each rank. Every rank calls :meth:`step`.

    Keyword Args:
        decay: weight of the old reference in an average, in [0, 1). TRL's ``1 - ref_model_mixup_alpha``. Default: no average.
        ema_power: in place of ``decay``. The policy has the weight ``(lag + t) ** -ema_power`` in an average. TRL: 0.5.
        bias_power: rate at which the correction of the lag falls, at least 0. TRL: 0.2. Default: no correction.
        lag: added to the number of steps in both powers, at least 1.
        every: steps between averages. Default 1.
        reset_every: steps between resets, if any.

    Attributes:
        steps: number of calls of :meth:`step`.

    Raises:
        TypeError: if an argument is not a model.
        ValueError: if nothing would ever change, a number is out of range, the two models have different weights, or they
            share their weights.

    Sources: averages after Polyak and Juditsky (1992), as used in TR-DPO (arXiv 2404.09656, eqs. 3 and 4: soft and hard
    update) and TRL's ``SyncRefModelCallback``. BEMA: Block and Zhang 2025 (arXiv 2508.00180), algorithm 1, and TRL's
    ``BEMACallback``, with ``multiplier=1``.

    Example:
        >>> policy, reference = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
        >>> _ = policy.weight.data.fill_(1.0), reference.weight.data.fill_(0.0)
        >>> updater = ReferenceUpdater(reference, policy, decay=0.75, reset_every=3)
        >>> for _ in range(3):
        ...     updater.step()
        ...     print(reference.weight.item())
        0.25
        0.4375
        1.0
    """

    def __init__(
        self,
        reference: ModelOrScorer | Service,
        policy: ModelOrScorer,
        *,
        decay: float | None = None,
        ema_power: float | None = None,
        bias_power: float | None = None,
        lag: int = 10,
        every: int = 1,
        reset_every: int | None = None,
    ) -> None:
        check_range(1, every=every, reset_every=reset_every, lag=lag)
        check_range(0.0, ema_power=ema_power, bias_power=bias_power)
        self._averages = decay is not None or ema_power is not None
        if not self._averages and (reset_every is None or every != 1 or bias_power is not None):
            raise ValueError("pass decay= for an average each `every` steps, or only reset_every= for resets.")
        if decay is not None and ema_power is not None:
            raise ValueError("decay and ema_power both set the weights of the average: pass one of them.")
        if decay is not None and not 0 <= decay < 1:
            raise ValueError(f"decay, the weight of the old reference, must be in [0, 1), got {decay}.")
        self.decay, self.ema_power, self.bias_power, self.lag = decay, ema_power, bias_power, lag
        self.every, self.reset_every, self.steps = every, reset_every, 0
        adapter = reference.options.adapters if isinstance(reference, LogProbScorer) else True
        self._policy = _module(policy, "policy")
        self._service = reference if isinstance(reference, Service) else None
        self._reference = self._policy if self._service is not None else _module(reference, "reference")
        self._check(adapter)
        self._adapter = adapter if isinstance(adapter, str) else None
        self._rest: dict[str, Tensor] = {}  # the exact average minus the reference, float32
        self._start: dict[str, Tensor] = {}  # theta_0
        self._own: dict[str, Tensor] = {}  # the averaged weights of a service
        if self._service is not None:
            self._own = {name: value.detach().clone() for name, value in self._sources()}
        self._restart()

    # ------------------------------------------------------------------ steps

    def step(self) -> None:
        """Count one optimizer step, and average or reset if this step is due for it."""
        self.steps += 1
        if self.reset_every is not None and self.steps % self.reset_every == 0:
            self.reset()
        elif self._averages and self.steps % self.every == 0:
            age = self.lag + self.steps
            weight = age**-self.ema_power if self.decay is None else 1 - self.decay  # type: ignore[operator]
            self._average(weight, 0.0 if self.bias_power is None else age**-self.bias_power)

    @torch.no_grad()
    def reset(self) -> None:
        """Copy the policy's weights into the reference."""
        # No score may run while the weights change.
        with locked(self._reference, self._policy):
            for _, own, new in self._pairs():
                own.copy_(new)
            for own, new in self._buffers():
                own.copy_(new)
        self._restart()
        self._push()

    def _restart(self) -> None:
        """Begin the average at the reference's weights."""
        self._rest.clear()
        pairs = self._pairs()
        self._start = {} if self.bias_power is None else {name: own.clone() for name, own, _ in pairs}

    @torch.no_grad()
    def _average(self, weight: float, bias: float) -> None:
        with locked(self._reference, self._policy):
            for name, own, new in self._pairs():
                rest = self._rest.get(name)
                if rest is None:
                    rest = self._rest[name] = torch.zeros_like(own, dtype=_precise(own))
                # own + rest is the exact average. Move it towards the policy, then keep the part that the reference lacks.
                old, theta = own.to(rest.dtype, copy=True), new.to(own.device, rest.dtype)
                rest += (theta - old - rest) * weight
                own.copy_(old + rest + bias * (theta - self._start[name]) if bias else old + rest)
                rest -= own.to(rest.dtype) - old
        self._push()

    # ------------------------------------------------------------------ state

    def state_dict(self) -> UpdaterState:
        """The state of a run: the count of steps, the reference's weights, their distance from the average, and the start.

        The tensors are not copied, and sharded ones stay sharded. The keys are the same at each step, because
        ``torch.distributed.checkpoint`` loads only keys that the state of a new updater has.
        """
        weights = {name: own.detach() for name, own in self._targets()}
        rest: dict[str, Tensor] = {}
        for name, own in weights.items() if self._averages else ():
            # Before the first average all distances are 0.
            local = _local_part(own)
            lost = self._rest.get(name, torch.zeros((), dtype=_precise(local), device=local.device).expand(local.shape))
            rest[name] = _sharded_like(lost.contiguous(), own)
        start = {name: _sharded_like(part, weights[name]) for name, part in self._start.items()}
        return {"steps": self.steps, "weights": weights, "rest": rest, "start": start}

    @torch.no_grad()
    def load_state_dict(self, state: UpdaterState) -> None:
        """Restore the reference (also one behind a service) and the count of steps.

        Raises:
            ValueError: if the state belongs to another reference. Nothing is changed then.
        """
        own = dict(self._targets())
        weights, rest, start = state["weights"], state["rest"], state.get("start", {})
        shapes, saved, lost = ({(name, x.shape) for name, x in some.items()} for some in (own, weights, rest))
        if different := sorted(
            {name for name, _ in (shapes ^ saved) | (lost - shapes)} | (start.keys() ^ self._start.keys())
        ):
            raise ValueError(f"the state is of another reference: {', '.join(different[:3])} differ.")
        with locked(self._reference):
            for name, value in own.items():
                value.copy_(weights[name])
        self._rest, self._start = (
            {name: _local_part(value).detach().clone() for name, value in some.items()} for some in (rest, start)
        )
        self.steps = int(state["steps"])
        self._push()

    # ------------------------------------------------------------------ weights

    def _targets(self) -> Iterator[tuple[str, Tensor]]:
        """The reference's weights by name."""
        if self._service is not None:
            yield from self._own.items()
            return
        for name, value in _parameters(self._reference):
            if self._adapter is None or f".{self._adapter}." in f".{name}.":
                yield name, value

    def _sources(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights, under the names of the corresponding weights of the reference."""
        of, to = ("", "") if self._adapter is None else (f".{self._active()}.", f".{self._adapter}.")
        for name, value in _parameters(self._policy):
            if of in f".{name}.":
                yield f".{name}.".replace(of, to).strip(".") if of else name, value

    def _pairs(self) -> list[tuple[str, Tensor, Tensor]]:
        """Triples of name, weight of the reference and weight of the policy. Sharded weights are local parts."""
        sources, targets, pairs = dict(self._sources()), dict(self._targets()), []
        if not targets or (different := sources.keys() ^ targets.keys()):
            shown = sorted(different)[:3] if targets else "all"
            raise ValueError(f"reference and policy must have weights of the same names. These differ: {shown}.")
        for name, target in targets.items():
            own, new = _local(target, sources[name])
            if own.shape != new.shape or not own.is_floating_point():
                raise ValueError(f"{name}: {own.dtype}{list(own.shape)} cannot follow {new.dtype}{list(new.shape)}.")
            pairs.append((name, own, new))
        if self._adapter is not None:
            self._check_scaling(self._active(), self._adapter)
        return pairs

    def _buffers(self) -> list[tuple[Tensor, Tensor]]:
        if self._adapter is not None or self._service is not None:
            return []
        # Buffers hold no trained values. They are copied in a reset, and never averaged.
        theirs = dict(self._policy.named_buffers())
        return [(own, theirs[name]) for name, own in self._reference.named_buffers() if name in theirs]

    def _active(self) -> str:
        """The policy's active adapter."""
        active = {name for layer in adapter_layers(self._policy) for name in layer.active_adapters}
        if len(active) != 1 or active == {self._adapter}:
            raise ValueError(f"{self._adapter!r} must follow another active adapter, found {sorted(active)}.")
        return active.pop()

    def _check_scaling(self, active: str, adapter: str) -> None:
        """Raise a ValueError if the two adapters scale their weights differently, since equal weights would then differ."""
        for layer in adapter_layers(self._policy):
            factors = asked(layer, "scaling", dict) or {}
            own, new = factors.get(adapter), factors.get(active)
            if own != new:
                raise ValueError(f"{adapter!r} scales weights by {own}, {active!r} by {new}: use one lora_alpha and r.")

    def _check(self, adapter: bool | str) -> None:
        if any(is_zero3(module) for model in (self._reference, self._policy) for module in model.modules()):
            raise ValueError("a model is sharded by ZeRO-3, which hides its weights: use ZeRO-2 or FSDP2.")
        if isinstance(adapter, str):
            check_has_adapters(self._reference, adapter)
        elif self._service is None:
            # With shared weights the reference would always equal the policy, and the KL would be 0.
            theirs = {id(value) for _, value in _parameters(self._policy)}
            if any(id(value) in theirs for _, value in _parameters(self._reference)):
                raise ValueError("reference and policy share weights: pass a copy, or a scorer with an adapter's name.")

    def _push(self) -> None:
        """Send the averaged weights to the service, from one rank."""
        if self._service is None:
            return
        # full_tensor is a collective operation: all ranks take part, but only one sends the result.
        whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in self._own.items()}
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not (several and torch.distributed.get_rank()):
            self._service.update_weights(whole)


def _module(model: object, name: str) -> nn.Module:
    check_not_a_name(**{name: model})
    module = model.model if isinstance(model, LogProbScorer) else unwrap(model) if is_wrapper(model) else model
    if not isinstance(module, nn.Module):
        raise TypeError(f"{name} must be a model in this process, got {type(model).__name__}.")
    return module


def _parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters by their names without wrappers. Sharded ones are shards."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        reshard(model)  # after a forward, parameters may still be whole copies
    for name, value in nn.Module.named_parameters(model):
        for prefix in WRAPPED:
            name = f".{name}".replace(f".{prefix}", ".").removeprefix(".")
        yield name, value


def _local(own: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """The corresponding local tensors of this rank."""
    own, new = own.detach(), new.detach()
    if isinstance(own, DTensor) and isinstance(new, DTensor):
        return own.to_local(), new.redistribute(own.device_mesh, own.placements).to_local()
    return own, new.full_tensor() if isinstance(new, DTensor) else new


def _local_part(value: Tensor) -> Tensor:
    """This rank's part of a tensor, or the tensor itself."""
    return value.to_local() if isinstance(value, DTensor) else value


def _sharded_like(part: Tensor, whole: Tensor) -> Tensor:
    """Wrap this rank's ``part`` as a tensor that is sharded like ``whole``."""
    if not isinstance(whole, DTensor):
        return part
    shape, mesh = (whole.shape, whole.stride()), whole.device_mesh
    return DTensor.from_local(part, mesh, whole.placements, run_check=False, shape=shape[0], stride=shape[1])


def _precise(value: Tensor) -> torch.dtype:
    return torch.promote_types(value.dtype, torch.float32)
