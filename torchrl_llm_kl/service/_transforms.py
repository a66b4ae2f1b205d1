"""The transforms with their models behind a service. What they compute is what the local classes compute."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from torchrl_llm_kl.service._client import RemoteModel
from torchrl_llm_kl.service._service import ScoringService
from torchrl_llm_kl.transforms import KLRewardTransform, RetrieveKL, RetrieveLogProb

__all__ = ["RayKLRewardTransform", "RayRetrieveKL", "RayRetrieveLogProb", "serve_model"]

#: Arguments of :class:`ScoringService` that the transforms hand on.
SERVICE_ARGS = (
    "num_replicas",
    "num_cpus",
    "num_gpus",
    "resources",
    "scheduling_strategy",
    "runtime_env",
    "max_restarts",
    "lifetime",
    "tokens_per_batch",
    "max_tokens",
    "max_wait",
    "max_queue",
    "timeout",
    "namespace",
)


def _on_device(factory: Callable[[], Any], device: Any) -> Any:
    """A factory's model, moved where the service is."""
    return factory().to(device)


def serve_model(
    model: Any,
    factory: Callable[[], Any] | None,
    *,
    actor_name: str | None,
    device: torch.device | str | None,
    options: dict[str, Any],
    undo: ExitStack,
) -> Any:
    """A model behind a service; what is there already, or is found later, stays as it is.

    Args:
        model: by value; None or a name with a factory.
        factory: makes it, in the actor.
        actor_name: of the service.
        device: of the model, in the actor.
        options: other arguments of :class:`ScoringService`.
        undo: closes the service, unless the transform is made after all.
    """
    if not _is_to_serve(model, factory):
        return model
    if factory is None and device is not None:
        model = model.to(device)
    elif factory is not None:
        model, factory = None, factory if device is None else partial(_on_device, factory, device)
    service = ScoringService(model, factory=factory, name=actor_name, **options)
    undo.callback(service.close)
    return service.model


def _is_to_serve(model: Any, factory: Callable[[], Any] | None) -> bool:
    return factory is not None or not (model is None or isinstance(model, (str, RemoteModel)))


def _check_used(
    models: list[tuple[Any, Callable[[], Any] | None]],
    *,
    use_ray_service: bool,
    **given: Any,
) -> None:
    """Refuse arguments of a service where none is made.

    Args:
        models: each with its factory.
        use_ray_service: as the transform got it.
        given: other arguments, by name.
    """
    if not use_ray_service:
        raise ValueError("use_ray_service=False: take the local class, whose name does not begin with Ray")
    if any(_is_to_serve(model, factory) or model is None for model, factory in models):
        return  # what is missing is for the local class to say
    idle = [name for name, value in given.items() if value is not None]
    if idle:
        raise ValueError(
            f"there is no model to make a service of, so that {', '.join(idle)} would be ignored: leave them out"
        )
    if not any(isinstance(model, RemoteModel) for model, _ in models) and any(model == "base" for model, _ in models):
        raise ValueError(
            "ref_model='base' is scored where the policy lives: there is nothing to serve, take the local class"
        )


def _check_one(name: str, model: Any, factory: Callable[[], Any] | None) -> None:
    if factory is not None and model is not None and not isinstance(model, str):
        raise ValueError(f"Cannot provide both '{name}' and '{name}_factory'. Choose one.")


def _check_possible(kwargs: dict[str, Any], *, policy_is_served: bool) -> None:
    """Refuse at once what a model in another process cannot do."""
    if kwargs.get("estimator") == "exact" or kwargs.get("reference") is not None:
        raise ValueError(
            "an exact KL needs the models in this process: a service sends log-probs and entropies. Use a local transform"
        )
    if policy_is_served and not kwargs.get("detach", True):
        raise ValueError("a model behind a service gives no gradient: score the policy where it is trained")


