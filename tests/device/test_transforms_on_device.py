"""Transforms, PolicyLoss and algorithms: every layout of a batch, every extra, every preset."""

from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase

from layouts import LAYOUTS, PROMPTS, RESPONSES, joined, tokens
from parity import CPU, gradients, same_on_both, to
from policy_batches import batch
from torchrl_llm_kl import PolicyLoss, RetrieveLogProb, RetrieveValue, Sampling, ScoreOptions, losses, transforms
from torchrl_llm_kl.advantages import Advantage
from torchrl_llm_kl.algorithms import ALGORITHMS
from torchrl_llm_kl.estimators import AdaptiveKLCoefficient
from torchrl_llm_kl.losses import ValueLoss
from torchrl_llm_kl.scoring import TokenCritic
from torchrl_llm_kl.transforms import KLComputation, RetrieveKL
from toy_models import tiny_model
from toy_tasks import TabularCritic, chain
from toy_training import made, rows_of_all, total

pytestmark = [
    pytest.mark.filterwarnings("ignore:LogProbScorer takes the model's full forward"),
    pytest.mark.filterwarnings("ignore:KL estimator"),
    pytest.mark.filterwarnings("ignore::torchrl_llm_kl.SamplerMismatchWarning"),
]
REWARD = torch.tensor([[1.0], [-0.5], [2.0]])


def wide(seed: int = 0, family: str = "qwen2") -> Any:
    return tiny_model(family, seed=seed).double()


def rollout(layout: str, at: torch.device, **more: Any) -> TensorDictBase:
    return tokens(layout, next__reward=REWARD, hint=[[20, 21], [22, 23, 24], [27]], **more).to(at)


TRANSFORMS: dict[str, Any] = {
    "RetrieveLogProb": lambda policy, reference: RetrieveLogProb(policy),
    "RetrieveKL": lambda policy, reference: RetrieveKL(policy, reference, coeff=0.3),
    "two steps": lambda policy, reference: torch.nn.Sequential(
        RetrieveKL(policy, reference, add_to_reward=False), KLComputation(coeff=0.3, estimator="k3")
    ),
    "KLRewardTransform": lambda policy, reference: torch.nn.Sequential(
        RetrieveLogProb(policy), transforms.KLRewardTransform(reference, coef=AdaptiveKLCoefficient(0.2, 6.0, 100))
    ),
}


OF_ROLLOUTS = [(n, x) for n in TRANSFORMS for x in LAYOUTS if n == "RetrieveKL" or x in ("padded", "lazy")]


@pytest.mark.parametrize(("name", "layout"), OF_ROLLOUTS)
@same_on_both()
def test_transforms(model_at, at, name, layout):
    transform = TRANSFORMS[name](wide().to(model_at), wide(1).to(model_at)).to(model_at)
    return transform(rollout(layout, at))


EXTRAS: dict[str, Any] = {
    "entropy, top k, moments": lambda reference: [transforms.Entropy(), transforms.TopK(3), transforms.Moments()],
    "exact": lambda reference: [transforms.ExactKL(reference)],
    "after another prompt": lambda reference: [transforms.AfterPrompt("hint")],
    "sampler": lambda reference: [transforms.SamplerLogProbs()],
}


@pytest.mark.parametrize("name", EXTRAS)
@pytest.mark.parametrize("layout", ["padded", "lazy"])
@same_on_both()
def test_extras(model_at, at, name, layout):
    stored = [[-1.0] * len(row) for row in joined(PROMPTS, RESPONSES)]
    transform = RetrieveLogProb(wide().to(model_at), extras=EXTRAS[name](wide(1).to(model_at)))
    return transform(rollout(layout, at, **({"log_probs__full": stored} if name == "sampler" else {})))


@pytest.mark.parametrize("estimator", ["k3", "corrected_k3", "exact"])
@same_on_both()
def test_estimators_of_the_penalty(model_at, at, estimator):
    transform = RetrieveKL(wide().to(model_at), wide(1).to(model_at), estimator=estimator, coeff=0.3, detach=False)
    return transform(rollout("padded", at))


@same_on_both(size=1e-4)  # experts are float32
def test_a_truncated_sampler_and_recorded_routing(model_at, at):
    options = ScoreOptions(Sampling(0.8, top_k=20, top_p=0.9))
    kept = RetrieveKL(wide().to(model_at), wide(1).to(model_at), options=options)(rollout("padded", at))
    experts = tiny_model("mixtral").to(model_at)
    routed = RetrieveLogProb(experts, extras=[transforms.RoutedExperts()])
    return kept, routed(routed(rollout("padded", at)))


@pytest.mark.parametrize("layout", LAYOUTS)
@same_on_both()
def test_values_and_their_loss(model_at, at, layout):
    torch.manual_seed(0)
    critic = TokenCritic(wide(2)).to(model_at)
    torch.nn.init.ones_(critic.head.weight)
    target = [[0.5 * len(row)] * len(row) for row in joined(PROMPTS, RESPONSES)]
    data = RetrieveValue(critic)(rollout(layout, at, value_target=target))
    loss = ValueLoss(critic)(data)
    return data, loss, gradients(loss, critic)


