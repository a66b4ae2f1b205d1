"""Private names of other libraries, which a new release may change, are read here.

Read in torch 2.13, transformers 5.24, PEFT 0.21, torchrl 0.14.1 and tensordict 0.14.3. Each name states what happens in a
release that lacks it: a slower route to the same numbers, or a :class:`PrivateNameError` where the name is needed first.
``tests/units/package/test_private.py`` removes each name in turn. One name is elsewhere: ``transforms/_base.py`` derives from
torchrl's metaclass, and without it the import of the transforms fails.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class PrivateNameError(RuntimeError):
    """The installed release of a library lacks a private name that this package needs."""

    def __init__(self, owner: str, name: str) -> None:
        library = owner.partition(".")[0]
        release = getattr(sys.modules.get(library), "__version__", "")
        super().__init__(
            f"{library} {release} has no {owner}.{name}, which torchrl_llm_kl needs here. Install a release of {library} that "
            "docs/versions.md lists as tested."
        )


def private(owner: str, name: str) -> Any:
    """The attribute ``name``, dots included, of the module ``owner``; a :class:`PrivateNameError` if there is none."""
    try:
        found: object = import_module(owner)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        raise PrivateNameError(owner, name) from None
    return found


# ---------------------------------------------------------------------- torch: nested tensors


def nested_sizes(values: Tensor) -> Tensor:
    """The size of each row of a strided nested tensor; ``[S, ndim - 1]``, on the CPU. If gone: read row by row."""
    if hasattr(values, "_nested_tensor_size"):
        return values._nested_tensor_size()
    return torch.tensor([row.shape for row in values.unbind()])


def jagged_bounds(values: Tensor) -> tuple[int | None, int | None]:
    """The shortest and the longest row of a jagged tensor where it knows them. If gone: torch computes them again."""
    shortest, longest = (getattr(values, f"_maybe_{which}_seqlen", None) for which in ("min", "max"))
    return shortest, longest


# ---------------------------------------------------------------------- torch: autograd and compilation

_TLS_SETS = "_dispatch_tls_local_include_set", "_dispatch_tls_local_exclude_set"
# The dispatcher's state in which autograd records a graph: it is switched off inside an operator.
_DISPATCH = [getattr(torch._C, name)() for name in _TLS_SETS if hasattr(torch._C, name)]


def default_dispatch() -> AbstractContextManager[None]:
    """A context with that state, also inside an operator. If gone: an error for compiled models with gradient."""
    if len(_DISPATCH) != len(_TLS_SETS):
        raise PrivateNameError("torch._C", " and ".join(_TLS_SETS))
    guard: AbstractContextManager[None] = private("torch._C", "_ForceDispatchKeyGuard")(*_DISPATCH)
    return guard


def backward_task() -> int:
    """The number of the backward that runs in this thread; negative if none does.

    If gone: an error in the backward of compiled models.
    """
    number: int = private("torch._C", "_current_graph_task_id")()
    return number


def backward_keeps_graph() -> bool:
    """Whether that backward keeps its graph. If gone: an error in the backward of compiled models."""
    keeps: bool = private("torch._C", "_autograd._get_current_graph_task_keep_graph")()
    return keeps


def saving_hook() -> object:
    """The innermost hook that gets the tensors that a graph saves; None without one.

    If gone: an error at the first score, since a checkpoint in the model's own code could not be recognised.
    """
    hooks = private("torch._C", "_autograd._top_saved_tensors_default_hooks")(False)
    return None if hooks is None else hooks[0]


# Fewer multiply-adds than this gain less than the preparation of a product of each new shape costs, half a millisecond.
_FEWEST_PRODUCTS = 2**25


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """``linear(x, weight, bias)`` of ``x [*B, H]``, without gradient; None where oneDNN has no advantage over MKL.

    In float32 MKL multiplies with the instructions of an older processor on any that is not Intel's: oneDNN is a sixth faster.
    If gone: torch's own product.
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
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return None


def mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Let one graph serve each size of a dimension, where it can. If gone: torch compiles a graph for more of the sizes."""
    mark = getattr(torch._dynamo, "maybe_mark_dynamic", None)
    if mark is not None:
        mark(tensor, dim)


def tensor_leaves(tree: object) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts. If gone: an error at a compiled or deterministic score."""
    return [leaf for leaf in private("torch.utils._pytree", "tree_leaves")(tree) if isinstance(leaf, Tensor)]


def register_tree(*functions: object) -> None:
    """Teach torch to look into a container, as DDP does. If gone: the import of the losses fails."""
    private("torch.utils._pytree", "register_pytree_node")(*functions)


def dispatch_mode() -> type:
    """The class whose subclasses see each operator. If gone: an error for ``deterministic=True``."""
    mode: type = private("torch.utils._python_dispatch", "TorchDispatchMode")
    return mode


_COMPILED, _FUNCTION = "_compiled_call_impl", "_torchdynamo_orig_callable"


def compiled_inside(model: object) -> object:
    """The module that ``torch.compile(module)`` holds; None for any other object. If gone: an error for such a module."""
    inner = getattr(model, "_orig_mod", None)
    if inner is None and type(model).__name__ == "OptimizedModule":
        raise PrivateNameError("torch._dynamo.OptimizedModule", "_orig_mod")
    return inner


def compiled_call(module: nn.Module) -> tuple[str, Any] | None:
    """The attribute that holds a module's compiled call, and that call; None if the module is not compiled.

    If gone: an error at the score, for a compiled module.
    """
    if not hasattr(nn.Module, _COMPILED):
        raise PrivateNameError("torch.nn.Module", _COMPILED)
    for name in (_COMPILED, "forward"):
        function = module.__dict__.get(name)
        if hasattr(function, _FUNCTION):
            return name, function
        if function is not None and name == _COMPILED:
            raise PrivateNameError("torch.compile", _FUNCTION)
    return None


