"""What an algorithm needs beside a policy and a reference: critic, teacher, expert answers, and its settings."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import nn
from torchrl.data import LazyStackStorage, ReplayBuffer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from countdown.model import render_prompt, warm_up
from countdown.report import progress
from countdown.task import Problem
from torchrl_llm_kl import AdaptiveKLCoefficient, DualKLCoefficient, PIKLCoefficient
from torchrl_llm_kl.algorithms import ALGORITHMS, AlgorithmParts, get_algorithm, make_algorithm, mix_buffers
from torchrl_llm_kl.scoring import TokenCritic

if TYPE_CHECKING:
    from torchrl_llm_kl.service import RemoteModel

# The task has one reward; gdpo takes several.
ON_POLICY = tuple(
    sorted(name for name, preset in ALGORITHMS.items() if preset.on_policy and preset.schema != "rewards")
)

# Advantages are scaled by the standard deviation over the batch. Over the group, as in the first version of GRPO, answers
# that are all right and differ only in their KL would weigh as much as a right one beside a wrong one.
_BATCH_SCALE = {"advantage_args": {"std": "batch"}}
SETTINGS: dict[str, dict[str, Any]] = {
    name: _BATCH_SCALE for name in ("grpo", "dapo", "cispo", "gspo", "sapo", "mix", "mix_chord", "multi_step_grpo")
}


def build(
    name: str,
    policy: PreTrainedModel,
    reference: PreTrainedModel | RemoteModel,
    *,
    coefficient: nn.Module | None,
    max_new_tokens: int,
    teacher: PreTrainedModel | None = None,
    in_collector: bool = True,
    kl_reward: str = "k1",
    kl_loss: str = "none",
    temperature: float = 1.0,
) -> AlgorithmParts:
    """Build an algorithm with its models; a KL penalty in the reward, times ``coefficient``, keeps it near the reference.

    Answers are scored in the env, under the policy that samples: that of the collector, or ``policy`` in an env without one.
    Algorithms without a reference have no penalty and need no coefficient. ``kl_reward`` and ``kl_loss`` place the KL
    elsewhere; ``temperature`` is that of the sampler.
    """
    preset = get_algorithm(name)
    settings = dict(SETTINGS.get(name, {}))
    if preset.use_reference:
        settings |= {"kl_loss": kl_loss, "kl_reward": kl_reward}
        settings |= {
            f"kl_{place}_coeff": coefficient for place, kl in (("loss", kl_loss), ("reward", kl_reward)) if kl != "none"
        }
        preset = replace(preset, kl_loss=kl_loss, kl_reward=kl_reward, use_reference=None)
    distils = preset.schema == "distill"
    return make_algorithm(
        name,
        policy,
        reference=teacher if distils else (reference if preset.use_reference else None),
        critic=TokenCritic(copy.deepcopy(policy)) if preset.use_critic else None,
        gen_model="from_collector" if preset.use_reference and in_collector else None,
        group_key="group" if preset.compares_answers else None,
        max_len=max_new_tokens,
        temperature=temperature,
        **settings,
    )


CONTROLLERS = ("pi", "dual", "ziegler")


def make_coefficient(controller: str, *, target: float, batch_size: int) -> nn.Module:
    """A coefficient that follows the KL of each step, in one of the ways :data:`CONTROLLERS`; target in nats per answer."""
    if controller == "pi":
        if batch_size < 256:  # the measured KL is noisy: the default gains
            return PIKLCoefficient(init=0.2, target=target)
        gains = {"proportional": 2.0, "integral": 0.08, "smoothing": 0.9, "max_step": 0.2}
        return PIKLCoefficient(init=0.25, target=target, **gains)
    if controller == "dual":
        return DualKLCoefficient(init=0.2, target=target)
    # Changes by at most 10 % per step: 0.2 * n / horizon.
    return AdaptiveKLCoefficient(init=0.2, target=target, horizon=2 * batch_size)


def label(batch: TensorDictBase, group_size: int) -> TensorDictBase:
    """Write the group of each answer (its problem), and mark all answers as the policy's own."""
    group = torch.arange(len(batch)) // group_size
    batch["group"] = group
    batch["state"] = group.clone()  # in a task of one step, the state is the problem
    batch["expert_mask"] = torch.zeros(len(batch), dtype=torch.bool)
    return batch


def make_teacher(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], *, steps: int, seed: int
) -> PreTrainedModel:
    """A copy of the policy, trained on right answers only."""
    teacher = copy.deepcopy(policy)
    with progress("teacher", steps) as advance:
        for loss in warm_up(teacher, tokenizer, problems, steps=steps, seed=seed, random_share=0.0):
            advance(f"loss {loss:.2f}")
    return teacher.requires_grad_(False)


def expert_buffer(problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, *, seed: int) -> ReplayBuffer:
    """A buffer of expert answers: right answers to the problems."""
    rows = []
    for problem in random.Random(seed).sample(list(problems), min(len(problems), 512)):
        prompt = tokenizer(render_prompt(problem, tokenizer), add_special_tokens=False)["input_ids"]
        answer = tokenizer(problem.answer(problem.operation), add_special_tokens=False)["input_ids"]
        full = torch.tensor([*prompt, *answer, tokenizer.eos_token_id])
        rows.append(
            TensorDict(
                tokens=TensorDict(full=full, prompt=torch.tensor(prompt)),
                masks=TensorDict(all_attention_mask=torch.ones_like(full, dtype=torch.bool)),
            )
        )
    buffer = ReplayBuffer(storage=LazyStackStorage(len(rows)), collate_fn=_as_it_is)
    buffer.extend(lazy_stack(rows))
    return buffer


def with_experts(answers: TensorDictBase, experts: ReplayBuffer) -> TensorDictBase:
    """A batch of the policy's answers and as many expert answers."""
    rollouts = ReplayBuffer(storage=LazyStackStorage(len(answers)), collate_fn=_as_it_is)
    rollouts.extend(answers)
    return mix_buffers(rollouts, experts, batch_size=2 * len(answers)).sample().reshape(-1)


def _as_it_is(data: Any) -> Any:
    return data