# ---------------------------------------------------------------------- advantages
PROMPTS_OF_GROUPS = [[5, 6, 7], [5, 6, 8], [5, 6, 7], [6, 7], [5, 6, 8], [5, 6, 7]]
_ROWS = [torch.tensor(row) for row in PROMPTS_OF_GROUPS]
GROUPS: dict[str, Any] = {
    "strings": NonTensorStack(*map(str, PROMPTS_OF_GROUPS)),
    "integers": torch.tensor([7, -1, 7, 30, -1, 7]),
    "padded": torch.tensor([[0, *row][-3:] for row in PROMPTS_OF_GROUPS]),
    "nested": torch.nested.as_nested_tensor(_ROWS),
    "jagged": torch.nested.as_nested_tensor(_ROWS, layout=torch.jagged),
}
ADVANTAGES: dict[str, dict[str, Any]] = {
    **{f"group by {form}": {"group_key": "group"} for form in GROUPS},
    "consecutive": {"group_size": 3},
    "of whole trajectories": {"name": "gigpo", "group_key": "group"},
}


@pytest.mark.parametrize("name", ADVANTAGES)
@same_on_both()
def test_the_advantage_transform(model_at, at, name):
    data = TensorDict(batch_size=[6])
    data["next", "reward"] = torch.tensor([[1.0], [4.0], [2.0], [5.0], [0.0], [6.0]])
    data["group"] = GROUPS[name.split()[-1] if "by" in name else "integers"]
    data["run"], data["step"] = torch.arange(6) // 2, torch.arange(6) % 2
    data["state"], data["done"] = data["step"].clone(), data["step"].bool()
    data["next", "done"] = data["step"].bool()
    return Advantage(**{"name": "grpo", **ADVANTAGES[name]})(data.to(at))["advantage"]


# ---------------------------------------------------------------------- PolicyLoss
@pytest.mark.parametrize("layout", ["padded", "nested", "lazy"])
@same_on_both()
def test_policy_loss_in_every_layout(model_at, at, layout):
    model = wide().to(model_at)
    loss = PolicyLoss(model, terms=[losses.KLToReference(0.3), losses.EntropyBonus(0.1)])
    out = loss(batch(layout=layout).to(at))
    return out, gradients(total(out), model)


PARTS: dict[str, dict[str, Any]] = {
    "terms": {"terms": [losses.KLToReference(0.3, "k3+"), losses.KLToSampler(0.2), losses.EntropyBonus(0.1)]},
    "corrections": {"corrections": [losses.ImportanceWeights(high=1.5), losses.RejectionMask("seq_mean_k3", high=0.5)]},
    "masks": {"corrections": [losses.OffPolicySequenceMask(), losses.TopEntropyMask(0.5)]},
    "controlled": {"terms": [losses.KLToReference(AdaptiveKLCoefficient(0.2, 0.1, 100))]},
    "packs": {"tokens_per_batch": 16},
    "hot": {"options": ScoreOptions(Sampling(0.7), entropy=True)},
}


@pytest.mark.parametrize("name", PARTS)
@same_on_both()
def test_parts_of_policy_loss(model_at, at, name):
    model = wide().to(model_at)
    loss = PolicyLoss(model, **{key: to(value, model_at) for key, value in PARTS[name].items()})
    out = loss(batch().to(at))
    return out, gradients(total(out), model)


@pytest.mark.parametrize("second", [False, True])
@same_on_both()
def test_the_exact_kl_to_a_reference_beside_the_policy_or_on_another_device(model_at, at, second):
    if second and torch.accelerator.device_count() < 2:
        pytest.skip("needs two accelerators")
    model = wide().to(model_at)
    reference = wide(1).to(torch.device(model_at.type, 1) if second and model_at != CPU else model_at)
    term = losses.KLToReference(0.3, "k2" if second else "exact")
    data = batch().to(at)
    if second:
        data = RetrieveKL(model, reference, add_to_reward=False)(data.exclude("next"))
    loss = PolicyLoss(model, terms=[term], **({} if second else {"reference": reference}))
    out = loss(data)
    return data, out, gradients(total(out), model)


# ---------------------------------------------------------------------- algorithms
TASK = chain()


@pytest.mark.parametrize("name", ALGORITHMS)
@same_on_both()
def test_algorithms(model_at, at, name):
    """Compares a prepared batch, its losses and their gradients, for the whole batch and in micro-batches."""
    uniform = TASK.policy(torch.zeros_like(TASK.reference).log_softmax(-1))
    actor, reference = TASK.policy().to(model_at), uniform.to(model_at)
    critic = {"critic": TabularCritic(TASK).to(model_at)} if ALGORITHMS[name].use_critic else {}
    parts = made(name, actor, reference, **critic)
    data = parts.prepare(rows_of_all(name=name).to(at))
    out = [loss(data) for loss in parts.losses]
    split = [loss(piece) for piece in parts.micro_batches(data, 2) for loss in parts.losses]
    return data, out, gradients(out, actor, *critic.values()), gradients(split, actor)
