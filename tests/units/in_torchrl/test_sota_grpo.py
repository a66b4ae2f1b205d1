"""torchrl's ``MCAdvantage`` and the loops of its sota GRPO recipe, with these transforms, advantages and loss.

What the recipe does around them is the same: a replay buffer that collectors fill and that scores what is extended,
``MCAdvantage``, a loss that is reduced with ``mean(reduce=True)``, weights that are pushed to the sampler.
"""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.objectives.llm import MCAdvantage

from group_rollouts import GROUP, ROWS, even_share, group_env, grpo_advantages, of_response, without_graph
from torchrl_llm_kl import Advantage, Doctor, KLRewardTransform, PolicyLoss, RetrieveKL
from torchrl_llm_kl.losses import EntropyBonus, KLToReference, KLToSampler
from toy_rollouts import flat, make_policy, make_scoring_wrapper, steps

# ------------------------------------------------------------------ ``MCAdvantage``, which waits for whole groups
COEFF = 0.2


class Lab:
    """Eight answers to two queries, and the transform that scores them."""

    def __init__(self, tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool) -> None:
        self.policy_model, self.ref_model = policy_model, ref_model
        torch.manual_seed(0)
        self.data = flat(group_env(tokenizer).rollout(1, make_policy(policy_model, tokenizer, pad_output=padded)))
        self.outcomes = [float(even_share(step)) for step in steps(self.data)]
        wrappers = (
            make_scoring_wrapper(model, tokenizer, pad_output=padded, log_probs_key=key)
            for model, key in ((policy_model, "log_probs"), (ref_model, "ref_log_probs"))
        )
        self.kl = RetrieveKL(*wrappers, coeff=COEFF)

    def penalised(self) -> list[float]:
        """Outcome less coefficient times KL, from plain forwards."""
        old, ref = without_graph(self.policy_model, self.data), without_graph(self.ref_model, self.data)
        pairs = zip(self.outcomes, old, ref, strict=True)
        return [outcome - COEFF * float((a - b).sum()) for outcome, a, b in pairs]

    def advantages(self, buffer: ReplayBuffer) -> list[float]:
        """Of the answers, as stored."""
        rows = [buffer._storage[i] for i in range(len(buffer))]
        found = {str(row["tokens", "full"].tolist()): float(row["advantage"]) for row in rows}
        return [found[str(step["tokens", "full"].tolist())] for step in steps(self.data)]


@pytest.fixture
def lab(tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool) -> Lab:
    return Lab(tokenizer, policy_model, ref_model, padded)


@pytest.mark.parametrize("padded", [False], indirect=True)
def test_it_waits_for_groups_that_are_then_scored(lab: Lab) -> None:
    """What is inserted at 0 runs after it, on whole groups: first the KL in the reward, then the advantage of these rewards."""
    buffer = ReplayBuffer(storage=LazyStackStorage(ROWS), transform=MCAdvantage(GROUP), batch_size=GROUP)
    buffer.insert_transform(0, lab.kl, invert=True)
    buffer.insert_transform(0, Advantage("grpo", group_key="query"), invert=True)
    buffer.insert_transform(0, Doctor(every=100, on_fault="log"), invert=True)
    assert len({step["query"] for step in steps(lab.data)}) == ROWS // GROUP
    # One answer to each query in turn, as collectors that work side by side deliver them.
    for number, row in enumerate(start + i for i in range(GROUP) for start in range(0, ROWS, GROUP)):
        buffer.extend(lab.data[row : row + 1].clone())
        assert len(buffer) == (0 if number < ROWS - 2 else GROUP * (number - ROWS + 3))
    assert lab.advantages(buffer) == pytest.approx(grpo_advantages(lab.penalised()), abs=1e-4)
    sample = buffer.sample(GROUP)
    assert all(torch.count_nonzero(row["next", "ref_log_probs", "full"]) for row in steps(sample))
    out = PolicyLoss(lab.policy_model, "ppo", aggregation="seq-mean-token-mean")(sample)
    assert out["loss_objective"].isfinite()


@pytest.mark.parametrize("padded", [True], indirect=True)
def test_its_own_advantage_feeds_the_loss(lab: Lab) -> None:
    """With one reward for each answer it equals ``grpo``; the loss on policy is minus its mean over tokens."""
    lab.kl.add_to_reward = False
    buffer = ReplayBuffer(storage=LazyStackStorage(ROWS), transform=MCAdvantage(GROUP), batch_size=ROWS)
    buffer.append_transform(lab.kl, invert=True)
    buffer.extend(lab.data.clone().unsqueeze(-1))
    assert lab.advantages(buffer) == pytest.approx(grpo_advantages(lab.outcomes), abs=1e-4)
    batch = buffer[:]
    lengths = torch.tensor([float(len(row)) for row in without_graph(lab.policy_model, batch)])
    advantages = torch.stack([row["advantage"].flatten()[0] for row in steps(batch)])
    loss = PolicyLoss(lab.policy_model, "ppo")(batch)["loss_objective"]
    assert_close(loss.detach(), -(advantages * lengths).sum() / lengths.sum(), atol=1e-5, rtol=0)


