"""vLLM in bfloat16, as it is served: how far its log-probs are from the trainer's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from seeded import PROMPTS, make_prompts, make_tokenizer
from torchrl_llm_kl import LogProbScorer, diagnose
from vllm_server import make, sampled, serving

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def test_its_mismatch(checkpoints: Path, measured: dict[str, Any]) -> None:
    """To a trainer in float32, and in bfloat16; the doctor names the precision, and nothing else."""
    with serving(checkpoints / "dense", dtype="bfloat16") as server:
        rollout = server.sample(make_prompts(PROMPTS, 0))
    rows, mask, theirs = sampled(rollout)
    sizes = {}
    for dtype in (torch.float32, torch.bfloat16):
        off = LogProbScorer(make("dense").to(dtype)).score(rows, mask).values[mask].double() - theirs
        k3 = torch.expm1(off) - off
        sizes[dtype] = float(off.square().mean().sqrt())
        measured[f"log-probs of samples, bfloat16, to a trainer in {dtype}"] = (
            f"rms {sizes[dtype]:.2g}, largest {off.abs().max():.2g}, k1 {-off.mean():.2g}, k3 {k3.mean():.2g}"
        )
    assert 1e-3 < sizes[torch.float32] < 0.1
    assert sizes[torch.bfloat16] < 0.1
    diagnosis = diagnose(rollout.batch(), policy=make("dense"), tokenizer=make_tokenizer())
    assert [each.cause for each in diagnosis.faults] == ["low_precision"], diagnosis
