"""Models and weights that an algorithm, a loss or a critic refuses when it is built."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torchrl_llm_kl import make_algorithm
from torchrl_llm_kl.losses import KLToReference, ValueLoss
from torchrl_llm_kl.scoring import RememberedModel, TokenCritic
from toy_models import tiny_model


def test_another_vocabulary_behind_a_store(tmp_path: Path) -> None:
    other = RememberedModel(tiny_model(vocab_size=194), tmp_path)
    with pytest.raises(ValueError, match=r"reference has a vocabulary of 194 tokens, and the actor one of 97"):
        make_algorithm("grpo", tiny_model(), reference=other, group_size=2)


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_weight_in_a_tensor_of_the_cpu_is_checked_like_a_number(value: float) -> None:
    with pytest.raises(ValueError, match="coeff must be a finite number of at least 0"):
        KLToReference(torch.tensor(value))
    with pytest.raises(ValueError, match="kl_loss_coeff must be a finite number of at least 0"):
        make_algorithm(
            "grpo", tiny_model(), reference=tiny_model(seed=1), group_size=2, kl_loss_coeff=torch.tensor(value)
        )
    assert float(KLToReference(torch.tensor(0.25)).coeff) == 0.25


def test_a_critic_that_is_a_name() -> None:
    with pytest.raises(TypeError, match=r"critic must be a model, got 'q': load it first"):
        ValueLoss("q")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model must be a model, got 'q': load it first"):
        TokenCritic("q")  # type: ignore[arg-type]
