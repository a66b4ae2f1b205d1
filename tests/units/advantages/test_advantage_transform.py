"""The transform wherever TorchRL runs it: groups, rewards, moments and trajectories in every layout of the data."""

import copy
import pickle
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torch.testing import assert_close
from torchrl.data import LazyStackStorage, LazyTensorStorage, ReplayBuffer
from torchrl.envs import Compose, RewardSum

from layouts import LAYOUTS, at_responses, tokens
from torchrl_llm_kl import KLRewardTransform, PolicyLoss
from torchrl_llm_kl.advantages import Advantage, clip_b, clip_v, gdpo, optimal_token_baseline, reinforce_plus_plus
from toy_rollouts import collect, flat, leaves, make_env, make_policy, make_scoring_wrapper, same_leaves, steps

# Group "a": rewards 1, 2, 6; group "b": 4, 0; group "c" alone.
NAMES = ["a", "b", "a", "c", "b", "a"]
REWARD = [1.0, 4.0, 2.0, 5.0, 0.0, 6.0]
RLOO = [-3.0, 4.0, -1.5, 0.0, -4.0, 4.5]


def batch(query: Any = None, reward: Any = None, size: tuple[int, ...] = (6,)) -> TensorDict:
    reward = torch.tensor(REWARD).reshape(*size, 1) if reward is None else reward
    query = NonTensorStack(*NAMES) if query is None else query
    return TensorDict(query=query, next=TensorDict(reward=reward, batch_size=size), batch_size=size)


def assert_values(td: TensorDictBase, want: list[float], shape: tuple[int, ...] | None = None) -> None:
    got = td["advantage"]
    assert got.shape == ((*td.batch_size, 1) if shape is None else shape)
    assert_close(got.flatten(), torch.tensor(want))


# ------------------------------------------------------------------ groups and rewards
NUMBERS = torch.tensor([7, -1, 7, 30, -1, 7])
PROMPTS = [{7: [5, 6, 7], -1: [5, 6, 8], 30: [6, 7]}[int(n)] for n in NUMBERS]
ROWS = [torch.tensor(prompt) for prompt in PROMPTS]
QUERIES = {
    "strings": NonTensorStack(*NAMES),
    "integers": NUMBERS,
    "integers [B, 1]": NUMBERS.unsqueeze(-1),
    "padded tokens": torch.tensor([[0, *prompt][-3:] for prompt in PROMPTS]),
    "nested tokens": torch.nested.as_nested_tensor(ROWS),
    "jagged tokens": torch.nested.as_nested_tensor(ROWS, layout=torch.jagged),
}


@pytest.mark.parametrize("form", QUERIES)
def test_groups_by_entry(form: str) -> None:
    data = batch(QUERIES[form])
    lazy = lazy_stack(list(batch(QUERIES[form]).rename_key_("query", "mine").unbind(0)))
    assert_values(Advantage("rloo")(data), RLOO)
    assert_values(Advantage("rloo", group_key="mine")(lazy), RLOO)


def test_tokens_are_not_confused_with_padding() -> None:
    """Token 0 pads, but a prompt that ends with token 0 is not the prompt without it."""
    rows = [torch.tensor([5, 0]), torch.tensor([5]), torch.tensor([5, 0])]
    data = batch(torch.nested.as_nested_tensor(rows), torch.tensor([[1.0], [9.0], [3.0]]), (3,))
    assert_values(Advantage("dr_grpo")(data), [-1.0, 0.0, 1.0])
    named = data.exclude("query").set_non_tensor("query", "one name for the whole batch")
    assert_values(Advantage("dr_grpo")(named), [-10 / 3, 14 / 3, -4 / 3])


def test_consecutive_groups() -> None:
    for data in (batch().exclude("query"), batch(torch.zeros(2, 3).long(), size=(2, 3))):
        found = Advantage("dr_grpo", group_size=3)(data)
        assert_values(found, [-4 / 3, 5 / 3, -1 / 3, 4 / 3, -11 / 3, 7 / 3])
    with pytest.raises(ValueError, match="6 sequences do not divide into groups of group_size=4"):
        Advantage("grpo", group_size=4)(batch())


