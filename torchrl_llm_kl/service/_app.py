"""The application from a configuration file of Serve: ``import_path: torchrl_llm_kl.service:app``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from importlib import import_module
from typing import Any

from ray import cloudpickle, serve

from torchrl_llm_kl._registry import did_you_mean
from torchrl_llm_kl.service._replica import application
from torchrl_llm_kl.service._spec import ServiceSpec, Settings

_NAMES = ("name", "model", "dtype", "factory", "arguments", *(each.name for each in fields(Settings)))


def app(args: Mapping[str, Any]) -> serve.Application:
    """The application of a service, from the ``args`` of a configuration file.

    Args:
        args: ``name``, that of the application; ``model``, a folder or a name of the hub, with ``dtype``; or ``factory``, as
            ``"module:function"``, with its ``arguments``; and ``tokens_per_batch``, ``memory``, ``max_tokens``, ``max_wait``
            and ``hang_after`` of :class:`ScoringService`. Replicas and resources are in the ``deployments`` of the file.

    Raises:
        ValueError: for other arguments, or without a model.

    Example:
        >>> app({"name": "reference", "model": "Qwen/Qwen3-0.6B", "dtype": "bfloat16"})  # doctest: +SKIP
    """
    for name in args:
        if name not in _NAMES:
            raise ValueError(f"the application has no argument {name!r}.{did_you_mean(name, _NAMES)}")
    if "name" not in args or ("model" in args) == ("factory" in args):
        raise ValueError(f"args must have a name, and a model or a factory, got {sorted(args)}.")
    if "model" in args:
        factory = partial(served_model, args["model"], args.get("dtype", "auto"))
    else:
        module, _, function = str(args["factory"]).partition(":")
        factory = partial(getattr(import_module(module), function), **args.get("arguments", {}))
    settings = Settings(**{each.name: args[each.name] for each in fields(Settings) if each.name in args})
    spec = ServiceSpec(
        str(args["name"]), repr(sorted(args.items())), settings, factory=cloudpickle.dumps(factory), detached=True
    )
    return application(spec)


def served_model(path: str, dtype: str) -> Any:
    """A causal language model of transformers, on the accelerator if the replica has one."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model.to(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else model