def _split(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of the service, and of the transform; ``memory`` is of both."""
    service = {name: kwargs.pop(name) for name in SERVICE_ARGS if name in kwargs}
    if "memory" in kwargs:
        service["memory"] = kwargs["memory"]
    return {name: value for name, value in service.items() if value is not None}, kwargs


class RayRetrieveLogProb(RetrieveLogProb):
    """:class:`~torchrl_llm_kl.RetrieveLogProb` whose model is behind a service that other processes share.

    Args:
        model: the model, sent by value; or None with a factory.

    Keyword Args:
        model_factory: makes it, in the actor.
        actor_name: of the service; processes that give the same one share it.
        device: of the model, in the actor.
        kwargs: of :class:`~torchrl_llm_kl.service.ScoringService` (``num_replicas``, ``num_cpus``, ``timeout``, ...) and
            of :class:`~torchrl_llm_kl.RetrieveLogProb`.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        model_factory: Callable[[], Any] | None = None,
        actor_name: str | None = None,
        device: torch.device | str | None = None,
        use_ray_service: bool = True,
        **kwargs: Any,
    ) -> None:
        _check_one("model", model, model_factory)
        _check_possible(kwargs, policy_is_served=True)
        options, rest = _split(kwargs)
        named = {key: value for key, value in options.items() if key != "memory"}
        _check_used(
            [(model, model_factory)], use_ray_service=use_ray_service, actor_name=actor_name, device=device, **named
        )
        with ExitStack() as undo:
            served = serve_model(model, model_factory, actor_name=actor_name, device=device, options=options, undo=undo)
            super().__init__(served, **rest)
            undo.pop_all()


class RayRetrieveKL(RetrieveKL):
    """:class:`~torchrl_llm_kl.RetrieveKL` whose models are behind services that other processes share.

    The policy is served too if it is given as a model or a factory; ``"from_collector"`` (the default) is scored where the
    policy lives.

    Args:
        gen_model: as for :class:`~torchrl_llm_kl.RetrieveKL`.
        ref_model: as for :class:`~torchrl_llm_kl.RetrieveKL`; sent by value, or None with a factory.

    Keyword Args:
        gen_model_factory: makes ``gen_model``, in its actor.
        ref_model_factory: makes ``ref_model``, in its actor.
        actor_name: of the reference's service; the policy's is ``ACTOR_NAME-gen``.
        device: of the models, in the actors.
        kwargs: of :class:`~torchrl_llm_kl.service.ScoringService` and of :class:`~torchrl_llm_kl.RetrieveKL`.
    """

    def __init__(
        self,
        gen_model: Any = "from_collector",
        ref_model: Any = None,
        *,
        gen_model_factory: Callable[[], Any] | None = None,
        ref_model_factory: Callable[[], Any] | None = None,
        actor_name: str | None = None,
        device: torch.device | str | None = None,
        use_ray_service: bool = True,
        **kwargs: Any,
    ) -> None:
        _check_one("gen_model", gen_model, gen_model_factory)
        _check_one("ref_model", ref_model, ref_model_factory)
        _check_possible(kwargs, policy_is_served=gen_model_factory is not None or not isinstance(gen_model, str))
        options, rest = _split(kwargs)
        named = {key: value for key, value in options.items() if key != "memory"}
        _check_used(
            [(gen_model, gen_model_factory), (ref_model, ref_model_factory)],
            use_ray_service=use_ray_service,
            actor_name=actor_name,
            device=device,
            **named,
        )
        gen_name = None if actor_name is None else f"{actor_name}-gen"
        with ExitStack() as undo:
            gen = serve_model(
                gen_model, gen_model_factory, actor_name=gen_name, device=device, options=options, undo=undo
            )
            ref = serve_model(
                ref_model, ref_model_factory, actor_name=actor_name, device=device, options=options, undo=undo
            )
            super().__init__(gen, ref, **rest)
            undo.pop_all()


class RayKLRewardTransform(KLRewardTransform):
    """:class:`~torchrl_llm_kl.KLRewardTransform` whose reference is behind a service that other processes share.

    Args:
        ref_model: the reference, sent by value; or None with a factory.

    Keyword Args:
        ref_model_factory: makes it, in the actor.
        actor_name: of the service.
        device: of the model, in the actor.
        kwargs: of :class:`~torchrl_llm_kl.service.ScoringService` and of :class:`~torchrl_llm_kl.KLRewardTransform`.
    """

    def __init__(
        self,
        ref_model: Any = None,
        *,
        ref_model_factory: Callable[[], Any] | None = None,
        actor_name: str | None = None,
        device: torch.device | str | None = None,
        use_ray_service: bool = True,
        **kwargs: Any,
    ) -> None:
        _check_one("ref_model", ref_model, ref_model_factory)
        options, rest = _split(kwargs)
        named = {key: value for key, value in options.items() if key != "memory"}
        _check_used(
            [(ref_model, ref_model_factory)],
            use_ray_service=use_ray_service,
            actor_name=actor_name,
            device=device,
            **named,
        )
        with ExitStack() as undo:
            served = serve_model(
                ref_model, ref_model_factory, actor_name=actor_name, device=device, options=options, undo=undo
            )
            super().__init__(served, **rest)
            undo.pop_all()
