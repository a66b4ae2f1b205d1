"""An algorithm with its models, the controllers of its KL, and the labels of its answers."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import nn
from transformers import PreTrainedModel

from torchrl_llm_kl import AdaptiveKLCoefficient, PIKLCoefficient, Sampling, ScoreOptions
from torchrl_llm_kl.algorithms import ALGORITHMS, AlgorithmParts, apply_overrides, get_algorithm, make_algorithm
from torchrl_llm_kl.scoring import TokenCritic

if TYPE_CHECKING:
    from torchrl_llm_kl.service import RemoteModel

EPOCHS = 2  # passes over the answers of each step
MINIBATCHES = 2  # updates per pass

# The task has one reward, and no teacher or experts.
SUPPORTED = tuple(
    sorted(
        name
        for name, preset in ALGORITHMS.items()
        if preset.on_policy and preset.schema not in ("rewards", "mix", "distill")
    )
)

# Advantages are scaled by the standard deviation over the batch. Over the group, as in the first version of GRPO, answers
# that are all right and differ only in their KL would weigh as much as a right one beside a wrong one.
_BATCH_SCALE = {"advantage_args": {"std": "batch"}}
SETTINGS: dict[str, dict[str, Any]] = {
    name: _BATCH_SCALE for name in ("grpo", "dapo", "cispo", "gspo", "sapo", "multi_step_grpo")
}


def build(
    name: str,
    policy: PreTrainedModel,
    reference: PreTrainedModel | RemoteModel,
    *,
    coefficient: nn.Module | None,
    max_new_tokens: int,
    in_collector: bool = True,
    kl_reward: str = "k1",
    kl_loss: str = "none",
    temperature: float = 1.0,
) -> AlgorithmParts:
    """Build an algorithm with its models; a KL penalty in the reward, times ``coefficient``, keeps it near the reference.

    Answers are scored in the env, under the policy that samples: the collector's, or ``policy`` in an env without one.
    Algorithms without a reference have no penalty and need no coefficient. ``kl_reward`` and ``kl_loss`` place the KL
    elsewhere; ``temperature`` is the sampler's.
    """
    preset = get_algorithm(name)
    settings = dict(SETTINGS.get(name, {}))
    if preset.use_reference:
        settings |= {"kl_loss": kl_loss, "kl_reward": kl_reward}
        settings |= {
            f"kl_{place}_coeff": coefficient for place, kl in (("loss", kl_loss), ("reward", kl_reward)) if kl != "none"
        }
        preset = replace(preset, kl_loss=kl_loss, kl_reward=kl_reward, use_reference=None)
    if apply_overrides(preset, settings).summed == "seq-mean-token-sum-norm":
        settings["max_len"] = max_new_tokens
    return make_algorithm(
        name,
        policy,
        reference=reference if preset.use_reference else None,
        critic=TokenCritic(copy.deepcopy(policy)) if preset.use_critic else None,
        gen_model="from_collector" if preset.use_reference and in_collector else None,
        group_key="group" if preset.compares_answers else None,
        options=ScoreOptions(Sampling(temperature)),
        **settings,
    )


def make_coefficient(controller: str, *, target: float, batch_size: int) -> nn.Module:
    """A coefficient that holds the KL at a target in nats per answer, by PI control (``"pi"``) or by ``"ziegler"``'s rule."""
    if controller == "pi":
        if batch_size < 256:  # the measured KL is noisy: the default gains
            return PIKLCoefficient(init=0.2, target=target)
        gains = {"proportional": 2.0, "integral": 0.08, "smoothing": 0.9, "max_step": 0.2}
        return PIKLCoefficient(init=0.25, target=target, **gains)
    # Changes by at most 10 % per step: 0.2 * n / horizon.
    return AdaptiveKLCoefficient(init=0.2, target=target, horizon=2 * batch_size)


def label(batch: TensorDictBase, group_size: int) -> TensorDictBase:
    """Write the group of each answer (its problem), and mark all answers as the policy's own."""
    group = torch.arange(len(batch)) // group_size
    batch["group"] = group
    batch["state"] = group.clone()  # in a task of one step, the state is the problem
    batch["expert_mask"] = torch.zeros(len(batch), dtype=torch.bool)
    return batch
