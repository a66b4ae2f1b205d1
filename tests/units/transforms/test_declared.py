"""Specs, state and order: declared entries are written, the coefficient is saved, and later reward transforms warn."""

import copy
from typing import Any, ClassVar

import pytest
import torch
from tensordict import TensorDictBase
from torchrl import envs
from torchrl.collectors.llm import LLMCollector
from torchrl.data import Composite, LazyStackStorage, ReplayBuffer
from torchrl.envs import BinarizeReward, Compose, EnvBase, RewardClipping, Transform, check_env_specs
from torchrl.envs.llm.transforms import RetrieveLogProb as TorchRLRetrieveLogProb

from closeness import assert_near
from layouts import tokens
from refused import warned
from torchrl_llm_kl import AdaptiveKLCoefficient, ExactKL, Extra, KLComputation, KLRewardTransform, RetrieveKL
from torchrl_llm_kl.rollouts import batch_mean
from torchrl_llm_kl.transforms import RetrieveLogProb, RoutedExperts, TopK
from toy_models import FORWARD
from toy_rollouts import Outcome, flat, make_model, make_scoring_wrapper, steps

# ------------------------------------------------------------------ what is declared is produced
K = 3


class Collision(Extra):
    """A user's extra, which requests moments and writes one of them."""

    asks: ClassVar[dict[str, Any]] = {"moments": True}
    columns: ClassVar[dict[Any, str]] = {("mine", "collision"): "collision"}


def chain(lab: Any, name: str, padded: bool, input_mode: str) -> list[Transform]:
    """The transform and those whose output it reads, with models of an ``input_mode``."""
    options = {"pad_output": padded, "input_mode": input_mode}
    extras = {"a top k": TopK(K), "an extra of a user": Collision(), "a record": RoutedExperts(record=True)}
    if name not in extras:
        return lab.chain(name, padded, input_mode=input_mode)
    model = make_model(lab.tokenizer, 0, "mixtral") if name == "a record" else lab.ref_model
    wrapper = make_scoring_wrapper(model, lab.tokenizer, log_probs_key="ref_log_probs", **options)
    return [RetrieveLogProb(wrapper, extras=[extras[name]])]


REF = ("ref_log_probs", "full")
BOTH: dict[Any, tuple[int, ...]] = {("log_probs", "full"): (), REF: (), "kl_penalty": (), "reward": (1,)}
WRITTEN: dict[str, dict[Any, tuple[int, ...]]] = {  # and the features after the token dimension
    "RetrieveLogProb": {REF: ()},
    **dict.fromkeys(("KLComputation", "RetrieveKL"), BOTH),
    "KLRewardTransform": {("log_probs", "full"): (), **dict.fromkeys(("ref_log_probs", "kl_penalty", "reward"), (1,))},
    "a top k": {REF: (), ("top_k", "ids"): (K,), ("top_k", "log_probs"): (K,), ("top_k", "rest_log_prob"): ()},
    "an extra of a user": {REF: (), ("mine", "collision"): ()},
    "a record": {REF: (), "routed_experts": (3, 2)},
}
DTYPES = {("top_k", "ids"): torch.int64, "routed_experts": torch.int8}
PAIRS = [(name, i % 2 == 0) for i, name in enumerate(WRITTEN)]


def declared(env: EnvBase) -> dict[Any, Any]:
    entries: dict[Any, Any] = {}
    for spec in (env.full_observation_spec, env.full_reward_spec):
        entries |= {key: leaf for key, leaf in spec.items(True, True) if not isinstance(leaf, Composite)}
    return entries


@pytest.mark.filterwarnings("ignore:sequence .*the full text does not start with its prompt")
@pytest.mark.parametrize(
    ("name", "padded", "input_mode"),
    [(name, padded != (mode == "text"), mode) for name, padded in PAIRS for mode in ("history", "text")],
    indirect=["padded"],
)
def test_defect_06_declared_is_produced(lab: Any, name: str, input_mode: str, padded: bool) -> None:
    """After a reset the entries exist and are empty. torchrl 0.14's own ``ChatEnv`` passes the check only in text mode."""
    parts = chain(lab, name, padded, input_mode)
    env, bare = (lab.env(*transforms, turns=2, input_mode=input_mode) for transforms in (parts, ()))
    if input_mode == "text":
        check_env_specs(env)
    before = declared(bare)
    added = {key: spec for key, spec in declared(env).items() if key not in before or spec != before[key]}
    shapes = {key: (2, -1, *features) for key, features in WRITTEN[name].items()}
    assert {key: tuple(spec.shape) for key, spec in added.items()} == shapes
    assert {key: spec.dtype for key, spec in added.items()} == {key: DTYPES.get(key, torch.float32) for key in added}
    for step in steps(env.reset()):
        for key, spec in added.items():
            if key != "reward":
                assert (step[key].shape, step[key].dtype) == ((0, *spec.shape[2:]), spec.dtype)
    for step in steps(env.rollout(2, lab.policy(padded, input_mode=input_mode))):
        for key, features in WRITTEN[name].items():
            value = step["next"].get(key)
            assert value.shape[1:] == features, key
            assert value.dtype == added[key].dtype