def token_rewards(layout: torch.layout) -> Tensor:
    """Rewards per token, in rows of 1 to 6 tokens whose sums are the outcomes."""
    rows = [torch.full((n, 1), total / n) for n, total in enumerate(REWARD, start=1)]
    return torch.nested.as_nested_tensor(rows, layout=layout)


@pytest.mark.parametrize(
    "reward",
    [
        *(torch.tensor(REWARD).reshape(shape) for shape in ((6,), (6, 1), (6, 1, 1))),
        token_rewards(torch.strided).to_padded_tensor(0.0),
        token_rewards(torch.strided),
        token_rewards(torch.jagged),
    ],
    ids=["[B]", "[B, 1]", "[B, 1, 1]", "padded", "nested", "jagged"],
)
def test_forms_of_the_reward(reward: Tensor) -> None:
    shape = (6, 1, 1) if not reward.is_nested and reward.shape[1:] == (1, 1) else (6, 1)
    assert_values(Advantage("rloo")(batch(reward=reward)), RLOO, shape)
    rows = [TensorDict(query=row["query"], reward=row["next", "reward"]) for row in batch(reward=reward).unbind(0)]
    result = Advantage("rloo")(lazy_stack(rows))
    assert_values(result, RLOO, shape)
    assert "next" not in result


def test_rewards_at_padding_are_ignored() -> None:
    attention = torch.arange(5) < torch.tensor([5, 1, 3, 2, 4, 5]).unsqueeze(-1)
    reward = torch.where(attention, torch.tensor(REWARD).unsqueeze(-1) / attention.sum(-1, keepdim=True), 7.0)
    reward[1, 3] = torch.nan
    padded = batch(reward=reward.unsqueeze(-1))
    padded["masks", "all_attention_mask"] = attention
    assert_values(Advantage("rloo")(padded.clone()), RLOO)
    assert_values(Advantage("rloo")(padded.set(("tokens", "full"), torch.ones(6, 5, dtype=torch.long))), RLOO)


def test_batches_with_other_numbers_of_dimensions() -> None:
    numbers = NUMBERS.reshape(2, 3)
    assert_values(Advantage("rloo")(batch(numbers, size=(2, 3))), RLOO)
    lazy = lazy_stack([lazy_stack(list(row.unbind(0))) for row in batch(numbers, size=(2, 3)).unbind(0)])
    assert_values(Advantage("rloo")(lazy), RLOO)
    single = TensorDict(reward=torch.tensor([3.0]), query=torch.tensor(1))
    assert_values(Advantage("reinforce")(single), [3.0])
    assert_values(Advantage("rloo")(single), [0.0])


def test_other_inputs_and_outputs_by_key() -> None:
    data = batch()
    data["greedy"] = torch.arange(6.0)
    result = Advantage("remax", keys={"baseline": "greedy", "advantage": ("out", "a")})(data)
    assert_close(result["out", "a"].flatten(), torch.tensor([1.0, 3.0, 0.0, 2.0, -4.0, 1.0]))
    assert "advantage" not in result
    scored = batch().set("score", torch.tensor(REWARD) * 2)
    assert_values(Advantage("reinforce", keys={"reward": "score"})(scored), [2 * x for x in REWARD])


ACCURACY, FORMAT = [1.0, 4.0, 2.0, 5.0, 0.0, 6.0], [0.1, 0.0, 0.3, 9.0, 0.2, 0.2]
WANT = gdpo(torch.tensor([ACCURACY, FORMAT]).T, torch.tensor([0, 1, 0, 2, 1, 0]), reward_weights=[2.0, 1.0])


def rewarded(form: str) -> TensorDictBase:
    """Two rewards, in one entry or in an entry each."""
    both = torch.tensor([ACCURACY, FORMAT]).T
    data = batch(reward=both)
    if form == "lazy":
        return lazy_stack(list(data.unbind(0)))
    if form == "two dimensions":
        return data.reshape(2, 3)
    if form in ("entries", "tokens"):
        data["next", "accuracy"] = both[:, :1]
        data["format"] = both[:, 1]  # an entry beside "next"
        data["next"].pop("reward")
    if form == "tokens":  # one number per token, whose sum is the reward
        data["next", "accuracy"] = torch.stack([both[:, 0] - 1, torch.ones(6)], 1).unsqueeze(-1)
    return data


