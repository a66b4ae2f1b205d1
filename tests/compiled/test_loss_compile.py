"""Outputs of losses in compiled functions."""

from __future__ import annotations

import torch

from torchrl_llm_kl.losses import LossOutput


def test_an_output_can_be_made_and_read_in_a_compiled_function() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def f(x: torch.Tensor) -> tuple[LossOutput, torch.Tensor]:
        out = LossOutput(loss_a=2 * x, loss_b=-x, ESS=x * 0 + 1)
        return out, out.total_loss

    out, total = f(torch.tensor(3.0))
    assert type(out) is LossOutput
    assert total == out.mean(reduce=True) == 3
