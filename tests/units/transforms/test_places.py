"""Every transform in every place where TorchRL runs one, compared with a plain model, and the cost of a turn."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import jinja2
import pytest
import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import Transform

from closeness import assert_near
from template_pairs import assistant, user
from torchrl_llm_kl import KLRewardTransform, RetrieveKL, RetrieveLogProb, ScoreOptions
from toy_models import FORWARD
from toy_rollouts import OUTCOMES, flat, histories, leaves, make_model, response_log_probs, same_leaves, steps

COEFF = 0.3
GEN, REF = ("next", "log_probs", "full"), ("next", "ref_log_probs", "full")
KL, REWARD, REF_FEATURE = ("next", "kl_penalty"), ("next", "reward"), ("next", "ref_log_probs")
WRITTEN: dict[str, list[Any]] = {
    "RetrieveLogProb": [REF],
    "KLComputation": [KL, REWARD],
    "RetrieveKL": [GEN, REF, KL, REWARD],
    "KLRewardTransform": [KL, REF_FEATURE, REWARD],
}


class Scored:
    """The models, the transforms under test, and the data that they read."""

    def __init__(self, lab: Any, padded: bool) -> None:
        self.lab, self.padded, self.policy = lab, padded, lab.policy(padded)
        self.scores: dict[Any, Any] = {}

    def chain(self, name: str) -> list[Transform]:
        return self.lab.chain(name, self.padded, COEFF)

    def data(self, name: str, **kwargs: Any) -> TensorDictBase:
        """A rollout with the entries that the transform reads."""
        return self.lab.collect(*self.chain(name)[:-1], pad_output=self.padded, **kwargs)

    def check(self, name: str, step: TensorDictBase, outcome: float) -> None:
        """Compare a step with numbers from one plain forward for each model."""
        ids = (len(step["tokens", "prompt"]), *step["tokens", "full"].tolist())
        if ids not in self.scores:
            models = self.lab.gen_model, self.lab.ref_model
            self.scores[ids] = tuple(response_log_probs(model, step) for model in models)
        gen, ref = self.scores[ids]
        response = step["masks", "all_attention_mask"] & (torch.arange(len(gen)) >= ids[0])
        kl = gen - ref
        reward = -COEFF * kl
        reward[response.nonzero()[-1]] += outcome
        want = {GEN: gen, REF: ref, KL: kl, REF_FEATURE: ref.unsqueeze(-1), REWARD: reward.unsqueeze(-1)}
        if name == "KLRewardTransform":
            want[KL] = kl.unsqueeze(-1)
        assert (gen[response] != 0).all(), "the oracle itself must score every token"
        for key in WRITTEN[name]:
            found = step[key]
            assert found.dtype == torch.float32
            assert not found.requires_grad
            assert_near(found, want[key], **FORWARD, msg=f"{name} {key}")
            assert (found.reshape(len(gen), -1)[~response] == 0).all()

    def check_all(self, name: str, rollout: TensorDictBase) -> int:
        for outcome, turns in zip(OUTCOMES, rollout.unbind(0), strict=False):
            for step in turns.unbind(0):
                self.check(name, step, outcome)
        return rollout.numel()


@pytest.fixture
def scored(lab: Any, padded: bool) -> Scored:
    return Scored(lab, padded)


def in_layouts(first: bool) -> pytest.MarkDecorator:
    """Each transform in one of two layouts. The other half of the places uses the other layout."""
    pairs = [(name, (i % 2 == 0) == first) for i, name in enumerate(WRITTEN)]
    ids = [f"{name}-{'padded' if padded else 'nested'}" for name, padded in pairs]
    return pytest.mark.parametrize(("name", "padded"), pairs, indirect=["padded"], ids=ids)


TWO = [OUTCOMES[0]] * 2 + [OUTCOMES[1]] * 2
BATCHES: dict[str, tuple[Callable[[TensorDictBase], TensorDictBase], list[float]]] = {
    "no batch dimension": (lambda td: td[1, 0], [OUTCOMES[1]]),
    "one": (lambda td: td[:, 0], [*OUTCOMES[:2]]),
    "two": (lambda td: td, TWO),
    "three": (lambda td: td[:, None], TWO),
    "three, of a lazy stack of lazy stacks": (lambda td: lazy_stack([td, td.clone()]), TWO * 2),
}


@in_layouts(True)
def test_defect_27_a_direct_call_on_any_number_of_batch_dimensions(scored: Scored, name: str) -> None:
    rollout = scored.data(name, envs=2, turns=2)
    for reshape, outcomes in BATCHES.values():
        data = reshape(rollout.clone())
        before = [leaves(step) for step in steps(data)]
        result = scored.chain(name)[-1](data)
        assert result.shape == data.shape
        for step, was, outcome in zip(steps(result), before, outcomes, strict=True):
            scored.check(name, step, outcome)
            assert same_leaves(was, step, except_for=WRITTEN[name])


@in_layouts(False)
def test_defect_07d_chat_env(scored: Scored, name: str) -> None:
    """Each turn is charged only for its own tokens."""
    torch.manual_seed(0)
    rollout = scored.lab.env(*scored.chain(name), envs=3, turns=3).rollout(3, scored.policy)
    assert scored.check_all(name, rollout) == 9


@in_layouts(True)
def test_collector(scored: Scored, name: str) -> None:
    env = scored.lab.env(*scored.chain(name), turns=2)
    assert sum(scored.check_all(name, batch) for batch in scored.lab.batches(env, 4, 8, policy=scored.policy)) == 8


@in_layouts(True)
def test_defect_25_26_replay_buffer_on_extend(scored: Scored, name: str) -> None:
    data = flat(scored.data(name, envs=3))
    before = [leaves(step) for step in steps(data)]
    buffer = ReplayBuffer(storage=LazyStackStorage(8), batch_size=3)
    buffer.append_transform(scored.chain(name)[-1], invert=True)
    buffer.extend(data)
    assert len(buffer) == 3
    for i in range(3):
        scored.check(name, buffer._storage[i], OUTCOMES[i])
    for step, was in zip(steps(data), before, strict=True):
        assert same_leaves(was, step), "extend must leave the caller's data as it was"


@in_layouts(False)
def test_defect_25_26_replay_buffer_on_sample(scored: Scored, name: str) -> None:
    data = flat(scored.data(name, envs=3))
    buffer = ReplayBuffer(storage=LazyStackStorage(8), batch_size=4)
    buffer.extend(data)
    stored = [leaves(buffer._storage[i]) for i in range(3)]
    outcome_of = {str(step["tokens", "full"].tolist()): OUTCOMES[i] for i, step in enumerate(steps(data))}
    buffer.append_transform(scored.chain(name)[-1])
    for _ in range(2):  # twice, because the first sample must not have changed the storage
        sample = buffer.sample()
        assert sample.shape == (4,)
        for step in steps(sample):
            scored.check(name, step, outcome_of[str(step["tokens", "full"].tolist())])
    for i in range(3):
        assert same_leaves(stored[i], buffer._storage[i])


@pytest.mark.parametrize(
    ("padded", "given"), [(True, "policy"), (False, "policy_factory")], indirect=["padded"], ids=["padded", "factory"]
)
def test_defect_05_09_from_collector(scored: Scored, given: str) -> None:
    """Specs exist before a collector does, and the policy is never changed."""

    def settings() -> dict[str, Any]:
        kinds = (dict, list, bool, str, tuple, int)
        return {k: copy.copy(v) for k, v in vars(policy).items() if isinstance(v, kinds) and k != "collector"}

    policy, ref = scored.policy, scored.lab.wrapped(scored.padded)[1]
    env = scored.lab.env(RetrieveKL("from_collector", ref, coeff=COEFF), turns=2)
    assert env.full_observation_spec["kl_penalty"].shape == (2, -1)
    before = settings()
    batches = scored.lab.batches(env, 4, 8, **{given: policy if given == "policy" else lambda: policy})
    assert sum(scored.check_all("RetrieveKL", batch) for batch in batches) == 8
    assert settings() == before


def test_from_collector_outside_a_collector_is_refused(lab: Any) -> None:
    transform = RetrieveKL("from_collector", lab.wrapped()[1])
    with pytest.raises(ValueError, match=r"The container is not set.*append the transform to the env.*LLMCollector"):
        transform(lab.collect())
    env = lab.env(transform)
    with pytest.raises(ValueError, match=r"The collector is not set.*append the transform to the env.*LLMCollector"):
        env.rollout(1, lab.policy())


# ------------------------------------------------------------------ what a turn costs
#: Transforms that score a model and a twin with equal weights, and the key of its log-probs.
TRANSFORMS: dict[str, tuple[Any, Any]] = {
    "RetrieveKL": (lambda ref, twin, options: [RetrieveKL(ref, twin, options=options)], GEN[1:]),
    "RetrieveLogProb": (lambda ref, _, options: [RetrieveLogProb(ref, options=options)], GEN[1:]),
    "KLRewardTransform": (
        lambda ref, twin, options: [RetrieveLogProb(twin), KLRewardTransform(ref, options=options)],
        "ref_log_probs",
    ),
}


def count(calls: list[int], _: Any, __: Any, kwargs: Any) -> None:
    """Count the tokens of a scoring forward. Generation uses its own cache."""
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
        # Decoding and encoding an answer again may change its tokens. New tokens begin at the first difference.
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


CHATS = [[user("hi"), assistant("yes"), user("why?"), assistant(f"because {i}")] for i in range(3)]


@pytest.mark.parametrize(("assistant_only", "renderings"), [(True, 2), (False, 1)])
def test_each_conversation_is_rendered_once_for_both_models(lab, monkeypatch, assistant_only, renderings):
    """Once for the text, and once to locate the turns. The first conversation of its kind is checked with more."""
    wrappers = lab.wrapped(input_mode="history")
    transform = RetrieveKL(*wrappers, assistant_only=assistant_only, add_to_reward=False)
    data = histories(full=CHATS)
    transform(data.clone())
    seen: list[int] = []
    render = jinja2.Template.render
    monkeypatch.setattr(jinja2.Template, "render", lambda self, *a, **k: seen.append(1) or render(self, *a, **k))
    transform(data)
    assert len(seen) == renderings * len(CHATS)
