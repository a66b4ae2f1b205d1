"""Teach a language model to play Countdown, while a KL penalty keeps it near its initial weights.

Run it with ``python tutorials/countdown_grpo.py``: two CPU cores, no network, a few minutes. It

1. builds a byte-level tokenizer and a small Qwen2, and warms the model up on demonstrations, many of which are wrong;
2. freezes a copy as the reference;
3. samples answers, rewards right ones *minus a coefficient times the KL to the reference*, and trains the model on this
   reward, while the coefficient adapts to hold the KL at a target;
4. prints the share of held-out problems that the model solves before and after.

``--model`` runs the same loop on any transformers checkpoint. Start reading at :func:`train`.
"""

from __future__ import annotations

import copy
import time
import warnings
from pathlib import Path
from typing import Annotated

import tensordict
import torch
import transformers
import typer
from tensordict import TensorDictBase
from torchrl.collectors.llm import LLMCollector
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from countdown.algorithms import ON_POLICY, build, expert_buffer, label, make_teacher, with_experts
from countdown.model import (
    MAX_NEW_TOKENS,
    accuracy,
    as_policy,
    build_model,
    build_tokenizer,
    load_checkpoint,
    warm_up,
)
from countdown.report import Metrics, MetricsFile, plot_curves, print_table, progress_bar, totals
from countdown.task import Problem, all_problems, make_env, split_problems
from torchrl_llm_kl import AdaptiveKLCoefficient, RetrieveKL
from torchrl_llm_kl.algorithms import AlgorithmParts, get_algorithm

# Required by torchrl's LLM components, which store lists of strings as stacks.
tensordict.set_list_to_stack(True).set()

NUM_PROMPTS = 16  # problems per step
GROUP_SIZE = 8  # answers per problem, compared with one another
EPOCHS = 2  # passes over the answers of each step
MINIBATCHES = 2  # updates per pass
WARMUP_STEPS = 300  # few enough to leave room for RL
LOSS_KEYS = (  # the entries that the losses read
    ("tokens", "full"),
    ("tokens", "prompt"),
    ("masks", "all_attention_mask"),
    ("next", "log_probs", "full"),
    ("next", "state_value"),
    "advantage",
    "value_target",
    "loss_mask",
    "expert_mask",
)
TEACHER_STEPS = 300  # supervised steps on right answers, for algorithms that learn from a teacher


def train(
    algorithm: str,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    *,
    steps: int,
    lr: float,
    kl_target: float,
    num_prompts: int,
    group_size: int,
    max_new_tokens: int,
    seed: int,
    metrics: MetricsFile,
    teacher: PreTrainedModel | None = None,
) -> None:
    """Train ``policy`` in place; the reference is a copy of its initial weights."""
    batch_size = num_prompts * group_size
    reference = copy.deepcopy(policy).requires_grad_(False)

    # An algorithm is a preset of advantage, objective and KL placement. Here the KL is part of the reward, times a
    # coefficient that changes by at most 10 % per step (0.2 * n / horizon) to hold the KL at its target.
    coefficient = AdaptiveKLCoefficient(init=0.2, target=kl_target, horizon=2 * batch_size)
    parts = build(
        algorithm,
        policy,
        reference,
        coefficient=coefficient,
        max_new_tokens=max_new_tokens,
        teacher=teacher,
    )
    experts = expert_buffer(problems, tokenizer, seed=seed) if parts.algorithm.use_rollout else None

    # The transform scores each answer under the collector's policy and under the reference. It writes both log-probs, their
    # difference per token ("kl_penalty") and the reward per token: minus coefficient times KL, plus the task's reward on
    # the last token. Algorithms without a reference have no such transform: the KL is then monitored only.
    kl = parts.kl_transform
    if not isinstance(kl, RetrieveKL):
        kl = RetrieveKL("from_collector", reference, add_to_reward=False)
    env = make_env(problems, tokenizer, num_prompts=num_prompts, group_size=group_size, seed=seed)
    collector = LLMCollector(
        env.append_transform(kl),
        policy=as_policy(policy, tokenizer, max_new_tokens=max_new_tokens),
        dialog_turns_per_batch=batch_size,
        total_dialog_turns=batch_size * steps,
        flatten_data=True,
    )
    optimizer = torch.optim.Adam([p for loss in parts.losses for p in loss.parameters() if p.requires_grad], lr=lr)
    # Decay to 0: noise in the updates also moves the policy away from the reference, and earns no reward.
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)

    with progress_bar() as bar:
        task = bar.add_task(algorithm, total=steps, status="")
        start = time.perf_counter()
        for step, batch in enumerate(collector):
            batch = parts.prepare(label(batch, group_size))  # evaluates the critic, writes advantages
            answers = batch.select(*LOSS_KEYS, strict=False).contiguous()  # dense and without strings: faster to index
            if experts is not None:
                answers = with_experts(answers, experts)
            learn(policy, parts, answers, optimizer)
            schedule.step()
            row = summarise(batch, step=step, coefficient=coefficient().item(), seconds=time.perf_counter() - start)
            metrics.append(row)
            # The penalty grows if the KL is above its target, and shrinks if it is below.
            coefficient.update(row["kl"], n=batch_size)
            bar.update(task, advance=1, status=STATUS.format(**row))
    collector.shutdown()


