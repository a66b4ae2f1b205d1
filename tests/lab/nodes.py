"""Run as a script: a cluster of four nodes in one machine, of which one is killed and one added while callers wait."""

import json
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from ray._private.state import actors
from ray.cluster_utils import Cluster

from load import callers, sequences
from remote_models import delayed, model
from torchrl_llm_kl import LogProbScorer
from torchrl_llm_kl.service import ScoringService
from waits import LONG, until

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


def homes(name: str, count: int) -> dict[str, str]:
    """The node of each actor of the service."""
    found = {}
    for actor in (*(f"{name}:{i}" for i in range(count)), f"{name}:control"):
        with suppress(ValueError):
            handle = ray.get_actor(actor, namespace="torchrl_llm_kl")
            found[actor] = actors(handle._actor_id.hex())["Address"]["NodeID"]
    return found


def main() -> dict[str, Any]:
    """Numbers of the run."""
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    nodes = [cluster.add_node(**NODE) for _ in range(3)]
    cluster.wait_for_nodes()
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}}
    ray.init(address=cluster.address, log_to_driver=False, runtime_env=environment)
    places = {"num_replicas": 4, "num_cpus": 1, "scheduling_strategy": "SPREAD"}
    service = ScoringService(factory=partial(delayed, 0.05), name="nodes", timeout=LONG, **places)
    before = homes("nodes", 4)
    with callers(service.model, count=3) as load:
        until(lambda: len(load.answers) > 20)
        victim = next(node for node in nodes if node.node_id in {before[f"nodes:{i}"] for i in range(4)})
        lost = [name for name, home in before.items() if home == victim.node_id]
        cluster.remove_node(victim, allow_graceful=False)
        answered = len(load.answers)
        until(lambda: len(load.answers) > answered + 10, seconds=240)
        added = cluster.add_node(**NODE)
        until(lambda: all(stats.get("requests", 0) > 5 for stats in service.stats()), seconds=240)
    local = LogProbScorer(model())
    wrong = sum(
        not torch.allclose(answer, local.score(sequences(seed)).values, rtol=1e-6, atol=1e-6)
        for seed, answer in load.answers.items()
    )
    after = homes("nodes", 4)
    service.shutdown()
    ray.shutdown()
    cluster.shutdown()
    return {
        "requests": load.asked,
        "lost": load.asked - len(load.answers),
        "errors": [repr(error)[:300] for error in load.errors[:3]],
        "wrong": wrong,
        "actors on the killed node": lost,
        "replicas on the new node": [name for name, home in after.items() if home == added.node_id],
        "moved": sum(after[name] != before[name] for name in lost if name in after),
    }


if __name__ == "__main__":
    print("RESULT", json.dumps(main()))
