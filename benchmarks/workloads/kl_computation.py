"""``KLComputation`` by itself: KL and penalised reward from existing log-probs, in rows of different lengths."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.envs.llm.transforms.kl import KLComputation as TorchRLKLComputation

from benchmarks.agreement import largest_difference
from benchmarks.measure import Contender
from benchmarks.results import Outcome, Targets
from benchmarks.workloads.base import OURS, THEIRS, Settings, Workload
from torchrl_llm_kl import KLComputation

Rows = list[tuple[Tensor, Tensor, Tensor]]  # log-probs of the policy, of the reference, reward of each token


def lazy(rows: Rows) -> TensorDictBase:
    """The rows as an env or a collector returns them with ``pad_output=False``."""
    return lazy_stack(
        [
            TensorDict(next=TensorDict({("log_probs", "full"): gen, ("ref_log_probs", "full"): ref, "reward": reward}))
            for gen, ref, reward in rows
        ]
    )


def nested(rows: Rows) -> TensorDictBase:
    """The rows in a dense TensorDict, as a wrapper with ``pad_output=False`` writes them."""
    gen, ref, reward = zip(*rows, strict=True)
    step = TensorDict(reward=torch.nested.as_nested_tensor(list(reward)), batch_size=[len(rows)])
    step["log_probs"] = lazy_stack([TensorDict(full=row) for row in gen])
    step["ref_log_probs"] = lazy_stack([TensorDict(full=row) for row in ref])
    return TensorDict(next=step, batch_size=[len(rows)])


def measure(form: Callable[[Rows], TensorDictBase], settings: Settings) -> Outcome:
    """Both libraries write the KL and ``reward - coeff * KL`` of each token."""
    count = 8 if settings.quick else 256
    data = form(_rows(count))
    theirs, ours = TorchRLKLComputation(coeff=0.5), KLComputation(coeff=0.5)
    results = theirs(data.copy()), ours(data.copy())
    difference = max(
        largest_difference(_flat(results[1], key), _flat(results[0], key), tolerance=1e-6, what=key)
        for key in ("kl_penalty", "reward")
    )
    found = settings.alternate(
        {
            THEIRS: Contender(theirs, prepare=data.copy),
            OURS: Contender(ours, prepare=data.copy),
        },
        repeats=settings.at_least(31),
        warm_up=3,
        memory_apart=True,
    )
    return Outcome(f"{count} rows of 50..800 tokens", found[THEIRS], found[OURS], difference)


def _rows(count: int) -> Rows:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(50, 801, (count,), generator=generator).tolist()
    return [
        (
            -torch.rand(length, generator=generator),
            -torch.rand(length, generator=generator),
            torch.rand(length, 1, generator=generator),
        )
        for length in lengths
    ]


def _flat(data: TensorDictBase, key: str) -> Tensor:
    found = data["next"].get(key, as_list=True)
    rows = found if isinstance(found, list) else found.unbind()
    return torch.cat([row.flatten() for row in rows])


WORKLOADS = (
    Workload("e", "KLComputation, a lazy stack of rows", partial(measure, lazy), Targets(faster=4)),
    Workload("e2", "KLComputation, rows in a dense TensorDict", partial(measure, nested), Targets(faster=4)),
)
