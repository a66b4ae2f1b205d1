"""``RetrieveKL`` against torchrl's on the same rollouts: log-probs under two models, and the KL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from tensordict import TensorDictBase
from torchrl.envs.llm.transforms.kl import RetrieveKL as TorchRLRetrieveKL

from benchmarks.agreement import largest_difference, tolerance_of
from benchmarks.data import Batch, grouped, independent
from benchmarks.measure import Contender
from benchmarks.models import ModelSize, qwen2, qwen3_5, wrapper
from benchmarks.products import products_of
from benchmarks.results import Goal, Outcome, Targets
from benchmarks.workloads.base import OURS, PRODUCTS, THEIRS, Settings, Workload
from torchrl_llm_kl import RetrieveKL, ScoreOptions

NORMAL = "here, normal mode"
SIZE = ModelSize(vocab=32_000, hidden=512, layers=6)
MakeBatch = Callable[[int], Batch]


def measure(
    full: MakeBatch, quick: MakeBatch, settings: Settings, *, deterministic: bool = False, recurrent: bool = False
) -> Outcome:
    """Score under two models and compute the KL, with the transforms of both libraries.

    ``deterministic`` also measures the mode in which scores do not depend on the batch. ``recurrent`` models carry a state.
    """
    size, make = settings.size(SIZE), qwen3_5 if recurrent else qwen2
    size = replace(size, family="Qwen3.5", layers=max(4, size.layers)) if recurrent else size
    batch = (quick if settings.quick else full)(size.vocab)
    policy, reference = (make(size, seed=seed, device=settings.device, dtype=settings.dtype) for seed in (0, 1))
    gen, ref = wrapper(policy, "log_probs"), wrapper(reference, "ref_log_probs")
    # Without no_grad, torchrl keeps the graphs of both models (it ignores `detach`) and needs twice the memory.
    theirs = torch.no_grad()(TorchRLRetrieveKL(gen, ref, assistant_only=False, add_to_reward=False))
    normal = RetrieveKL(gen, ref, add_to_reward=False)
    ours = (
        RetrieveKL(gen, ref, add_to_reward=False, options=ScoreOptions(deterministic=True)) if deterministic else normal
    )
    data = batch.padded(settings.device)
    difference = _check_agreement(theirs(data.copy()), ours(data.copy()), batch, tolerance_of(settings.dtype))

    contenders = {
        THEIRS: Contender(lambda _: theirs(data.copy())),
        OURS: Contender(lambda _: ours(data.copy())),
    }
    if deterministic:
        contenders[NORMAL] = Contender(lambda _: normal(data.copy()))
    both = [products_of(model, batch) for model in (policy, reference)]
    contenders[PRODUCTS] = Contender(lambda _: [products() for products in both])
    found = settings.alternate(contenders)
    work = f"{batch.tokens:,} tokens ({batch.source}); {size}"
    outcome = Outcome(work, found[THEIRS], found[OURS], difference, products=found[PRODUCTS])
    if not deterministic:
        return outcome
    ratio = found[OURS].seconds / found[NORMAL].seconds
    return replace(outcome, further=(Goal("time beside the normal mode", "beside normal", ratio, 2, at_least=False),))


def _check_agreement(theirs: TensorDictBase, ours: TensorDictBase, batch: Batch, tolerance: float) -> float:
    """Compare the responses, which both score. Rotary positions make torchrl's left padding harmless."""
    response = batch.padded_response()
    found, expected = ours["next", "kl_penalty"], theirs["next", "kl_penalty"]
    if expected.is_nested:
        expected = torch.nested.to_padded_tensor(expected, 0.0)
    return largest_difference(found.cpu()[response], expected.cpu()[response], tolerance=tolerance, what="KL")


def _workload(name: str, title: str, full: MakeBatch, quick: MakeBatch, targets: Targets) -> Workload:
    return Workload(name, f"RetrieveKL, {title}", partial(measure, full, quick), targets, cuda=True)


WORKLOADS = (
    _workload(
        "a4",
        "4 prompts x 4 answers",
        partial(grouped, 4, 4),
        partial(grouped, 2, 2),
        Targets(faster=5, share=0.9),
    ),
    _workload(
        "a16",
        "4 prompts x 16 answers",
        partial(grouped, 4, 16),
        partial(grouped, 2, 6),
        Targets(faster=8, smaller=30, share=0.9),
    ),
    _workload(
        "b",
        "16 lengths of 100..800, nothing shared",
        partial(independent, 16),
        partial(independent, 4, shortest=8, longest=40),
        Targets(faster=2.5, smaller=30, share=0.9),
    ),
    Workload(
        "a4-recurrent",
        "RetrieveKL, 4 prompts x 4 answers, recurrent layers",
        partial(measure, partial(grouped, 4, 4), partial(grouped, 2, 2), recurrent=True),
        Targets(faster=2.5),
        half=False,
    ),
    Workload(
        "a4-bits",
        "RetrieveKL, 4 prompts x 4 answers, deterministic",
        partial(measure, partial(grouped, 4, 4), partial(grouped, 2, 2), deterministic=True),
        Targets(faster=1.75),
        half=False,
    ),
)
