"""Settings that change after construction: the next call, keys and specs follow, and bad values are refused."""

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch.testing import assert_close

from refused import setting_refused
from torchrl_llm_kl import AfterPrompt, Entropy, KeptTokens, KLRewardTransform, Sampling, ScoreOptions
from torchrl_llm_kl.estimators import FixedKLCoefficient
from torchrl_llm_kl.scoring import TokenCritic
from torchrl_llm_kl.transforms import Moments, RetrieveKL, RetrieveLogProb, RetrieveValue
from toy_models import with_lora
from toy_rollouts import flat, make_model, steps

OLD = ("old", "full")


@pytest.fixture
def data(lab: Any) -> TensorDictBase:
    return flat(lab.collect(pad_output=True))


@pytest.fixture
def make(lab: Any) -> Any:
    return lambda **kwargs: RetrieveKL(*lab.wrapped(True), **kwargs)


def assert_same(a: TensorDictBase, b: TensorDictBase) -> None:
    for one, other in zip(steps(a), steps(b), strict=True):
        keys = [set(td.keys(True, True)) for td in (one, other)]
        assert keys[0] == keys[1]
        for key in keys[0]:
            if isinstance(one[key], torch.Tensor) and one[key].is_floating_point():
                assert_close(one[key], other[key], rtol=0, atol=0, equal_nan=True)
                assert one[key].requires_grad == other[key].requires_grad


SETTINGS: list[tuple[str, Any]] = [
    *(("estimator", "k2"), ("estimator", "exact"), ("coeff", 0.25), ("coeff", FixedKLCoefficient(0.25))),
    *(("add_to_reward", False), ("reward_placement", "broadcast"), ("assistant_only", False)),
    *(("scope", "full"), ("detach", False), ("kl_key", "kl")),
    *(("gen_log_probs_full_key", ("gen", "full")), ("ref_log_probs_full_key", ("reference", "full"))),
    *(("options", ScoreOptions(**x)) for x in ({"sampling": Sampling(0.5)}, {"dtype": torch.bfloat16}, {"memory": 0})),
    *(("extras", (x,)) for x in (Moments(), Entropy(("entropy", "full")))),
]


@pytest.mark.parametrize(("name", "value"), SETTINGS, ids=lambda x: str(x)[:60])
def test_a_later_setting_equals_a_constructor_argument(name: str, value: Any, make: Any, data: TensorDictBase) -> None:
    if name == "scope":  # needs to know who spoke in earlier turns
        for step in data.tensordicts:
            step["masks", "all_assistant_mask"] = step["masks", "all_attention_mask"].clone()
    changed, built = make(), make(**{name: value})
    plain = changed(data.clone())
    setattr(changed, name, value)
    found = getattr(changed, name)
    assert found == value or callable(found)
    result = changed(data.clone())
    assert_same(result, built(data.clone()))
    if value != ScoreOptions(memory=0):
        with pytest.raises(AssertionError):
            assert_same(result, plain)
    for part, other in zip(changed, built, strict=True):
        assert (part.in_keys, part.out_keys) == (other.in_keys, other.out_keys)


@pytest.mark.parametrize(("name", "value"), [("reward_key", "score"), ("old_log_probs_key", OLD), ("charged_key", "c")])
def test_keys_of_the_kl_can_be_set_on_the_composition(name: str, value: Any, make: Any, data: TensorDictBase) -> None:
    for step in data.tensordicts:
        step[OLD] = torch.full(step["tokens", "full"].shape, -1.0)
    whole, parts = make(estimator="corrected_k3"), make(estimator="corrected_k3")
    plain = whole(data.clone())
    setattr(whole, name, value)
    setattr(parts[2], name, value)
    result = whole(data.clone())
    assert_same(result, parts(data.clone()))
    with pytest.raises(AssertionError):
        assert_same(result, plain)
    if name == "old_log_probs_key":
        with pytest.raises(ValueError, match="has no effect with estimator='exact'"):
            whole.estimator = "exact"
        assert whole.estimator != "exact"


FIXED = ["gen_model", "ref_model", "history_key", "device", "tokenizer", "tokenizer_kwargs", "padding_side"]