@pytest.mark.parametrize("form", ["one entry", "lazy", "two dimensions", "entries", "tokens"])
def test_several_rewards_share_an_entry_or_have_one_each(form: str) -> None:
    keys = {"rewards": [("next", "accuracy"), ("next", "format")]} if form in ("entries", "tokens") else None
    transform = Advantage("gdpo", reward_weights=[2.0, 1.0], keys=keys)
    result = transform(rewarded(form))
    assert result["advantage"].shape == (*result.batch_size, 1)
    assert_close(result["advantage"].flatten(), WANT)
    assert transform.in_keys == [*(keys["rewards"] if keys else [("next", "reward")]), "query"]


# ------------------------------------------------------------------ layouts of tokens
SAID = [[3, 4], [9], [3, 4]], [[5], [8, 9, 2], [6, 6]]


AT = [torch.arange(1.0, 1 + len(prompt + response)) for prompt, response in zip(*SAID, strict=True)]
SCORED = [-0.5 * x for x in AT]


def conversations(form: str, **more: Any) -> TensorDictBase:
    """Three sequences: prompts of 2, 1 and 2 tokens, responses of 1, 3 and 2. Two have the same prompt."""
    numbers = {"next__reward": torch.tensor([[1.0], [2.0], [4.0]]), "query": torch.tensor([7, 9, 7])}
    numbers["next__state_value"] = [x * (i + 1) for i, x in enumerate(AT)]
    numbers["next__log_probs__full"] = SCORED
    numbers["next__ref_log_probs__full"] = [-0.25 * x**2 for x in AT]
    return tokens(form, *SAID, **numbers | more)


def of(name: str, data: TensorDictBase, key: str = "advantage", **settings: Any) -> list[list[float]]:
    """What the transform writes at each row's response tokens; everywhere else it must write 0."""
    rows = at_responses(Advantage(name, **settings)(data), key, *SAID)
    assert all(row.shape[1:] == (1,) for row in rows)
    return [row.flatten().tolist() for row in rows]


each_layout = pytest.mark.parametrize("form", LAYOUTS)


@each_layout
def test_an_outcome_on_each_response_token(form: str) -> None:
    """The prompt's group has rewards 1 and 4 on 1 and 2 tokens: mean 2.5, and opo's baseline 3; the other row is alone.

    REINFORCE++-baseline whitens -1.5, 1.5, 1.5: mean 1/2, variance 3.
    """
    for name, low, high in (("dr_grpo", -1.5, 1.5), ("opo", -2.0, 1.0)):
        assert of(name, conversations(form), layout="token") == [[low], [0, 0, 0], [high, high]]
        assert_values(Advantage(name)(conversations(form)), [low, 0.0, high])
    found = of("reinforce_plus_plus_baseline", conversations(form))
    assert found[1] == [0, 0, 0]
    assert_close(torch.tensor(found[0] + found[2]), torch.tensor([-2.0, 1, 1]) / 3**0.5)


@each_layout
def test_advantages_that_read_numbers_per_token(form: str) -> None:
    """gae, gamma 0.5, lam 0.5. Row 0: 1 - 3. Row 2, values 9, 12: 4 - 12 = -8, and 6 - 9 + 0.25 * -8 = -5."""
    data, hyper = conversations(form), {"gamma": 0.5, "lam": 0.5}
    # Row 1, values 4, 6, 8: 2 - 8 = -6; 4 - 6 - 1.5 = -3.5; 3 - 4 - 0.875.
    assert of("gae", data, **hyper) == [[-2.0], [-1.875, -3.5, -6.0], [-5.0, -8.0]]
    assert of("gae", data, "value_target", **hyper) == [[1.0], [2.125, 2.5, 2.0], [4.0, 4.0]]
    # Distillation. At position t, from 1: student -t / 2, teacher -t^2 / 4.
    at = {2: 2 * (1.0 - 1.0), 3: 2 * (1.5 - 2.25), 4: 2 * (2.0 - 4.0)}
    assert of("on_policy_distill", data, kl_coef=2.0) == [[at[3]], [at[2], at[3], at[4]], [at[3], at[4]]]
    # Mean log-probs -1.5, -1.5 (of -1, -1.5, -2) and -1.75: ranks 1, 1 and 0 of three, and rewards of 0.8, 0.8 and 1.
    data["query"], data["next", "reward"] = torch.zeros(3, dtype=torch.long), torch.ones(3, 1)
    result = Advantage("grpo", rank_penalty=0.6, epsilon=0.0)(data)
    assert_close(result["advantage"].flatten(), torch.tensor([-1.0, -1.0, 2.0]) / 3**0.5)


