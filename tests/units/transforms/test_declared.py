"""In an env and a buffer the transforms write what they declare, save their coefficient, and warn of later rewards."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.collectors.llm import LLMCollector
from torchrl.data import Composite, LazyStackStorage, ReplayBuffer
from torchrl.envs import (
    BinarizeReward,
    Compose,
    DoubleToFloat,
    EnvBase,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SignTransform,
    Transform,
    check_env_specs,
)
from torchrl.envs.llm.transforms import RetrieveLogProb as TorchRLRetrieveLogProb

from torchrl_llm_kl import AdaptiveKLCoefficient, KLComputation, KLRewardTransform, RetrieveKL, RetrieveLogProb
from toy_rollouts import Outcome, collect, make_env, make_policy, make_scoring_wrapper, steps

# ------------------------------------------------------------------ what is declared is produced


def chain(
    name: str, tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool, input_mode: str
) -> list[Transform]:
    """The transform and those whose output it reads, with models that take ``input_mode``."""

    def wrapper(model: Any, key: str, mode: str = input_mode) -> Any:
        return make_scoring_wrapper(model, tokenizer, pad_output=padded, log_probs_key=key, input_mode=mode)

    gen, ref = wrapper(policy_model, "log_probs"), wrapper(ref_model, "ref_log_probs")
    return {
        "RetrieveLogProb": [RetrieveLogProb(ref)],
        "KLComputation": [RetrieveLogProb(gen), RetrieveLogProb(ref), KLComputation()],
        "RetrieveKL": [RetrieveKL(gen, ref)],
        "KLRewardTransform": [RetrieveLogProb(gen), KLRewardTransform(wrapper(ref_model, "ref_log_probs", "tokens"))],
    }[name]


NAMES = ["RetrieveLogProb", "KLComputation", "RetrieveKL", "KLRewardTransform"]
PAIRS = list(zip(NAMES, [True, False, False, True], strict=True))


@pytest.mark.filterwarnings("ignore:sequence .*the full text does not start with its prompt")
@pytest.mark.parametrize(("name", "padded"), PAIRS, indirect=["padded"])
def test_check_env_specs(name: str, tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool) -> None:
    """In text mode, the one in which the bare ``ChatEnv`` of torchrl 0.14 passes its own check."""
    transforms = chain(name, tokenizer, policy_model, ref_model, padded, "text")
    check_env_specs(make_env(tokenizer, *transforms, envs=2, turns=2, input_mode="text"))


def declared(env: EnvBase) -> dict[Any, Any]:
    entries: dict[Any, Any] = {}
    for spec in (env.full_observation_spec, env.full_reward_spec):
        entries |= {key: leaf for key, leaf in spec.items(True, True) if not isinstance(leaf, Composite)}
    return entries


def fits(shape: torch.Size, spec: Any) -> bool:
    """Whether the shape of one row is that of the spec, whose batch dimension comes first and where -1 is any size."""
    want = spec.shape[1:]
    return len(shape) == len(want) and all(w in (-1, s) for s, w in zip(shape, want, strict=True))


def check_declared(env: EnvBase, step: TensorDictBase, written: list[Any]) -> None:
    entries = declared(env)
    for key in written:
        value = step["next"].get(key)
        assert key in entries, f"{key} is written but not declared"
        assert fits(value.shape, entries[key]), f"{key}: declared {entries[key].shape}, produced {value.shape}"
        assert value.dtype == entries[key].dtype


@pytest.mark.parametrize(
    ("name", "padded", "input_mode"),
    [(name, padded != (mode == "text"), mode) for name, padded in PAIRS for mode in ("history", "text")],
    indirect=["padded"],
)
def test_declared_is_produced_by_a_policy(
    name: str, input_mode: str, tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool
) -> None:
    transforms = chain(name, tokenizer, policy_model, ref_model, padded, input_mode)
    env = make_env(tokenizer, *transforms, envs=2, turns=2, input_mode=input_mode)
    bare = declared(make_env(tokenizer, envs=2, turns=2, input_mode=input_mode))
    added = [key for key, spec in declared(env).items() if key not in bare or spec != bare[key]]
    rollout = env.rollout(2, make_policy(policy_model, tokenizer, pad_output=padded, input_mode=input_mode))
    for step in steps(rollout):
        check_declared(env, step, added)
    expected = {
        "RetrieveLogProb": {("ref_log_probs", "full")},
        "KLComputation": {("log_probs", "full"), ("ref_log_probs", "full"), "kl_penalty", "reward"},
        "RetrieveKL": {("log_probs", "full"), ("ref_log_probs", "full"), "kl_penalty", "reward"},
        "KLRewardTransform": {("log_probs", "full"), "ref_log_probs", "kl_penalty", "reward"},
    }
    assert set(added) == expected[name]


@pytest.mark.parametrize(("name", "padded"), PAIRS, indirect=["padded"])
def test_after_a_reset_the_entries_exist_and_are_empty(
    name: str, tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool
) -> None:
    env = make_env(tokenizer, *chain(name, tokenizer, policy_model, ref_model, padded, "history"), envs=3)
    reset = env.reset()
    for key, spec in declared(env).items():
        if key not in declared(make_env(tokenizer, envs=3)) and key not in env.full_reward_spec.keys(True, True):
            for step in steps(reset):
                assert step.get(key).shape == torch.Size([0, *spec.shape[2:]])


@pytest.mark.parametrize(
    ("features", "padded"),
    [((), True), ((1,), False), ((1, 1), True)],
    ids=["[B]", "[B, 1]", "[B, 1, 1]"],
    indirect=["padded"],
)
def test_defect_07a_07b_reward_of_any_outcome_shape(
    features: tuple[int, ...], tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool
) -> None:
    (transform,) = chain("RetrieveKL", tokenizer, policy_model, ref_model, padded, "history")
    env = make_env(tokenizer).append_transform(Outcome(features)).append_transform(transform)
    (step,) = steps(env.rollout(1, make_policy(policy_model, tokenizer, pad_output=padded))[:1])
    check_declared(env, step, ["reward", "kl_penalty"])
    torch.testing.assert_close(step["next", "reward"].sum(), 1.0 - step["next", "kl_penalty"].sum())


# ------------------------------------------------------------------ what is saved

Make = Callable[[float], Transform]


@pytest.fixture(params=["RetrieveKL", "RetrieveLogProb", "KLRewardTransform", "from_collector"])
def make(request: Any, wrapped: Any, ref_model: Any) -> Make:
    """Builds a transform with a coefficient."""

    def build(value: float) -> Transform:
        coefficient = AdaptiveKLCoefficient(value, target=1.0, horizon=100)
        gen, ref = wrapped(True)
        if request.param == "RetrieveKL":
            return RetrieveKL(gen, ref, coeff=coefficient)
        if request.param == "from_collector":
            return RetrieveKL("from_collector", ref, coeff=coefficient)
        if request.param == "RetrieveLogProb":
            return RetrieveLogProb(gen, reference=ref_model)
        return KLRewardTransform(ref, coef=coefficient)

    return build


KEYS = {
    "RetrieveKL": ["transforms.2.coeff.value"],
    "from_collector": ["transforms.2.coeff.value"],
    "RetrieveLogProb": [],
    "KLRewardTransform": ["coef.value"],
}


def test_a_transform_saves_its_coefficient_alone(make: Make, request: Any) -> None:
    transform, other = make(0.25), make(0.5)
    state = transform.state_dict()
    assert list(state) == KEYS[request.node.callspec.params["make"]]
    assert [float(value) for value in state.values()] == [0.25] * len(state)
    prefixed = transform.state_dict(prefix="mine.")
    assert [key.removeprefix("mine.") for key in prefixed] == list(state)
    missing, unexpected = other.load_state_dict(state)
    assert missing == unexpected == []
    assert [float(value) for value in other.state_dict().values()] == [0.25] * len(state)
    models = [part.model for part in (transform, *transform.children()) if hasattr(part, "model")]
    if state:
        with pytest.raises(RuntimeError, match=r"Missing key.*value"):
            other.load_state_dict({})
    assert all(any(p is q for q in transform.parameters()) for model in models for p in model.parameters()), (
        "still submodules: moved with the transform"
    )


def test_envs_collectors_and_buffers_save_no_weights(make: Make, tokenizer: Any, policy_model: Any) -> None:
    def build(value: float) -> tuple[Any, Any, Any]:
        env = make_env(tokenizer, make(value))
        policy = make_policy(policy_model, tokenizer, pad_output=True)
        collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=4, total_dialog_turns=8)
        buffer = ReplayBuffer(storage=LazyStackStorage(4), batch_size=2, transform=make(value))
        return env, collector, buffer

    def numbers(state: Any) -> list[float]:
        return [float(value) for key, value in state.items() if isinstance(value, torch.Tensor) and "coef" in key]

    env, collector, buffer = build(0.25)
    saved = env.state_dict()
    states = [saved, collector.state_dict()["env_state_dict"], buffer.state_dict()["_transforms"]]
    for state in states:
        assert not [key for key in state if "weight" in key or "model" in key]
    weight = policy_model.get_output_embeddings().weight.detach().clone()
    again, again_collector, again_buffer = build(0.5)
    again.load_state_dict(copy.deepcopy(saved))
    assert numbers(again.state_dict()) == numbers(saved)
    again_buffer.load_state_dict(buffer.state_dict())
    assert numbers(again_buffer.state_dict()["_transforms"]) == numbers(saved)
    assert torch.equal(policy_model.get_output_embeddings().weight, weight)
    for one in (collector, again_collector):
        one.shutdown()


def test_a_state_with_weights_loads_them(tokenizer: Any, policy_model: Any, ref_model: Any) -> None:
    """As torchrl's transforms save theirs."""

    def build(kind: Any, model: Any) -> Transform:
        wrapper = make_scoring_wrapper(copy.deepcopy(model), tokenizer, pad_output=True)
        return kind(wrapper, log_probs_full_key=("ref_log_probs", "full"), assistant_only=False)

    state = build(TorchRLRetrieveLogProb, ref_model).state_dict()
    assert any(key.endswith("lm_head.weight") for key in state)
    ours = build(RetrieveLogProb, policy_model)
    assert ours.state_dict() == {}
    ours.load_state_dict(state)
    found = ours.model.model.get_output_embeddings().weight
    assert torch.equal(found, ref_model.get_output_embeddings().weight)
    (first, *_) = state
    with pytest.raises(RuntimeError, match=rf"Missing key.*{first}"):
        ours.load_state_dict({key: value for key, value in state.items() if key != first})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*other"):
        ours.load_state_dict({"other": torch.zeros(1)})


