"""Tests that train each algorithm that learns from rewards until it reaches its known optimum."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from optima import pi_star, token_kl_optimum
from torchrl_llm_kl.algorithms import make_algorithm
from toy_tasks import TabularCritic, TabularPolicy, Task, bandit, chain, product, total_variation
from toy_training import ADAM, GROUP, best_probability, learned, train

#: Those whose advantage is not linear in the reward; more of them in test_learning_kl.py.
OTHERS = ["optimal_token_baseline", "clip_b", "clip_v"]
#: algorithm -> advantage that is linear in the reward, and by how much the mean policy gradient then multiplies it: a mean
#: of four that has the answer itself in it leaves 3/4, and the objective of opmd is divided by 1 + tau = 2.
LINEAR: dict[str, tuple[str | None, float]] = {
    **dict.fromkeys(
        ("grpo", "dapo", "fipo", "ctpo", "cispo", "sapo", "reinforce_plus_plus_baseline"), ("dr_grpo", 3 / 4)
    ),
    **dict.fromkeys(("dr_grpo", "dro", "sppo", "rec", "opo"), (None, 3 / 4)),  # opo's answers have one length there
    **dict.fromkeys(("rloo", "topr"), (None, 1.0)),
    **dict.fromkeys(("gspo", "luspo"), ("rloo", 1.0)),
    "reinforce_plus_plus": ("reinforce", 1.0),
    **dict.fromkeys(("opmd", "asymre"), (None, 3 / 8)),
}
KL_IN_THE_REWARD: dict[str, Any] = {"kl_loss": "none", "kl_reward": "k1", "use_reference": True}


#: How the best answer is found, where it is not as by all others.
BEST_ANSWER_HOW: dict[str, dict[str, Any]] = {
    "grpo": {"how": {**ADAM, "lr": 0.3, "steps": 16, "epochs": 2, "micro_batches": 2}},
    "raft": {"how": {**ADAM, "lr": 0.3, "steps": 35}, "group": 8, "group_key": "query"},
    "maxrl": {"group": 8},
}


@pytest.mark.parametrize("name", [*LINEAR, *OTHERS, "maxrl", "raft"])
def test_the_preset_finds_the_best_answer(name: str) -> None:
    """The presets are unchanged. Their KL is too weak to hold the policy back.

    The reward of maxrl is replaced by success: 1 for the best answer of a prompt, 0 for all others.
    """
    task = chain()
    if name == "maxrl":
        task = replace(task, reward=(task.reward == task.reward.amax(-1, keepdim=True)).double())
    assert best_probability(task, task.reference) < 0.1
    how = {"how": {**ADAM, "lr": 0.4, "steps": 24}, **BEST_ANSWER_HOW.get(name, {})}
    assert best_probability(task, learned(task, name, rows=256, **how)) > 0.9


@pytest.mark.parametrize("name", [*LINEAR, *OTHERS])
def test_kl_in_the_reward_leads_to_pi_star(name: str) -> None:
    """At pi* all answers have the same penalised reward, so no advantage is left, whatever its scale."""
    one_token, beta = name == "optimal_token_baseline", 0.5
    task = bandit(3) if one_token else chain()
    found = learned(task, name, how={**ADAM, "steps": 35}, **KL_IN_THE_REWARD, kl_reward_coeff=beta)
    target = pi_star(task, beta)
    assert total_variation(task.reference, target) > (0.3 if one_token else 0.5)
    assert one_token or total_variation(token_kl_optimum(task, beta), target) > 0.2
    assert total_variation(found, target) < 0.03


@pytest.mark.parametrize("name", LINEAR)
def test_kl_in_the_loss_leads_to_pi_star_where_tokens_are_independent(name: str) -> None:
    """The optimum is ``pi_ref exp(gain r / beta)``. A wrong factor in the objective or the penalty changes the temperature."""
    task, beta = product(), 0.75
    advantage, gain = LINEAR[name]
    kl = {"kl_loss": "k2", "kl_loss_coeff": beta, "use_reference": True}
    own = {} if advantage is None else {"advantage": advantage}
    how = {"steps": 45, "lr": 3.75 if name in ("luspo", "dro") else 7.5}  # they sum over the two tokens of an answer
    how |= {"steps": 20, "lr": 10.0, "epochs": 2, "micro_batches": 2} if name == "rloo" else {}
    found = learned(task, name, rows=256, how=how, **kl, **own)
    target = pi_star(task, beta, gain * task.reward)
    assert total_variation(target, pi_star(task, 4 / 3 * beta, gain * task.reward)) > 0.05
    assert total_variation(target, task.reference) > 0.15
    assert total_variation(found, target) < 0.035


# ------------------------------------------------------------------ a critic
def test_ppo_finds_the_best_answer_and_its_value() -> None:
    task = chain()
    critic = TabularCritic(task)
    how = {**ADAM, "steps": 30, "epochs": 2, "micro_batches": 2, "lr": 0.15}
    found = learned(task, "ppo", group=1, critic=critic, how=how)
    assert best_probability(task, found) > 0.9
    # The mean reward from here on: nearly the best reward, and all of it at the end of the best answer.
    mean = (found.exp() * task.reward).sum(-1)
    for p, prompt in enumerate(task.prompts):
        best = task.answers[int(task.reward[p].argmax())]
        assert abs(critic.of(prompt) - mean[p]) < 0.1
        assert abs(critic.of(prompt, *best[:-1]) - task.reward[p].max()) < 0.15


def test_a_kl_in_the_reward_leads_ppo_to_pi_star_and_its_critic_to_soft_values() -> None:
    """At pi* the value ``V(s) = beta log E_ref[exp(r / beta) | s]`` is the remaining penalised reward."""
    task, beta = chain(), 0.5
    critic = TabularCritic(task)
    kl = {**KL_IN_THE_REWARD, "kl_reward_coeff": beta}
    found = learned(task, "ppo", group=1, critic=critic, how={**ADAM, "steps": 35, "epochs": 2, "lr": 0.15}, **kl)
    assert total_variation(found, pi_star(task, beta)) < 0.03
    for p, prompt in enumerate(task.prompts):
        weighted = (task.reference[p] + task.reward[p] / beta).exp()
        for prefix in ((), (0,), (1,), (2,)):
            inside = torch.tensor([answer[: len(prefix)] == prefix for answer in task.answers])
            soft = beta * (weighted[inside].sum() / task.reference[p].exp()[inside].sum()).log()
            assert abs(critic.of(prompt, *prefix) - soft) < 0.1
        assert abs(critic.of(prompt) - task.reward[p].max()) > 0.3  # and not what a policy without penalty would get


def test_vapo_finds_the_best_answer_and_imitates_right_ones() -> None:
    """With rewards of 0 only the likelihood is left. Its optimum is the sampler's distribution over right answers."""
    task = chain()
    right = torch.where(task.reward > 0, task.reference, -torch.inf).log_softmax(-1)

    def batch(model: Any, rng: torch.Generator, factor: float, least: float) -> TensorDict:
        data = task.sample(model, 512, rng)
        data["chosen"] = data["next", "reward"].flatten() > least
        data["next", "reward"] *= factor
        return data

    actor, imitator, other = task.policy(), task.policy(), task.policy()
    parts = make_algorithm("vapo", actor, critic=TabularCritic(task))
    train(parts, lambda rng: batch(actor, rng, 1.0, 1.0), **{**ADAM, "lr": 0.15, "steps": 30, "epochs": 2})
    assert best_probability(task, task.log_probs(actor)) > 0.9
    parts = make_algorithm("vapo", imitator, advantage="reinforce", objective_args={"mu": 1.0})
    train(parts, lambda rng: batch(other, rng, 0.0, 0.0), steps=80, lr=30.0)
    assert total_variation(task.reference, right) > 0.3
    assert total_variation(task.log_probs(imitator), right) < 0.03


