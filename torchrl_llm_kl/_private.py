"""All uses of private names of other libraries, which a new release may change.

Read in torch 2.13, transformers 5.24, PEFT 0.21, torchrl 0.14.1 and tensordict 0.14.3. Releases without one of
these names are outside the bounds of ``pyproject.toml``. ``transforms/_base.py`` also derives from torchrl's private metaclass.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# ---------------------------------------------------------------------- torch: nested tensors


def nested_sizes(values: Tensor) -> Tensor:
    """The size of each row of a strided nested tensor, ``[S, ndim - 1]`` on the CPU."""
    return values._nested_tensor_size()


def jagged_bounds(values: Any) -> tuple[int | None, int | None]:
    """The length of the shortest and the longest row of a jagged tensor. None if the tensor does not store it."""
    return values._maybe_min_seqlen, values._maybe_max_seqlen


# ---------------------------------------------------------------------- torch: autograd and compilation

_C: Any = torch._C
# The dispatcher's state when this module is imported. Autograd records graphs in it, but not inside an operator.
_DISPATCH = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()


def default_dispatch() -> AbstractContextManager[None]:
    """A context in which autograd records graphs, also inside an operator."""
    guard: AbstractContextManager[None] = _C._ForceDispatchKeyGuard(*_DISPATCH)
    return guard


def backward_task() -> int:
    """The number of the backward that runs in this thread. Negative if none runs."""
    number: int = _C._current_graph_task_id()
    return number


def backward_keeps_graph() -> bool:
    """Whether the backward that runs in this thread keeps its graph."""
    keeps: bool = _C._autograd._get_current_graph_task_keep_graph()
    return keeps


def saving_hook() -> object:
    """The innermost hook for tensors that a graph saves. None without one."""
    hooks = _C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]


#: oneDNN prepares each new shape for half a millisecond, which products with fewer multiply-adds do not gain back.
FEWEST_PRODUCTS = 2**25


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """``linear(x, weight, bias)`` for ``x [*B, H]`` without gradient, or None if oneDNN has no advantage over MKL.

    On processors that are not Intel's, MKL uses older instructions for float32, and oneDNN is a sixth faster.
    """
    if (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and x.numel() * weight.shape[0] >= FEWEST_PRODUCTS
        and type(x) is Tensor
        and type(weight) in (Tensor, nn.Parameter)
        and type(bias) in (Tensor, nn.Parameter, type(None))
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.enabled
        and torch.backends.mkl.is_available()
    ):
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return None


def mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Ask torch.compile to use one graph for all sizes of a dimension."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def tensor_leaves(tree: object) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def register_tree(*functions: Any) -> None:
    """Register a container as a pytree, so that DDP finds its tensors."""
    _pytree.register_pytree_node(*functions)


def dispatch_mode() -> type:
    """The class whose subclasses intercept each operator."""
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode


def compiled_inside(model: object) -> object:
    """The module inside ``torch.compile(module)``. None for any other object."""
    # The search for a missing attribute of a module takes long.
    return getattr(model, "_modules", {}).get("_orig_mod")


def compiled_call(module: nn.Module) -> tuple[str, Any] | None:
    """The attribute that holds a module's compiled call, and this call. None if the module is not compiled."""
    for name in ("_compiled_call_impl", "forward"):
        function = module.__dict__.get(name)
        if hasattr(function, "_torchdynamo_orig_callable"):
            return name, function
    return None


# ---------------------------------------------------------------------- torch, DeepSpeed: ranks

#: Prefixes that wrappers put before the names of parameters.
WRAPPED = ("module.", "_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")


def deepspeed_groups(parameter: nn.Parameter) -> list[ProcessGroup]:
    """The process groups of a parameter of ZeRO-3, or of ZeRO-1 and 2, whose backward needs all ranks."""
    groups = (getattr(parameter, name, None) for name in ("ds_process_group", "_dp_group"))
    return [group for group in groups if group is not None]


def active_ddp() -> DistributedDataParallel | None:
    """The DDP module whose forward runs now. None without one."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    active: DistributedDataParallel | None = DistributedDataParallel._get_active_ddp_module()
    return active


def reshard_fsdp1(module: Any) -> None:
    """Free the unsharded weights of a ``FullyShardedDataParallel``, after its first forward."""
    from torch.distributed.fsdp._runtime_utils import _reshard

    handle = module._handle
    if handle is not None and hasattr(handle.flat_param, "_local_shard"):
        _reshard(module, handle, free_unsharded_flat_param=True)


# ---------------------------------------------------------------------- attributes in transformers and PEFT

#: Attribute of a configuration: the name of the attention function.
ATTENTION = "_attn_implementation_internal"
#: Attribute of a body: whether its mask is described by arguments such as causal, window, soft-cap and sinks.
FLASH = "_supports_flash_attn"
#: Attributes of a module that hold its checkpoint function: in transformers, and in torch's CheckpointWrapper.
CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of the transformers models inside a module, which FSDP must not split."""
    kinds = {kind for part in model.modules() for kind in getattr(part, "_no_split_modules", None) or ()}
    return [part for part in model.modules() if type(part).__name__ in kinds]


def is_stateful(module: nn.Module) -> bool:
    """Whether a transformers model carries a recurrent state from token to token."""
    return bool(getattr(module, "_is_stateful", False))


def own_adapters(layer: object) -> set[str]:
    """The names of the adapters in a PEFT layer that copies a whole layer or tokens."""
    return set(getattr(layer, "_adapters", None) or ())


def activate_adapters(layer: Any, names: object) -> None:
    """Make adapters of a PEFT layer active without making them trainable."""
    layer._active_adapter = names


def active_adapters(layer: object) -> object:
    """The value that :func:`activate_adapters` replaces."""
    return getattr(layer, "_active_adapter", None)


# ---------------------------------------------------------------------- torchrl and tensordict


def is_remote(wrapper: object) -> bool:
    """Whether a wrapper stands for a wrapper in another process."""
    return "_remote_wrapper" in getattr(wrapper, "__dict__", {})


def container_of(transform: object) -> Any:
    """The composition or env that holds a transform or env. None if nothing does."""
    container = getattr(transform, "_container", None)
    return container() if callable(container) else container


def chat_templates() -> Mapping[str, str]:
    """Torchrl's chat templates by name."""
    from torchrl.data.llm.history import _CHAT_TEMPLATES

    return _CHAT_TEMPLATES


def part_of_class(value: object, name: Literal["_tensordict", "_non_tensordict"]) -> object:
    """One part of a tensorclass, chosen by ``name``.

    ``_tensordict`` is its TensorDict, and ``_non_tensordict`` holds the fields that are neither tensors nor TensorDicts.
    """
    part: object = getattr(value, name)
    return part
