"""Compares an operation on the CPU and on the accelerator: equal values and gradients, wherever the batch is."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.testing import assert_close

from simulated import watch
from torchrl_llm_kl import Ragged

T = TypeVar("T")
CPU = torch.device("cpu")


def to(value: T, device: torch.device) -> T:
    """A value with all its tensors on a device. Modules are copied."""
    if isinstance(value, nn.Module):
        return copy.deepcopy(value).to(device)
    if isinstance(value, Ragged):
        return Ragged.from_list([row.to(device) for row in value.to_list()])
    if isinstance(value, Mapping) and not isinstance(value, TensorDictBase):
        return type(value)({key: to(item, device) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        items = [to(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
        return value.detach().to(device).requires_grad_()
    return value.to(device) if hasattr(value, "to") else value


def tensors_of(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors in a result with the names of their places. Nested tensors are yielded row by row."""
    if isinstance(value, Tensor):
        rows = value.unbind() if value.is_nested else [value]
        yield from ((name if len(rows) == 1 else f"{name}[{i}]", row) for i, row in enumerate(rows))
    elif isinstance(value, (bool, int, float)):
        yield name, torch.tensor(value)
    elif isinstance(value, TensorDictBase):
        for key in sorted(value.keys(True, True), key=str):
            rows = value.get(key, as_list=True)
            yield from tensors_of(rows if isinstance(rows, (Tensor, list)) else None, f"{name}.{key}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_of(item, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        keys = getattr(value, "_fields", range(len(value)))
        for key, item in zip(keys, value, strict=True):
            yield from tensors_of(item, f"{name}.{key}")
    elif isinstance(value, Ragged):
        yield from ((f"{name}.values", value.values), (f"{name}.lengths", value.lengths))


def assert_same(run: Callable[[torch.device, torch.device], Any], device: torch.device, *, size: float = 1e-5) -> None:
    """``run(device of models, device of data)`` gives the CPU's numbers for models on the accelerator, wherever the data is."""
    expected = dict(tensors_of(run(CPU, CPU)))
    assert expected, "there is nothing to compare"
    for place in (device, CPU):
        found = dict(tensors_of(run(device, place)))
        assert found.keys() == expected.keys(), f"other keys with the data on {place}: {found.keys() ^ expected.keys()}"
        for name, want in expected.items():
            pair, message = (found[name].detach().cpu(), want.detach()), f"{name}, with the data on {place}"
            assert_close(*pair, rtol=size, atol=size, msg=lambda text, m=message: f"{m}: {text}")


def same_on_both(size: float | Callable[..., float] = 1e-5) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a test from ``run(device of models, device of data, *arguments of pytest)`` with :func:`assert_same`.

    ``size`` may be a function of some of pytest's arguments.
    """

    def decorate(run: Callable[..., Any]) -> Callable[..., None]:
        def test(device: torch.device, **given: Any) -> None:
            bound = size(**{n: given[n] for n in inspect.signature(size).parameters}) if callable(size) else size
            assert_same(lambda model_at, at: run(model_at, at, **given), device, size=bound)

        parameters = list(inspect.signature(test).parameters.values())[:1]
        parameters += list(inspect.signature(run).parameters.values())[2:]
        test.__signature__ = inspect.Signature(parameters)
        test.__name__, test.__doc__, test.__module__ = run.__name__, run.__doc__, run.__module__
        return test

    return decorate


@contextmanager
def no_sync(device: torch.device) -> Iterator[None]:
    """Fail if the body makes the host wait for the device."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    with watch() if device.type == "sim" else nullcontext() as record:
        yield
    assert record is None or not record.kinds["sync"], record.text("sync")


def gradients(value: Any, *modules: nn.Module) -> dict[str, Tensor]:
    """Gradients of the sum of all numbers of a result that have one."""
    parts = [x[x.isfinite()].sum() for _, x in tensors_of(value) if x.requires_grad]
    named = {f"{i}.{n}": p for i, module in enumerate(modules) for n, p in module.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(sum(parts), list(named.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(named, found, strict=True))