# ------------------------------------------------------------------ other baselines
def test_rae_learns_two_roles_whose_rewards_are_far_apart() -> None:
    """The prompt is the role. The largest rewards of the roles are 1.5 and 6.5, and each average ends there."""
    task = chain()
    actor = task.policy()

    def collect(rng: torch.Generator) -> TensorDict:
        data = task.sample(actor, 256, rng)[torch.randperm(256, generator=rng)]
        data["role"] = (data["tokens", "prompt"] == task.prompts[0]).long().flatten()
        data["next", "reward"] += 5.0 * data["role"].unsqueeze(-1)
        return data

    parts = make_algorithm("rae", actor)
    train(parts, collect, **{**ADAM, "lr": 0.3, "steps": 30})
    assert best_probability(task, task.log_probs(actor)) > 0.9
    kept = dict(parts.state_dict()["advantage.kept._extra_state"])
    assert kept == {0: pytest.approx(1.5, abs=0.1), 1: pytest.approx(6.5, abs=0.1)}


@pytest.mark.parametrize("own", [True, False])
def test_a2po_is_a_regression_on_pi_star_whoever_sampled(own: bool) -> None:
    task, beta = chain(), 0.5
    actor, other = task.policy(), task.policy()
    value = beta * (task.reference + task.reward / beta).logsumexp(-1).float()

    def collect(rng: torch.Generator) -> TensorDict:
        data = task.sample(actor if own else other, 256, rng)
        data["reward_baseline"] = value[(data["tokens", "prompt"] == task.prompts[1]).long()]
        return data

    train(
        make_algorithm("a2po", actor, reference=task.policy(), objective_args={"beta": beta}),
        collect,
        **{**ADAM, "steps": 60},
    )
    target = pi_star(task, beta)
    assert total_variation(task.reference, target) > 0.5
    assert total_variation(task.log_probs(actor), target) < 0.01


