"""The base of all transforms: settings, execution, specs, and access to the surrounding env and collector."""

from __future__ import annotations

import inspect
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, TypeVar, cast

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import nn
from torchrl._utils import _RayServiceMetaClass
from torchrl.data import Composite, Unbounded
from torchrl.envs import Compose, EnvBase, Transform

from torchrl_llm_kl._exports import load_plugins
from torchrl_llm_kl._numerics import check_choice, read_device
from torchrl_llm_kl._private import container_of
from torchrl_llm_kl.ragged import Ragged, Rows, own_leaves, read_node, write_ragged
from torchrl_llm_kl.rollouts import with_a_row
from torchrl_llm_kl.scoring import Changes, EntrySpec, Model, repair_padding

T = TypeVar("T")
M = TypeVar("M")


# ------------------------------------------------------------------ settings


class TransformSetting(Generic[T]):
    """An attribute of a transform that may change at any time. The transform's keys and its env's specs follow.

    A rejected value leaves the transform unchanged.

    Args:
        check: returns the value to store, or raises an error.

    Keyword Args:
        choices: the accepted values. Empty accepts all.
        registers: whether a module becomes a submodule of the transform, with its weights.
    """

    def __init__(
        self, check: Callable[..., T] | None = None, *, choices: Collection[T] = (), registers: bool = True
    ) -> None:
        self.check, self.choices, self.registers = check, choices, registers

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, transform: Transform | None, owner: type) -> T:
        if transform is None:
            return cast(T, self)
        if self.name in vars(transform):
            return cast(T, vars(transform)[self.name])
        raise AttributeError(self.name)  # torch then looks among the submodules

    def __set__(self, transform: StepTransform, value: object) -> None:
        value = value if self.check is None else self.check(value)
        if self.choices:
            check_choice(self.choices, **{self.name: value})
        plain, modules = transform.__dict__, cast("dict[str, object]", transform._modules)
        # nn.Module keeps submodules apart from plain values, so the old value may be in either place.
        before = [(place, place.pop(self.name)) for place in (plain, modules) if self.name in place]
        place = modules if isinstance(value, nn.Module) and self.registers else plain
        place[self.name] = value
        if "_out_keys" in plain:  # the constructor has finished
            try:
                transform.declare()
            except Exception:
                del place[self.name]
                for old_place, old in before:
                    old_place[self.name] = old
                raise


class SharedSetting(Generic[T]):
    """A setting of a composition: the attributes ``(part, name)`` of its parts, read from the first and set in all."""

    def __init__(self, *places: tuple[int, str]) -> None:
        self.places = places

    def __get__(self, composition: Compose | None, owner: type) -> T:
        if composition is None:
            return cast(T, self)
        part, name = self.places[0]
        return cast(T, getattr(composition[part], name))

    def __set__(self, composition: Compose, value: object) -> None:
        for part, name in self.places:
            setattr(composition[part], name, value)


# ------------------------------------------------------------------ where a transform runs


