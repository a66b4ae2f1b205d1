"""One rank of a gang: a Ray actor with a share of the model, in step with the other ranks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import wraps
from typing import Any, ClassVar, Literal, ParamSpec, TypeVar

import ray
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torchrl_llm_kl._typing import Json
from torchrl_llm_kl.rollouts import ModelInterface
from torchrl_llm_kl.scoring import ScoreOptions, ScoreRequest, collective_device, is_wrapper, unwrap
from torchrl_llm_kl.service._errors import portable
from torchrl_llm_kl.service._messages import columns_of
from torchrl_llm_kl.service.engines._engine import TransformersEngine

#: A rank's scores of its share of a request at the masked-in tokens, by name; ``[K, ...]``.
Columns = dict[str, Tensor]
#: How to shard: by name, or a function of the model and the mesh of all ranks that returns the model (None: in place).
Shard = Literal["fsdp2", "tp", "none"] | Callable[[Any, DeviceMesh], Any]


_P = ParamSpec("_P")
_T = TypeVar("_T")


def _errors_as_values(call: Callable[_P, _T]) -> Callable[_P, _T | Exception]:
    """The method with its errors as results, which the gang compares between ranks."""

    @wraps(call)
    def caught(*args: _P.args, **kwargs: _P.kwargs) -> _T | Exception:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            return portable(error)

    return caught


class RankEngine(TransformersEngine):
    """The engine of a model whose weights may be shards. All ranks call it alike."""

    def check_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Check whole weights; returns this rank's shards of them, without communication."""
        own = self._module().state_dict(keep_vars=True)
        return {name: _sharded_as(own[name], value) for name, value in super().check_weights(weights).items()}

    def _module(self) -> nn.Module:
        module = super()._module()
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()  # after a forward the root's parameters may still be whole
        return module


def _sharded_as(own: Tensor, value: Tensor) -> Tensor:
    """``value`` sharded as ``own`` is."""
    if not isinstance(own, DTensor) or isinstance(value, DTensor):
        return value
    value = value.to(own.device)
    return distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)


class GangRank:
    """An actor. The model runs in one thread; progress and life are asked in threads of their own.

    Methods return their errors.
    """

    GROUPS: ClassVar[dict[str, int]] = {"watch": 1, "life": 1}  # threads for each group of calls
    _engine: RankEngine  # after start

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    @_errors_as_values
    def start(
        self,
        factory: Callable[[], Any],
        shard: Shard,
        store: tuple[str, int],
        backend: str,
        timeout: float,
        settings: Mapping[str, Any],
    ) -> tuple[tuple[ModelInterface, bool], bool, list[list[str]]]:
        """Join the other ranks and load the model.

        Returns its interface, whether ranks may score different sequences, and the names of its tensors.
        """
        # Ray shows each rank its own GPU alone, as device 0.
        os.environ.update(RANK=str(self._rank), WORLD_SIZE=str(self._ranks), LOCAL_RANK="0")
        limit = timedelta(seconds=timeout)
        server = dist.TCPStore(*store, self._ranks, is_master=False, timeout=limit)
        dist.init_process_group(backend, store=server, rank=self._rank, world_size=self._ranks, timeout=limit)
        mesh = init_device_mesh(collective_device(backend).type, (self._ranks,))
        made = shard_model(factory(), shard, mesh)
        engine = RankEngine(made, **settings)
        _meet()
        self._engine = engine
        return engine.interface(), may_split(made), engine.tensors()

    @_errors_as_values
    def run(self, request: ScoreRequest, options: ScoreOptions) -> Columns:
        """The scores of a rank's share of a request."""
        return columns_of(self._engine.run(request, options), request.mask)

    @_errors_as_values
    def check_weights(self, weights: Mapping[str, Tensor]) -> dict[str, str]:
        """The model's own names of whole weights, by those given; an error if they do not fit the model."""
        self._engine.check_weights(weights)
        return self._engine.own_names(weights)

    @_errors_as_values
    def update_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy this rank's shards of whole weights into the model; an error if they do not fit."""
        self._engine.update_weights(weights)

    @_errors_as_values
    def in_step(self) -> None:
        """Meet the other ranks."""
        _meet()

    @ray.method(concurrency_group="watch")
    def progress(self) -> int:
        """Steps of the engine so far."""
        return self._engine.progress() if hasattr(self, "_engine") else 0

    @ray.method(concurrency_group="life")
    def life(self) -> None:
        """Return never: the reference to this call gets ready when the process ends."""
        threading.Event().wait()


def _meet() -> None:
    dist.all_reduce(torch.ones(1, device=collective_device(dist.get_backend())))


# ------------------------------------------------------------------ sharding


def shard_model(made: Any, shard: Shard, mesh: DeviceMesh) -> Any:
    """``made``, a model or a TorchRL wrapper of one, sharded in place, or what the function ``shard`` returns."""
    if callable(shard):
        sharded = shard(made, mesh)
        return made if sharded is None else sharded
    if shard == "none":
        return made
    model = unwrap(made) if is_wrapper(made) else made
    if not isinstance(model, nn.Module):
        raise TypeError(f"shard={shard!r} needs a torch module, the factory returned {type(made).__name__}.")
    (_shard_by_layer if shard == "fsdp2" else _shard_by_plan)(model, mesh)
    return made


def may_split(made: Any) -> bool:
    """Whether ranks may score different sequences: with FSDP or whole models, not with tensor parallel ones."""
    model = unwrap(made) if is_wrapper(made) else made
    parts = list(model.modules()) if isinstance(model, nn.Module) else []
    sharded = [x for part in parts for x in part.parameters(recurse=False) if isinstance(x, DTensor)]
    by_fsdp = any(isinstance(part, FSDPModule) for part in parts) and all(x.device_mesh.ndim == 1 for x in sharded)
    return by_fsdp or not sharded


def _shard_by_layer(model: nn.Module, mesh: DeviceMesh) -> None:
    get_decoder: Any = getattr(model, "get_decoder", None)
    decoder = model if get_decoder is None else get_decoder()
    for layer in getattr(decoder, "layers", ()):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _shard_by_plan(model: nn.Module, mesh: DeviceMesh) -> None:
    """Apply the tensor parallel plan that transformers has for the model; embeddings stay whole."""
    styles: Json = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "colwise_rep": ColwiseParallel(output_layouts=Replicate()),  # its name in earlier versions of transformers
    }
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    plan = {name: style for name, style in plan.items() if "embed" not in name}
    unknown = sorted(set(plan.values()) - styles.keys())
    if not plan or unknown:
        plans = f"a plan with {', '.join(unknown)}" if unknown else "no plan"
        raise ValueError(
            f"shard='tp': transformers has {plans} for {type(model).__name__}; this needs one of {', '.join(styles)} "
            "alone. Pass shard='fsdp2', or a function that shards the model."
        )
    heads = getattr(getattr(model, "config", None), "num_key_value_heads", mesh.size())
    if heads % mesh.size():
        raise ValueError(
            f"shard='tp': the model has {heads} heads of keys and values, which {mesh.size()} ranks cannot share "
            "equally. Pass ranks= a divisor of it, or shard='fsdp2'."
        )
    model.to(mesh.device_type)
    parallelize_module(model, mesh, {name: styles[style] for name, style in plan.items()})