def test_fixed_arguments_and_refused_settings(make: Any, ref_model: Any) -> None:
    for transform, names in ((make(), FIXED), (RetrieveLogProb(ref_model), FIXED[3:])):
        for name in names:
            message = rf"{type(transform).__name__}\.{name} is fixed at construction: build a new"
            with pytest.raises(AttributeError, match=message):
                setattr(transform, name, "left")
    kinds = [partial(kind, ref_model) for kind in (RetrieveValue, KLRewardTransform, RetrieveLogProb)]
    kinds.append(partial(RetrieveKL, ref_model, ref_model))
    for kind in kinds:
        setting_refused(kind, "scope", "word", "scope must be one of 'turn', 'full', got 'word'")
    for kind in kinds[1:]:
        with pytest.raises(AttributeError, match=r"temperature is an option: set transform.options = .*but"):
            kind().temperature = 0.5
        for name, wrong, message in WRONG:
            setting_refused(kind, name, wrong, message)
    with pytest.raises(ValueError, match="extras has Entropy, which needs the policy: use RetrieveKL"):
        KLRewardTransform(ref_model).extras = [Entropy()]
    for transform, name in ((KLRewardTransform(ref_model), "ref_model"), (RetrieveLogProb(ref_model), "model")):
        message = f"{name} must be a wrapper or another torch module that returns logits, got int"
        with pytest.raises(TypeError, match=f"^{message}"):
            setattr(transform, name, 3)
        assert getattr(transform, name) is ref_model
    hinted = KLRewardTransform(ref_model, extras=[AfterPrompt("hint")])
    assert hinted.in_keys == [*KLRewardTransform(ref_model).in_keys, "hint"]


WRONG: list[tuple[str, Any, str]] = [
    ("options", ScoreOptions(grad=True), r"options asks for grad\. Use detach=False"),
    ("options", ScoreOptions(top_k=3), r"options asks for top_k\. .*extras=\[Entropy"),
    ("extras", [KeptTokens("a"), KeptTokens("b")], "extras has one kind twice: leave one out of .*KeptTokens"),
]


def test_switching_adapters_does_not_enable_those_of_a_base_reference(tokenizer: Any) -> None:
    transform = RetrieveKL(with_lora(make_model(tokenizer, seed=0)), "base")
    for on in (False, True):
        transform.options = transform.options.but(adapters=on)
        assert [part.options.adapters for part in transform.transforms[:2]] == [on, False]


def test_keys_and_interface_follow_another_model(lab: Any, data: TensorDictBase) -> None:
    transform = RetrieveLogProb(lab.ref_model)
    transform.log_probs_full_key, transform.extras = ("mine", "full"), [Entropy()]
    assert transform.out_keys == [("mine", "full"), "entropy"]
    assert {"mine", "entropy"} <= set(next(steps(transform(data)))["next"].keys())
    transform.model = lab.wrapped(True, input_mode="history")[1]
    assert transform.tokenizer is lab.tokenizer
    assert transform.in_keys == [("history", "full")]
    with pytest.raises(ValueError, match="must have `generate=False`"):
        transform.model = lab.policy(True)


def test_another_critic_is_used_and_not_part_of_the_state(data: TensorDictBase, ref_model: Any) -> None:
    critic = TokenCritic(ref_model)
    torch.nn.init.ones_(critic.head.weight)
    transform = RetrieveValue(TokenCritic(ref_model))
    transform.critic = critic
    assert transform.state_dict() == {}
    found, want = transform(data.clone()), RetrieveValue(critic)(data.clone())
    assert_same(found, want)
    assert next(steps(found))["next", "state_value"].any()


def test_the_estimator_of_kl_reward_transform(data: TensorDictBase, policy_model: Any, ref_model: Any) -> None:
    data = RetrieveLogProb(policy_model)(data)
    changed = KLRewardTransform(ref_model)
    changed.estimator = "k2"
    assert_same(changed(data.clone()), KLRewardTransform(ref_model, estimator="k2")(data.clone()))
    for name, message in (("exact", "estimator='exact' needs the policy"), ("k9", "unknown KL estimator 'k9'")):
        setting_refused(partial(KLRewardTransform, ref_model), "estimator", name, message)


@pytest.mark.parametrize("device", ["cuda:99", "meta", "mars", True])
def test_a_device_that_does_not_exist(ref_model: Any, device: Any) -> None:
    shown = repr(device)
    for make in (RetrieveLogProb, KLRewardTransform, partial(RetrieveKL, ref_model)):
        with pytest.raises(
            ValueError, match=rf"^device={shown} is not a device of this process .*has cpu.*: pass one of"
        ):
            make(ref_model, device=device)
    assert {parameter.device.type for parameter in ref_model.parameters()} == {"cpu"}
    RetrieveLogProb(ref_model, device=torch.device("cpu"))


@pytest.mark.parametrize("whole", [True, False], ids=["RetrieveKL", "KLComputation"])
def test_the_specs_of_an_env_follow(whole: bool, make: Any, lab: Any) -> None:
    transform = make()
    env, owner = lab.env(transform), transform if whole else transform[2]
    for add, shape in ((True, (2, -1, 1)), (False, (2, 1)), (True, (2, -1, 1))):
        owner.add_to_reward = add
        assert env.full_reward_spec["reward"].shape == shape
        for step, outcome in zip(steps(env.rollout(1, lab.policy(True))), (1.0, -0.5), strict=True):
            assert step["next", "kl_penalty"].ndim == 1
            assert (step["next", "reward"].tolist() == [outcome]) != add
