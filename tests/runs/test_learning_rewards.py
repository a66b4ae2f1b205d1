"""Every algorithm that learns from rewards, trained until it is where it must end."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from optima import pi_star, token_kl_optimum
from torchrl_llm_kl.algorithms import ALGORITHMS, make_algorithm
from toy_tasks import chain, product, total_variation
from toy_training import best_probability, train

GROUP = 4
#: Those whose advantage is not linear in the reward; more of them in test_learning_baselines.py.
OTHERS = ["optimal_token_baseline", "clip_b", "clip_v"]
#: algorithm -> advantage that is linear in the reward, and by how much the mean policy gradient then multiplies it: a mean
#: of four that has the answer itself in it leaves 3/4, and the objective of opmd is divided by 1 + tau = 2.
LINEAR: dict[str, tuple[str | None, float]] = {
    "grpo": ("dr_grpo", 3 / 4),
    "dr_grpo": (None, 3 / 4),
    "dapo": ("dr_grpo", 3 / 4),
    "rloo": (None, 1.0),
    "reinforce_plus_plus": ("reinforce", 1.0),
    "topr": (None, 1.0),
    "cispo": ("dr_grpo", 3 / 4),
    "gspo": ("rloo", 1.0),
    "luspo": ("rloo", 1.0),
    "sapo": ("dr_grpo", 3 / 4),
    "dro": (None, 3 / 4),
    "opmd": (None, 3 / 8),
    "asymre": (None, 3 / 8),
    "sppo": (None, 3 / 4),
    "rec": (None, 3 / 4),
    "opo": (None, 3 / 4),  # all answers of that task have one length
    "reinforce_plus_plus_baseline": ("dr_grpo", 3 / 4),
}
ADAM = {"optimiser": partial(torch.optim.Adam, betas=(0.8, 0.98)), "lr": 0.2}


def settings(name: str, **more: Any) -> dict[str, Any]:
    """Further settings of each algorithm."""
    return {**({"max_len": 2} if name == "dr_grpo" else {}), **more}


@pytest.mark.parametrize("name", [*LINEAR, *OTHERS])
def test_the_preset_finds_the_best_answer(name: str) -> None:
    """Nothing changed: scaled advantages, and a KL too weak to hold anything back."""
    task = chain()
    actor, reference = task.policy(), task.policy()
    given = {"reference": reference} if ALGORITHMS[name].use_reference else {}
    parts = make_algorithm(name, actor, **settings(name), **given)
    often = {"epochs": 2, "micro_batches": 3, "steps": 25} if name in ("grpo", "dapo") else {"steps": 40}
    often = {"steps": 60} if name == "clip_b" else often  # without some of the failures
    assert best_probability(task, actor) < 0.1
    train(parts, lambda rng: task.sample(actor, 128, rng, GROUP), **ADAM, **often)
    assert best_probability(task, actor) > 0.9


@pytest.mark.parametrize("name", [*LINEAR, "clip_b", "clip_v"])
def test_kl_in_the_reward_leads_to_pi_star(name: str) -> None:
    """Whatever the scale of the advantage: at pi* all answers have the same reward less penalty, and none an advantage."""
    task, beta = chain(), 0.5
    actor = task.policy()
    kl = {"kl_loss": "none", "kl_reward": "k1", "kl_reward_coeff": beta, "use_reference": True}
    parts = make_algorithm(name, actor, reference=task.policy(), **settings(name, **kl))
    train(parts, lambda rng: task.sample(actor, 128, rng, GROUP), **ADAM)
    target = pi_star(task, beta)
    assert total_variation(task.reference, target) > 0.5
    assert total_variation(token_kl_optimum(task, beta), target) > 0.2
    assert total_variation(task.log_probs(actor), target) < 0.03


@pytest.mark.parametrize("name", LINEAR)
def test_kl_in_the_loss_leads_to_pi_star_where_tokens_are_independent(name: str) -> None:
    """``pi_ref exp(gain r / beta)``: a wrong factor anywhere in the objective or the penalty is a wrong temperature."""
    task, beta = product(), 0.75
    actor = task.policy()
    advantage, gain = LINEAR[name]
    kl = {"kl_loss": "k2", "kl_loss_coeff": beta, "use_reference": True}
    own = {} if advantage is None else {"advantage": advantage}
    parts = make_algorithm(name, actor, reference=task.policy(), **settings(name, **kl, **own))
    often = {"epochs": 2, "micro_batches": 2, "steps": 30} if name == "rloo" else {}
    lr = 5.0 if name in ("luspo", "dro") else 10.0  # they sum over the two tokens of an answer
    train(parts, lambda rng: task.sample(actor, 256, rng, GROUP), lr=lr, **often)
    target = pi_star(task, beta, gain * task.reward)
    assert total_variation(target, pi_star(task, 4 / 3 * beta, gain * task.reward)) > 0.05
    assert total_variation(target, task.reference) > 0.15
    assert total_variation(task.log_probs(actor), target) < 0.035