def with_moments(form: str) -> TensorDictBase:
    """Rows of one group, with entropies and moments that differ from token to token, in the layout of the log-probs."""
    moments = {name: [function(x) for x in SCORED] for name, function in MOMENTS.items()}
    return conversations(form, query=torch.zeros(3, dtype=torch.long), **moments)


MOMENTS: dict[str, Any] = {
    "next__entropy": lambda x: 0.3 - x,
    "next__moments__collision": lambda x: 0.5 - 0.125 * x,
    "next__moments__discriminator": lambda x: -0.25 * x,
}


@each_layout
def test_moments_are_read_by_their_default_keys(form: str) -> None:
    one, mask = torch.zeros(3, dtype=torch.long), torch.arange(3) < torch.tensor([[1], [3], [2]])
    at = torch.tensor([[2, 0, 0], [1, 2, 3], [2, 3, 0]])  # the response tokens' positions
    log_prob = torch.where(mask, -0.5 * (at + 1.0), 0)
    entropy, collision, discriminator = (torch.where(mask, x(log_prob), 0) for x in MOMENTS.values())
    outcome, on_last = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([[1.0, 0, 0], [0, 0, 2], [0, 4, 0]])
    b, v = {"mu": 0.5}, {"mu": 0.01, "max_frac": 0.5}
    for name, hyper, want in (
        ("clip_b", b, clip_b(outcome, one, log_prob, entropy, mask, **b)),
        ("clip_v", v, clip_v(outcome, one, log_prob, entropy, discriminator, mask, **v)),
        ("optimal_token_baseline", {}, optimal_token_baseline(on_last, one, log_prob, collision, mask)),
    ):
        found = of(name, with_moments(form), **hyper)
        assert_close(torch.tensor([x for row in found for x in row]), want[mask])
        assert (want != 0).sum() in (range(1, 6) if hyper else [6])


def test_a_given_mask_skips_padding() -> None:
    """A mask that is True at padding, as a loss's would be: the outcome is on the last token of the sequence."""
    mask, attention = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]]) == 1, torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]]) == 1
    data = TensorDict(reward=torch.tensor([[1.0], [3.0]]), mine=mask, batch_size=[2])
    data["masks", "all_attention_mask"] = attention
    result = Advantage("reinforce_plus_plus", gamma=0.5, keys={"mask": "mine"})(data)["advantage"].squeeze(-1)
    rewards = torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 3.0]])
    assert_close(result, reinforce_plus_plus(rewards, mask & attention, gamma=0.5))
    with pytest.raises(ValueError, match="the mask is empty: mine has no tokens"):
        Advantage("reinforce_plus_plus", keys={"mask": "mine"})(data.set("mine", mask & False))
    # With responses of one token, one number per sequence is also one per token.
    data = conversations("padded")
    data["next", "state_value"] = torch.tensor([0.5, 1.0, 2.0])
    data["mine"] = torch.arange(5) == torch.tensor([2, 4, 3]).unsqueeze(-1)
    single = Advantage("gae", keys={"mask": "mine"})(data)["advantage"]
    assert single.squeeze(-1)[data["mine"]].tolist() == [0.5, 1.0, 2.0]  # rewards 1, 2, 4


