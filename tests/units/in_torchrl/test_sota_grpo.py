"""The loops of torchrl's sota GRPO recipe, synchronous and asynchronous, with these transforms and this loss.

What the recipe does around them is the same: a replay buffer that collectors fill and that scores what is extended,
``MCAdvantage``, a loss that is reduced with ``mean(reduce=True)``, weights that are pushed to the sampler.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import nn
from torch.testing import assert_close
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.objectives.llm import GRPOLoss, MCAdvantage

from group_rollouts import GROUP, even_share, group_env, of_response, without_graph
from torchrl_llm_kl import KLRewardTransform, PolicyLoss, RetrieveKL
from torchrl_llm_kl.losses import EntropyBonus, KLToReference, KLToSampler
from toy_rollouts import make_policy, make_scoring_wrapper, steps

ROWS = 32
NEW_TOKENS = 6


def terms() -> list[Any]:
    return [KLToReference(1e-3), KLToSampler(1e-2), EntropyBonus(1e-4)]


class Recipe:
    """A buffer that scores what is extended, as ``add_kl_transforms_to_replay_buffer`` makes it."""

    def __init__(self, tokenizer: Any, policy_model: nn.Module, ref_model: nn.Module, kl: str = "RetrieveKL") -> None:
        self.tokenizer, self.model = tokenizer, copy.deepcopy(policy_model)
        self.sampler = copy.deepcopy(policy_model)  # the recipe's inference engine has weights of its own
        reference = make_scoring_wrapper(ref_model, tokenizer, pad_output=False, log_probs_key="ref_log_probs")
        self.buffer = ReplayBuffer(
            storage=LazyStackStorage(ROWS),
            sampler=SamplerWithoutReplacement(),
            transform=MCAdvantage(grpo_size=GROUP),
            batch_size=ROWS // 2,
        )
        if kl == "RetrieveKL":
            policy = make_scoring_wrapper(self.sampler, tokenizer, pad_output=False, log_probs_key="log_probs")
            transform = RetrieveKL(policy, reference, add_to_reward=False)
        else:
            transform = KLRewardTransform(reference, add_to_reward=False)
        self.buffer.append_transform(transform, invert=True)

    def collector(self, batches: int) -> LLMCollector:
        policy = make_policy(self.sampler, self.tokenizer, pad_output=False)
        policy.generate_kwargs["top_k"] = 0
        return LLMCollector(
            group_env(self.tokenizer, rows=ROWS),
            policy=policy,
            dialog_turns_per_batch=ROWS,
            total_dialog_turns=batches * ROWS,
            replay_buffer=self.buffer,
            track_policy_version=True,
        )

    def push_weights(self) -> None:
        self.sampler.load_state_dict(self.model.state_dict())


@pytest.mark.slow
def test_synchronous_loop_earns_more(tokenizer: Any, policy_model: Any, ref_model: Any) -> None:
    """Ten batches of 32 answers: the share of even bytes rises by more than the noise of a batch, 0.5 / sqrt(192) = 0.036."""
    torch.manual_seed(0)
    recipe = Recipe(tokenizer, policy_model, ref_model)
    collector, loss = recipe.collector(10), PolicyLoss(recipe.model, "ppo", terms=terms())
    optimizer = torch.optim.Adam(recipe.model.parameters(), lr=3e-3)
    rewards, versions = [], []
    for data in collector:
        assert data is None  # it wrote to the buffer
        assert len(recipe.buffer) == ROWS
        rewards.append(float(torch.stack([even_share(row) for row in steps(recipe.buffer[:])]).mean()))
        versions.append(int(recipe.buffer[:]["next", "policy_version"].flatten()[0]))
        for batch in recipe.buffer:
            loss(batch).mean(reduce=True).backward()
            torch.nn.utils.clip_grad_norm_(recipe.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recipe.push_weights()
        collector.increment_version()
        recipe.buffer.empty(empty_write_count=False)
    collector.shutdown()
    assert versions == list(range(10))
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards


def one_batch(recipe: Recipe) -> TensorDictBase:
    collector = recipe.collector(1)
    next(iter(collector))
    collector.shutdown()
    return recipe.buffer[:]


def test_log_probs_that_the_sampler_stored(tokenizer: Any, policy_model: Any, ref_model: Any) -> None:
    """The recipe's ``KLRewardTransform`` reads them; transformers' first one is 0, and left out with a warning."""
    torch.manual_seed(1)
    recipe = Recipe(tokenizer, policy_model, ref_model, kl="KLRewardTransform")
    with pytest.warns(UserWarning, match="exactly 0 for the first generated token"):
        batch = one_batch(recipe)
    ref = without_graph(ref_model, batch)
    gen = without_graph(policy_model, batch)
    checked = 0
    for row, own, base in zip(steps(batch), gen, ref, strict=True):
        if (
            len(own) < NEW_TOKENS
        ):  # torchrl drops a sampled pad token, here of a model that draws any, and not its effect
            continue
        checked += 1
        kl = of_response(row, row["next", "kl_penalty"].flatten())
        want = own - base
        want[0] = 0
        assert_close(kl, want, atol=1e-4, rtol=0)
    assert checked > ROWS // 2


def test_what_mean_reduce_is_in_torchrl(tokenizer: Any, policy_model: Any, ref_model: Any) -> None:
    """Over all entries, metrics too: the gradient of the objective is divided by their number. Here it is the losses' sum."""
    torch.manual_seed(2)
    batch = one_batch(Recipe(tokenizer, policy_model, ref_model))
    batch["advantage"] = batch["advantage"].reshape(ROWS, 1, 1)  # as GRPOLoss reads it
    model = copy.deepcopy(policy_model)
    actor = make_scoring_wrapper(model, tokenizer, pad_output=False)
    theirs = GRPOLoss(actor, entropy_bonus=False, kl_to_ref_coeff=0.1)
    theirs.set_keys(sample_log_prob=("next", "log_probs", "full"))
    out = theirs(batch)
    entries = out.to_tensordict()
    number = len([value for value in entries.values() if value is not None])
    losses = sum(value for key, value in entries.items() if key.startswith("loss_"))
    assert number == 6  # two losses and four metrics
    constants = sum(float(value) for key, value in entries.items() if not key.startswith("loss_"))
    assert_close(out.mean(reduce=True), (losses + constants) / number)
    ours = PolicyLoss(model, "ppo", terms=[KLToReference(0.1)])(batch)
    assert_close(ours.mean(reduce=True), ours["loss_objective"] + ours["loss_kl_to_ref"], atol=0, rtol=0)
