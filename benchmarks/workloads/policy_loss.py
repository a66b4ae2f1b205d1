"""A whole loss module, forward and backward, against torchrl's GRPOLoss: clipped objective, with and without entropy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.objectives.llm import GRPOLoss

from benchmarks.data import Batch, grouped
from benchmarks.models import ModelSize, qwen2, wrapper
from benchmarks.results import Outcome, Targets
from benchmarks.workloads.base import OURS, THEIRS, Settings, Workload
from benchmarks.workloads.loss import compare
from torchrl_llm_kl.losses import EntropyBonus, PolicyLoss

ENTROPY_COEFF = 0.01


def measure(full: ModelSize, entropy: bool, settings: Settings) -> Outcome:
    """Both libraries compute one objective on one batch of rollouts, with gradients of all parameters."""
    size = settings.size(full)
    batch = grouped(2, 2, size.vocab) if settings.quick else grouped(4, 4, size.vocab)
    model = qwen2(size, device=settings.device, dtype=settings.dtype)
    data = _rollouts(batch, settings.device)
    theirs = GRPOLoss(wrapper(model, "log_probs"), entropy_bonus=entropy, entropy_coeff=ENTROPY_COEFF, clip_epsilon=0.2)
    theirs.set_keys(sample_log_prob=("next", "log_probs", "full"))
    # torchrl's loss has no dual clip.
    terms = [EntropyBonus(ENTROPY_COEFF)] if entropy else []
    ours = PolicyLoss(model, clip_low=0.2, clip_high=0.2, clip_ratio_c=None, terms=terms)
    steps = {THEIRS: partial(_step, theirs, data), OURS: partial(_step, ours, data)}
    return compare(size, settings, batch, model, steps)


def _rollouts(batch: Batch, device: torch.device) -> TensorDictBase:
    """Rollouts with log-probs of a sampler, and an advantage per token, as GRPOLoss expects."""
    generator = torch.Generator().manual_seed(0)
    data = batch.padded(device)
    response = batch.padded_response()
    log_probs = -10.3 + torch.randn(response.shape, generator=generator) * 0.5
    data["next", "log_probs"] = {"full": torch.where(response, log_probs, 0).to(device)}
    advantage = torch.randn(len(response), 1, 1, generator=generator).expand(*response.shape, 1)
    return data.set("advantage", advantage.contiguous().to(device))


def _step(loss: Callable[[TensorDictBase], Any], data: TensorDictBase) -> Tensor:
    out = loss(data.copy())
    parts = [out.get(key) for key in ("loss_objective", "loss_entropy") if out.get(key, None) is not None]
    torch.stack([part.reshape(()) for part in parts]).sum().backward()
    return torch.stack([part.detach().reshape(()) for part in parts])


def _workload(name: str, size: ModelSize, *, entropy: bool) -> Workload:
    what = " and an entropy bonus" if entropy else ""
    title = f"PolicyLoss{what}, forward and backward, beside GRPOLoss, vocabulary {size.vocab:,}"
    return Workload(name, title, partial(measure, size, entropy), Targets(faster=2, smaller=8), cuda=True)


WORKLOADS = (
    _workload("g", ModelSize(vocab=32_000, hidden=512, layers=2), entropy=False),
    _workload("g-entropy", ModelSize(vocab=32_000, hidden=512, layers=2), entropy=True),
)
