"""Train a language model on your own prompts and reward: GRPO, with the KL to the initial weights held at a target.

Run it with ``python tutorials/train_grpo.py MODEL``, where ``MODEL`` is a folder or a name on the hub. It is the loop of
``torchrl-llm-kl train`` written out, to copy and change. With the same settings both give bit-equal weights. It

1. loads the model twice, as the policy and as the frozen reference
2. binds GRPO to them. The KL is part of the reward, times a coefficient that adapts to hold it at the target.
3. samples answers to prompts in groups, rewards them, and learns from the comparison within each group
4. saves checkpoints, from which the same command resumes, even after ``kill -9``

Start reading at :func:`train`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import tensordict
import torch
from torch import nn

from torchrl_llm_kl import PIKLCoefficient, RunMonitor, Sampling, make_algorithm
from torchrl_llm_kl.tasks import PromptOrder, make_env
from torchrl_llm_kl.training import (
    Checkpoints,
    chat_tokenizer,
    first_coefficient,
    forget_scores,
    learn,
    load_model,
    loss_entries,
    make_sampler,
    progress,
    random_state,
    save_policy,
    seed_everything,
    set_random_state,
    step_figures,
)

# Rows with a column "question", "prompt" or "messages", or the path of a JSONL or Parquet file. The reward gets the others.
PROMPTS = [{"question": f"What is {a} * {b}?", "answer": str(a * b)} for a in range(3, 20) for b in range(3, 20)]


def right(question: str, answer: str, metadata: dict[str, Any]) -> float:
    """1 if the last number of the answer is the right one."""
    numbers = re.findall(r"\d+", answer)
    return float(bool(numbers) and numbers[-1] == metadata["answer"])


def train(
    model: str,
    out: Path,
    *,
    prompts: Any = PROMPTS,
    reward: Any = right,
    steps: int = 200,
    num_prompts: int = 8,
    group_size: int = 8,
    max_new_tokens: int = 64,
    kl_target: float = 0.5,
    lr: float = 1e-6,
    minibatches: int = 2,
    save_every: int = 20,
    seed: int = 0,
) -> nn.Module:
    """Train, and return the policy."""
    tensordict.set_list_to_stack(True).set()  # required by torchrl's LLM components
    checkpoints = Checkpoints(out / "checkpoints", keep=2)
    saved = checkpoints.latest()  # None for a new run. A damaged checkpoint is skipped.
    done = 0 if saved is None else saved.step

    tokenizer = chat_tokenizer(model)
    policy = load_model(model if saved is None else str(saved.folder / "model"), dtype="float32").requires_grad_(True)
    reference = load_model(model, dtype="float32")

    coefficient = PIKLCoefficient(init=0.1, target=kl_target)
    grpo = make_algorithm(
        "grpo",
        policy,
        reference=reference,
        group_key="group",  # make_env numbers the prompts
        kl_loss="none",
        kl_reward="k1",
        kl_reward_coeff=coefficient,
    )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / steps)

    seed_everything(seed)
    if saved is not None:
        state = torch.load(saved.folder / "state.pt", weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        grpo.load_state_dict(state["parts"])  # the coefficient
        set_random_state(state["random"])

    # The env takes prompts in an order given by the seed, each for `group_size` rows, then rewards answers and charges the KL.
    env = make_env(
        prompts,
        reward,
        tokenizer,
        num_prompts=num_prompts,
        group_size=group_size,
        kl_transform=grpo.kl_transform,
        order=PromptOrder(seed, start=done * num_prompts),
    )
    # Sampling() drops transformers' default top-k, so that answers come from the distribution that is scored.
    sampler = make_sampler(policy, tokenizer, max_new_tokens=max_new_tokens, sampling=Sampling())
    monitor = RunMonitor(every=0, kl_target=kl_target)

    with progress("grpo", steps, done=done) as advance:
        for step in range(done, steps):
            forget_scores(env)  # a resumed run has empty caches
            batch = grpo.prepare(env.rollout(1, sampler).reshape(-1))  # scored answers with advantages
            figures = step_figures(batch, coefficient=coefficient, charged=True)
            if step == 0:  # the KL of the first batch is 0, so the start follows from the spread of its rewards
                coefficient.value.fill_(first_coefficient(batch, kl_target, charged=True) or 0.1)
            learn(grpo, loss_entries(batch), optimizer, minibatches=minibatches, monitor=monitor)
            schedule.step()
            coefficient.update(figures["kl"], n=len(batch))
            monitor.step(step, **figures)
            advance(monitor.status)
            if (step + 1) % save_every == 0 or step + 1 == steps:
                with checkpoints.writing(step + 1, figures) as folder:
                    save_policy(policy, tokenizer, folder / "model")
                    state = {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
                    state |= {"parts": grpo.state_dict(), "random": random_state()}
                    torch.save(state, folder / "state.pt")
    return policy


if __name__ == "__main__":
    name, out = sys.argv[1], Path("runs/grpo")
    train(name, out).save_pretrained(out / "final")
    chat_tokenizer(name).save_pretrained(out / "final")
    print(f"wrote {out / 'final'}")