@each_layout
def test_rows_that_hold_only_the_response_are_aligned_as_in_a_loss(form: str, policy_model: Any) -> None:
    """An advantage and a loss read the same numbers from an entry that begins with the first response token."""
    responses = [row[-n:] for row, n in zip(SCORED, (1, 3, 2), strict=True)]
    whole, alone = conversations(form), conversations(form, next__log_probs__full=responses)
    if form == "padded":
        alone["next", "log_probs", "full"] = torch.nested.as_nested_tensor(responses)
    want, got = (of("on_policy_distill", data) for data in (whole, alone))
    assert got == want
    assert want[1] == [0.0, -0.75, -2.0]
    loss = PolicyLoss(policy_model, "ppo")
    assert torch.equal(loss(alone)["loss_objective"], loss(whole)["loss_objective"])


# ------------------------------------------------------------------ trajectories
def rollout() -> TensorDict:
    """Three envs, three steps; the last two envs make a group; env 1 ends early and starts again."""
    reward = torch.tensor([[0.0, 0.0, 2.0], [0.0, 6.0, 4.0], [0.0, 0.0, 0.0]]).unsqueeze(-1)
    done = torch.tensor([[False, False, True], [False, True, True], [False, False, True]]).unsqueeze(-1)
    query = torch.tensor([[1, 1, 1], [1, 1, 2], [2, 2, 2]])
    return TensorDict(query=query, next=TensorDict(reward=reward, done=done, batch_size=[3, 3]), batch_size=[3, 3])


def test_trajectories_run_along_time_and_end_when_done() -> None:
    """Query 1: last rewards 2 and 6 of 3 and 2 steps; query 2: 4 and 0 of 1 and 3."""
    unit = 0.5**0.5
    want = [-unit, -unit, -unit, unit, unit, unit, -unit, -unit, -unit]
    for data in (rollout(), rollout().reshape(9)):
        assert_values(Advantage("step_wise_grpo", epsilon=0.0)(data), want)
    # In any order, when keys give trajectory and step.
    data["run"] = NonTensorStack(*"aaabbcddd")
    data["at"] = torch.tensor([0, 1, 2, 0, 1, 0, 0, 1, 2]).unsqueeze(-1)
    order = torch.tensor([2, 8, 0, 5, 4, 1, 7, 3, 6])
    shuffled = data[order].exclude(("next", "done"), "advantage")
    got = Advantage("step_wise_grpo", epsilon=0.0, keys={"run": "run", "step": "at"})(shuffled)
    assert_values(got, [want[i] for i in order])


def test_trajectories_of_consecutive_envs() -> None:
    data = rollout()[[0, 2]].exclude("query")
    data["next", "reward"][1, 2] = 4.0
    unit = 0.5**0.5
    assert_values(Advantage("step_wise_grpo", group_size=2, epsilon=0.0)(data), [-unit] * 3 + [unit] * 3)
    with pytest.raises(ValueError, match="3 trajectories do not divide into groups of group_size=2"):
        Advantage("step_wise_grpo", group_size=2)(rollout().exclude(("next", "done")))
    for data in (rollout(), rollout().reshape(9)):
        with pytest.raises(ValueError, match="group_size needs one trajectory in each row"):
            Advantage("step_wise_grpo", group_size=3)(data)


def test_gigpo_reads_states() -> None:
    """Two runs of one task: rewards 0, 1 and 0, 0 from states s, t and s, u."""
    after = TensorDict(reward=torch.tensor([[[0.0], [1.0]], [[0.0], [0.0]]]), batch_size=[2, 2])
    states = torch.tensor([[5, 6], [5, 7]])
    data = TensorDict(state=states, query=torch.zeros(2, 2).long(), next=after, batch_size=[2, 2])
    assert_values(Advantage("gigpo", gamma=0.8, omega=0.5)(data.clone()), [0.7, 0.5, -0.7, -0.5])
    data["seen"] = NonTensorStack(NonTensorStack("s", "t"), NonTensorStack("s", "u"))
    assert_values(Advantage("gigpo", gamma=0.8, omega=0.5, keys={"state": "seen"})(data), [0.7, 0.5, -0.7, -0.5])


