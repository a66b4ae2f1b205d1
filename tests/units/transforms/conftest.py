from __future__ import annotations

from typing import Any

import pytest

from rollout_fixtures import _lists_become_stacks, padded, policy_model, ref_model, tokenizer  # noqa: F401
from toy_rollouts import make_policy, make_scoring_wrapper


@pytest.fixture
def wrapped(tokenizer: Any, policy_model: Any, ref_model: Any) -> Any:  # noqa: F811
    """Wrappers of both models, which write ``"log_probs"`` and ``"ref_log_probs"``."""

    def make(pad_output: bool, **kwargs: Any) -> tuple[Any, Any]:
        return tuple(
            make_scoring_wrapper(model, tokenizer, pad_output=pad_output, log_probs_key=key, **kwargs)
            for model, key in ((policy_model, "log_probs"), (ref_model, "ref_log_probs"))
        )

    return make


@pytest.fixture
def gen(wrapped: Any) -> Any:
    return wrapped(False)[0]


@pytest.fixture
def ref(wrapped: Any) -> Any:
    return wrapped(False)[1]


@pytest.fixture
def policy(tokenizer: Any, policy_model: Any) -> Any:  # noqa: F811
    return make_policy(policy_model, tokenizer, pad_output=False)
