"""liger-kernel's fused kernel of the head on a GPU: equal to plain torch in float64 and to the tiles, and used by a scorer.

``tests/units/head`` runs the same cases in Triton's interpreter.
"""

import copy
import time
from typing import Any

import pytest
import torch

from closeness import assert_near
from fused_head import CASES, in_torch, results, take_real
from parity import CPU
from torchrl_llm_kl import LogProbScorer
from torchrl_llm_kl.head import _fused, fused_failure, linear_log_prob
from torchrl_llm_kl.head._fused import fused_log_prob
from toy_models import tiny_model

ROWS = [[*range(3, 25), 30, 31, 32], [*range(3, 25), 40, 41], [5, 6, 7]]


@pytest.fixture(autouse=True)
def kernel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    take_real(monkeypatch, device)


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_against_float64(device, case):
    truth, found = results(in_torch, torch.float64, CPU, case), results(fused_log_prob, torch.float32, device, case)
    # Logits are sums of 24 products of up to 4 * 4. The weight's gradient adds 37 positions, the hidden one's 301 tokens.
    for name, terms in (("log_prob", 24), ("hidden", 301), ("weight", 37)):
        assert_near(found[name], truth[name], terms=terms, size=60.0, dtype=torch.float32, msg=name)


def test_a_scorer_in_bfloat16_uses_it(device, monkeypatch):
    dtype = torch.bfloat16
    model: Any = tiny_model("llama").to(device, dtype)
    other = copy.deepcopy(model)
    with monkeypatch.context() as without:
        without.setattr(_fused, "_DEVICES", ())
        tiles = LogProbScorer(other)
    scorer = LogProbScorer(model)
    assert scorer.explain(ROWS, 1, 23).head == "liger-kernel's fused kernel"
    found, want = scorer.score(ROWS, grad=True).values, tiles.score(ROWS, grad=True).values
    eps = torch.finfo(dtype).eps
    assert (found - want).norm() <= 4 * eps * want.norm()
    weights = torch.linspace(-1.0, 2.0, len(found))
    for each in (found, want):
        (each * weights).sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert (ours.grad - theirs.grad).float().norm() <= 4 * eps * theirs.grad.float().norm(), name


def test_a_large_head(device, figures):
    """Its logits are in several blocks of positions and of tokens. Records the times of both, forward and backward."""
    rng = torch.Generator(device).manual_seed(0)
    hidden, weight = (torch.randn(n, 1024, generator=rng, device=device).bfloat16() for n in (4096, 151_936))
    weight *= 0.1
    assert fused_failure(hidden[:64], weight) is None
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    targets = torch.randint(151_936, (4096,), generator=rng, device=device)

    def milliseconds(fused: bool) -> float:
        torch.accelerator.synchronize()
        start = time.perf_counter()
        torch.autograd.grad(linear_log_prob(*leaves, targets, fused=fused).log_prob.sum(), leaves)
        torch.accelerator.synchronize()
        return 1e3 * (time.perf_counter() - start)

    times = [min(milliseconds(fused) for _ in range(4)) for fused in (False, True)]
    figures("head", "4096 x 151936, forward and backward", *(f"{each:.1f} ms" for each in times))
