"""Ray variants of the transforms: the results of the local classes, with the models behind a service."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from torchrl_llm_kl._numerics import read_device
from torchrl_llm_kl.service._remote import RemoteModel
from torchrl_llm_kl.service._service import ScoringService
from torchrl_llm_kl.service._spec import ServeOptions
from torchrl_llm_kl.transforms import (
    RAY_VARIANTS,
    KLRewardTransform,
    RayVariant,
    RetrieveKL,
    RetrieveLogProb,
)

Factory: TypeAlias = Callable[[], nn.Module]
#: Options of Ray's actors and of Serve. Their ``memory`` differs from the service's, and is left out.
ACTOR_OPTIONS = tuple(ServeOptions.__annotations__)
#: Arguments of :class:`ScoringService` that the transforms pass on.
SERVICE_ARGS = [*inspect.signature(ScoringService).parameters, *ACTOR_OPTIONS]
SERVICE_ARGS = [name for name in SERVICE_ARGS if name not in ("model", "factory", "name", "options")]


class Served(RayVariant):
    """Constructs a Ray variant. The options of torchrl's Ray backend become arguments of the service."""

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, object]) -> None:
        super().__init__(name, bases, namespace)
        if not isinstance(bases[0], Served):  # a user's subclass of a variant
            RAY_VARIANTS[bases[0]] = cls

    def __call__(
        cls,
        *args: object,
        use_ray_service: bool = True,
        service_backend: str | None = None,
        service_backend_options: Mapping[str, object] | None = None,
        ray_actor_options: Mapping[str, object] | None = None,
        **kwargs: object,
    ) -> Any:
        """Returns the variant. Torchrl's metaclass passes its options as ``ray_actor_options``."""
        if not use_ray_service or service_backend not in (None, "ray"):
            raise ValueError(
                f"{cls.__name__} always uses Ray. Use the local class, whose name does not begin with Ray."
            )
        options = {**(service_backend_options or {}), **(ray_actor_options or {})}
        for name, value in cast("dict[str, object]", options.get("actor_options", options)).items():
            argument = "actor_name" if name == "name" else name
            if name not in (*ACTOR_OPTIONS, "name") or argument in kwargs:
                raise ValueError(
                    f"service_backend_options has {name!r}, expected options of Ray's actors among {['name', *ACTOR_OPTIONS]}, "
                    f"each given only once. Pass others, such as timeout= or num_replicas=, to {cls.__name__}."
                )
            kwargs[argument] = value
        return type.__call__(cls, *args, **kwargs)


class RayRetrieveLogProb(RetrieveLogProb, metaclass=Served):
    """:class:`~torchrl_llm_kl.RetrieveLogProb` with its model behind a service that other processes share.

    Args:
        model: the model, sent by value, or None with a factory.

    Keyword Args:
        model_factory: returns the model, in the actor.
        actor_name: of the service. Processes that pass the same name share it.
        device: of the model, in the actor.
        kwargs: of :class:`ScoringService` (``num_replicas``, ``timeout``, ...) and of :class:`~torchrl_llm_kl.RetrieveLogProb`
            (``extras=[TopK(64)]`` for a teacher's distribution, ...).
    """

    def __init__(
        self,
        model: object = None,
        *,
        model_factory: Factory | None = None,
        actor_name: str | None = None,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        with _served(kwargs, actor_name, device, model=(model, model_factory, "")) as (served,):
            super().__init__(served, **kwargs)


class RayRetrieveKL(RetrieveKL, metaclass=Served):
    """:class:`~torchrl_llm_kl.RetrieveKL` with its models behind services that other processes share.

    A policy passed as a model or a factory is served too; ``"from_collector"`` (the default) is scored in its own process.

    Args:
        gen_model, ref_model: as for :class:`~torchrl_llm_kl.RetrieveKL`. Models are sent by value. None with a factory.

    Keyword Args:
        gen_model_factory, ref_model_factory: return the models, in their actors.
        actor_name: of the reference's service. The policy's service is ``ACTOR_NAME-gen``.
        device, kwargs: see :class:`RayRetrieveLogProb`.
    """

    def __init__(
        self,
        gen_model: object = "from_collector",
        ref_model: object = None,
        *,
        gen_model_factory: Factory | None = None,
        ref_model_factory: Factory | None = None,
        actor_name: str | None = None,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        gen, ref = (gen_model, gen_model_factory, "-gen"), (ref_model, ref_model_factory, "")
        with _served(kwargs, actor_name, device, gen_model=gen, ref_model=ref) as served:
            super().__init__(*served, **kwargs)


class RayKLRewardTransform(KLRewardTransform, metaclass=Served):
    """:class:`~torchrl_llm_kl.KLRewardTransform` with its reference behind a service that other processes share.

    Args:
        ref_model: the reference, sent by value, or None with a factory.

    Keyword Args:
        ref_model_factory: returns the reference, in the actor.
        actor_name, device, kwargs: see :class:`RayRetrieveLogProb`.
    """

    def __init__(
        self,
        ref_model: object = None,
        *,
        ref_model_factory: Factory | None = None,
        actor_name: str | None = None,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        with _served(kwargs, actor_name, device, ref_model=(ref_model, ref_model_factory, "")) as (served,):
            super().__init__(served, **kwargs)


@contextmanager
def _served(
    kwargs: dict[str, Any],
    actor_name: str | None,
    device: torch.device | str | None,
    **models: tuple[Any, Factory | None, str],
) -> Iterator[list[Any]]:
    """Starts services for the models. Models that are served already, and names for the local class, stay as they are.

    ``models`` holds the model, the factory and the suffix of the service's name, for each argument. The services' arguments
    are removed from ``kwargs``. The services are closed if the block raises.
    """
    options = {name: kwargs.pop(name) for name in SERVICE_ARGS if name in kwargs}
    options = {name: value for name, value in options.items() if value is not None}
    with ExitStack() as undo:
        served = []
        for name, (model, factory, suffix) in models.items():
            if factory is not None and model is not None and not isinstance(model, str):
                raise ValueError(f"Cannot provide both '{name}' and '{name}_factory'. Choose one.")
            if factory is not None or not (model is None or isinstance(model, (str, RemoteModel))):
                if factory is not None:
                    model, factory = None, factory if device is None else partial(_on_device, factory, device)
                elif device is not None:
                    model = model.to(read_device(device))
                service_name = None if actor_name is None else actor_name + suffix
                service = ScoringService(model, factory=factory, name=service_name, **options)
                undo.callback(service.close)
                model = service.model
            served.append(model)
        given = {"actor_name": actor_name, "device": device, **options}
        idle = [name for name, value in given.items() if value is not None]
        if idle and None not in served and served == [model for model, *_ in models.values()]:
            raise ValueError(f"there is no model to serve, so {', '.join(idle)} would have no effect. Leave them out.")
        yield served
        undo.pop_all()


def _on_device(factory: Callable[[], nn.Module], device: torch.device | str) -> nn.Module:
    """Runs a factory and moves its model to a device, in the actor."""
    return factory().to(read_device(device))
