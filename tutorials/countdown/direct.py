"""The answers of a run without an env and a collector: the same tokens, and scores to rounding, in half the time.

torchrl's env of strings stacks and copies a TensorDict for each answer, which costs more than a model this small. A study of
many runs can bypass it; a task of several turns, or one that may not end after an answer, can't.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from torchrl.envs.llm.reward.countdown import CountdownRewardParser
from torchrl.modules.llm import TransformersWrapper
from transformers import PreTrainedTokenizerBase

from countdown.model import render_prompt
from countdown.task import Problem, in_order
from torchrl_llm_kl import RetrieveKL


def direct_batches(
    kl: RetrieveKL,
    policy: TransformersWrapper,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    *,
    steps: int,
    num_prompts: int,
    group_size: int,
    seed: int | None,
) -> Iterator[TensorDictBase]:
    """What a collector of ``make_env`` yields, with the entries that training reads; ``[num_prompts * group_size]``."""
    loader = in_order(problems, seed, collate=lambda rows: rows[0])
    rewards = CountdownRewardParser(tokenizer=tokenizer)
    posed: list[Problem] = []
    for step in range(-1, steps):
        while len(posed) < num_prompts:
            posed += loader
        chosen, posed = posed[:num_prompts], posed[num_prompts:]
        if step < 0:
            continue  # these are lost in torchrl's collector: it resets the env twice before its first step
        asked = [problem for problem in chosen for _ in range(group_size)]
        texts = NonTensorStack(*(render_prompt(problem, tokenizer) for problem in asked))
        batch = policy(TensorDict({"text": {"prompt": texts}}, batch_size=[len(asked)]))
        replies = [reply.removesuffix(tokenizer.eos_token) for reply in batch["text", "response"]]
        right = [problem.is_solved_by(reply) for problem, reply in zip(asked, replies, strict=True)]
        tagged = [bool(rewards.extract_tags(reply)[1]) for reply in replies]
        success = torch.tensor(right).view(-1, 1, 1)
        reward = torch.tensor(tagged).view(-1, 1, 1) * rewards.format_reward
        batch["next"] = TensorDict(
            success=success, reward=torch.where(success, rewards.correct_reward, reward), batch_size=batch.batch_size
        )
        yield kl(batch)
