"""torchrl's ``MCAdvantage``, which waits for whole groups, beside ``RetrieveKL``, ``Advantage`` and ``PolicyLoss``."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch.testing import assert_close
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.objectives.llm import MCAdvantage

from group_rollouts import GROUP, ROWS, even_share, group_env, grpo_advantages, without_graph
from torchrl_llm_kl import Advantage, Doctor, PolicyLoss, RetrieveKL
from torchrl_llm_kl.scoring import SamplerMismatchWarning
from toy_rollouts import flat, make_policy, make_scoring_wrapper, steps

COEFF = 0.2


class Lab:
    """Eight answers to two queries, and the transform that scores them."""

    def __init__(self, tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool) -> None:
        self.policy_model, self.ref_model = policy_model, ref_model
        torch.manual_seed(0)
        policy = make_policy(policy_model, tokenizer, pad_output=padded)
        self.data = flat(group_env(tokenizer).rollout(1, policy))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SamplerMismatchWarning)
            gen = make_scoring_wrapper(policy_model, tokenizer, pad_output=padded, log_probs_key="log_probs")
            ref = make_scoring_wrapper(ref_model, tokenizer, pad_output=padded, log_probs_key="ref_log_probs")
            self.kl = RetrieveKL(gen, ref, coeff=COEFF)

    def outcomes(self) -> list[float]:
        return [float(even_share(step)) for step in steps(self.data)]

    def penalised(self) -> list[float]:
        """Outcome less coefficient times KL, from plain forwards."""
        old, ref = without_graph(self.policy_model, self.data), without_graph(self.ref_model, self.data)
        pairs = zip(self.outcomes(), old, ref, strict=True)
        return [outcome - COEFF * float((a - b).sum()) for outcome, a, b in pairs]


@pytest.fixture
def lab(tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool) -> Lab:
    return Lab(tokenizer, policy_model, ref_model, padded)


def interleaved(data: TensorDictBase) -> list[int]:
    """One answer to each query in turn, as collectors that work side by side deliver them."""
    assert len({step["query"] for step in steps(data)}) == ROWS // GROUP
    return [start + i for i in range(GROUP) for start in range(0, ROWS, GROUP)]


def stored(buffer: ReplayBuffer) -> dict[str, TensorDictBase]:
    """What is in the buffer, by the tokens."""
    rows = [buffer._storage[i] for i in range(len(buffer))]
    return {str(row["tokens", "full"].tolist()): row for row in rows}


@pytest.mark.parametrize("padded", [False], indirect=True)
def test_it_waits_for_groups_that_are_then_scored(lab: Lab) -> None:
    """What is inserted at 0 runs after it, on whole groups: first the KL in the reward, then the advantage of these rewards."""
    buffer = ReplayBuffer(storage=LazyStackStorage(ROWS), transform=MCAdvantage(GROUP), batch_size=GROUP)
    buffer.insert_transform(0, lab.kl, invert=True)
    buffer.insert_transform(0, Advantage("grpo", group_key="query"), invert=True)
    buffer.insert_transform(0, Doctor(every=100, on_fault="log"), invert=True)
    for number, row in enumerate(interleaved(lab.data)):
        buffer.extend(lab.data[row : row + 1].clone())
        assert len(buffer) == (0 if number < ROWS - 2 else GROUP * (number - ROWS + 3))
    found = stored(buffer)
    want = grpo_advantages(lab.penalised())
    for step, value in zip(steps(lab.data), want, strict=True):
        row = found[str(step["tokens", "full"].tolist())]
        assert float(row["advantage"]) == pytest.approx(value, abs=1e-4)
        assert torch.count_nonzero(row["next", "ref_log_probs", "full"])
    out = PolicyLoss(lab.policy_model, "ppo", aggregation="seq-mean-token-mean")(buffer.sample(GROUP))
    assert out["loss_objective"].isfinite()


@pytest.mark.parametrize("padded", [True], indirect=True)
def test_its_own_advantage_feeds_the_loss(lab: Lab) -> None:
    """With one reward for each answer it is that of ``grpo``; the loss on policy is minus its mean over tokens."""
    lab.kl.add_to_reward = False
    buffer = ReplayBuffer(storage=LazyStackStorage(ROWS), transform=MCAdvantage(GROUP), batch_size=ROWS)
    buffer.append_transform(lab.kl, invert=True)
    buffer.extend(lab.data.clone().unsqueeze(-1))
    want = grpo_advantages(lab.outcomes())
    found = stored(buffer)
    keys = [str(step["tokens", "full"].tolist()) for step in steps(lab.data)]
    assert_close(torch.tensor([float(found[key]["advantage"]) for key in keys]), torch.tensor(want), atol=1e-4, rtol=0)
    batch = buffer[:]
    lengths = torch.tensor([float(len(row)) for row in without_graph(lab.policy_model, batch)])
    advantages = torch.stack([row["advantage"].flatten()[0] for row in steps(batch)])
    loss = PolicyLoss(lab.policy_model, "ppo")(batch)["loss_objective"]
    assert_close(loss.detach(), -(advantages * lengths).sum() / lengths.sum(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("padded", [False], indirect=True)
def test_of_token_rewards_it_makes_one_group_of_all_tokens(lab: Lab) -> None:
    """torchrl's semantics: each token's reward is normalised among the tokens of all answers; no sum is formed."""
    buffer = ReplayBuffer(storage=LazyStackStorage(ROWS), transform=MCAdvantage(GROUP), batch_size=ROWS)
    buffer.append_transform(lab.kl, invert=True)
    buffer.extend(lab.data.clone().unsqueeze(-1))
    group = [row for row in stored(buffer).values() if row["query"] == lab.data[0]["query"]]
    rewards = torch.cat([row["next", "reward"].flatten() for row in group])
    for row in group:
        want = (row["next", "reward"] - rewards.mean()) / rewards.std()
        assert_close(row["advantage"].flatten(), want.flatten(), atol=1e-5, rtol=1e-4)