# ------------------------------------------------------------------ replay buffers, envs, rollouts
@pytest.mark.parametrize("lazy", [True, False])
def test_in_a_replay_buffer(lazy: bool) -> None:
    """Extending leaves the caller's data unchanged, and what sampling writes does not reach the storage."""
    form, storage = ("lazy", LazyStackStorage) if lazy else ("padded", LazyTensorStorage)
    data, want = conversations(form), Advantage("gae")(conversations(form))
    before = [leaves(step) for step in steps(data)]
    buffer = ReplayBuffer(storage=storage(6), batch_size=3)
    buffer.append_transform(Advantage("gae"), invert=True)
    buffer.extend(data)
    for kept, row in zip(steps(buffer[:]), steps(want), strict=True):
        assert_close(kept["advantage"], row["advantage"])
    for step, was in zip(steps(data), before, strict=True):
        assert same_leaves(was, step)
    buffer = ReplayBuffer(storage=storage(6), batch_size=3)
    buffer.extend(data)
    both = Compose(Advantage("dr_grpo", layout="token"), Advantage("reinforce", keys={"advantage": "r"}))
    buffer.append_transform(both)
    for _ in range(2):
        sample = buffer.sample()
        assert_close(sample["r"], sample["next", "reward"])
        for row in steps(sample):
            assert row["advantage"].shape == (len(row["tokens", "full"]), 1)
        for row in steps(buffer._storage[:]):
            assert not {"advantage", "r"} & set(row.keys())


def test_rollouts_with_a_kl_in_the_reward(tokenizer: Any, policy_model: Any, ref_model: Any, padded: bool) -> None:
    """The outcome is the sum of the token rewards; four envs ask the same two questions."""
    policy = make_policy(policy_model, tokenizer, pad_output=padded)
    data = flat(collect(tokenizer, policy, envs=4))
    for row, name in zip(data.unbind(0), "abab", strict=True):
        row.set("query", name)
        row["log_probs"].full = None
    ref = make_scoring_wrapper(ref_model, tokenizer, pad_output=padded)
    data = KLRewardTransform(ref, coef=0.3)(data)
    returns = torch.stack([row["next", "reward"].sum() for row in data.unbind(0)])
    pairs = (returns - returns.roll(2)) / 2
    whole = Advantage("dr_grpo")(data)
    assert_close(whole["advantage"], pairs.unsqueeze(-1))
    with pytest.raises(RuntimeError, match=r"Advantage\('grpo', group_key='query'.*append it to the replay buffer"):
        make_env(tokenizer, RewardSum(), Advantage("grpo")).rollout(1, policy)
    spread = Advantage("dr_grpo", layout="token")(data)
    for row, value in zip(spread.unbind(0), pairs, strict=True):
        inside = torch.arange(len(row["tokens", "full"])) >= len(row["tokens", "prompt"])
        inside &= row["masks", "all_attention_mask"]
        assert_close(row["advantage"].flatten(), torch.where(inside, value, 0.0))


def test_keys_in_copies_of_the_transform_and_in_out_keys() -> None:
    transform = Advantage("gae", gamma=0.9, lam=0.8)
    assert repr(transform) == "Advantage('gae', layout='token', gamma=0.9, lam=0.8)"
    assert transform.in_keys == [("next", "reward"), ("next", "state_value")]
    assert transform.out_keys == ["advantage", "value_target"]
    grouped = Advantage("grpo", group_size=4, std="batch")
    assert repr(grouped) == "Advantage('grpo', group_size=4, layout='sequence', std='batch')"
    assert grouped.in_keys == [("next", "reward")]
    assert Advantage("grpo").in_keys == [("next", "reward"), "query"]
    for other in (copy.deepcopy(grouped), pickle.loads(pickle.dumps(grouped))):
        assert_close(other(batch(0 * NUMBERS)[:4])["advantage"], grouped(batch(0 * NUMBERS)[:4])["advantage"])
    data = conversations("padded")
    before = leaves(data)
    result = Advantage("gae")(data)
    assert result is data
    assert same_leaves(before, result, except_for=["advantage", "value_target"])
    assert not result["advantage"].requires_grad
