"""Child envs of a pool, each with a query of its own; importable, since other processes make them."""

from __future__ import annotations

from typing import Any

import tensordict
import torch
from torchrl.envs import EnvBase

from group_rollouts import group_env
from torchrl_llm_kl import RetrieveKL
from toy_rollouts import make_model, make_scoring_wrapper, make_tokenizer

COEFF = 0.3


def scoring_models(pad_output: bool = False) -> tuple[Any, Any]:
    """The policy and the reference as wrappers that score."""
    tokenizer = make_tokenizer()
    return (
        make_scoring_wrapper(make_model(tokenizer, 0), tokenizer, pad_output=pad_output, log_probs_key="log_probs"),
        make_scoring_wrapper(make_model(tokenizer, 1), tokenizer, pad_output=pad_output, log_probs_key="ref_log_probs"),
    )


def child_env(query: str, *, turns: int = 1, models: tuple[Any, Any] | None = None) -> EnvBase:
    """One conversation that starts with ``query``; with models of its own unless they are given."""
    tensordict.set_list_to_stack(True).set()
    torch.set_num_threads(1)
    gen, ref = scoring_models() if models is None else models
    transform = RetrieveKL(gen, ref, coeff=COEFF)
    return group_env(make_tokenizer(), transform, rows=1, group=1, turns=turns, queries=[query])
