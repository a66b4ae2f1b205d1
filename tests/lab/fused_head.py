"""A fused kernel for the head on any device: liger-kernel's own, or a fake in its place."""

import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from head_reference import at, make_head, make_targets, plain
from torchrl_llm_kl.head import _fused
from torchrl_llm_kl.head._tiles import Head

#: Options of a head. Each differs from its default, so that an omission shows.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "soft-cap": {"soft_cap": 2.0},
    "temperature": {"temperature": 0.7},
    "all": {"soft_cap": 3.0, "temperature": 1.7, "scale": 0.6},
}
SIZES = {"n": 37, "h": 24, "v": 301}


def take_fake(monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Tensor]) -> None:
    """Put a function in the place of liger-kernel's, and use it on the CPU."""
    parents = "liger_kernel", "liger_kernel.transformers"
    for name in (*parents, "liger_kernel.transformers.functional"):
        module: Any = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=name in parents)
        module.liger_fused_linear_cross_entropy = kernel
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(_fused, "_DEVICES", ("cpu",))
    monkeypatch.setattr(_fused, "_is_installed", lambda: True)


def honest(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    reduction: str,
    softcap: float | None,
    accum_dtype: torch.dtype,
) -> Tensor:
    """The contract of liger-kernel's function, in plain torch."""
    assert (reduction, accum_dtype) == ("none", torch.float32)
    logits = F.linear(hidden, weight).float()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets, reduction="none")


def take_real(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Use liger-kernel on a GPU, or on the CPU in Triton's interpreter. Skips the test where neither is possible."""
    if importlib.util.find_spec("liger_kernel") is None:
        pytest.skip("liger-kernel is not installed: pip install '.[gpu]'")
    if device.type == "cuda":
        return
    if device.type != "cpu":
        pytest.skip("Triton has no kernels for the simulated accelerator")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton's interpreter needs TRITON_INTERPRET=1")
    import triton.language as tl
    from liger_kernel.ops import cross_entropy
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def tensor(data: Any) -> Any:
        return tl.tensor(interpreter.TensorHandle(data, tl.float32), tl.float32)

    def with_floats(arg: Any) -> Any:
        return tensor(np.array([arg], np.float32)) if isinstance(arg, float) else convert(arg)

    def tanh(x: Any) -> Any:
        return tl.tensor(interpreter.TensorHandle(np.tanh(x.handle.data), tl.float32), x.type)

    # Compiled kernels get floats as scalars of float32, and tanh from CUDA's library. The interpreter has neither.
    monkeypatch.setattr(interpreter, "_implicit_cvt", with_floats)
    monkeypatch.setattr(cross_entropy, "tanh", tanh)
    monkeypatch.setattr(_fused, "_DEVICES", ("cpu",))


def results(
    function: Callable[[Head, Tensor], Tensor], dtype: torch.dtype, device: torch.device, case: str
) -> dict[str, Tensor]:
    """Log-probs, and the gradients of their weighted sum, on the CPU. The weights differ in size and sign."""
    leaves = [x.to(device).requires_grad_() for x in make_head(**SIZES, dtype=dtype)[:2]]
    head = Head(*leaves, None, dtype, **CASES[case])
    targets = make_targets(SIZES["n"], SIZES["v"]).to(device)
    weights = torch.linspace(-2.0, 3.0, SIZES["n"], device=device)
    log_prob = function(head, targets)
    gradients = torch.autograd.grad(log_prob, leaves, weights.to(log_prob.dtype))
    named = dict(zip(("hidden", "weight"), gradients, strict=True))
    return {name: each.detach().cpu() for name, each in ({"log_prob": log_prob} | named).items()}


def in_torch(head: Head, targets: Tensor) -> Tensor:
    """The same log-probs in plain torch, in the dtype of the head."""
    options = {"temperature": head.temperature, "scale": head.scale, "soft_cap": head.soft_cap}
    return at(plain(head.hidden, head.weight, head.bias, **options), targets)
