from typing import Any

import pytest
from tensordict import TensorDictBase
from torchrl.envs import EnvBase, Transform

from rollout_fixtures import (  # noqa: F401
    _imported_before_the_first_test,
    _lists_become_stacks,
    padded,
    policy_model,
    ref_model,
    tokenizer,
)
from toy_rollouts import collect, make_env, make_policy, make_scoring_wrapper


class Lab:
    """A tokenizer, models of a policy and a reference, new wrappers of them, and rollouts of the policy."""

    def __init__(self, tokenizer: Any, gen_model: Any, ref_model: Any) -> None:  # noqa: F811
        self.tokenizer, self.gen_model, self.ref_model = tokenizer, gen_model, ref_model

    def wrapped(self, pad_output: bool = False, **kwargs: Any) -> Any:
        """Wrappers of both models, which write ``"log_probs"`` and ``"ref_log_probs"``."""
        return tuple(
            make_scoring_wrapper(model, self.tokenizer, pad_output=pad_output, **{"log_probs_key": key, **kwargs})
            for model, key in ((self.gen_model, "log_probs"), (self.ref_model, "ref_log_probs"))
        )

    def policy(self, pad_output: bool = False, **kwargs: Any) -> Any:
        return make_policy(self.gen_model, self.tokenizer, pad_output=pad_output, **kwargs)

    def env(self, *transforms: Transform, **kwargs: Any) -> EnvBase:
        return make_env(self.tokenizer, *transforms, **kwargs)

    def collect(self, *transforms: Transform, pad_output: bool = False, **kwargs: Any) -> TensorDictBase:
        return collect(self.tokenizer, self.policy(pad_output), *transforms, **kwargs)


@pytest.fixture
def lab(tokenizer: Any, policy_model: Any, ref_model: Any) -> Lab:  # noqa: F811
    return Lab(tokenizer, policy_model, ref_model)


@pytest.fixture
def wrapped(lab: Lab) -> Any:
    return lab.wrapped


@pytest.fixture
def gen(lab: Lab) -> Any:
    return lab.wrapped()[0]


@pytest.fixture
def ref(lab: Lab) -> Any:
    return lab.wrapped()[1]


@pytest.fixture
def policy(lab: Lab) -> Any:
    return lab.policy()