# ---------------------------------------------------------------------- torch, DeepSpeed: ranks

#: Prefixes that wrappers put before the names of parameters. If gone: an update of weights refuses names it does not know.
WRAPPED = ("module.", "_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")
_ZERO3_GROUP, _ZERO_GROUP = "ds_process_group", "_dp_group"


def deepspeed_groups(parameter: nn.Parameter) -> list[ProcessGroup]:
    """The process groups of a parameter: of ZeRO-3, and of ZeRO-1 and 2, whose backward is in step.

    If gone: an error for a parameter of ZeRO-3.
    """
    if hasattr(parameter, "ds_id") and not hasattr(parameter, _ZERO3_GROUP):
        raise PrivateNameError("deepspeed.Parameter", _ZERO3_GROUP)
    return [group for name in (_ZERO3_GROUP, _ZERO_GROUP) if (group := getattr(parameter, name, None)) is not None]


def active_ddp() -> DistributedDataParallel | None:
    """The DDP whose forward runs; None without one. If gone: an error once ranks are initialised."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    active: DistributedDataParallel | None = private(
        "torch.nn.parallel.distributed", "DistributedDataParallel._get_active_ddp_module"
    )()
    return active


def reshard_fsdp1(module: Any) -> None:
    """Free the whole weights of a ``FullyShardedDataParallel``, after its first forward. If gone: an error."""
    owner = "torch.distributed.fsdp._runtime_utils"
    free = private(owner, "_reshard")
    try:
        handle = module._handle
        if handle is not None and hasattr(handle.flat_param, "_local_shard"):
            free(module, handle, free_unsharded_flat_param=True)
    except AttributeError as error:
        raise PrivateNameError("torch.distributed.fsdp", str(error.name)) from error


# ---------------------------------------------------------------------- attributes in transformers and PEFT

#: Of a configuration: the name of the attention. If gone: padded batches.
ATTENTION = "_attn_implementation_internal"
#: Of a body: whether it describes its mask by arguments: causal, window, soft-cap, sinks. If gone: padded batches.
FLASH = "_supports_flash_attn"
#: Of a module, its checkpoint function: in transformers, and in torch's CheckpointWrapper. If gone: padded batches with
#: gradient, and a warning.
CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")
_STATEFUL = "_is_stateful"


def is_stateful(module: nn.Module) -> bool:
    """Whether a model of transformers carries a recurrent state from token to token. If gone: an error for such models."""
    if not hasattr(module, _STATEFUL) and any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__):
        raise PrivateNameError("transformers.PreTrainedModel", _STATEFUL)
    return bool(getattr(module, _STATEFUL, False))


_ADAPTERS, _ACTIVE_ADAPTER = "_adapters", "_active_adapter"


def own_adapters(layer: object) -> set[str]:
    """The adapters that a layer of PEFT holds in a set of its own. If gone: an error for copies of whole layers or tokens."""
    names = getattr(layer, _ADAPTERS, None)
    if names is None and any(base.__name__ == "AuxiliaryTrainingWrapper" for base in type(layer).__mro__):
        raise PrivateNameError("peft.utils.other.AuxiliaryTrainingWrapper", _ADAPTERS)
    return set(names or ())


def activate_adapters(layer: object, names: object) -> None:
    """Make adapters of a PEFT layer active without making them trainable. If gone: an error."""
    if not hasattr(layer, _ACTIVE_ADAPTER):
        raise PrivateNameError("peft.BaseTunerLayer", _ACTIVE_ADAPTER)
    setattr(layer, _ACTIVE_ADAPTER, names)


def active_adapters(layer: object) -> object:
    """The value that :func:`activate_adapters` replaces."""
    return getattr(layer, _ACTIVE_ADAPTER, None)


# ---------------------------------------------------------------------- torchrl and tensordict

_REMOTE = "_remote_wrapper"


def is_remote(wrapper: object) -> bool:
    """Whether a wrapper stands for one in another process. If gone: an error for such a wrapper."""
    kind = type(wrapper)
    if _REMOTE not in getattr(wrapper, "__dict__", {}):
        if kind.__name__.startswith("Remote") and kind.__module__.startswith("torchrl."):
            raise PrivateNameError(f"{kind.__module__}.{kind.__name__}", _REMOTE)
        return False
    return True


def container_of(transform: object) -> Any:
    """What holds a transform or an env: a composition or an env; None if nothing does. If gone: an error for a transform."""
    if hasattr(type(transform), "set_container") and not hasattr(transform, "_container"):
        raise PrivateNameError("torchrl.envs.Transform", "_container")
    found = getattr(transform, "_container", None)
    return found() if callable(found) else found


def chat_templates() -> Mapping[str, str]:
    """Torchrl's chat templates by name. If gone: an error for ``chat_template_name=``."""
    templates: Mapping[str, str] = private("torchrl.data.llm.history", "_CHAT_TEMPLATES")
    return templates


def part_of_class(value: object, name: Literal["_tensordict", "_non_tensordict"]) -> object:
    """Of a tensorclass the TensorDict inside it, or the fields that are neither tensors nor TensorDicts.

    If gone: an error for data with tensorclasses, such as histories.
    """
    if not hasattr(value, name):
        raise PrivateNameError("tensordict.tensorclass", name)
    part: object = getattr(value, name)
    return part
