"""Inputs beyond a reward and a group: lengths, several rewards, moments of distributions; in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from test_advantage_transform import FORMS, batch, conversations, rows_of
from torch import Tensor
from torch.testing import assert_close

from torchrl_llm_kl import RetrieveKL, RetrieveLogProb
from torchrl_llm_kl.advantages import Advantage, clip_b, clip_v, gdpo, optimal_token_baseline

MASK = torch.tensor([[True, False, False], [True, True, True], [True, True, False]])
GROUP = torch.tensor([7, 9, 7])


def with_moments(form: str) -> TensorDictBase:
    """Entropies and moments that differ from token to token, in the layout of the log-probs."""
    data = conversations(form)
    for row in data.unbind(0) if form == "lazy" else [data]:
        log_prob = row["next", "log_probs", "full"]
        row["next", "entropy"] = each(log_prob, lambda x: 0.3 - x)
        row["next", "moments", "collision"] = each(log_prob, lambda x: 0.5 - 0.125 * x)
        row["next", "moments", "discriminator"] = each(log_prob, lambda x: -0.25 * x)
    return data


def each(x: Tensor, function: Any) -> Tensor:
    """Strided nested tensors know little arithmetic."""
    if x.layout == torch.strided and x.is_nested:
        return torch.nested.as_nested_tensor([function(row) for row in x.unbind()], layout=torch.strided)
    return function(x)


def gathered(function: Any) -> Tensor:
    """At response tokens of the three rows; positions 2, 1-3 and 2-3."""
    at = torch.tensor([[2, 0, 0], [1, 2, 3], [2, 3, 0]])
    return torch.where(MASK, function(-0.5 * (at + 1.0)), 0)


@pytest.mark.parametrize("form", FORMS)
def test_moments_are_read_by_their_default_keys(form: str) -> None:
    data = with_moments(form)
    data["query"] = one = torch.zeros(3, dtype=torch.long)
    log_prob, entropy = gathered(lambda x: x), gathered(lambda x: 0.3 - x)
    collision, discriminator = gathered(lambda x: 0.5 - 0.125 * x), gathered(lambda x: -0.25 * x)
    outcome, on_last = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([[1.0, 0, 0], [0, 0, 2], [0, 4, 0]])
    b, v = {"mu": 0.5}, {"mu": 0.01, "max_frac": 0.5}
    for name, hyper, want in (
        ("clip_b", b, clip_b(outcome, one, log_prob, entropy, MASK, **b)),
        ("clip_v", v, clip_v(outcome, one, log_prob, entropy, discriminator, MASK, **v)),
        ("optimal_token_baseline", {}, optimal_token_baseline(on_last, one, log_prob, collision, MASK)),
    ):
        found = rows_of(Advantage(name, **hyper)(data.copy()), "advantage", form)
        responses = [row[-n:] + [0.0] * (3 - n) for row, n in zip(found, (1, 3, 2), strict=True)]
        assert_close(torch.tensor(responses), want)
        assert (want != 0).sum() in (range(1, 6) if hyper else [6])


# ------------------------------------------------------------------ several rewards

ACCURACY, FORMAT = [1.0, 4.0, 2.0, 5.0, 0.0, 6.0], [0.1, 0.0, 0.3, 9.0, 0.2, 0.2]
WANT = gdpo(torch.tensor([ACCURACY, FORMAT]).T, torch.tensor([0, 1, 0, 2, 1, 0]), reward_weights=[2.0, 1.0])


def rewarded(form: str) -> TensorDictBase:
    """The group of each row by name; both rewards in one entry, or in one each."""
    both = torch.tensor([ACCURACY, FORMAT]).T
    data = batch(reward=both)
    if form == "lazy":
        return lazy_stack(list(data.unbind(0)))
    if form == "two dimensions":
        return data.reshape(2, 3)
    if form in ("entries", "tokens"):
        data["next", "accuracy"] = both[:, :1]
        data["format"] = both[:, 1]  # without "next"
        data["next"].pop("reward")
    if form == "tokens":  # one number per token, whose sum is the reward
        data["next", "accuracy"] = torch.stack([both[:, 0] - 1, torch.ones(6)], 1).unsqueeze(-1)
    return data


@pytest.mark.parametrize("form", ["one entry", "lazy", "two dimensions", "entries", "tokens"])
def test_several_rewards_in_one_entry_or_in_one_each(form: str) -> None:
    keys = {"rewards": [("next", "accuracy"), ("next", "format")]} if form in ("entries", "tokens") else None
    transform = Advantage("gdpo", gdpo_reward_weights=[2.0, 1.0], keys=keys)
    result = transform(rewarded(form))
    assert result["advantage"].shape == (*result.batch_size, 1)
    assert_close(result["advantage"].flatten(), WANT)
    assert transform.in_keys == [*(keys["rewards"] if keys else [("next", "reward")]), "query"]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (torch.zeros(6), r"under \('next', 'reward'\) must be \[\*B, R\], R numbers for each of 6 .* found \(6,\)"),
        (torch.zeros(6, 4, 1), r"must be \[\*B, R\].*found \(6, 4, 1\)\. Pass keys=\{'rewards': \[\.\.\.\]\}"),
        (torch.tensor([[0, 0], [0, 0], [0, 0], [0, torch.nan], [0, 0], [0, 0]]), "is nan at sequence 3, reward 1"),
    ],
)
def test_rewards_that_fit_no_sequence(reward: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Advantage("gdpo")(batch(reward=reward))


def test_a_list_of_keys_is_for_several_rewards_only() -> None:
    with pytest.raises(ValueError, match=r"keys=\{'reward': \.\.\.\} must be one key, got the list \['a', 'b'\]"):
        Advantage("grpo", keys={"reward": ["a", "b"]})
    with pytest.raises(ValueError, match=r"keys=\{'rewards': \.\.\.\} must be one key, got the list \[\]"):
        Advantage("gdpo", keys={"rewards": []})
    with pytest.raises(KeyError, match=r"the rewards are missing: expected 'b'.*an entry for each"):
        Advantage("gdpo", keys={"rewards": ["a", "b"]})(TensorDict(a=torch.zeros(2), query=GROUP[:2], batch_size=[2]))


@pytest.mark.parametrize(
    ("name", "drop", "message"),
    [
        ("clip_b", "entropy", "the entropy is missing: .*entropy_key='entropy'"),
        ("clip_v", ("moments", "discriminator"), "the discriminator is missing: .*moments_key='moments'"),
        ("optimal_token_baseline", ("moments", "collision"), "the collision is missing: .*moments_key='moments'"),
    ],
)
def test_what_writes_a_missing_input(name: str, drop: Any, message: str) -> None:
    data = with_moments("padded")
    data["next"].pop(drop)
    with pytest.raises(KeyError, match=message):
        Advantage(name)(data)


@pytest.mark.parametrize(("retrieve", "form"), [("log-prob", "padded"), ("KL", "lazy"), ("KL", "strided")])
def test_the_scoring_transforms_write_what_the_advantages_read(
    retrieve: str, form: str, policy_model: Any, ref_model: Any
) -> None:
    data = conversations(form)
    for row in data.unbind(0) if form == "lazy" else [data]:
        row["next"].pop("log_probs")
        row["next"].pop("ref_log_probs")
    data["query"] = torch.zeros(3, dtype=torch.long)
    also: dict[str, Any] = {"entropy_key": "entropy", "moments_key": "moments"}
    if retrieve == "KL":
        data = RetrieveKL(policy_model, ref_model, add_to_reward=False, **also)(data)
    else:
        data = RetrieveLogProb(policy_model, **also)(data)
    for name in ("optimal_token_baseline", "clip_b", "clip_v"):
        found = rows_of(Advantage(name)(data.copy()), "advantage", form)
        assert [sum(x != 0 for x in row) for row in found] == [1, 3, 2]
