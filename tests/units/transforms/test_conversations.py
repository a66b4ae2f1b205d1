"""Several turns in an env: each costs its new tokens alone.

A conversation without tokens is rendered once for both models.
"""

from functools import partial
from typing import Any

import jinja2
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data.llm import History

from closeness import assert_near
from torchrl_llm_kl import KLRewardTransform, RetrieveKL, RetrieveLogProb, ScoreOptions
from toy_models import FORWARD
from toy_rollouts import make_model, response_log_probs, steps

FULL = ("log_probs", "full")
#: Transforms that score a model, beside one of equal weights, and where.
TRANSFORMS: dict[str, tuple[Any, Any]] = {
    "RetrieveKL": (lambda ref, twin, options: [RetrieveKL(ref, twin, options=options)], FULL),
    "RetrieveLogProb": (lambda ref, _, options: [RetrieveLogProb(ref, log_probs_full_key=FULL, options=options)], FULL),
    "KLRewardTransform": (
        lambda ref, twin, options: [RetrieveLogProb(twin), KLRewardTransform(ref, options=options)],
        "ref_log_probs",
    ),
}


def count(calls: list[int], _: Any, __: Any, kwargs: Any) -> None:
    """Tokens of a forward that scores; generation has its own cache."""
    if not kwargs.get("use_cache"):
        calls.append(kwargs["input_ids"].numel())


@pytest.mark.parametrize(("name", "padded"), [(name, name == "RetrieveKL") for name in TRANSFORMS], indirect=["padded"])
def test_a_turn_costs_its_new_tokens(lab: Any, name: str, padded: bool) -> None:
    make, key = TRANSFORMS[name]
    costs: list[list[int]] = []  # tokens through the body, turn by turn, with a cache and without
    for memory in (ScoreOptions(), ScoreOptions(memory=0)):
        calls: list[int] = []
        ref, twin = (make_model(lab.tokenizer, seed=1) for _ in range(2))
        ref.get_decoder().register_forward_pre_hook(partial(count, calls), with_kwargs=True)
        env = lab.env(*make(ref, twin, memory), envs=2, turns=3)
        calls.clear()  # of the probe
        torch.manual_seed(0)
        rollout = env.rollout(3, lab.policy(padded))
        costs.append(list(calls))  # not the comparison's below
        for step in steps(rollout):
            found = step["next"][key]
            assert_near(found.reshape(len(found)), response_log_probs(ref, step), **FORWARD)
    cached, whole = costs
    assert [len(cached), len(whole), cached[0]] == [3, 3, whole[0]]
    real = ("masks", "all_attention_mask")
    rows = [[step["tokens", "full"][step[real]] for step in turns.unbind(0)] for turns in rollout.unbind(0)]
    for turn in range(1, 3):
        # What was decoded and encoded again may be other tokens: new are those from the first difference on.
        known = [min(common(row[turn - 1], row[turn]), len(row[turn - 1]) - 1) for row in rows]
        assert cached[turn] == sum(len(row[turn]) - 1 - k for row, k in zip(rows, known, strict=True))
        assert whole[turn] > whole[turn - 1]
    assert cached[2] < 0.6 * whole[2]


def common(a: Tensor, b: Tensor) -> int:
    n = min(len(a), len(b))
    return int((a[:n] == b[:n]).long().cumprod(0).sum())


def test_outside_an_env_nothing_is_remembered(lab: Any) -> None:
    transform = RetrieveKL(lab.gen_model, lab.ref_model)
    transform(lab.collect())
    assert [len(transform[i].scorer.memory) for i in (0, 1)] == [0, 0]


TURNS = [("user", "hi"), ("assistant", "yes"), ("user", "why?")]
CHATS = [[{"role": r, "content": c} for r, c in [*TURNS, ("assistant", f"because {i}")]] for i in range(3)]


@pytest.mark.parametrize(("assistant_only", "renderings"), [(True, 2), (False, 1)])
def test_each_conversation_is_rendered_once_for_both_models(lab, monkeypatch, assistant_only, renderings):
    """Once as it is, and once more to see who spoke where; more for the first with such turns, which is checked."""
    wrappers = lab.wrapped(input_mode="history")
    transform = RetrieveKL(*wrappers, assistant_only=assistant_only, add_to_reward=False)
    data = TensorDict({"history": TensorDict({"full": History.from_chats(CHATS)}, [3])}, [3])
    transform(data.clone())
    seen: list[int] = []
    render = jinja2.Template.render
    monkeypatch.setattr(jinja2.Template, "render", lambda self, *a, **k: seen.append(1) or render(self, *a, **k))
    transform(data)
    assert len(seen) == renderings * len(CHATS)