# ------------------------------------------------------------------ rewards written after the KL

AMOUNT = 0.25


class Bonus(Transform):
    """Adds a constant to the reward."""

    def __init__(self, key: str = "reward") -> None:
        super().__init__(in_keys=[key], out_keys=[key])

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        key = self.out_keys[0]
        reward = next_tensordict.get(key, None, as_list=True) if next_tensordict.batch_dims else next_tensordict[key]
        if isinstance(reward, list):
            for row, value in zip(next_tensordict.unbind(0), reward, strict=True):
                row[key] = value + AMOUNT
            return next_tensordict
        return next_tensordict.set(key, reward + AMOUNT)


def order_warnings(run: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if "after the KL" in str(w.message)]


def test_an_amount_added_after_the_kl(
    tokenizer: Any, policy: Any, policy_model: nn.Module, ref_model: nn.Module
) -> None:
    """Before: once; after: once per token position, with one warning for all steps."""
    rewards = {}
    for place in ("before", "after"):
        kl = RetrieveKL(policy_model, ref_model, coeff=0.5)
        transforms = (Bonus(), kl) if place == "before" else (kl, Bonus())
        run = partial(collect, tokenizer, policy, *transforms, turns=2)
        found = order_warnings(lambda run=run, place=place: rewards.update({place: run()}))
        assert len(found) == (place == "after"), found
    assert "Bonus comes after the KL was charged to 'reward'" in found[0]
    assert "Append Bonus before the KL transform" in found[0]
    for right, wrong in zip(steps(rewards["before"]), steps(rewards["after"]), strict=True):
        number = wrong["next", "reward"].numel()
        more = wrong["next", "reward"].sum() - right["next", "reward"].sum()
        assert number > 10
        assert more.item() == pytest.approx((number - 1) * AMOUNT, abs=1e-4)


