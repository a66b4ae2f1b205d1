"""The configuration of a service for Serve's own commands and KubeRay: see ``docs/ray.md``."""

from __future__ import annotations

from pathlib import Path

from torchrl_llm_kl._typing import Json
from torchrl_llm_kl.cli._console import CommandError

_HEAD = """\
# An application of Ray Serve: `serve run FILE`, `serve deploy FILE`, or `serveConfigV2` of a KubeRay RayService.
# Clients use it by its name: torchrl_llm_kl.service.ScoringService(name="{name}").
"""


def serve_config(name: str, model: str, dtype: str, replicas: str, gpus: float) -> Json:
    """The configuration; ``replicas`` is a number, or ``MIN:MAX`` for Serve to scale them."""
    lowest, _, highest = replicas.partition(":")
    if not lowest.isdigit() or (highest and not highest.isdigit()):
        raise CommandError(f"--replicas must be a number or MIN:MAX, got {replicas!r}.")
    deployment: Json = {"name": "Replica", "ray_actor_options": {"num_cpus": 1, "num_gpus": gpus}}
    if highest:
        deployment["autoscaling_config"] = {"min_replicas": int(lowest), "max_replicas": int(highest)}
    else:
        deployment["num_replicas"] = int(lowest)
    application = {
        "name": name,
        "route_prefix": None,
        "import_path": "torchrl_llm_kl.service:app",
        "args": {"name": name, "model": model, "dtype": dtype},
        "deployments": [deployment],
    }
    return {"proxy_location": "Disabled", "applications": [application]}


def write_config(path: Path, config: Json) -> None:
    """Write it as YAML."""
    import yaml

    name = config["applications"][0]["name"]
    path.write_text(_HEAD.format(name=name) + yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
