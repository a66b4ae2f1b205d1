"""Envs, policies and models for Ray's actors and other processes, equal in every process.

Models of actors are float64, so that the shape of a batch does not affect any number visibly.
"""

from functools import cache
from typing import Any

import tensordict
import torch
from torchrl.envs import EnvBase

from group_rollouts import GROUP, group_env
from torchrl_llm_kl import PromptOrder, RetrieveKL, Turns, make_env
from toy_rollouts import make_model, make_policy, make_scoring_wrapper, make_tokenizer

CPUS = {"num_cpus": 0.2}


def _scores(seed: int, dtype: torch.dtype) -> Any:
    tokenizer = make_tokenizer()
    key = "ref_log_probs" if seed else "log_probs"
    return make_scoring_wrapper(make_model(tokenizer, seed).to(dtype), tokenizer, pad_output=False, log_probs_key=key)


@cache
def scoring_model(seed: int) -> Any:
    """The policy (seed 0) or the reference (seed 1), as a wrapper that scores."""
    return _scores(seed, torch.float64)


def scoring_models() -> tuple[Any, Any]:
    """Both models in float32, built anew."""
    return _scores(0, torch.float32), _scores(1, torch.float32)


def child_env(query: str, *, turns: int = 1, models: tuple[Any, Any] | None = None) -> EnvBase:
    """An env of a pool: one conversation that starts with ``query``, with its own models by default."""
    tensordict.set_list_to_stack(True).set()
    torch.set_num_threads(1)
    transform = RetrieveKL(*(models or scoring_models()), coeff=0.3)
    return group_env(make_tokenizer(), transform, rows=1, group=1, turns=turns, queries=[query])


def sampling_policy() -> Any:
    """A policy that samples from the scored distribution."""
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    policy = make_policy(make_model(tokenizer, 0).double(), tokenizer, pad_output=False)
    policy.generate_kwargs["top_k"] = 0
    return policy


def text_policy() -> Any:
    """:func:`sampling_policy` for rendered prompts."""
    policy = sampling_policy()
    return make_policy(policy.model, policy.tokenizer, pad_output=False, input_mode="text")


def plain_env(rows: int = 2 * GROUP) -> EnvBase:
    """Groups of answers with a reward."""
    tensordict.set_list_to_stack(True).set()
    return group_env(make_tokenizer(), rows=rows)


def scoring_env(rows: int = 2 * GROUP) -> EnvBase:
    """Groups of answers, scored under the collector's own policy and the reference."""
    tensordict.set_list_to_stack(True).set()
    return group_env(make_tokenizer(), RetrieveKL("from_collector", scoring_model(1), add_to_reward=False), rows=rows)


def task_env(turns: int = 1) -> EnvBase:
    """An env of ``make_env`` with groups of answers, a sync and an async reward, and optionally a user who asks again."""
    tensordict.set_list_to_stack(True).set()

    async def number(question: str, answer: str, metadata: dict[str, Any]) -> float:
        return metadata["number"]

    rewards = {"length": (0.5, lambda question, answer, metadata: len(answer)), "number": number}
    several = Turns(turns, reply=lambda messages, metadata: "And now?") if turns > 1 else None
    kl = RetrieveKL("from_collector", scoring_model(1), add_to_reward=False)
    rows = [{"question": f"question {i}", "number": i} for i in range(4)]
    order = PromptOrder(seed=None)
    return make_env(
        rows, rewards, make_tokenizer(), group_size=GROUP, num_prompts=2, order=order, kl_transform=kl, turns=several
    )
