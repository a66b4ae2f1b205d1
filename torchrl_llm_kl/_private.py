"""Private names of other libraries, which a new release may change.

Read in torch 2.13, transformers 5.23, PEFT 0.21 and torchrl 0.14.1. Those of tensordict, in 0.14.3, are in
``ragged/_tensordict.py``; torchrl's metaclass is in ``transforms/_base.py``, since type checkers follow a base by its import.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import register_pytree_node as register_pytree_node, tree_leaves as tree_leaves

# ---------------------------------------------------------------------- torch: nested tensors

#: The size of each row of a strided nested tensor; ``[S, ndim - 1]``, on the CPU.
nested_sizes = methodcaller("_nested_tensor_size")


def jagged_facts(values: Tensor) -> tuple[int, int | None, int | None]:
    """The dimension of a jagged tensor whose size varies, and its shortest and longest row where it knows them."""
    shortest, longest = (getattr(values, f"_maybe_{which}_seqlen", None) for which in ("min", "max"))
    return getattr(values, "_ragged_idx", 1), shortest, longest


# ---------------------------------------------------------------------- torch: autograd and compilation

# The dispatcher's state in which autograd records a graph: it is switched off inside an operator.
_DISPATCH = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
#: A context with that state, also inside an operator.
default_dispatch = partial(torch._C._ForceDispatchKeyGuard, *_DISPATCH)
#: The number of the backward that runs in this thread; negative if none does.
backward_task = torch._C._current_graph_task_id
#: Whether that backward keeps its graph.
backward_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


def saving_hook() -> object:
    """The innermost hook that gets the tensors that a graph saves; None without one."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]


# Fewer multiply-adds than this gain less than the preparation of a product of each new shape costs, half a millisecond.
_FEWEST_PRODUCTS = 2**25


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """``linear(x, weight, bias)`` of ``x [*B, H]``, without gradient; None where oneDNN has no advantage over MKL.

    In float32 MKL multiplies with the instructions of an older processor on any that is not Intel's: oneDNN is a sixth faster.
    """
    if (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and x.numel() * weight.shape[0] >= _FEWEST_PRODUCTS
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
    """Let one graph serve each size of a dimension, where it can."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def compiled_inside(model: object) -> object:
    """The module that ``torch.compile(module)`` holds; None for any other object."""
    return getattr(model, "_orig_mod", None)


def compiled_call(module: nn.Module) -> tuple[str, Any] | None:
    """The attribute that holds a module's compiled call, and that call; None if the module is not compiled."""
    for name in ("_compiled_call_impl", "forward"):
        function = module.__dict__.get(name)
        if hasattr(function, "_torchdynamo_orig_callable"):
            return name, function
    return None


# ---------------------------------------------------------------------- torch, DeepSpeed: ranks

#: What wrappers put before the names of parameters.
WRAPPED = ("module.", "_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")
#: Attributes of a parameter with a process group: of ZeRO-3, and of ZeRO-1 and 2, whose backward is in step.
DEEPSPEED_GROUPS = ("ds_process_group", "_dp_group")
#: The DDP whose forward runs; None without one.
active_ddp = DistributedDataParallel._get_active_ddp_module


def reshard_fsdp1(module: Any) -> None:
    """Free the whole weights of a ``FullyShardedDataParallel``, after its first forward."""
    from torch.distributed.fsdp import _runtime_utils

    handle = module._handle
    if handle is not None and hasattr(handle.flat_param, "_local_shard"):
        _runtime_utils._reshard(module, handle, free_unsharded_flat_param=True)


# ---------------------------------------------------------------------- attributes in transformers and PEFT

#: Of a configuration: the name of the attention.
ATTENTION = "_attn_implementation_internal"
#: Of a body: whether it describes its mask by arguments: causal, window, soft-cap, sinks.
FLASH = "_supports_flash_attn"
#: Of a layer: whether it carries a state from token to token, as recurrence and convolution do.
STATEFUL = "_is_stateful"
#: Of a module, its checkpoint function: in transformers, and in torch's CheckpointWrapper.
CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")
#: Of a layer of PEFT: the adapters that it holds in a set of its own; and the active ones.
ADAPTERS, ACTIVE_ADAPTER = "_adapters", "_active_adapter"

# ---------------------------------------------------------------------- torchrl

#: In a wrapper that stands for one in another process.
REMOTE = "_remote_wrapper"


def container_of(transform: object) -> Any:
    """What holds a transform or an env: a composition or an env; None if nothing does."""
    found = getattr(transform, "_container", None)
    return found() if callable(found) else found


def chat_templates() -> Mapping[str, str]:
    """Torchrl's chat templates by name."""
    from torchrl.data.llm import history

    return history._CHAT_TEMPLATES
