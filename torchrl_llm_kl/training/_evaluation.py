"""Rewards and KL of a policy on held-out prompts."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase

from torchrl_llm_kl.training._steps import apart, mean_and_error


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
        ``reward/<name>``, ``kl`` in nats per answer if there is an entry ``("next", "kl_penalty")``, ``answer_tokens``, the
        mean length, and ``num_prompts``.

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
            for name, values in _columns(batch).items():
                columns.setdefault(name, []).extend(values.flatten().tolist())
    reward, error = mean_and_error(columns.pop("reward"))
    others = {name: mean_and_error(values)[0] for name, values in columns.items()}
    errors = {"reward_error": error} if num_prompts > 1 else {}
    return {"reward": reward, **errors, **others, "num_prompts": num_prompts}


def _columns(batch: TensorDictBase) -> dict[str, torch.Tensor]:
    """Numbers of each answer, by name."""
    after = batch["next"]
    found = {"reward": after["reward"].flatten(1).sum(-1)}
    parts = after.get("rewards", None)
    if parts is not None:
        found |= {f"reward/{name}": parts[name].float() for name in parts.keys()}  # noqa: SIM118  # of a TensorDict
    if "kl_penalty" in after.keys():  # noqa: SIM118
        found["kl"] = after["kl_penalty"].flatten(1).sum(-1)
    width = batch["tokens", "prompt"].shape[-1]
    found["answer_tokens"] = batch["masks", "all_attention_mask"][:, width:].sum(-1).float()
    return found
