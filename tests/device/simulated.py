"""The simulated accelerator "sim": builds and loads ``sim.cpp``, and records the operations of code on the device."""

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

SOURCE = Path(__file__).with_name("sim.cpp")
#: Paths of the package. The place of an operation is the deepest frame with such a path.
PACKAGE = f"{os.sep}torchrl_llm_kl{os.sep}"


class NoCompiler(Exception):
    """Nothing on this machine can compile ``sim.cpp``."""


def build() -> Path:
    """The compiled backend for this Python and torch, from the cache or from the compiler (half a minute).

    The cache is that of torch's own extensions (``TORCH_EXTENSIONS_DIR``). Processes that build at once wait for the first.

    Raises:
        NoCompiler: without a compiler of C++, or without the headers of Python.
    """
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    torch_at = Path(torch.__file__).parent
    key = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = root / f"torchrl_llm_kl_sim-{torch.__version__}-{sys.implementation.cache_tag}-{key}"
    library = folder / "_sim.so"
    if library.exists():
        return library
    headers = sysconfig.get_path("include")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or not Path(headers, "Python.h").exists():
        needed = f"no Python.h in {headers}" if compiler else "no compiler of C++ (apt-get install g++)"
        raise NoCompiler(needed)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                includes = [torch_at / "include", torch_at / "include/torch/csrc/api/include", headers]
                libraries = [f"-L{torch_at / 'lib'}", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-lc10"]
                command = [compiler, "-O0", "-shared", "-fPIC", "-std=c++20", "-w", "-DTORCH_EXTENSION_NAME=_sim"]
                command += [*(f"-I{path}" for path in includes), str(SOURCE), "-o", f"{scratch}/_sim.so", *libraries]
                subprocess.run([*command, f"-Wl,-rpath,{torch_at / 'lib'}"], check=True)
                os.replace(f"{scratch}/_sim.so", library)  # there as a whole or not at all
    return library


@functools.cache
def load() -> Any:
    """Register "sim" as this process's accelerator. It cannot be undone, so only processes of these tests do it."""
    spec = importlib.util.spec_from_file_location("_sim", build())
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _device_module(core))
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    return core


def _device_module(core: Any) -> types.ModuleType:
    """``torch.sim``: the functions that torch and libraries call on the module of a device."""
    module = types.ModuleType("torch.sim")

    def generator(device: Any = None) -> torch.Generator:
        index = torch.device(device).index if isinstance(device, (str, torch.device)) else device
        return core.default_generator(-1 if index is None else index)

    def manual_seed_all(seed: int) -> None:
        for i in range(core.device_count()):
            generator(i).manual_seed(seed)

    members = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "is_bf16_supported": lambda: True,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "device_count": core.device_count,
        "current_device": torch.accelerator.current_device_index,
        "set_device": torch.accelerator.set_device_index,
        "device": lambda device: torch.accelerator.device_index(torch.device(device).index),
        "synchronize": torch.accelerator.synchronize,
        "empty_cache": torch.accelerator.empty_cache,
        "manual_seed": lambda seed: generator().manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "get_rng_state": lambda device=None: generator(device).get_state(),
        "set_rng_state": lambda state, device=None: generator(device).set_state(state),
        "default_generators": tuple(core.default_generator(i) for i in range(core.device_count())),
        "get_device_name": lambda device=None: "simulated accelerator",
        "get_device_properties": lambda device=None: types.SimpleNamespace(
            name="simulated accelerator", total_memory=torch.accelerator.get_memory_info(device)[1]
        ),
    }
    for name, member in members.items():
        setattr(module, name, member)
    return module


@contextmanager
def memory_limit(size: int) -> Iterator[None]:
    """Context with less memory on each device. Allocations beyond it raise a ``torch.OutOfMemoryError``."""
    core = load()
    core.set_limit(size)
    try:
        yield
    finally:
        core.set_limit(1 << 34)


class Record:
    """The recorded operations, by kind and by place.

    Kinds: ``kernel``; ``sync``, where the host waits for the device (a number or a tensor read, a shape that depends on
    values); ``h2d`` and ``h2d_async``, copies to the device from pageable and from pinned memory; ``d2h_async``.
    """

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        #: (kind, operator, "file:line function" of the package or "-").
        self.places: Counter[tuple[str, str, str]] = Counter()
        #: (whose code: "model", "library" or "outside"; kind).
        self.inside: Counter[tuple[str, str]] = Counter()

    def text(self, wanted: str) -> str:
        """The places of one kind of operation, the most frequent first."""
        found = [(n, *key) for key, n in self.places.most_common() if key[0] == wanted]
        return "\n".join(f"{n:5} {kind:9} {name:32} {place}" for n, kind, name, place in found)


@contextmanager
def watch() -> Iterator[Record]:
    """Record the operations of the body on the device. A backward runs in its own thread, where no line is known."""
    record = Record()

    def hook(kind: str, name: str) -> None:
        record.kinds[kind] += 1
        frame, place, model = sys._getframe(), None, False
        while frame is not None:
            path = frame.f_code.co_filename
            if place is None and PACKAGE in path:
                place = f"{path.split(PACKAGE)[-1]}:{frame.f_lineno} {frame.f_code.co_name}"
            model = model or (place is None and f"{os.sep}transformers{os.sep}" in path)
            frame = frame.f_back
        record.inside["model" if model else "library" if place else "outside", kind] += 1
        record.places[kind, name, place or "-"] += 1

    core = load()
    core.set_hook(hook)
    try:
        yield record
    finally:
        core.set_hook(None)
