from typing import Any

import pytest
from tensordict import TensorDictBase
from torchrl.collectors.llm import LLMCollector
from torchrl.envs import EnvBase, Transform

from layouts import LAYOUTS
from rollout_fixtures import (  # noqa: F401
    _imported_before_the_first_test,
    _lists_become_stacks,
    padded,
    policy_model,
    ref_model,
    tokenizer,
)
from torchrl_llm_kl import KLComputation, KLRewardTransform, RetrieveKL, RetrieveLogProb
from toy_rollouts import collect, make_env, make_policy, make_scoring_pair


class Lab:
    """A tokenizer, models of a policy and a reference, new wrappers of them, and rollouts of the policy."""

    def __init__(self, tokenizer: Any, gen_model: Any, ref_model: Any) -> None:  # noqa: F811
        self.tokenizer, self.gen_model, self.ref_model = tokenizer, gen_model, ref_model

    def wrapped(self, pad_output: bool = False, **kwargs: Any) -> Any:
        return make_scoring_pair(self.gen_model, self.ref_model, self.tokenizer, pad_output=pad_output, **kwargs)

    def chain(self, name: str, pad_output: bool, coeff: float = 1.0, **options: Any) -> list[Transform]:
        """A transform on wrappers with ``options``, after those whose output it reads."""
        gen, ref = self.wrapped(pad_output, **options)
        return {
            "RetrieveLogProb": lambda: [RetrieveLogProb(ref)],
            "KLComputation": lambda: [RetrieveLogProb(gen), RetrieveLogProb(ref), KLComputation(coeff=coeff)],
            "RetrieveKL": lambda: [RetrieveKL(gen, ref, coeff=coeff)],
            "KLRewardTransform": lambda: [
                RetrieveLogProb(gen),
                KLRewardTransform(self.wrapped(pad_output)[1], coef=coeff),
            ],
        }[name]()

    def policy(self, pad_output: bool = False, **kwargs: Any) -> Any:
        return make_policy(self.gen_model, self.tokenizer, pad_output=pad_output, **kwargs)

    def env(self, *transforms: Transform, **kwargs: Any) -> EnvBase:
        return make_env(self.tokenizer, *transforms, **kwargs)

    def batches(self, env: EnvBase, rows: int = 2, total: int | None = None, **policy: Any) -> list[TensorDictBase]:
        """All batches of a collector, by default one batch of two turns. ``policy`` is a policy or its factory."""
        given = policy or {"policy": self.policy(True)}
        collector = LLMCollector(env, **given, dialog_turns_per_batch=rows, total_dialog_turns=total or rows)
        batches = list(collector)
        collector.shutdown()
        return batches

    def collect(self, *transforms: Transform, pad_output: bool = False, **kwargs: Any) -> TensorDictBase:
        return collect(self.tokenizer, self.policy(pad_output), *transforms, **kwargs)


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    """The layout of ``layouts.lay_out`` and ``layouts.tokens``: padded, nested, or rows of a lazy stack."""
    return request.param


@pytest.fixture
def lab(tokenizer: Any, policy_model: Any, ref_model: Any) -> Lab:  # noqa: F811
    return Lab(tokenizer, policy_model, ref_model)
