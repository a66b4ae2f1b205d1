"""The table of ``docs/torchrl.md``: what each setting of ``GRPOLoss`` is here, values and gradients, off policy."""

import copy
from typing import Any

import pytest
import tensordict
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.testing import assert_close
from torchrl.objectives.llm import DAPO, GRPOLoss, SFTLoss

from group_rollouts import GROUP, ROWS, group_env, of_response, response
from torchrl_llm_kl import Advantage, PolicyLoss, RetrieveKL
from torchrl_llm_kl.losses import Correction, EntropyBonus, KLToReference, KLToSampler
from toy_rollouts import flat, make_policy, make_scoring_wrapper, steps


class Lab:
    """Scored rollouts of unequal lengths, and a policy that has moved since."""

    def __init__(self, tokenizer: Any, policy_model: nn.Module, ref_model: nn.Module) -> None:
        self.tokenizer = tokenizer
        policy = make_policy(policy_model, tokenizer, pad_output=False)
        policy.generate_kwargs["eos_token_id"] = [tokenizer.eos_token_id, *range(0, 256, 5)]  # some stop early
        gen = make_scoring_wrapper(policy_model, tokenizer, pad_output=False, log_probs_key="log_probs")
        ref = make_scoring_wrapper(ref_model, tokenizer, pad_output=False, log_probs_key="ref_log_probs")
        torch.manual_seed(0)
        self.data = flat(group_env(tokenizer, RetrieveKL(gen, ref, add_to_reward=False)).rollout(1, policy))
        self.data = Advantage("grpo", group_size=GROUP)(self.data)
        self.data["advantage"] = self.data["advantage"].reshape(ROWS, 1, 1)
        self.lengths = [len(response(step)) for step in steps(self.data)]
        assert len(set(self.lengths)) > 2
        self.model = copy.deepcopy(policy_model)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape))

    def theirs(self, kind: type[GRPOLoss] = GRPOLoss, **settings: Any) -> GRPOLoss:
        actor = make_scoring_wrapper(self.model, self.tokenizer, pad_output=False)
        loss = kind(actor, **{"entropy_bonus": False, **settings})
        loss.set_keys(sample_log_prob=("next", "log_probs", "full"))
        return loss

    @property
    def slots(self) -> int:
        """Positions that torchrl averages a KL over: the longest sequence, times the rows."""
        return ROWS * max(len(step["tokens", "full"]) for step in steps(self.data))

    def gradients(self, value: Tensor) -> list[Tensor]:
        self.model.zero_grad(set_to_none=True)
        value.backward()
        return [parameter.grad.clone() for parameter in self.model.parameters()]

    def same(self, theirs: Tensor, ours: Tensor, factor: float = 1.0) -> None:
        """``factor`` times torchrl's value is ours, and so is the gradient."""
        assert_close(factor * theirs.detach(), ours.detach(), rtol=1e-4, atol=1e-5)
        found, want = self.gradients(ours), self.gradients(theirs)
        for got, expected in zip(found, want, strict=True):
            size = float(factor * expected.abs().max())
            assert size > 0
            assert_close(got, factor * expected, rtol=0, atol=2e-3 * size)


@pytest.fixture(scope="module")
def lab(tokenizer: Any, policy_model: Any, ref_model: Any) -> Lab:
    with tensordict.set_list_to_stack(True):
        return Lab(tokenizer, policy_model, ref_model)


UNCLIPPED = {"clip_ratio_c": None}
OBJECTIVES: list[tuple[type[GRPOLoss], dict[str, Any], dict[str, Any]]] = [
    (GRPOLoss, {"clip_epsilon": 0.1}, {"clip_low": 0.1, "clip_high": 0.1, **UNCLIPPED}),
    (GRPOLoss, {"clip_epsilon": (0.1, 0.3)}, {"clip_low": 0.1, "clip_high": 0.3, **UNCLIPPED}),
    (GRPOLoss, {"aggregation": "prompt_mean"}, {"aggregation": "seq-mean-token-mean", **UNCLIPPED}),
    (DAPO, {"clip_epsilon": (0.2, 0.28)}, {"objective": "dapo"}),
]


@pytest.mark.parametrize(("kind", "settings", "ours"), OBJECTIVES, ids=str)
def test_objective(lab: Lab, kind: type[GRPOLoss], settings: Any, ours: Any) -> None:
    found = PolicyLoss(lab.model, **{"objective": "ppo", **ours})(lab.data)["loss_objective"]
    lab.same(lab.theirs(kind, **settings)(lab.data).loss_objective.squeeze(), found)


