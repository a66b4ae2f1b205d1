"""Rewards and KL of a policy on held-out prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import torch
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase

from torchrl_llm_kl.training._steps import answer_columns, apart, mean_and_error

_Z95 = NormalDist().inv_cdf(0.975)
#: Two-sided 95 % quantiles of Student's t with 1 to 10 degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@torch.no_grad()
def evaluate(env: EnvBase, sampler: TensorDictModuleBase, num_prompts: int, *, seed: int = 0) -> dict[str, float]:
    """The mean reward of a policy's answers to the first prompts of an env, and their KL if the env measures it.

    Random numbers outside are not touched.

    Args:
        env: of :func:`~torchrl_llm_kl.tasks.make_env`, new, with one answer to each prompt and prompts as they come.
        sampler: the policy; see :func:`make_sampler`.
        num_prompts: how many are posed.

    Keyword Args:
        seed: of the answers, if they are sampled.

    Returns:
        ``reward`` and, of several prompts, its standard error ``reward_error``, the mean of each named part
        ``reward/<name>``, the ends of the 95 % interval of these means where there is one (:func:`interval`), ``low/reward``,
        ``high/reward`` and so on, ``kl`` in nats per answer if there is an entry ``("next", "kl_penalty")``,
        ``answer_tokens``, the mean length, and ``num_prompts``.

    Example:
        >>> env = make_env(held_out, reward, tokenizer, group_size=1, order=PromptOrder(seed=None))  # doctest: +SKIP
        >>> evaluate(env, sampler, 200)  # doctest: +SKIP
    """
    columns: dict[str, list[float]] = {}
    done = 0
    with apart(seed):
        while done < num_prompts:
            batch = env.rollout(1, sampler).reshape(-1)[: num_prompts - done]
            done += len(batch)
            for name, values in answer_columns(batch).items():
                columns.setdefault(name, []).extend(values.flatten().tolist())
    figures = {name: mean_and_error(values)[0] for name, values in columns.items()}
    if num_prompts > 1:
        figures["reward_error"] = mean_and_error(columns["reward"])[1]
    for name in [name for name in columns if name.startswith("reward")]:
        ends = interval(columns[name])
        if ends is not None:
            figures[f"low/{name}"], figures[f"high/{name}"] = ends
    return {**figures, "num_prompts": num_prompts}


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of the mean of independent values: Wilson's score interval if all are 0 or 1, else Student's t.

    Returns:
        Its ends; None for one value, and for equal ones other than 0 and 1: they do not show how much others differ.

    Example:
        >>> [round(end, 2) for end in interval([1.0, 1.0])]
        [0.34, 1.0]
        >>> [round(end, 2) for end in interval([0.2, 0.4, 0.6])]
        [-0.1, 0.9]
        >>> interval([0.5, 0.5])

    Source: E. B. Wilson, "Probable Inference, the Law of Succession, and Statistical Inference" (1927).
    """
    n, (mean, error) = len(values), mean_and_error(values)
    if n < 2:
        return None
    if set(values) <= {0.0, 1.0}:
        shrunk = 1 + _Z95**2 / n
        centre = (mean + _Z95**2 / (2 * n)) / shrunk
        half = _Z95 / shrunk * math.sqrt(mean * (1 - mean) / n + (_Z95 / (2 * n)) ** 2)
        return max(0.0, centre - half), min(1.0, centre + half)
    if min(values) == max(values):
        return None
    half = (_T95[n - 2] if n - 2 < len(_T95) else _Z95 + 2.5 / (n - 1)) * error  # to 1 % of the quantile
    return mean - half, mean + half