def test_the_column_of_an_extra_of_a_user(lab: Any) -> None:
    """In an env, by hand: the sum of squares of each distribution. A reset leaves empty rows at the root."""
    data = lab.collect(RetrieveLogProb(lab.ref_model, extras=[Collision()]))
    with pytest.raises(ValueError, match="Rows at the root are empty after the reset"):
        batch_mean(flat(data), ("mine", "collision"), per="token")
    assert 0 < float(batch_mean(flat(data), ("next", "mine", "collision"), per="token")) < 1
    for step in steps(data):
        start, ids = len(step["tokens", "prompt"]), step["tokens", "full"]
        with torch.no_grad():
            want = lab.ref_model(input_ids=ids[None]).logits[0, start - 1 : -1].softmax(-1).square().sum(-1)
        assert_near(step["next", "mine", "collision"][start:], want, **FORWARD)
        assert not step["next", "mine", "collision"][:start].any()


@pytest.mark.parametrize(
    ("features", "padded"),
    [((), True), ((1,), False), ((1, 1), True)],
    ids=["[B]", "[B, 1]", "[B, 1, 1]"],
    indirect=["padded"],
)
def test_defect_07a_07b_07c_reward_of_any_outcome_shape(lab: Any, features: tuple[int, ...], padded: bool) -> None:
    env = lab.env(Outcome(features), *chain(lab, "RetrieveKL", padded, "history"))
    (step,) = steps(env.rollout(1, lab.policy(padded))[:1])
    reward, kl = step["next", "reward"], step["next", "kl_penalty"]
    assert reward.shape == (*kl.shape, 1)
    torch.testing.assert_close(reward.sum(), 1.0 - kl.sum())


# ------------------------------------------------------------------ what is saved
KEYS = {
    "RetrieveKL": ["transforms.2.coeff.value"],
    "from_collector": ["transforms.2.coeff.value"],
    "RetrieveLogProb": [],
    "KLRewardTransform": ["coef.value"],
}


def build(lab: Any, name: str, value: float) -> Transform:
    """A transform with a coefficient of this value."""
    coefficient, (gen, ref) = AdaptiveKLCoefficient(value, target=1.0, horizon=100), lab.wrapped(True)
    return {
        "RetrieveKL": lambda: RetrieveKL(gen, ref, coeff=coefficient),
        "from_collector": lambda: RetrieveKL("from_collector", ref, coeff=coefficient),
        "RetrieveLogProb": lambda: RetrieveLogProb(gen, extras=[ExactKL(lab.ref_model)]),
        "KLRewardTransform": lambda: KLRewardTransform(ref, coef=coefficient),
    }[name]()


def numbers(state: Any) -> list[float]:
    return [float(value) for value in state.values() if isinstance(value, torch.Tensor) and value.numel() == 1]


@pytest.mark.parametrize("name", KEYS)
def test_a_transform_saves_only_its_coefficient(lab: Any, name: str) -> None:
    transform, other = build(lab, name, 0.25), build(lab, name, 0.5)
    state = transform.state_dict()
    assert list(state) == KEYS[name]
    assert numbers(state) == [0.25] * len(state)
    assert [key.removeprefix("mine.") for key in transform.state_dict(prefix="mine.")] == list(state)
    missing, unexpected = other.load_state_dict(state)
    assert missing == unexpected == []
    assert numbers(other.state_dict()) == numbers(state)
    models = [part.model for part in (transform, *transform.children()) if hasattr(part, "model")]
    if state:
        with pytest.raises(RuntimeError, match=r"Missing key.*value"):
            other.load_state_dict({})
    still = "still submodules: moved with the transform"
    assert all(any(p is q for q in transform.parameters()) for model in models for p in model.parameters()), still


@pytest.mark.parametrize("name", KEYS)
def test_envs_collectors_and_buffers_save_no_weights(lab: Any, name: str) -> None:
    def coefficients(state: Any) -> list[float]:
        return numbers({key: value for key, value in state.items() if "coef" in key})

    env, again = (lab.env(build(lab, name, value)) for value in (0.25, 0.5))
    buffer, again_buffer = (
        ReplayBuffer(storage=LazyStackStorage(4), batch_size=2, transform=build(lab, name, value))
        for value in (0.25, 0.5)
    )
    collector = LLMCollector(env, policy=lab.policy(True), dialog_turns_per_batch=4, total_dialog_turns=8)
    saved = env.state_dict()
    states = [saved, collector.state_dict()["env_state_dict"], buffer.state_dict()["_transforms"]]
    for state in states:
        assert not [key for key in state if "weight" in key or "model" in key]
    weight = lab.gen_model.get_output_embeddings().weight.detach().clone()
    again.load_state_dict(copy.deepcopy(saved))
    again_buffer.load_state_dict(buffer.state_dict())
    for state in (saved, again.state_dict(), again_buffer.state_dict()["_transforms"]):
        assert coefficients(state) == [0.25] * len(KEYS[name])
    assert torch.equal(lab.gen_model.get_output_embeddings().weight, weight)
    collector.shutdown()


