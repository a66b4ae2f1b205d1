"""Another prompt for a served model: the client builds the sequences, which go over the wire as any others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from closeness import assert_near
from remote_models import model
from torchrl_llm_kl import RetrieveKL, RetrieveLogProb
from torchrl_llm_kl.service import RayRetrieveLogProb, ScoringService

PROMPTS, CONTEXTS, RESPONSES = [[7, 8], [5, 6]], [[20, 21, 22], [23, 24, 25]], [[11, 12], [13, 14]]


def data() -> TensorDict:
    full = torch.tensor([p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)])
    tokens = {"full": full, "prompt": full[:, :2].clone()}
    return TensorDict({"tokens": tokens, "hint": torch.tensor(CONTEXTS), "next": {"reward": torch.zeros(2, 1)}}, [2])


@pytest.fixture
def served(shared: ScoringService) -> Any:
    return shared.model


def by_hand() -> torch.Tensor:
    ids = torch.tensor([c + r for c, r in zip(CONTEXTS, RESPONSES, strict=True)])
    with torch.no_grad():
        log_p = model()(input_ids=ids).logits[:, 2:-1].log_softmax(-1)
    return log_p.gather(-1, ids[:, 3:, None])[..., 0]


def test_sequences_built_by_hand(served: Any) -> None:
    found = RetrieveLogProb(served, context="hint")(data())["next", "log_probs", "full"]
    assert_near(found[:, 2:], by_hand(), size=16, dtype=torch.float32)
    assert not found[:, :2].any()
    both = RetrieveKL(model(1), served, context="hint")(data())["next"]
    assert_near(both["ref_log_probs", "full"], found, size=16, dtype=torch.float32)
    top = RetrieveLogProb(served, context="hint", top_k=3)(data())["next", "top_k"]
    local = RetrieveLogProb(model(), context="hint", top_k=3)(data())["next", "top_k"]
    assert torch.equal(top["ids"], local["ids"])
    assert_near(top["log_probs"], local["log_probs"].float(), size=16, dtype=torch.float32)  # float32 for any model


def test_the_ray_variant_takes_a_context(served: Any) -> None:
    transform = RayRetrieveLogProb(served, context="hint")
    assert_near(transform(data())["next", "log_probs", "full"][:, 2:], by_hand(), size=16, dtype=torch.float32)
