"""A frozen reference that takes less memory: bfloat16 or int8 weights, and layers that stay on the host until they run."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchrl_llm_kl._numerics import check_not_a_name, read_device
from torchrl_llm_kl._typing import asked, has
from torchrl_llm_kl.scoring._model import OFFLOADED, body_and_head
from torchrl_llm_kl.scoring._wrapping import is_fsdp2, is_zero3, unwrapped

_ALIGN = 256  # bytes; no dtype needs more


ModuleT = TypeVar("ModuleT", bound=nn.Module)


def prepare_reference(
    model: ModuleT, *, dtype: torch.dtype | None = None, offload_to: torch.device | str | None = None
) -> ModuleT:
    """Freeze a model in place and reduce its memory. The policy may have any dtype.

    Scores are computed from the changed weights, in float32 from the head's logits on. The model cannot be trained
    afterwards, so pass a copy and never the policy itself.

    Args:
        model: a transformers causal LM with its layers in a ``ModuleList``, before it is sharded.

    Keyword Args:
        dtype: a floating-point type for all parameters, such as ``torch.bfloat16``. Buffers, such as rotary frequencies,
            keep their dtype. ``torch.int8`` instead applies to the linear layers between embedding and head. Each row is
            rounded to 127 steps on either side of 0 and has its own scale. Products have the dtype of the activations.
            Default None: no change.
        offload_to: the device that scores. The layers stay in the host's memory (page-locked for an accelerator), and each
            is copied to the device while the previous one runs. The device holds two layers, the norm, the head, and the
            embedding if it is tied to the head. Default None: the model stays where it is.

    Returns:
        ``model``, in evaluation mode, without gradients.

    Raises:
        TypeError: if the model does not expose its body and head, or ``dtype`` is neither floating-point nor int8.
        ValueError: if it has no list of layers, no linear layers for int8, is sharded, or offloaded already.

    Example:
        >>> import copy, torch
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> policy = Qwen2ForCausalLM(Qwen2Config(vocab_size=11, hidden_size=64, num_hidden_layers=3))
        >>> reference = prepare_reference(copy.deepcopy(policy), dtype=torch.int8, offload_to="cpu")
        >>> reference.model.layers[0].mlp.up_proj.weight.dtype
        torch.int8
    """
    check_not_a_name(model=model)
    device = None if offload_to is None else read_device(offload_to, "offload_to")
    inner = unwrapped(model)
    body, head = body_and_head(inner)
    embedding = inner.get_input_embeddings()
    sharded = any(is_fsdp2(module) or is_zero3(module) for module in inner.modules())
    if sharded or inner is not model or has(embedding, OFFLOADED):
        raise ValueError(f"{type(model).__name__} is wrapped, sharded or offloaded: prepare a plain copy.")
    layers = max((list(m) for m in body.modules() if isinstance(m, nn.ModuleList)), key=len)
    if dtype == torch.int8:
        _to_int8(layers, type(model).__name__)
    elif dtype is not None:
        if not dtype.is_floating_point:
            raise TypeError(f"dtype must be torch.int8 or a floating-point type, got {dtype}.")
        for parameter in inner.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    inner.requires_grad_(False).eval()
    if device is not None:
        device = torch.empty(0, device=device).device  # adds the index of the device
        _keep_apart(inner, layers, embedding, head, device)
        LayerStream(layers, device)
    return model


# ---------------------------------------------------------------------- int8


class Int8Linear(nn.Module):
    """A linear layer with the weights ``scale * weight``: int8 ``[out, in]`` with one scale for each row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        largest = weight.abs().amax(1).to(torch.promote_types(weight.dtype, torch.float32))
        # A row of zeros must not be divided by 0.
        scale = torch.where(largest == 0, 1, largest) / 127
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Parameter((weight / scale[:, None]).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias

    def forward(self, input: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``, in the dtype of the input."""
        out = functional.linear(input, self.weight.to(input.dtype)) * self.scale.to(input.dtype)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def _to_int8(layers: list[nn.Module], name: str) -> None:
    parents = [module for layer in layers for module in layer.modules()]
    # Only exact nn.Linear: a subclass may compute more than a product.
    linears = [(parent, key, x) for parent in parents for key, x in parent.named_children() if type(x) is nn.Linear]
    if not linears:
        raise ValueError(f"the layers of {name} hold no nn.Linear to store in int8: use dtype=torch.bfloat16.")
    for parent, key, linear in linears:
        setattr(parent, key, Int8Linear(linear))


# ---------------------------------------------------------------------- offload


def _keep_apart(
    model: nn.Module, layers: list[nn.Module], embedding: nn.Module, head: nn.Module, device: torch.device
) -> None:
    """Move the layers and an untied embedding to the host, and everything else to the device."""
    host, pin = torch.device("cpu"), device.type != "cpu"
    tied = asked(head, "weight", Tensor) is embedding.weight
    streamed = {module for layer in layers for module in layer.modules()}
    away = set() if tied else set(embedding.modules())
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            # A tied embedding is the head's weight, which must stay on the device.
            moved = parameter.data.to(host if module in streamed or module in away else device)
            # Copies from page-locked memory run beside the computation.
            parameter.data = moved.pin_memory() if pin and module in streamed else moved
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(host if module in away else device)
    setattr(embedding, OFFLOADED, device)
    if not tied:
        embedding.register_forward_pre_hook(lambda _, ids: tuple(each.to(host) for each in ids))
        embedding.register_forward_hook(lambda _, __, out: out.to(device))


class LayerStream:
    """Copies the weights of each layer to the device while the previous layer runs. The device has room for two layers."""

    def __init__(self, layers: list[nn.Module], device: torch.device) -> None:
        self._weights = [
            [
                (module, name, weight)
                for module in layer.modules()
                for name, weight in module.named_parameters(recurse=False)
            ]
            for layer in layers
        ]
        size = max(sum(_room(weight) for _, _, weight in weights) for weights in self._weights)
        self._slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        self._held: list[int | None] = [None, None]  # the layer in each slot
        apart = device.type != "cpu"
        self._copies = torch.Stream(device) if apart else None
        self._copied, self._used = ([torch.Event(device) for _ in range(2)] if apart else [] for _ in range(2))
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._begin, index))
            # Also after an error, so that layers get their own weights back.
            layer.register_forward_hook(partial(self._end, index), always_call=True)

    def _begin(self, index: int, *_: object) -> None:
        slot = index % 2
        if index == 0:
            self._held = [None, None]  # an error may have left stale weights in the slots
        if self._held[slot] != index:
            self._fetch(index)
        if self._copies is not None:
            torch.accelerator.current_stream(self._slots[slot].device).wait_event(self._copied[slot])
        for (module, name, _weight), copy in zip(self._weights[index], self._views(index), strict=True):
            module._parameters[name] = nn.Parameter(copy, requires_grad=False)
        if index + 1 < len(self._weights):
            self._fetch(index + 1)

    def _end(self, index: int, *_: object) -> None:
        for module, name, weight in self._weights[index]:
            module._parameters[name] = weight
        slot = index % 2
        self._held[slot] = None
        if self._copies is not None:
            self._used[slot].record(torch.accelerator.current_stream(self._slots[slot].device))

    def _fetch(self, index: int) -> None:
        slot = index % 2
        self._held[slot] = index
        pairs = [(copy, weight) for copy, (_, _, weight) in zip(self._views(index), self._weights[index], strict=True)]
        if self._copies is None:
            for copy, weight in pairs:
                copy.copy_(weight)
            return
        with self._copies:
            self._copies.wait_event(self._used[slot])
            for copy, weight in pairs:
                copy.copy_(weight, non_blocking=True)
            self._copied[slot].record(self._copies)

    def _views(self, index: int) -> list[Tensor]:
        """Views of a layer's weights in its slot."""
        views, start = [], 0
        for _, _, weight in self._weights[index]:
            raw = self._slots[index % 2][start : start + weight.numel() * weight.element_size()]
            views.append(raw.view(weight.dtype).view(weight.shape))
            start += _room(weight)
        return views


def _room(weight: Tensor) -> int:
    return -(-weight.numel() * weight.element_size() // _ALIGN) * _ALIGN