TRANSFORMS: dict[str, tuple[Any, bool]] = {
    "RewardClipping": (lambda: RewardClipping(-1, 1), True),
    "RewardScaling": (lambda: RewardScaling(loc=0.5, scale=2.0), True),
    "SignTransform": (lambda: SignTransform(in_keys=["reward"]), True),
    "BinarizeReward": (BinarizeReward, True),
    "Bonus": (Bonus, True),
    # A factor is that of the sum; no change; other entries.
    "factor": (lambda: RewardScaling(loc=0.0, scale=2.0), False),
    "DoubleToFloat": (DoubleToFloat, False),
    "RewardSum": (lambda: RewardSum(in_keys=["reward"], out_keys=["episode_reward"]), False),
    "other": (lambda: Bonus("other"), False),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("how", ["env", "composition", "appended", "part"])
def test_every_reward_transform(
    name: str, how: str, policy_model: nn.Module, ref_model: nn.Module, tokenizer: Any
) -> None:
    """Wherever it comes after: found when the first step runs, so the transform itself is not needed."""
    make, warns = TRANSFORMS[name]
    later, kl = make(), RetrieveKL(policy_model, ref_model)
    if how == "env":
        env = make_env(tokenizer, kl, later)
    elif how == "composition":
        env = make_env(tokenizer, Compose(kl), Compose(Compose(later)))
    elif how == "part":
        kl = KLComputation()
        env = make_env(tokenizer, RetrieveLogProb(policy_model), kl, later)
    else:
        env = make_env(tokenizer, kl).append_transform(later)
    found = order_warnings(kl.check_order)
    assert [name in text for text in found] == [True] * warns
    assert order_warnings(kl.check_order) == []
    del env


def test_no_warning(tokenizer: Any, policy_model: nn.Module, ref_model: nn.Module) -> None:
    """Before the KL, with the reward left alone, broadcast as torchrl does, or written elsewhere; and one that comes later."""
    for settings in ({"add_to_reward": False}, {"reward_placement": "broadcast"}, {"reward_key": "penalised"}):
        kl = RetrieveKL(policy_model, ref_model, **settings)
        env = make_env(tokenizer, Bonus(), kl, RewardClipping(-1, 1))
        assert order_warnings(kl.check_order) == []
    kl = KLRewardTransform(ref_model, out_keys=["penalised"])
    env = make_env(tokenizer, kl, Bonus())
    assert order_warnings(kl.check_order) == []
    kl = KLRewardTransform(ref_model)
    own = {"kl_key": "kl", "ref_log_probs_full_key": ("other", "full")}
    env = make_env(tokenizer, kl, RetrieveKL(policy_model, ref_model, **own))
    assert order_warnings(kl.check_order) == []
    env = env.append_transform(Bonus())
    env.full_reward_spec  # noqa: B018  # computed again
    assert len(order_warnings(kl.check_order)) == 1


def test_in_a_replay_buffer(policy_model: nn.Module, ref_model: nn.Module) -> None:
    tokens = TensorDict(full=torch.tensor([[3, 4, 5, 6]]), prompt=torch.tensor([[3, 4]]), batch_size=[1])
    data = TensorDict(tokens=tokens, next=TensorDict(reward=torch.ones(1, 1), batch_size=[1]), batch_size=[1])
    buffer = ReplayBuffer(storage=LazyStackStorage(1), batch_size=1)
    buffer.append_transform(RetrieveKL(policy_model, ref_model))
    buffer.append_transform(RewardClipping(-1, 1, in_keys=[("next", "reward")], out_keys=["reward"]))
    buffer.extend(data)
    assert len(order_warnings(buffer.sample)) == 1
