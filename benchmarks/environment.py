"""The environment of a run: machine, versions and settings."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.workloads import Settings


def machine(device: torch.device) -> dict[str, str]:
    """Properties of the machine that affect the figures."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "memory": f"{gib:.0f} GiB",
        "system": f"{platform.system()} on {platform.machine()}",
    }
    return {**found, "device": torch.cuda.get_device_name(device)} if device.type == "cuda" else found


def versions() -> dict[str, str]:
    """Versions of Python and the packages."""
    packages = ("torch", "tensordict", "torchrl", "transformers", "trl", "torchrl-llm-kl")
    found = {name.replace("-", "_"): version_of(name) for name in packages}
    return {"python": platform.python_version(), **found}


def version_of(package: str) -> str:
    """The version of a package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def described(settings: Settings) -> dict[str, str]:
    """Settings that affect the figures."""
    return {
        "threads": str(torch.get_num_threads()),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "(not set)"),
        "quick": "yes" if settings.quick else "no",
        "weights": str(settings.dtype).removeprefix("torch."),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
