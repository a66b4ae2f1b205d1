"""Share one reference model between several collectors over Ray, kill it halfway, and get the same result.

Run it with ``python tutorials/ray_shared_reference.py``. It takes a few minutes on two CPU cores and needs no network. Append
changes of :class:`Settings`, such as ``steps=20``. It

1. starts Ray on this machine, with a few collector processes, each with its own env and its own copy of the policy
2. puts the reference behind a service that scores for all collectors, with one copy in one process
3. trains the demo's model on its task with the responses from all collectors
4. trains again, and halfway kills the process with the reference. Ray reports that a worker died and restarts it, and the
   collectors retry.
5. compares the two runs, which differ only in the time of the restart

Start reading at :func:`train`.
"""

from __future__ import annotations

import copy
import logging
import os
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
import tensordict
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from countdown.algorithms import EPOCHS, MINIBATCHES, build, label
from countdown.model import MAX_NEW_TOKENS, WARMUP_STEPS, accuracy, make_policy, warm_up
from countdown.report import (
    Metrics,
    MetricsFile,
    keep_earlier_run,
    progress,
    silence_dependencies,
    status,
    summarise,
)
from countdown.settings import check_positive, read_settings
from countdown.sharing import ShareCollector, join
from countdown.task import all_problems, split_problems
from torchrl_llm_kl import PIKLCoefficient
from torchrl_llm_kl.service import ScoringService
from torchrl_llm_kl.training import learn, loss_entries

# Required by torchrl's LLM components, which store lists of strings as stacks.
tensordict.set_list_to_stack(True).set()

CLOCKS = {"seconds", "collecting"}  # these metrics differ in every run
TOLERANCE = 1e-6  # for any metric and any weight. The verdict reports whether the runs needed it.


@dataclass
class Settings:
    """Settings of the two runs."""

    kill: bool = True  # train twice, and kill the reference halfway through the second run
    collectors: int = 4  # processes
    steps: int = 60
    seed: int = 0  # seed of the weights, the order of the problems and the sampling
    warmup_steps: int = WARMUP_STEPS
    kl_target: float = 0.5  # nats per answer
    lr: float = 3e-4  # at the start of RL, from where it falls to 0
    num_prompts: int = 4  # per collector and step
    group_size: int = 8
    batching: bool = False  # score concurrent requests in one forward, whose rounding depends on timing
    out: str = "runs/ray"


@dataclass(frozen=True)
class Process:
    """A process with the reference, and the number of requests that it has answered."""

    pid: int
    answered: int

    @classmethod
    def of(cls, service: ScoringService) -> Process:
        """The current process of the service."""
        (replica,) = service.replicas()
        return cls(replica.pid, replica.answered)

    def since(self, earlier: Process) -> Process:
        """This process with the requests answered since ``earlier``."""
        return Process(self.pid, self.answered - (earlier.answered if earlier.pid == self.pid else 0))


