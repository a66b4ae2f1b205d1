"""Models whose layers are checkpointed in the ways that users do it."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint


def layers(model: Any) -> nn.ModuleList:
    body = model.get_decoder()
    return body.h if hasattr(body, "h") else body.layers


def enable(model: Any, reentrant: bool = False) -> None:
    """Checkpoint as transformers does. Release 5.24 renamed the method."""
    way = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    way({"use_reentrant": reentrant})


def wrap(model: Any, reentrant: bool) -> None:
    """Checkpoint as users of FSDP do."""
    implementation = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    for i, layer in enumerate(layers(model)):
        layers(model)[i] = checkpoint_wrapper(layer, implementation)


def in_own_code(model: Any, reentrant: bool, run: Callable[..., Any] = checkpoint) -> None:
    """Call torch's checkpoint, or another one, in the forward of the layers."""
    for layer in layers(model):

        def forward(hidden: Tensor, *args: Any, plain: Callable[..., Any] = layer.forward, **options: Any) -> Any:
            return run(lambda x: plain(x, *args, **options), hidden, use_reentrant=reentrant)

        layer.forward = forward


def enable_and_wrap(model: Any, reentrant: bool) -> None:
    """A checkpoint within a checkpoint."""
    enable(model, reentrant)
    wrap(model, reentrant)


def enable_in_own_code(model: Any, reentrant: bool) -> None:
    """A checkpoint that the scorer follows within one that it does not follow."""
    in_own_code(model, reentrant)
    for layer in layers(model):
        layer.self_attn = checkpoint_wrapper(layer.self_attn)
