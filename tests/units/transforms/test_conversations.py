"""Several turns in an env: each costs its new tokens, and a policy trained meanwhile is never served old values.

A conversation without tokens is rendered once for both models.
"""

from __future__ import annotations

import copy
from typing import Any

import jinja2
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data.llm import History

from closeness import assert_near
from torchrl_llm_kl import KLRewardTransform, RetrieveKL, RetrieveLogProb
from toy_models import FORWARD
from toy_rollouts import collect, make_env, make_model, make_policy, response_log_probs, steps


class Counter:
    """Tokens that go through a body while it is scored, call by call; generation is not counted."""

    def __init__(self, model: Any) -> None:
        self.calls: list[int] = []
        model.get_decoder().register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _: Any, __: Any, kwargs: Any) -> None:
        if not kwargs.get("use_cache"):
            self.calls.append(kwargs["input_ids"].numel())


TRANSFORMS = {
    "RetrieveKL": lambda ref, options: RetrieveKL(ref, copy.deepcopy(ref), **options),
    "RetrieveLogProb": lambda ref, options: RetrieveLogProb(ref, log_probs_full_key=("log_probs", "full"), **options),
}


@pytest.mark.parametrize(("name", "padded"), [("RetrieveKL", True), ("RetrieveLogProb", False)], indirect=["padded"])
def test_a_turn_costs_its_new_tokens(tokenizer: Any, policy_model: Any, name: str, padded: bool) -> None:
    policy = make_policy(policy_model, tokenizer, pad_output=padded)
    costs = {}
    for memory in ({}, {"memory": 0}):
        ref = make_model(tokenizer, seed=1)
        counter = Counter(ref)
        env = make_env(tokenizer, TRANSFORMS[name](ref, memory), envs=2, turns=3)
        torch.manual_seed(0)
        counter.calls.clear()  # of the probe
        rollout = env.rollout(3, policy)
        costs[bool(memory)] = list(counter.calls)
        for step in steps(rollout):
            assert_near(step["next", "log_probs", "full"], response_log_probs(ref, step), **FORWARD)
    with_memory, without = costs[False], costs[True]  # memory=0 is the one without
    assert len(with_memory) == len(without) == 3
    assert with_memory[0] == without[0]
    rows = [
        [step["tokens", "full"][step["masks", "all_attention_mask"]] for step in env.unbind(0)]
        for env in rollout.unbind(0)
    ]
    for turn in range(1, 3):
        # What was decoded and encoded again may be other tokens: new are those from the first difference on.
        known = [min(common(row[turn - 1], row[turn]), len(row[turn - 1]) - 1) for row in rows]
        assert with_memory[turn] == sum(len(row[turn]) - 1 - k for row, k in zip(rows, known, strict=True))
        assert without[turn] > without[turn - 1]
    assert with_memory[2] < 0.6 * without[2]


def common(a: Tensor, b: Tensor) -> int:
    n = min(len(a), len(b))
    return int((a[:n] == b[:n]).long().cumprod(0).sum())


def test_the_legacy_transform_too(tokenizer: Any, policy: Any, policy_model: Any) -> None:
    ref = make_model(tokenizer, seed=1)
    counter = Counter(ref)
    scored = RetrieveLogProb(policy_model)
    env = make_env(tokenizer, scored, KLRewardTransform(ref), envs=2, turns=3)
    torch.manual_seed(0)
    counter.calls.clear()
    rollout = env.rollout(3, policy)
    calls = list(counter.calls)
    assert len(calls) == 3
    for step in steps(rollout):
        assert_near(step["next", "ref_log_probs"][..., 0], response_log_probs(ref, step), **FORWARD)
    total = sum(int(step["masks", "all_attention_mask"].sum()) for step in rollout[:, 2].unbind(0))
    assert calls[2] < 0.6 * total


def test_a_policy_trained_between_two_turns_is_scored_as_it_is(tokenizer: Any) -> None:
    """As an asynchronous updater does, through ``.data``, which no version counter sees."""
    model = make_model(tokenizer, seed=0)
    policy = make_policy(model, tokenizer, pad_output=False)
    env = make_env(tokenizer, RetrieveLogProb(policy.get_new_version(generate=False)), envs=2, turns=2)
    torch.manual_seed(0)
    td = env.reset()
    seen: list[TensorDictBase] = []
    for _ in range(2):
        stepped = env.step(policy(td))
        for step in stepped.unbind(0):
            assert_near(step["next", "log_probs", "full"], response_log_probs(model, step), **FORWARD)
        seen.append(stepped)
        for parameter in model.parameters():
            parameter.data.mul_(1.05)
        td = env.step_mdp(stepped)


def test_outside_an_env_nothing_is_remembered(tokenizer: Any, policy_model: Any, ref_model: Any) -> None:
    transform = RetrieveKL(policy_model, ref_model)
    transform(collect(tokenizer, make_policy(policy_model, tokenizer, pad_output=False)))
    assert [len(transform[i].scorer.memory) for i in (0, 1)] == [0, 0]


TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "why?"},
]
CHATS = [[*TURNS, {"role": "assistant", "content": f"because {i}"}] for i in range(3)]


@pytest.mark.parametrize(("assistant_only", "renderings"), [(True, 2), (False, 1)])
def test_each_conversation_is_rendered_once_for_both_models(
    wrapped: Any, monkeypatch: pytest.MonkeyPatch, assistant_only: bool, renderings: int
) -> None:
    """Once as it is, and once more to see who spoke where; more for the first with such turns, which is checked."""
    transform = RetrieveKL(*wrapped(False, input_mode="history"), assistant_only=assistant_only, add_to_reward=False)
    data = TensorDict({"history": TensorDict({"full": History.from_chats(CHATS)}, [3])}, [3])
    transform(data.clone())
    seen: list[int] = []
    render = jinja2.Template.render
    monkeypatch.setattr(jinja2.Template, "render", lambda self, *a, **k: seen.append(1) or render(self, *a, **k))
    transform(data)
    assert len(seen) == renderings * len(CHATS)