def train(
    policy: PreTrainedModel,
    service: ScoringService,
    collectors: list[Any],
    *,
    steps: int,
    lr: float,
    kl_target: float,
    batch_size: int,
    group_size: int,
    seed: int,
    metrics: MetricsFile,
    kill_at: int | None = None,
) -> list[Process]:
    """Train ``policy`` in place. Returns the processes of the service, the killed one first."""
    coefficient = PIKLCoefficient(init=0.2, target=kl_target)
    # The service's model works like any model. Here it is the reference of the transform that scores responses. The
    # collectors receive a copy of the transform, which is small, since it holds the service's name, not the model.
    parts = build("grpo", policy, service.model, coefficient=coefficient, max_new_tokens=MAX_NEW_TOKENS)
    ray.get([collector.start.remote(parts.kl_transform, seed=seed + i) for i, collector in enumerate(collectors)])
    optimizer = torch.optim.Adam(policy.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    first = Process.of(service)
    processes = []

    torch.manual_seed(seed)
    with progress("run 1" if kill_at is None else "run 2", steps) as advance:
        start = time.perf_counter()
        for step in range(steps):
            before = time.perf_counter()
            state = ray.put((policy.state_dict(), coefficient.state_dict()))  # one copy for all collectors
            shares = [
                collector.collect.remote(state, seed=(seed * steps + step) * len(collectors) + i)
                for i, collector in enumerate(collectors)
            ]
            if step == kill_at:  # the collectors are generating, and will need the reference soon
                processes.append(Process.of(service).since(first))
                os.kill(first.pid, signal.SIGKILL)
            batch = join(ray.get(shares))  # in this order, independent of which finishes first
            collecting = time.perf_counter() - before

            batch = parts.prepare(label(batch, group_size))
            learn(parts, loss_entries(batch), optimizer, epochs=EPOCHS, minibatches=MINIBATCHES)
            schedule.step()
            row = summarise(batch, step=step, coefficient=coefficient, seconds=time.perf_counter() - start)
            metrics.append(row | {"collecting": collecting})
            coefficient.update(row["kl"], n=batch_size)
            advance(status(row))
    return [*processes, Process.of(service).since(first)]


@dataclass(frozen=True)
class Run:
    """The results of one training run."""

    rows: list[Metrics]
    accuracy: tuple[float, float]
    weights: dict[str, Tensor]
    processes: list[Process]
    kill_at: int | None

    def column(self) -> dict[str, str]:
        """The run as a column of the table."""
        last_half = [row["kl"] for row in self.rows[len(self.rows) // 2 :]]
        return {
            "greedy accuracy before RL": f"{self.accuracy[0]:.1%}",
            "greedy accuracy after RL": f"{self.accuracy[1]:.1%}",
            "KL, mean of the last half (nats per answer)": f"{statistics.mean(last_half):.4f}",
            "KL coefficient at the end": f"{self.rows[-1]['coefficient']:.6f}",
            "restarts of the reference": str(len(self.processes) - 1),
            "requests answered by its processes": " + ".join(str(process.answered) for process in self.processes),
            "seconds lost to the restart": f"{self.seconds_lost:.1f}",
            "RL, seconds": f"{self.rows[-1]['seconds']:.0f}",
        }

    @property
    def seconds_lost(self) -> float:
        """The seconds that the step of the kill took longer than the median step."""
        if self.kill_at is None:
            return 0.0
        collecting = [row["collecting"] for row in self.rows]
        return collecting[self.kill_at] - statistics.median(collecting)


def start_ray(processes: int) -> None:
    """Start Ray on this machine only, with room for ``processes``."""
    folders = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    ray.init(
        address="local",  # never join a running cluster
        num_cpus=processes,  # slots, not cores, since waiting processes need no core
        num_gpus=0,
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}},
        _node_ip_address="127.0.0.1",
    )


def serve(reference: Path, *, batching: bool) -> ScoringService:
    """Serve the reference, which the service's process loads from a folder. Other processes have no copy.

    A forward of several requests sums in another order than one forward per request, so log-probs differ by up to 1e-6, and
    timing decides which requests share a batch. At some step such a difference changes a sampled token, and from then on two
    runs differ like runs with different seeds. For bit-equal runs each request is scored in its own forward, and without the
    cache, which a restarted process has lost.
    """
    exact: dict[str, Any] = {} if batching else {"max_ongoing_requests": 1, "max_wait": 0.0, "memory": 0}
    factory = partial(AutoModelForCausalLM.from_pretrained, str(reference.resolve()), dtype=torch.float32)
    return ScoringService(factory=factory, **exact)


def largest_difference(one: Sequence[Metrics], other: Sequence[Metrics]) -> float:
    """The largest difference of any metric except times, over all steps. Infinite if the runs have different steps."""
    if [row["step"] for row in one] != [row["step"] for row in other]:
        return float("inf")
    return max(abs(a[key] - b[key]) for a, b in zip(one, other, strict=True) for key in a.keys() - CLOCKS)


def print_columns(title: str, columns: Mapping[str, Mapping[str, str]]) -> None:
    """Print a table with one column per run and one row per measurement."""
    table = Table("", *columns, title=title, title_justify="left")
    for name in next(iter(columns.values())):
        table.add_row(name, *(column[name] for column in columns.values()))
    Console().print(table)


def agree(one: Run, other: Run) -> bool:
    """Print whether two runs are the same, and return it."""
    metric = largest_difference(one.rows, other.rows)
    weight = max((one.weights[name] - other.weights[name]).abs().max().item() for name in one.weights)
    largest = max(metric, weight, abs(one.accuracy[1] - other.accuracy[1]))
    if largest == 0:
        verdict = "The two runs agree to the last bit, in every metric of every step and in every weight."
    elif largest <= TOLERANCE:
        verdict = f"The two runs agree to {TOLERANCE:g}"
    else:
        verdict = "The two runs differ"
    if largest:
        verdict += f": a metric by up to {metric:.2g}, a weight by up to {weight:.2g}."
    print(verdict)
    return largest <= TOLERANCE


def main(settings: Settings) -> int:
    """Share one reference between collectors over Ray, kill it halfway, and compare with an undisturbed run."""
    check_positive(kl_target=settings.kl_target, lr=settings.lr, collectors=settings.collectors)
    if settings.steps < 2 or settings.group_size < 2:
        raise ValueError(f"steps is {settings.steps} and group_size {settings.group_size}: expected at least 2 of both")
    collectors, steps, seed, out = settings.collectors, settings.steps, settings.seed, Path(settings.out)
    num_prompts, group_size, warmup_steps = settings.num_prompts, settings.group_size, settings.warmup_steps
    silence_dependencies()
    begin = time.perf_counter()
    torch.manual_seed(seed)
    train_problems, held_out = split_problems(problems := all_problems())
    policy, tokenizer = make_policy(problems)

    keep_earlier_run(out, ("undisturbed.jsonl", "killed.jsonl", "reference", "model"))
    start_ray(collectors + 1)
    # The collectors start while the model warms up.
    workers = [
        ray.remote(ShareCollector).remote(
            policy, tokenizer, train_problems[i::collectors], num_prompts=num_prompts, group_size=group_size
        )
        for i in range(collectors)
    ]
    with progress("warm-up", warmup_steps) as advance:
        for loss in warm_up(policy, tokenizer, train_problems, steps=warmup_steps, seed=seed):
            advance(f"loss {loss:.2f}")
    policy.save_pretrained(out / "reference")
    before = accuracy(policy, tokenizer, held_out, max_new_tokens=MAX_NEW_TOKENS)

    service = serve(out / "reference", batching=settings.batching)
    runs: dict[str, Run] = {}

    def run(name: str, file: str, kill_at: int | None) -> None:
        trained, metrics = copy.deepcopy(policy), MetricsFile(out / file)
        try:
            processes = train(
                trained,
                service,
                workers,
                steps=steps,
                lr=settings.lr,
                kl_target=settings.kl_target,
                batch_size=collectors * num_prompts * group_size,
                group_size=group_size,
                seed=seed,
                metrics=metrics,
                kill_at=kill_at,
            )
        except KeyboardInterrupt:
            trained.save_pretrained(out / "model")
            tokenizer.save_pretrained(out / "model")
            print(f"\ninterrupted after {len(metrics.rows)} of {steps} RL steps: wrote {out / 'model'}, {metrics.path}")
            sys.exit(130)
        after = accuracy(trained, tokenizer, held_out, max_new_tokens=MAX_NEW_TOKENS)
        runs[name] = Run(metrics.rows, (before, after), trained.state_dict(), processes, kill_at)

    run("undisturbed", "undisturbed.jsonl", None)
    if settings.kill:
        run("reference killed", "killed.jsonl", steps // 2)
    service.shutdown()
    ray.shutdown()

    print_columns(
        f"Countdown, grpo, seed {seed}: {collectors} collectors, one reference, {steps} steps, "
        f"{time.perf_counter() - begin:.0f} s in all",
        {name: run.column() for name, run in runs.items()},
    )
    print(f"wrote {', '.join(str(path) for path in sorted(out.glob('*.jsonl')))}")
    return int(settings.kill and not agree(*runs.values()) and not settings.batching)


if __name__ == "__main__":
    try:
        sys.exit(main(read_settings(Settings, sys.argv[1:])))
    except ValueError as error:
        sys.exit(str(error))