# ------------------------------------------------------------------ the loops
ANSWERS, NEW_TOKENS = 32, 6


class Recipe:
    """A buffer that scores what is extended, as ``add_kl_transforms_to_replay_buffer`` makes it."""

    def __init__(self, tokenizer: Any, policy_model: nn.Module, ref_model: nn.Module, kl: str = "RetrieveKL") -> None:
        self.tokenizer, self.model = tokenizer, copy.deepcopy(policy_model)
        self.sampler = copy.deepcopy(policy_model)  # the recipe's inference engine has its own weights
        how = {"sampler": SamplerWithoutReplacement(), "batch_size": ANSWERS // 2}
        self.buffer = ReplayBuffer(storage=LazyStackStorage(ANSWERS), transform=MCAdvantage(grpo_size=GROUP), **how)
        reference = make_scoring_wrapper(ref_model, tokenizer, pad_output=False, log_probs_key="ref_log_probs")
        transform: Any = KLRewardTransform(reference, add_to_reward=False)
        if kl == "RetrieveKL":
            policy = make_scoring_wrapper(self.sampler, tokenizer, pad_output=False, log_probs_key="log_probs")
            transform = RetrieveKL(policy, reference, add_to_reward=False)
        self.buffer.append_transform(transform, invert=True)

    def collector(self, batches: int) -> LLMCollector:
        policy = make_policy(self.sampler, self.tokenizer, pad_output=False)
        policy.generate_kwargs["top_k"] = 0
        how = {"dialog_turns_per_batch": ANSWERS, "total_dialog_turns": batches * ANSWERS, "replay_buffer": self.buffer}
        return LLMCollector(group_env(self.tokenizer, rows=ANSWERS), policy=policy, track_policy_version=True, **how)


@pytest.mark.slow
def test_synchronous_loop_earns_more(tokenizer: Any, policy_model: Any, ref_model: Any) -> None:
    """Ten batches of 32 answers: the share of even bytes rises by more than the noise of a batch, 0.5 / sqrt(192) = 0.036."""
    torch.manual_seed(0)
    recipe = Recipe(tokenizer, policy_model, ref_model)
    terms = [KLToReference(1e-3), KLToSampler(1e-2), EntropyBonus(1e-4)]
    collector, loss = recipe.collector(10), PolicyLoss(recipe.model, "ppo", terms=terms)
    optimizer = torch.optim.Adam(recipe.model.parameters(), lr=3e-3)
    rewards, versions = [], []
    for data in collector:
        assert data is None  # it wrote to the buffer
        assert len(recipe.buffer) == ANSWERS
        rewards.append(float(torch.stack([even_share(row) for row in steps(recipe.buffer[:])]).mean()))
        versions.append(int(recipe.buffer[:]["next", "policy_version"].flatten()[0]))
        for batch in recipe.buffer:
            loss(batch).mean(reduce=True).backward()
            torch.nn.utils.clip_grad_norm_(recipe.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recipe.sampler.load_state_dict(recipe.model.state_dict())
        collector.increment_version()
        recipe.buffer.empty(empty_write_count=False)
    collector.shutdown()
    assert versions == list(range(10))
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards


def test_log_probs_that_the_sampler_stored(tokenizer: Any, policy_model: Any, ref_model: Any) -> None:
    """The recipe's ``KLRewardTransform`` reads them; transformers' first one is 0, and left out with a warning."""
    torch.manual_seed(1)
    recipe = Recipe(tokenizer, policy_model, ref_model, kl="KLRewardTransform")
    collector = recipe.collector(1)
    with pytest.warns(UserWarning, match="exactly 0 for the first generated token"):
        next(iter(collector))
    collector.shutdown()
    batch = recipe.buffer[:]
    gen, ref = (without_graph(model, batch) for model in (policy_model, ref_model))
    checked = 0
    for row, own, base in zip(steps(batch), gen, ref, strict=True):
        # torchrl drops a sampled pad token, here of a model that draws any, and not its effect
        if len(own) == NEW_TOKENS:
            checked += 1
            want = own - base
            want[0] = 0
            assert_close(of_response(row, row["next", "kl_penalty"].flatten()), want, atol=1e-4, rtol=0)
    assert checked > ANSWERS // 2
