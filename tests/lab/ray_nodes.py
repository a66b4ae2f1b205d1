"""Train a configuration with Ray Train on two nodes of a cluster on the loopback interface.

``python ray_nodes.py CONFIG.yaml`` kills the second node after the first checkpoint, and starts another one.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

LAB = str(Path(__file__).parent)
MEMORY = 100 * 2**20
#: A node as `ray start` makes it. `ray start` itself replaces 127.0.0.1 by an address that may not be reachable.
NODE = f"""
import signal
from ray._private.node import Node
from ray._private.parameter import RayParams

how = dict(num_cpus=1, num_gpus=0, object_store_memory={MEMORY}, node_ip_address="127.0.0.1")
node = Node(RayParams(gcs_address="ADDRESS", **how), head=False, shutdown_at_exit=True, spawn_reaper=True)
signal.pause()
"""


def start_node(address):
    """Start a node in a process group of its own."""
    return subprocess.Popen([sys.executable, "-c", NODE.replace("ADDRESS", address)], start_new_session=True)


def worker(settings):
    import torch.distributed as dist

    from torchrl_llm_kl.training import read_config, train

    def say(line):
        print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {line}", flush=True)

    train(read_config(settings["config"]), say=say)


def main(config):
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from torchrl_llm_kl.training import read_config

    out = Path(read_config(config).run.out)
    how = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": MEMORY, "include_dashboard": False}
    environment = {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"], "OMP_NUM_THREADS": "1"}}
    ray.init(address="local", _node_ip_address="127.0.0.1", runtime_env=environment, **how)
    address = ray.get_runtime_context().gcs_address
    nodes = [start_node(address)]

    def replace_node():
        while not list(out.glob("checkpoints/step-*")):
            time.sleep(0.05)
        os.killpg(nodes[0].pid, signal.SIGKILL)
        print("killed the second node", flush=True)
        nodes.append(start_node(address))

    threading.Thread(target=replace_node, daemon=True).start()
    try:
        scaling = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}, placement_strategy="STRICT_SPREAD")
        run = RunConfig(storage_path=str(out.parent / "ray"), failure_config=FailureConfig(max_failures=3))
        TorchTrainer(worker, train_loop_config={"config": config}, scaling_config=scaling, run_config=run).fit()
        print("done", flush=True)
    finally:
        ray.shutdown()
        for node in nodes:
            with suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.wait()


if __name__ == "__main__":
    main(sys.argv[1])