# ------------------------------------------------------------------ the best of several, several rewards, the entropy
def test_pass_at_k_finds_the_best_answer_and_leaves_room_for_others() -> None:
    """One of four answers is nearly always the best, while a single answer is the best less often than with grpo."""
    task = chain()
    alone, grpo = (best_probability(task, learned(task, x, how={**ADAM, "steps": 60})) for x in ("pass_at_k", "grpo"))
    assert 1 - (1 - alone) ** GROUP > 0.99
    assert alone < grpo - 0.02


@pytest.mark.parametrize(("name", "succeeds"), [("gdpo", True), ("grpo", False)])
def test_a_reward_a_thousand_times_smaller_than_a_noisy_one_is_learned(name: str, succeeds: bool) -> None:
    """The large reward is noise, and the small one is the reward of the task."""
    task = bandit(3)
    actor = task.policy()

    def collect(rng: torch.Generator) -> TensorDict:
        data = task.sample(actor, 128, rng, GROUP)
        noise, small = torch.randn(128, 1, generator=rng), 1e-3 * data["next"].pop("reward")
        if name == "grpo":
            data["next", "reward"] = noise + small
        else:
            data["noise"], data["next", "small"] = noise, small
        return data

    keys: dict[str, Any] = {"advantage_args": {"keys": {"rewards": ["noise", "small"]}}} if name == "gdpo" else {}
    train(make_algorithm(name, actor, reference=task.policy(), **keys), collect, **ADAM)
    assert (best_probability(task, task.log_probs(actor)) > 0.9) == succeeds


def test_less_entropy_is_lost_while_failures_are_left_out() -> None:
    """After equally many steps the policy of clip_v has more entropy than that of grpo. Without its limit clip_v is grpo."""
    task = chain()
    entropy = {}
    for name, hyper in (("grpo", {"kl_loss": "none"}), ("clip_v", {"advantage_args": {"mu": 0.5, "max_frac": 1.0}})):
        log_p = learned(task, name, how={**ADAM, "steps": 10}, use_reference=False, **hyper)
        entropy[name] = float(-(log_p.exp() * log_p).sum(-1).mean())
    assert entropy["clip_v"] > entropy["grpo"] + 0.05


# ---------------------------------------- trajectories of three steps: states are prompts, answers are actions
STEPS, LOST = 3, 3
KEYS = {"keys": {"run": "run", "step": "step"}}
RIGHT = torch.tensor([2, 0, 3])
Rewards = tuple[float, float, float]
#: Of a right action in each state.
AT_THE_END, AT_EACH_STEP = (0.0, 0.0, 1.0), (0.2, 0.3, 0.5)


