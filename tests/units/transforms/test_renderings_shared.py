"""The chat template runs once for both models, not once for each."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest
from tensordict import TensorDict
from torchrl.data.llm import History

from torchrl_llm_kl import RetrieveKL
from toy_rollouts import make_scoring_wrapper

CHATS = [
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "why?"},
        {"role": "assistant", "content": f"because {i}"},
    ]
    for i in range(3)
]


@pytest.mark.parametrize(("assistant_only", "renderings"), [(True, 2), (False, 1)])
def test_each_conversation_is_rendered_once_for_both_models(
    tokenizer: Any,
    policy_model: Any,
    ref_model: Any,
    monkeypatch: pytest.MonkeyPatch,
    assistant_only: bool,
    renderings: int,
) -> None:
    """Once as it is, and once more to see who spoke where; more for the first with such turns, which is checked."""
    options = {"tokenizer": tokenizer, "pad_output": False, "input_mode": "history"}
    transform = RetrieveKL(
        make_scoring_wrapper(policy_model, log_probs_key="log_probs", **options),
        make_scoring_wrapper(ref_model, log_probs_key="ref_log_probs", **options),
        assistant_only=assistant_only,
        add_to_reward=False,
    )
    data = TensorDict({"history": TensorDict({"full": History.from_chats(CHATS)}, [3])}, [3])
    transform(data.clone())
    seen = []
    render = jinja2.Template.render
    monkeypatch.setattr(jinja2.Template, "render", lambda self, *a, **k: seen.append(1) or render(self, *a, **k))
    transform(data)
    assert len(seen) == renderings * len(CHATS)
