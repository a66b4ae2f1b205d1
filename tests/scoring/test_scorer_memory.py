"""A forward that runs out of memory is tried again on half the tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from torchrl_llm_kl import LogProbScorer, Ragged
from toy_models import VOCAB_SIZE, tiny_model
from toy_rollouts import plain_log_probs


def model_with_room_for(tokens: int) -> Any:
    """A model whose body fails, as a full device does, on more than ``tokens`` tokens with their past and padding."""
    model = tiny_model("qwen2")

    def check(_: Any, args: Any, kwargs: Any) -> None:
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.numel() > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory (as told by a test)")

    model.model.register_forward_pre_hook(check, with_kwargs=True)
    return model


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_the_budget_is_halved_until_it_fits_and_stays(share: bool, grad: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(VOCAB_SIZE, (20,), generator=generator)
    rows = [torch.cat([prompt, torch.randint(VOCAB_SIZE, (n,), generator=generator)]) for n in (3, 9, 6, 4, 7, 2)]
    model = model_with_room_for(70)
    scorer = LogProbScorer(model, tokens_per_batch=256, share_prefixes=share)
    with pytest.warns(UserWarning, match="out of memory: LogProbScorer goes on with tokens_per_batch="):
        found = scorer.score(Ragged.from_list(rows), grad=grad)
    assert scorer.tokens_per_batch in (64, 128)
    plain = tiny_model("qwen2")
    for row, log_probs in zip(rows, found.to_list(), strict=True):
        assert_close(log_probs.detach(), plain_log_probs(plain, row), atol=1e-5, rtol=0)


def test_a_sequence_that_does_not_fit_alone_is_the_devices_error() -> None:
    scorer = LogProbScorer(model_with_room_for(40), tokens_per_batch=64)
    row = torch.arange(50)
    with pytest.warns(UserWarning, match="out of memory"), pytest.raises(torch.OutOfMemoryError):
        scorer.score(Ragged.from_list([row]))
    assert scorer.tokens_per_batch == 32