def maze() -> Task:
    """In each of three states one action leads to the next state, and any other action to an absorbing state."""
    rng = torch.Generator().manual_seed(0)
    reference = (0.5 * torch.randn(4, 4, generator=rng, dtype=torch.float64)).log_softmax(-1)
    return Task(4, (0, 1, 2, LOST), ((0,), (1,), (2,), (3,)), torch.zeros(4, 4, dtype=torch.float64), reference)


def roll_out(task: Task, actor: TabularPolicy, runs: int, rewards: Rewards, rng: torch.Generator) -> TensorDict:
    """Sample ``[runs, 3]`` steps. ``rewards`` are those of the right action in each state."""
    policy, state, steps = task.log_probs(actor).exp(), torch.zeros(runs, dtype=torch.long), []
    for at in range(STEPS):
        action = torch.multinomial(policy[state], 1, generator=rng).squeeze(-1)
        right = (state == at) & (action == RIGHT[at])
        row = task.batch(state, action)
        row["next", "reward"] = torch.where(right, rewards[at], 0.0).unsqueeze(-1)
        row["run"], row["step"], row["state"] = torch.arange(runs), torch.full_like(state, at), state
        steps.append(row)
        state = torch.where(right, at + 1, LOST)
    return torch.stack(steps, 1)


def optimum(task: Task, beta: float, gain: float, rewards: Rewards) -> Tensor:
    """Compute ``ref(a | s) exp(gain Q(s, a) / beta)`` from the last state backwards. A KL per token ignores later KL."""
    found, value = task.reference.clone(), torch.zeros((), dtype=torch.float64)
    for at in reversed(range(STEPS)):
        q = torch.zeros(4, dtype=torch.float64)
        q[RIGHT[at]] = rewards[at] + value
        found[at] = (task.reference[at] + gain * q / beta).log_softmax(-1)
        value = found[at].exp() @ q
    return found


@pytest.mark.parametrize(
    ("name", "settings", "rewards", "how"),
    [
        # Rows in any order, run and step beside them.
        ("multi_step_grpo", {"advantage_args": KEYS}, AT_THE_END, {"steps": 20, "epochs": 2, "micro_batches": 2}),
        ("gigpo", {"group_size": 8}, AT_EACH_STEP, {"steps": 25}),
    ],
)
def test_the_best_trajectory_is_found(name: str, settings: Any, rewards: Rewards, how: Any) -> None:
    task = maze()
    actor = task.policy()

    def success() -> float:
        return float(task.log_probs(actor)[torch.arange(STEPS), RIGHT].exp().prod())

    def collect(rng: torch.Generator) -> TensorDict:
        data = roll_out(task, actor, 128, rewards, rng)
        if name == "gigpo":
            return data
        data["query"] = (torch.arange(128) // 8).unsqueeze(-1).expand(128, STEPS)
        return data.reshape(-1)[torch.randperm(128 * STEPS, generator=rng)]

    assert success() < 0.05
    train(make_algorithm(name, actor, reference=task.policy(), **settings), collect, **ADAM, **how)
    assert success() > 0.9


@pytest.mark.parametrize(
    ("name", "settings", "beta", "gain", "rewards", "bound"),
    [
        # Groups of two and rewards of 0 and 1: (r - r') / sqrt(2).
        ("multi_step_grpo", {"group_size": 2}, 0.25, 2**-0.5, AT_THE_END, 0.04),
        # The trajectory counts once and the step half, of the rewards from a step on.
        ("gigpo", {"group_size": 256, "advantage_args": {"omega": 0.5}}, 0.5, 1.5, AT_EACH_STEP, 0.03),
    ],
)
def test_optima_of_a_strong_kl(name: str, settings: Any, beta: float, gain: float, rewards: Any, bound: Any) -> None:
    task = maze()
    actor = task.policy()
    parts = make_algorithm(name, actor, reference=task.policy(), kl_loss_coeff=beta, **settings)
    train(parts, lambda rng: roll_out(task, actor, 256, rewards, rng), **ADAM, steps=40)
    target = optimum(task, beta, gain, rewards)
    assert total_variation(task.reference, target) > 0.4
    assert total_variation(optimum(task, beta, 1.0, rewards), target) > 0.1
    assert total_variation(task.log_probs(actor), target) < bound