def learn(
    policy: PreTrainedModel, parts: AlgorithmParts, answers: TensorDictBase, optimizer: torch.optim.Optimizer
) -> None:
    """Update the policy on minibatches of one step's answers: each is a step with its own mean."""
    for _ in range(EPOCHS):
        for minibatch in parts.minibatches(answers, MINIBATCHES):
            optimizer.zero_grad()
            for loss in parts.losses:
                loss(minibatch).total_loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()


STATUS = "right {success:4.0%}  reward {reward:.2f}  KL {kl:5.2f}  coefficient {coefficient:.3f}"


def summarise(batch: TensorDictBase, *, step: int, coefficient: float, seconds: float) -> Metrics:
    """Means over the answers of a step; the KL is in nats per answer, summed over its tokens."""
    kl = batch["next", "kl_penalty"].sum(-1).mean().item()
    reward = batch["next", "reward"]
    penalised = reward.flatten(1).sum(-1).mean().item()
    in_reward = reward.shape[1] > 1  # one reward per token: it includes the KL
    prompt_width = batch["tokens", "prompt"].shape[-1]
    return {
        "step": step,
        "success": batch["next", "success"].float().mean().item(),
        "reward": penalised + coefficient * kl * in_reward,
        "penalised_reward": penalised,
        "kl": kl,
        "coefficient": coefficient * in_reward,
        "answer_tokens": batch["masks", "all_attention_mask"][:, prompt_width:].sum().item(),
        "tokens": batch["masks", "all_attention_mask"].sum().item(),
        "seconds": seconds,
    }