class StepMixin(ABC):
    """Runs :meth:`outputs` wherever TorchRL runs a transform. A mixin for transforms and compositions of them.

    All outputs are computed before the first is written, so bad input leaves the data unchanged. The names in :attr:`fixed`
    are constructor arguments only. Setting one raises an AttributeError.
    """

    fixed: ClassVar[frozenset[str]] = frozenset()

    if TYPE_CHECKING:

        def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
            """See :meth:`forward`."""

    def __setattr__(self, name: str, value: object) -> None:
        owner, declared = type(self).__name__, getattr(type(self), name, None)
        if isinstance(declared, (TransformSetting, SharedSetting)):
            declared.__set__(self, value)  # type: ignore[arg-type]  # torch would register a module, past the setting
        elif name in self.fixed:
            raise AttributeError(f"{owner}.{name} is fixed at construction: build a new {owner}({name}=...).")
        elif name in Changes.__annotations__:
            raise AttributeError(f"{name} is an option: set transform.options = transform.options.but({name}=...).")
        else:
            super().__setattr__(name, value)

    @abstractmethod
    def outputs(self, td: TensorDictBase, next_td: TensorDictBase) -> dict[NestedKey, Ragged]:
        """Compute the entries to write from the step ``td`` and its result ``next_td``. Padding will hold 0."""

    def _ordered(self, td: TensorDictBase, next_td: TensorDictBase) -> list[tuple[NestedKey, Ragged]]:
        # Nested keys come last because they always fit. A root entry that does not fit then raises before anything is written.
        self.check_order()
        outputs = [(key, self.arrange(data)) for key, data in self.outputs(td, next_td).items()]
        return sorted(outputs, key=lambda output: isinstance(output[0], tuple))

    def arrange(self, data: Ragged) -> Ragged:
        """Convert an output to the layout in which it is written."""
        return data

    def check_order(self) -> None:
        """Warn if a transform that must run earlier comes later."""
        return None

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        for key, data in self._ordered(tensordict, next_tensordict):
            next_tensordict = write_ragged(next_tensordict, key, data.slots(), data.container)
        return next_tensordict

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply to collected data: on a direct call, or when a replay buffer is sampled."""
        if tensordict.batch_size.numel() == 0:
            row = with_a_row(tensordict)
            if row is not tensordict:  # a sharded model needs a forward on every rank, also on one without rows
                return tensordict.update(self.forward(row)[:0])
            raise ValueError(f"the batch is empty: its batch size is {tuple(tensordict.batch_size)}. Drop it.")
        next_td = read_node(tensordict, "next")
        # Collected data holds the results of a step below "next". Data without "next" is both the step and its result.
        inside = () if next_td is None else ("next",)
        outputs = [
            (unravel_key((*inside, key)), data)
            for key, data in self._ordered(tensordict, tensordict if next_td is None else next_td)
        ]
        # A replay buffer's sample shares its rows with the storage. Copy them, so that writing does not change stored
        # data.
        own_leaves(tensordict, *(key for key, _ in outputs))
        for key, data in outputs:
            tensordict = write_ragged(tensordict, key, data.slots(), data.container)
        return tensordict

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        # A replay buffer calls this on `extend` when the transform was appended with `invert=True`. torchrl's MCAdvantage
        # passes None on while it collects a group.
        return None if next_tensordict is None else self.forward(next_tensordict)


class StepTransform(StepMixin, Transform):
    """A transform of one step that behaves the same in an env, in a replay buffer and on a direct call.

    Each setting is an attribute, a :class:`TransformSetting`.
    """

    @abstractmethod
    def keys(self) -> tuple[list[NestedKey], list[NestedKey]]:
        """The ``in_keys`` and ``out_keys`` of the current settings."""

    @property
    @abstractmethod
    def entries(self) -> dict[NestedKey, EntrySpec]:
        """The per-token entries that the transform adds to the observation."""

    def declare(self) -> None:
        """Update ``in_keys`` and ``out_keys``, and clear the cached specs of envs that hold the transform."""
        self.in_keys, self.out_keys = self.keys()
        for container in containers(self):
            # Only an env has specs to recompute.
            if isinstance(container, EnvBase):
                container.empty_cache()

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Declare the per-token entries, ``[*B, -1, *F]``."""
        for key, entry in self.entries.items():
            declare_entry(observation_spec, key, entry)
        return observation_spec

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        with suppress(NoCollectorError):  # before the policy's first answer
            repair_padding(collector_policy(self))
        # An env must return every declared entry after a reset. No token is scored yet, so each has length 0.
        lengths = [0] * tensordict_reset.batch_size.numel()
        for key, entry in self.entries.items():
            empty = torch.zeros((0, *entry.shape), dtype=entry.dtype, device=tensordict_reset.device)
            tensordict_reset = write_ragged(tensordict_reset, key, empty, Rows(lengths, tensordict_reset.batch_size))
        return tensordict_reset


def declare_entry(spec: Composite, key: NestedKey, entry: EntrySpec) -> None:
    """Add an entry ``[*B, -1, *F]`` to a spec."""
    shape = (*spec.shape, -1, *entry.shape)
    spec[unravel_key(key)] = Unbounded(shape=shape, device=spec.device, dtype=entry.dtype)