def test_a_state_with_weights_loads_them(lab: Any) -> None:
    """torchrl's transforms save their weights."""

    def scoring(kind: Any, side: int) -> Transform:
        wrapper = copy.deepcopy(lab.wrapped(True)[side])
        return kind(wrapper, log_probs_full_key=REF, assistant_only=False)

    state = scoring(TorchRLRetrieveLogProb, 1).state_dict()
    assert any(key.endswith("lm_head.weight") for key in state)
    ours = scoring(RetrieveLogProb, 0)
    assert ours.state_dict() == {}
    ours.load_state_dict(state)
    found = ours.model.model.get_output_embeddings().weight
    assert torch.equal(found, lab.ref_model.get_output_embeddings().weight)
    (first, *_) = state
    with pytest.raises(RuntimeError, match=rf"Missing key.*{first}"):
        ours.load_state_dict({key: value for key, value in state.items() if key != first})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*other"):
        ours.load_state_dict({"other": torch.zeros(1)})


# ------------------------------------------------------------------ rewards written after the KL
class Bonus(Transform):
    """Declares the reward as its output."""

    def __init__(self, key: str = "reward") -> None:
        super().__init__(in_keys=[key], out_keys=[key])

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict


def order_warnings(run: Any) -> list[str]:
    return warned(run, "after the KL")[1]


TRANSFORMS: dict[str, tuple[Any, bool]] = {
    "RewardClipping": (lambda: RewardClipping(-1, 1), True),
    "RewardScaling": (lambda: envs.RewardScaling(loc=0.5, scale=2.0), True),
    "SignTransform": (lambda: envs.SignTransform(in_keys=["reward"]), True),
    "BinarizeReward": (BinarizeReward, True),
    "Bonus": (Bonus, True),
    # These do not warn: a factor scales the sum of the rewards, and the others do not change the reward.
    "factor": (lambda: envs.RewardScaling(loc=0.0, scale=2.0), False),
    "DoubleToFloat": (envs.DoubleToFloat, False),
    "RewardSum": (lambda: envs.RewardSum(in_keys=["reward"], out_keys=["episode_reward"]), False),
    "other": (lambda: Bonus("other"), False),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("how", ["composition", "part", "appended"])
def test_every_reward_transform(lab: Any, name: str, how: str) -> None:
    """A later transform is found when the first step runs, at any depth of composition."""
    make, warns = TRANSFORMS[name]
    later, kl = make(), KLComputation() if how == "part" else RetrieveKL(lab.gen_model, lab.ref_model)
    env = {
        "composition": lambda: lab.env(Compose(kl), Compose(Compose(later))),
        "part": lambda: lab.env(RetrieveLogProb(lab.gen_model), kl, later),
        "appended": lambda: lab.env(kl).append_transform(later),
    }[how]()
    found = order_warnings(kl.check_order)
    assert len(found) == warns
    for text in found:
        assert f"{name} comes after the KL was charged to 'reward'" in text
        assert f"Append {name} before the KL transform" in text
    assert order_warnings(kl.check_order) == []
    del env


def test_no_warning(lab: Any) -> None:
    """No warning for an earlier transform, an unchanged or broadcast reward, or another key. One for a later transform."""
    models = lab.gen_model, lab.ref_model
    elsewhere = RetrieveKL(*models, kl_key="kl", ref_log_probs_full_key=("other", "full"))
    last, penalised = KLRewardTransform(lab.ref_model), RetrieveKL(*models)
    penalised.reward_key = "penalised"
    for kl, later in (
        (RetrieveKL(*models, add_to_reward=False), RewardClipping(-1, 1)),
        (RetrieveKL(*models, reward_placement="broadcast"), RewardClipping(-1, 1)),
        (penalised, RewardClipping(-1, 1)),
        (KLRewardTransform(lab.ref_model, out_keys=["penalised"]), Bonus()),
        (last, elsewhere),
    ):
        env = lab.env(Bonus(), kl, later)
        assert order_warnings(kl.check_order) == []
    env = env.append_transform(Bonus())
    env.full_reward_spec  # noqa: B018  # computed again
    assert len(order_warnings(last.check_order)) == 1


def test_in_a_replay_buffer(lab: Any) -> None:
    buffer = ReplayBuffer(storage=LazyStackStorage(1), batch_size=1)
    buffer.append_transform(RetrieveKL(lab.gen_model, lab.ref_model))
    buffer.append_transform(RewardClipping(-1, 1, in_keys=[("next", "reward")], out_keys=["reward"]))
    buffer.extend(tokens("padded", [[3, 4]], [[5, 6]], next__reward=torch.ones(1, 1)))
    assert len(order_warnings(buffer.sample)) == 1