app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.command()
def main(
    algorithm: Annotated[str, typer.Option(help=f"One of {', '.join(ON_POLICY)}.")] = "grpo",
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the weights, the order of the problems and the sampling.")
    ] = 0,
    steps: Annotated[int, typer.Option(min=1, help="RL steps.")] = 140,
    warmup_steps: Annotated[
        int | None,
        typer.Option(min=0, help="Supervised steps before RL. Default: 300, or 0 for a checkpoint."),
    ] = None,
    kl_target: Annotated[float, typer.Option(help="KL to the reference to hold, in nats per answer.")] = 0.5,
    lr: Annotated[float, typer.Option(help="Adam's learning rate at the start of RL; it falls to 0.")] = 1.5e-4,
    num_prompts: Annotated[int, typer.Option(min=1, help="Problems per RL step.")] = NUM_PROMPTS,
    group_size: Annotated[int, typer.Option(min=2, help="Answers to each problem.")] = GROUP_SIZE,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = MAX_NEW_TOKENS,
    model: Annotated[
        str | None,
        typer.Option(help="A transformers checkpoint (folder or hub name). Default: the small model built here."),
    ] = None,
    save_model: Annotated[
        Path | None, typer.Option(help="Save the trained model and its tokenizer in this folder.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for metrics.jsonl and curves.png.")] = Path("runs/demo"),
) -> None:
    """Teach a language model to play Countdown, with a KL penalty that keeps it near its initial weights."""
    check_options(algorithm=algorithm, kl_target=kl_target, lr=lr, out=out)
    silence_dependencies()
    start = time.perf_counter()
    torch.manual_seed(seed)

    problems = all_problems()
    train_problems, held_out = split_problems(problems)
    policy, tokenizer = make_policy(problems) if model is None else open_policy(model)
    if warmup_steps is None:
        warmup_steps = WARMUP_STEPS if model is None else 0
    with progress_bar() as bar:
        task = bar.add_task("warm-up", total=warmup_steps, status="", visible=warmup_steps > 0)
        for loss in warm_up(policy, tokenizer, train_problems, steps=warmup_steps, seed=seed):
            bar.update(task, advance=1, status=f"loss {loss:.2f}")

    before = accuracy(policy, tokenizer, held_out, max_new_tokens=max_new_tokens)
    metrics = MetricsFile(out / "metrics.jsonl")
    teacher = None
    if get_algorithm(algorithm).schema == "distill":
        teacher = make_teacher(policy, tokenizer, train_problems, steps=TEACHER_STEPS, seed=seed)
    train(
        algorithm,
        policy,
        tokenizer,
        train_problems,
        steps=steps,
        lr=lr,
        kl_target=kl_target,
        num_prompts=num_prompts,
        group_size=group_size,
        max_new_tokens=max_new_tokens,
        seed=seed,
        metrics=metrics,
        teacher=teacher,
    )
    after = accuracy(policy, tokenizer, held_out, max_new_tokens=max_new_tokens)

    if save_model is not None:
        policy.save_pretrained(save_model)
        tokenizer.save_pretrained(save_model)
    plot_curves(metrics.rows, out / "curves.png", kl_target=kl_target, held_out=(before, after), algorithm=algorithm)
    results = {"greedy accuracy before RL": f"{before:.1%}", "greedy accuracy after RL": f"{after:.1%}"}
    results |= totals(metrics.rows, kl_target) | {"everything": f"{time.perf_counter() - start:.0f} s"}
    print_table(f"Countdown, {algorithm}, seed {seed}: {len(held_out)} problems held out of warm-up and RL", results)
    typer.echo(f"wrote {metrics.path} and {out / 'curves.png'}")


def make_policy(problems: list[Problem]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Build the small model, untrained."""
    torch.set_num_threads(1)  # more only wait for one another on a model this small, and change the numbers
    tokenizer = build_tokenizer(problems)
    return build_model(tokenizer), tokenizer


def open_policy(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a checkpoint; a failure is reported as a bad option."""
    try:
        return load_checkpoint(name)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"cannot use {name!r}: {error}", param_hint="--model") from error


def check_options(*, algorithm: str, kl_target: float, lr: float, out: Path) -> None:
    if algorithm not in ON_POLICY:
        raise typer.BadParameter(
            f"{algorithm!r} is none of {', '.join(ON_POLICY)}: choose one of them.", param_hint="--algorithm"
        )
    for name, value in (("--kl-target", kl_target), ("--lr", lr)):
        if not value > 0:
            raise typer.BadParameter(f"{value:g} is not greater than 0: choose a positive number.", param_hint=name)
    if out.exists() and not out.is_dir():
        raise typer.BadParameter(f"{out} is a file, expected a folder: choose another path.", param_hint="--out")


def silence_dependencies() -> None:
    warnings.filterwarnings("ignore", module="torchrl|tensordict|transformers")
    warnings.filterwarnings("ignore", message="size_average and reduce")  # from torchrl's cross_entropy
    transformers.utils.logging.disable_progress_bar()  # for writing one small file


if __name__ == "__main__":
    app()