# ------------------------------------------------------------------ envs and collectors around a transform


def containers(transform: Transform) -> Iterator[EnvBase]:
    """The env that holds the transform at any depth, followed by the envs around it."""
    try:
        container = transform.container
    except ValueError:  # inside a Compose that is in no env
        return
    while container is not None:
        yield container
        container = container_of(container)


def later_transforms(transform: Transform) -> Iterator[Transform]:
    """The transforms that run after ``transform`` in the same env or replay buffer, at any depth of composition."""
    inner = transform
    while inner is not None:
        outer = container_of(inner)
        if isinstance(outer, Compose):
            siblings = list(outer.transforms)
            at = next(i for i, sibling in enumerate(siblings) if sibling is inner)
            yield from _leaves(siblings[at + 1 :])
        inner = outer


def _leaves(transforms: Iterable[Transform]) -> Iterator[Transform]:
    for transform in transforms:
        if isinstance(transform, Compose) and not isinstance(transform, StepMixin):
            yield from _leaves(transform.transforms)
        else:
            yield transform


def in_env(transform: Transform) -> bool:
    """Whether an env holds the transform. Conversations in an env continue, so caching their states pays off."""
    return next(containers(transform), None) is not None


class NoCollectorError(ValueError):
    """No collector runs the env that holds the transform, or no env holds it."""


def collector_policy(transform: Transform) -> nn.Module:
    """The policy of the collector whose env holds ``transform``.

    Raises:
        NoCollectorError: if there is no such collector.
    """
    missing = "container"
    for container in containers(transform):
        missing = "collector"
        if isinstance(container, EnvBase) and container.collector is not None:
            policy: nn.Module = container.collector.policy
            return policy
    raise NoCollectorError(
        f"The {missing} is not set. Please set the {missing} before calling this method. 'from_collector' needs an env that a "
        "collector runs: append the transform to the env and pass the env to an LLMCollector. Elsewhere, pass the model, for "
        "example `policy.get_new_version(generate=False)`."
    )


# ------------------------------------------------------------------ models from factories and of a service


def resolve_factory(
    name: str, model: M, factory: Callable[[], Model] | None, *, default: str | None = None
) -> M | Model:
    """The model, built by the factory if there is one.

    Raises:
        ValueError: if the factory comes with a model other than the argument's ``default``.
    """
    if factory is None:
        return model
    # Only strings are compared, since a model may define `==` in its own way.
    if model is not None and not (isinstance(model, str) and model == default):
        raise ValueError(f"Cannot provide both '{name}' and '{name}_factory'. Choose one.")
    return factory()


def on_device(model: Model, device: torch.device | str | None) -> Model:
    """Move a model to a device. None leaves it where it is."""
    return model if device is None else cast(nn.Module, model).to(read_device(device))


#: Maps a transform class to its Ray variant, whose models run in a service. The service package fills it.
RAY_VARIANTS: dict[type, type] = {}
#: Where the models of a transform run: in this process, or in a service on Ray.
ServiceBackend = Literal["direct", "ray"]


class RayVariant(_RayServiceMetaClass, ABCMeta):
    """Builds the Ray variant of a class for ``service_backend="ray"``, torchrl's scope, or ``use_ray_service=True``."""

    @property
    def __signature__(cls) -> inspect.Signature:
        """The constructor's signature. ``inspect.signature`` would return that of the metaclass."""
        constructor = inspect.signature(cls.__init__)  # type: ignore[misc]
        return constructor.replace(parameters=list(constructor.parameters.values())[1:])

    @property
    def _RayServiceClass(cls) -> type:  # the name that torchrl reads
        # Importing the service package registers its variants.
        load_plugins()
        if cls in RAY_VARIANTS:
            return RAY_VARIANTS[cls]
        raise TypeError(f"{cls.__name__} has no variant for Ray: pass it the model of a ScoringService instead.")
