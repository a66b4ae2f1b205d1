"""Teach a language model to play Countdown, while a KL penalty keeps it near its initial weights.

Run it with ``python tutorials/countdown_grpo.py``: two CPU cores, no network, a few minutes. It

1. builds a byte-level tokenizer and a small Qwen2, and warms the model up on demonstrations, many of which are wrong;
2. freezes a copy as the reference;
3. samples answers, rewards right ones *minus a coefficient times the KL to the reference*, and trains the model on this
   reward, while the coefficient adapts to hold the KL at a target;
4. prints the share of held-out problems that the model solves before and after, and leaves a page with the tokens of a late
   batch (``rollouts.html``), what the doctor found in it (``diagnosis.txt``) and the curves.

Ctrl-C saves the model and the plot of the steps so far; files of an earlier run are moved aside, not overwritten. Algorithms
without a reference (``--algorithm dapo``) have no penalty: the KL is then only measured. ``--model`` runs the same loop on any
transformers checkpoint. Start reading at :func:`train`.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import tensordict
import torch
import transformers
import typer
from tensordict import TensorDictBase
from torch import nn
from torchrl.collectors.llm import LLMCollector
from torchrl.record import CSVLogger
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from countdown.algorithms import (
    CONTROLLERS,
    ON_POLICY,
    build,
    expert_buffer,
    label,
    make_coefficient,
    make_teacher,
    with_experts,
)
from countdown.direct import direct_batches
from countdown.model import (
    MAX_NEW_TOKENS,
    accuracy,
    as_policy,
    build_model,
    build_tokenizer,
    load_checkpoint,
    warm_up,
)
from countdown.report import Metrics, MetricsFile, keep_earlier_run, plot_curves, print_table, progress, totals
from countdown.task import Problem, all_problems, make_env, split_problems
from torchrl_llm_kl import RetrieveKL, RunMonitor
from torchrl_llm_kl.algorithms import get_algorithm
from torchrl_llm_kl.diagnostics import status_line
from torchrl_llm_kl.training import learn, loss_entries

# Required by torchrl's LLM components, which store lists of strings as stacks.
tensordict.set_list_to_stack(True).set()

NUM_PROMPTS = 32  # problems per step
GROUP_SIZE = 8  # answers per problem, compared with one another
EPOCHS = 2  # passes over the answers of each step
MINIBATCHES = 2  # updates per pass
WARMUP_STEPS = 300  # few enough to leave room for RL
TEACHER_STEPS = 300  # supervised steps on right answers, for algorithms that learn from a teacher


def train(
    algorithm: str,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    *,
    steps: int,
    lr: float,
    coefficient: nn.Module | None,
    num_prompts: int,
    group_size: int,
    max_new_tokens: int,
    seed: int,
    metrics: MetricsFile,
    monitor: RunMonitor | None = None,
    teacher: PreTrainedModel | None = None,
    sampling: Mapping[str, Any] | None = None,
    direct: bool = False,
    **placement: Any,
) -> None:
    """Train ``policy`` in place; the reference is a copy of its initial weights.

    ``coefficient`` is that of the KL penalty, None for an algorithm without one. ``sampling`` goes to the sampler,
    ``placement`` to the algorithm; the demo has the defaults of both. ``direct`` samples without env and collector.
    """
    batch_size = num_prompts * group_size
    monitor = RunMonitor(every=0) if monitor is None else monitor
    reference = copy.deepcopy(policy).requires_grad_(False)

    # An algorithm is a preset of advantage, objective and KL placement. Here the KL is part of the reward, times a
    # coefficient that adapts to hold the KL at its target.
    parts = build(
        algorithm,
        policy,
        reference,
        coefficient=coefficient,
        max_new_tokens=max_new_tokens,
        teacher=teacher,
        in_collector=not direct,
        **placement,
    )
    experts = expert_buffer(problems, tokenizer, seed=seed) if parts.algorithm.use_rollout else None

    # The transform scores each answer under the collector's policy and under the reference. It writes both log-probs, their
    # difference per token ("kl_penalty") and the reward per token: minus coefficient times KL, plus the task's reward on
    # the last token. Algorithms without a reference have no such transform: the KL is then monitored only.
    kl = parts.kl_transform
    if not isinstance(kl, RetrieveKL):
        temperature = placement.get("temperature", 1.0)
        kl = RetrieveKL(policy if direct else "from_collector", reference, add_to_reward=False, temperature=temperature)
    sampler = as_policy(policy, tokenizer, max_new_tokens=max_new_tokens, **(sampling or {}))
    task = {"num_prompts": num_prompts, "group_size": group_size, "seed": seed}
    batches: Iterable[TensorDictBase]
    if direct:
        batches = direct_batches(kl, sampler, tokenizer, problems, steps=steps, **task)
    else:
        batches = LLMCollector(
            make_env(problems, tokenizer, **task).append_transform(kl),
            policy=sampler,
            dialog_turns_per_batch=batch_size,
            total_dialog_turns=batch_size * steps,
            flatten_data=True,
        )
    optimizer = torch.optim.Adam([p for loss in parts.losses for p in loss.parameters() if p.requires_grad], lr=lr)
    # Decay to 0: noise in the updates also moves the policy away from the reference, and earns no reward.
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)

    with progress(algorithm, steps) as advance:
        start = time.perf_counter()
        for step, batch in enumerate(batches):
            batch = parts.prepare(label(batch, group_size))  # evaluates the critic, writes advantages
            monitor.look(
                step, batch
            )  # now and then, before the update: what is wrong with the batch, and its tokens as a page
            answers = loss_entries(batch)
            if experts is not None:
                answers = with_experts(answers, experts)
            learn(parts, answers, optimizer, epochs=EPOCHS, minibatches=MINIBATCHES, monitor=monitor)
            schedule.step()
            row = summarise(
                batch,
                step=step,
                coefficient=coefficient,
                charged=kl.add_to_reward,
                seconds=time.perf_counter() - start,
            )
            logged = monitor.step(**row)
            metrics.append(row | {name: logged[name] for name in ("clip_fraction", "ESS") if name in logged})
            if coefficient is not None:
                # The penalty grows if the KL is above its target, and shrinks if it is below.
                coefficient.update(row["kl"], n=batch_size)
            advance(status(logged, monitor.kl_target))
    if isinstance(batches, LLMCollector):
        batches.shutdown()


def summarise(
    batch: TensorDictBase, *, step: int, coefficient: nn.Module | None, seconds: float, charged: bool = True
) -> Metrics:
    """Means over the answers of a step; the KL is in nats per answer, summed over its tokens.

    With ``charged`` the rewards include the penalty, if there is a coefficient.
    """
    kl = batch["next", "kl_penalty"].sum(-1).mean().item()
    reward = {"reward": batch["next", "reward"].flatten(1).sum(-1).mean().item()}
    if coefficient is not None:
        value = coefficient().item()
        reward["penalised_reward"] = reward["reward"] - (0.0 if charged else value * kl)
        reward = {**reward, "reward": reward["penalised_reward"] + value * kl, "coefficient": value}
    prompt_width = batch["tokens", "prompt"].shape[-1]
    return {
        "step": step,
        "success": batch["next", "success"].float().mean().item(),
        **reward,
        "kl": kl,
        "answer_tokens": batch["masks", "all_attention_mask"][:, prompt_width:].sum().item(),
        "tokens": batch["masks", "all_attention_mask"].sum().item(),
        "seconds": seconds,
    }


def status(row: Metrics, kl_target: float | None = None) -> str:
    """One line about a step."""
    return f"right {row['success']:4.0%}  {status_line(row, kl_target=kl_target)}"


app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.command()
def main(
    algorithm: Annotated[str, typer.Option(help=f"One of {', '.join(ON_POLICY)}.")] = "grpo",
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the weights, the order of the problems and the sampling.")
    ] = 0,
    steps: Annotated[int, typer.Option(min=1, help="RL steps.")] = 100,
    warmup_steps: Annotated[
        int | None,
        typer.Option(min=0, help="Supervised steps before RL. Default: 300, or 0 for a checkpoint."),
    ] = None,
    kl_target: Annotated[
        float | None, typer.Option(help="KL to the reference to hold, in nats per answer. Default: 0.5.")
    ] = None,
    controller: Annotated[
        str, typer.Option(help="How the coefficient follows the target: pi, dual (ascent) or ziegler.")
    ] = "pi",
    lr: Annotated[float, typer.Option(help="Adam's learning rate at the start of RL; it falls to 0.")] = 3e-4,
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
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for metrics, curves, rollouts.html and diagnosis.txt; for the model too if interrupted."
        ),
    ] = Path("runs/demo"),
) -> None:
    """Teach a language model to play Countdown, with a KL penalty that keeps it near its initial weights."""
    check_options(
        algorithm=algorithm, kl_target=kl_target, lr=lr, out=out, save_model=save_model, controller=controller
    )
    if kl_target is None and get_algorithm(algorithm).use_reference:
        kl_target = 0.5
    coefficient = None
    if kl_target is not None:
        coefficient = make_coefficient(controller, target=kl_target, batch_size=num_prompts * group_size)
    silence_dependencies()
    start = time.perf_counter()
    torch.manual_seed(seed)

    problems = all_problems()
    train_problems, held_out = split_problems(problems)
    policy, tokenizer = make_policy(problems) if model is None else open_policy(model)
    if warmup_steps is None:
        warmup_steps = WARMUP_STEPS if model is None else 0
    keep_earlier_run(out, ("metrics.jsonl", "curves.png", "rollouts.html", "diagnosis.txt", "csv", "model"))
    metrics = MetricsFile(out / "metrics.jsonl")
    monitor = RunMonitor(
        CSVLogger("csv", log_dir=str(out)),
        every=max(1, steps // 7),
        folder=out,
        tokenizer=tokenizer,
        kl_target=kl_target,
    )
    found: list[float] = []  # accuracy on held-out problems, before and after
    interrupted = False
    try:
        if warmup_steps:
            with progress("warm-up", warmup_steps) as advance:
                for loss in warm_up(policy, tokenizer, train_problems, steps=warmup_steps, seed=seed):
                    advance(f"loss {loss:.2f}")
        found.append(accuracy(policy, tokenizer, held_out, max_new_tokens=max_new_tokens))
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
            coefficient=coefficient,
            num_prompts=num_prompts,
            group_size=group_size,
            max_new_tokens=max_new_tokens,
            seed=seed,
            metrics=metrics,
            monitor=monitor,
            teacher=teacher,
        )
        found.append(accuracy(policy, tokenizer, held_out, max_new_tokens=max_new_tokens))
    except KeyboardInterrupt:
        interrupted = True
        save_model = save_model or out / "model"
        typer.echo(f"\ninterrupted after {len(metrics.rows)} of {steps} RL steps: saving the model")

    written = [metrics.path, *(path for path in (out / "rollouts.html", out / "diagnosis.txt") if path.exists())]
    if save_model is not None:
        policy.save_pretrained(save_model)
        tokenizer.save_pretrained(save_model)
        written.append(save_model)
    results = {
        f"greedy accuracy {when} RL": f"{value:.1%}" for when, value in zip(("before", "after"), found, strict=False)
    }
    if metrics.rows:
        plot_curves(metrics.rows, out / "curves.png", kl_target=kl_target, held_out=found, algorithm=algorithm)
        written.append(out / "curves.png")
        results |= totals(metrics.rows, kl_target)
    results["everything"] = f"{time.perf_counter() - start:.0f} s"
    print_table(f"Countdown, {algorithm}, seed {seed}: {len(held_out)} problems held out of warm-up and RL", results)
    typer.echo(f"wrote {', '.join(map(str, written))}")
    if interrupted:
        raise typer.Exit(130)


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


def check_options(
    *,
    algorithm: str,
    kl_target: float | None,
    lr: float,
    out: Path,
    save_model: Path | None = None,
    controller: str = "pi",
) -> None:
    if algorithm not in ON_POLICY:
        raise typer.BadParameter(
            f"{algorithm!r} is none of {', '.join(ON_POLICY)}: choose one of them.", param_hint="--algorithm"
        )
    if kl_target is not None and not get_algorithm(algorithm).use_reference:
        raise typer.BadParameter(
            f"{algorithm} has no KL penalty that could hold a target: leave the option out, or choose another algorithm.",
            param_hint="--kl-target",
        )
    if controller not in CONTROLLERS:
        raise typer.BadParameter(
            f"{controller!r} is none of {', '.join(CONTROLLERS)}: choose one of them.", param_hint="--controller"
        )
    for name, value in (("--kl-target", kl_target), ("--lr", lr)):
        if value is not None and not value > 0:
            raise typer.BadParameter(f"{value:g} is not greater than 0: choose a positive number.", param_hint=name)
    if out.exists() and not out.is_dir():
        raise typer.BadParameter(f"{out} is a file, expected a folder: choose another path.", param_hint="--out")
    if save_model is not None and save_model.exists() and (save_model.is_file() or any(save_model.iterdir())):
        raise typer.BadParameter(
            f"{save_model} exists already, and saving would overwrite it: choose a new folder.",
            param_hint="--save-model",
        )


def silence_dependencies() -> None:
    warnings.filterwarnings("ignore", module="torchrl|tensordict|transformers")
    warnings.filterwarnings("ignore", message="size_average and reduce")  # from torchrl's cross_entropy
    transformers.utils.logging.disable_progress_bar()  # for writing one small file


if __name__ == "__main__":
    app()