def test_per_token(lab: Lab) -> None:
    """``aggregation="none"`` of both, at the sampled tokens."""
    theirs = lab.theirs(aggregation="none")(lab.data).loss_objective.squeeze(-1)
    ours = PolicyLoss(lab.model, "ppo", aggregation="none", **UNCLIPPED)(lab.data)["loss_objective"]
    for row, (found, want) in enumerate(zip(ours, theirs, strict=True)):
        values = [x for x in found.flatten().tolist() if x != 0][-lab.lengths[row] :]
        assert_close(torch.tensor(values), want[want != 0].detach(), rtol=1e-4, atol=1e-5)


def test_kl_to_the_reference(lab: Lab) -> None:
    """torchrl's is k3, averaged over prompts and padding too."""
    theirs = lab.theirs(kl_to_ref_coeff=0.3)(lab.data)
    ours = PolicyLoss(lab.model, "ppo", terms=[KLToReference(0.3, "k3")])(lab.data)
    factor = lab.slots / sum(lab.lengths)
    lab.same(theirs.loss_kl_to_ref, ours["loss_kl_to_ref"], factor)
    assert_close(ours["kl_to_ref"], factor * theirs.kl_to_ref, rtol=1e-4, atol=1e-5)


def test_kl_to_the_sampler(lab: Lab) -> None:
    """``kl_approx`` is k1, ``kl_to_sampler`` k3 of the sampler's KL to the policy; ``kl_to_inference`` is k3 the other way."""
    theirs = lab.theirs(kl_to_inference_coeff=0.3)(lab.data)
    ours = PolicyLoss(lab.model, "ppo", terms=[KLToSampler(0.3, "k3")])(lab.data)
    factor = lab.slots / sum(lab.lengths)
    lab.same(theirs.loss_kl_to_inference, ours["loss_kl_to_sampler"], factor)
    with torch.no_grad():
        pairs = [of(lab, step) for step in steps(lab.data)]
    old_less_new = torch.cat([old - new for old, new in pairs])
    assert_close(factor * theirs.kl_approx, old_less_new.mean(), rtol=1e-3, atol=1e-5)
    assert_close(ours["kl_to_sampler"], ((-old_less_new).exp() - 1 + old_less_new).mean(), rtol=1e-3, atol=1e-5)


def of(lab: Lab, step: TensorDictBase) -> tuple[Tensor, Tensor]:
    """Old and current log-probs of a row."""
    ids = step["tokens", "full"]
    now = lab.model(input_ids=ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
    old = of_response(step, step["next", "log_probs", "full"])
    return old, now[-len(old) :]


def test_entropy(lab: Lab) -> None:
    theirs = lab.theirs(entropy_bonus=True, entropy_coeff=0.2)(lab.data)
    ours = PolicyLoss(lab.model, "ppo", terms=[EntropyBonus(0.2)])(lab.data)
    lab.same(theirs.loss_entropy.squeeze(), ours["loss_entropy"])


def kl_mask(log_prob: Tensor, old_log_prob: Tensor, mask: Tensor, threshold: float = 0.1) -> Any:
    """torchrl's ``kl_mask_threshold``: 0 for tokens whose k2 to the sampler exceeds it."""
    k2 = (log_prob - old_log_prob).detach() ** 2 / 2
    return (k2 <= threshold).to(log_prob), {}


def test_kl_mask_threshold(lab: Lab) -> None:
    """As a correction; the masked tokens stay in the denominator."""
    distances = torch.cat([(new - old).detach() ** 2 / 2 for old, new in (of(lab, step) for step in steps(lab.data))])
    low, high = distances.sort().values[len(distances) // 2 - 1 : len(distances) // 2 + 1].tolist()
    threshold = (low + high) / 2
    kept = int((distances <= threshold).sum())
    assert 0 < kept < sum(lab.lengths)
    theirs = lab.theirs(kl_mask_threshold=threshold)(lab.data).loss_objective.squeeze()
    ours = PolicyLoss(lab.model, "ppo", corrections=[Correction(kl_mask, threshold=threshold)], **UNCLIPPED)(lab.data)
    lab.same(theirs, ours["loss_objective"], kept / sum(lab.lengths))


def test_sft(lab: Lab) -> None:
    """torchrl averages over the tokens of each answer, then over answers."""
    data = lab.data.clone()
    for step in steps(data):
        mask = torch.zeros(len(step["tokens", "full"]), dtype=torch.bool)
        mask[len(step["tokens", "prompt"]) :] = True
        step["masks", "all_assistant_mask"] = mask
    actor = make_scoring_wrapper(lab.model, lab.tokenizer, pad_output=False)
    theirs = SFTLoss(actor)
    theirs.set_keys(history="tokens")
    found = theirs(data).loss_sft
    ours = PolicyLoss(lab.model, "sft", aggregation="seq-mean-token-mean")(data)["loss_objective"]
    lab.same(found, ours)
