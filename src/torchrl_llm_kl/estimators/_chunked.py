"""Evaluate a function of rows chunk by chunk, and recompute it chunk by chunk in backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def map_rows(
    fn: Callable[..., Tensor], rows: tuple[Tensor, ...], shared: tuple[Tensor | None, ...], *, chunk_size: int
) -> Tensor:
    """Concatenate ``fn(*row_chunks, *shared)`` over chunks of rows, holding one chunk's intermediates at a time.

    Args:
        fn: maps ``n`` rows and the shared tensors to ``[n]``; row ``i`` of the result depends on row ``i`` only.
        rows: tensors ``[N, ...]``, cut along the first axis.
        shared: tensors passed whole; their gradient is summed over the chunks in float32 or wider.
        chunk_size: rows at a time; changes memory and speed only.

    Returns:
        ``[N]``. Differentiable once with respect to every row and shared tensor.

    Raises:
        ValueError: if ``chunk_size`` is less than 1.

    Example:
        >>> map_rows(lambda x, w: x @ w, (torch.eye(3),), (torch.tensor([1.0, 2.0, 3.0]),), chunk_size=2)
        tensor([1., 2., 3.])
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1 position, got {chunk_size}.")
    result: Tensor = _MapRows.apply(fn, chunk_size, len(rows), *rows, *shared)
    return result


class _MapRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fn: Callable[..., Tensor], chunk_size: int, num_rows: int, *tensors: Tensor | None) -> Tensor:
        ctx.fn, ctx.chunk_size, ctx.num_rows = fn, chunk_size, num_rows
        device = tensors[0].device.type  # type: ignore[union-attr]
        # The recomputation must run under the caster of the forward pass; backward runs under none.
        ctx.autocast = (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
        ctx.save_for_backward(*tensors)
        chunks = [fn(*_slice(tensors, num_rows, at)) for at in _chunks(tensors, chunk_size)]
        return torch.cat(chunks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[3:]
        grads: list[Any] = [
            torch.zeros_like(t, dtype=t.dtype if i < ctx.num_rows else torch.promote_types(t.dtype, torch.float32))
            if need
            else None
            for i, (t, need) in enumerate(zip(tensors, needed, strict=True))
        ]
        for at in _chunks(tensors, ctx.chunk_size):
            sliced = _slice(tensors, ctx.num_rows, at)
            leaves = [
                t if t is None else t.detach().requires_grad_(need) for t, need in zip(sliced, needed, strict=True)
            ]
            with torch.enable_grad(), _autocast(ctx.autocast):
                value = ctx.fn(*leaves)
            wanted = {i: leaf for i, leaf in enumerate(leaves) if leaf is not None and leaf.requires_grad}
            chunk_grads = torch.autograd.grad(value, tuple(wanted.values()), grad_output[at])
            for i, grad in zip(wanted, chunk_grads, strict=True):
                target = grads[i]
                if i < ctx.num_rows:
                    target[at] = grad
                else:
                    target += grad
        return None, None, None, *(g if g is None else g.to(t.dtype) for g, t in zip(grads, tensors, strict=True))


def _chunks(tensors: tuple[Tensor | None, ...], chunk_size: int) -> Iterator[slice]:
    length = tensors[0].shape[0]  # type: ignore[union-attr]
    # One empty chunk when there are no rows, so that the result has the right dtype.
    return (slice(start, start + chunk_size) for start in range(0, max(length, 1), chunk_size))


def _slice(tensors: tuple[Tensor | None, ...], num_rows: int, at: slice) -> list[Tensor | None]:
    return [t[at] if t is not None and i < num_rows else t for i, t in enumerate(tensors)]


def _autocast(state: tuple[str, torch.dtype] | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if state is None else torch.autocast(state[0], dtype=state[1])
