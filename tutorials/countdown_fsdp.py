"""Train on several ranks with sharded models (FSDP2): a smaller ``countdown_grpo.py``, with the same figures on any number.

Run it with ``torchrun --nproc-per-node 2 tutorials/countdown_fsdp.py``: gloo on CPU cores, NCCL on GPUs; or without torchrun in
one process. Each rank

1. holds a share of the weights of the policy, the reference and, if there is one, the critic;
2. samples and scores answers to its share of a step's problems. Noise is drawn for each problem by its number in the run, so
   that an answer does not depend on the rank that samples it;
3. receives all answers, and computes advantages and metrics from them;
4. trains on its share of each minibatch: ``count`` divides by the tokens of all ranks, FSDP adds up the gradients.

Checkpoints are sharded too (``torch.distributed.checkpoint``). ``--resume FOLDER`` continues a run on any number of ranks, and
ends where it would have ended without a break; Ctrl-C saves one. Start reading at :meth:`Run.train`.
"""

from __future__ import annotations

import copy
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from tensordict import TensorDictBase
from torch import nn

from countdown.algorithms import ON_POLICY, build, label
from countdown.model import MAX_NEW_TOKENS, accuracy, as_policy, to_dtype, warm_up
from countdown.ranks import (
    Gumbel,
    Ranks,
    Stop,
    generator,
    load,
    problem_at,
    read_state,
    save,
    shard,
    start_ranks,
    whole,
)
from countdown.report import Metrics, MetricsFile, keep_earlier_run, plot_curves, print_table, progress, totals
from countdown.task import all_problems, make_env, split_problems
from countdown_grpo import (
    EPOCHS,
    GROUP_SIZE,
    MINIBATCHES,
    WARMUP_STEPS,
    check_options,
    make_policy,
    open_policy,
    silence_dependencies,
    status,
    summarise,
)
from torchrl_llm_kl import PIKLCoefficient, RetrieveKL
from torchrl_llm_kl.algorithms import get_algorithm
from torchrl_llm_kl.training import LOSS_KEYS

# Others need expert answers or a teacher, which countdown_grpo.py makes.
SUPPORTED = tuple(name for name in ON_POLICY if get_algorithm(name).schema not in ("mix", "distill"))


@dataclass(frozen=True)
class Settings:
    """What a run is; saved with it, and the same when it is resumed."""

    algorithm: str = "grpo"
    seed: int = 0
    steps: int = 80
    warmup_steps: int | None = None
    kl_target: float | None = None
    lr: float = 3e-4
    num_prompts: int = 16
    group_size: int = GROUP_SIZE
    max_new_tokens: int = MAX_NEW_TOKENS
    model: str | None = None
    dtype: str = "float64"


class Run:
    """Sharded models, an algorithm, an optimizer, and the steps done so far.

    Args:
        settings: the same on all ranks.
        out: folder of the run; if ``resume``, one that holds a checkpoint.
        device: of this rank.
        stop: becomes True if the run is to end after the current step.
    """

    def __init__(
        self,
        settings: Settings,
        out: Path,
        *,
        resume: bool,
        device: torch.device | None = None,
        stop: Stop | None = None,
    ) -> None:
        self.settings, self.out, self.ranks, self.stop = settings, out, Ranks(), Stop() if stop is None else stop
        self.step, self.accuracies = 0, list[float]()
        if settings.num_prompts < self.ranks.count:
            raise ValueError(f"{self.ranks.count} ranks for {settings.num_prompts} problems per step: use fewer ranks.")
        torch.manual_seed(settings.seed)
        problems = all_problems()
        self.problems, self.held_out = split_problems(problems)
        policy, self.tokenizer = make_policy(problems) if settings.model is None else open_policy(settings.model)
        # In float64, rounding, which depends on the number of ranks, never changes a sampled token. In float32 it will at some
        # step, and runs then differ as if their seeds did.
        self.policy = to_dtype(policy.to(device or "cpu"), getattr(torch, settings.dtype))
        rows: list[Metrics] = []
        if resume:
            saved = read_state(out)
            self.step, self.accuracies = saved["step"], saved["accuracies"]
            rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()[: self.step]]
            self.ranks.wait()  # before the first rank writes the file anew
        else:
            self._warm_up()
        self._shard()
        if resume:
            load(out, self.models, self.optimizer, parts=self.parts)
        else:
            self.accuracies.append(self.accuracy())
        self.metrics = MetricsFile(out / "metrics.jsonl", rows, writes=self.ranks.first)

    def _warm_up(self) -> None:
        """Train the first rank's model on demonstrations, and copy it to all."""
        ranks, settings = self.ranks, self.settings
        steps = settings.warmup_steps
        if steps is None:
            steps = WARMUP_STEPS if settings.model is None else 0
        if ranks.first and steps:
            with progress("warm-up", steps) as advance:
                for loss in warm_up(self.policy, self.tokenizer, self.problems, steps=steps, seed=settings.seed):
                    advance(f"loss {loss:.2f}")
                    if self.stop:
                        break
        ranks.from_first(self.policy)
        if ranks.any(bool(self.stop)):
            raise InterruptedError("interrupted in the warm-up: there is nothing to resume yet")

    def _shard(self) -> None:
        """Build the algorithm on whole models, then shard them, then build the optimizer on the shards."""
        settings, preset = self.settings, get_algorithm(self.settings.algorithm)
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)
        self.kl_target = settings.kl_target
        if self.kl_target is None and preset.use_reference:
            self.kl_target = 0.5
        self.coefficient = None
        if self.kl_target is not None:
            self.coefficient = PIKLCoefficient(init=0.2, target=self.kl_target)
        self.parts = build(
            settings.algorithm,
            self.policy,
            self.reference,
            coefficient=self.coefficient,
            max_new_tokens=settings.max_new_tokens,
            in_collector=False,
        )
        self.models = nn.ModuleDict({"policy": self.policy, "reference": self.reference})
        if self.parts.critic_loss is not None:
            self.models["critic"] = self.parts.critic_loss.critic_network
        for model in self.models.values():
            shard(model)
        trained = [p for loss in self.parts.losses for p in loss.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(trained, lr=settings.lr)

    # ------------------------------------------------------------------ training

    def train(self, until: int | None = None, *, save_every: int = 10) -> bool:
        """Train to the last step, or to step ``until``, and save; False if the user ended it before."""
        settings, ranks = self.settings, self.ranks
        last = settings.steps if until is None else min(until, settings.steps)
        if self.step >= last:
            return True
        seconds = self.metrics.rows[-1]["seconds"] if self.step else 0.0
        start, stopped = time.perf_counter() - seconds, False
        shown = progress(settings.algorithm, last - self.step, shown=ranks.first)
        sample = self._sampler()
        with shown as advance:
            while self.step < last and not stopped:
                for group in self.optimizer.param_groups:
                    group["lr"] = settings.lr * (1 - self.step / settings.steps)
                batch = self.parts.prepare(label(ranks.gather(sample()), settings.group_size))
                self._learn(batch.select(*LOSS_KEYS, strict=False).to(self.policy.device))
                row = summarise(
                    batch, step=self.step, coefficient=self.coefficient, seconds=time.perf_counter() - start
                )
                self.metrics.append(row)
                if self.coefficient is not None:
                    self.coefficient.update(row["kl"], n=len(batch), all_ranks=False)  # that of the whole batch
                self.step += 1
                advance(status(row))
                stopped = ranks.any(bool(self.stop))
                if stopped or self.step == last or self.step % save_every == 0:
                    self._save()
        return not stopped

    def _learn(self, answers: TensorDictBase) -> None:
        """Update the models on minibatches of all answers, of which each rank takes a share."""
        for epoch in range(EPOCHS):
            order = generator(self.settings.seed, "minibatches", self.step, epoch)
            for minibatch in self.parts.minibatches(answers, MINIBATCHES, generator=order):  # the same on all ranks
                share = self.parts.count(minibatch[self.ranks.number :: self.ranks.count])  # may be empty
                self.optimizer.zero_grad()
                for loss in self.parts.losses:
                    loss(share).total_loss.backward()
                torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
                self.optimizer.step()

    def _sampler(self) -> Callable[[], TensorDictBase]:
        """A function that samples and scores this rank's answers of the next step."""
        settings, size = self.settings, self.settings.num_prompts
        shares = [self.ranks.share(range(i * size, (i + 1) * size)) for i in range(self.step, settings.steps)]
        kl = self.parts.kl_transform
        if not isinstance(kl, RetrieveKL):  # no reference in the algorithm: the KL is only measured
            kl = RetrieveKL(self.policy, self.reference, add_to_reward=False)
        env = make_env(
            [problem_at(self.problems, index, seed=settings.seed) for share in shares for index in share],
            self.tokenizer,
            num_prompts=len(shares[0]),
            group_size=settings.group_size,
            seed=None,
        ).append_transform(kl)
        noise = Gumbel(settings.group_size)
        policy = as_policy(self.policy, self.tokenizer, max_new_tokens=settings.max_new_tokens, noise=noise)
        following = iter(shares)

        def sample() -> TensorDictBase:
            noise.start([generator(settings.seed, "answers", index) for index in next(following)])
            with whole(self.policy):
                # A collector would fetch problems ahead, which a resumed run would have to leave out.
                return env.rollout(1, policy).reshape(-1)

        return sample

    def accuracy(self) -> float:
        """Share of the held-out problems that greedy decoding solves; each rank decodes some."""
        own = self.held_out[self.ranks.number :: self.ranks.count]
        with whole(self.policy):
            share = accuracy(self.policy, self.tokenizer, own, max_new_tokens=self.settings.max_new_tokens)
        return self.ranks.add_up(share * len(own)) / len(self.held_out)

    # ------------------------------------------------------------------ what is shown and saved

    def _save(self) -> None:
        state = {"settings": asdict(self.settings), "step": self.step, "accuracies": self.accuracies}
        save(self.out, state, self.models, self.optimizer, parts=self.parts)

    def report(self, seconds: float) -> None:
        """Print the table and draw the plot."""
        settings, rows, count = self.settings, self.metrics.rows, self.ranks.count
        plot = self.out / "curves.png"
        plot_curves(rows, plot, kl_target=self.kl_target, held_out=self.accuracies, algorithm=settings.algorithm)
        results = {
            f"greedy accuracy {when} RL": f"{value:.1%}"
            for when, value in zip(("before", "after"), self.accuracies, strict=False)
        }
        results |= totals(rows, self.kl_target) | {"everything": f"{seconds:.0f} s"}
        ranks = f"{count} sharded rank{'s' * (count > 1)}" if dist.is_initialized() else "one process"
        print_table(f"Countdown, {settings.algorithm}, seed {settings.seed}, {ranks}", results)
        typer.echo(f"wrote {self.metrics.path}, {self.out / f'checkpoint-{self.step}'}, {plot}")


app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)

DEFAULT = Settings()
KEPT = ("resume", "stop_after", "save_every")  # options that a resumed run takes


@app.command()
def main(
    context: typer.Context,
    algorithm: Annotated[str, typer.Option(help=f"One of {', '.join(SUPPORTED)}.")] = DEFAULT.algorithm,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the weights, the order of the problems and the sampling.")
    ] = DEFAULT.seed,
    steps: Annotated[int, typer.Option(min=1, help="RL steps.")] = DEFAULT.steps,
    warmup_steps: Annotated[
        int | None, typer.Option(min=0, help="Supervised steps before RL. Default: 300, or 0 for a checkpoint.")
    ] = DEFAULT.warmup_steps,
    kl_target: Annotated[
        float | None, typer.Option(help="KL to the reference to hold, in nats per answer. Default: 0.5.")
    ] = DEFAULT.kl_target,
    lr: Annotated[float, typer.Option(help="Adam's learning rate at the start of RL; it falls to 0.")] = DEFAULT.lr,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Problems per RL step, over all ranks.")
    ] = DEFAULT.num_prompts,
    group_size: Annotated[int, typer.Option(min=2, help="Answers to each problem.")] = DEFAULT.group_size,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = DEFAULT.max_new_tokens,
    model: Annotated[
        str | None,
        typer.Option(help="A transformers checkpoint (folder or hub name). Default: the small model built here."),
    ] = DEFAULT.model,
    dtype: Annotated[
        str,
        typer.Option(
            help="float64: the same figures on any number of ranks; float32: faster, the same up to rounding."
        ),
    ] = DEFAULT.dtype,
    out: Annotated[Path, typer.Option(help="Folder for metrics, curves.png and checkpoints.")] = Path("runs/fsdp"),
    resume: Annotated[
        Path | None,
        typer.Option(help="Continue the run in this folder, with its own options, on any number of ranks."),
    ] = None,
    stop_after: Annotated[
        int | None, typer.Option(min=1, help="End after this RL step, to resume later. Default: the last.")
    ] = None,
    save_every: Annotated[int, typer.Option(min=1, help="RL steps between checkpoints.")] = 10,
) -> None:
    """Teach a language model to play Countdown on several ranks, with sharded models."""
    stop, begin = Stop(), time.perf_counter()
    silence_dependencies()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    device = start_ranks()
    try:
        with stop.on_signals():
            if resume is not None:
                settings, out = settings_of(resume, context), resume
            else:
                settings = Settings(**{name: context.params[name] for name in asdict(DEFAULT)})
                check_options(algorithm=algorithm, kl_target=kl_target, lr=lr, out=out)
                check_ranks(settings)
                if Ranks().first:
                    keep_earlier_run(out, ("metrics.jsonl", "curves.png", "run.json", *checkpoints(out)))
            run = Run(settings, out, resume=resume is not None, device=device, stop=stop)
            finished = run.train(stop_after, save_every=save_every)
            if run.step == settings.steps:
                run.accuracies.append(run.accuracy())
        if run.ranks.first:
            run.report(time.perf_counter() - begin)
            if run.step < settings.steps:
                typer.echo(f"{run.step} of {settings.steps} RL steps are done: continue with --resume {out}")
        if not finished:
            raise typer.Exit(130)
    except InterruptedError as error:
        if Ranks().first:
            typer.echo(f"\n{error}")
        raise typer.Exit(130) from None
    except typer.BadParameter:
        if Ranks().first:
            raise
        sys.exit(2)  # one rank says what is wrong
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def checkpoints(folder: Path) -> list[str]:
    """The names of the checkpoints in a folder."""
    return [path.name for path in folder.glob("checkpoint-*")]


def check_ranks(settings: Settings) -> None:
    """Check what several ranks need."""
    if settings.algorithm not in SUPPORTED:
        raise typer.BadParameter(
            f"{settings.algorithm} needs expert answers or a teacher: run it with countdown_grpo.py, or choose one of "
            f"{', '.join(SUPPORTED)}.",
            param_hint="--algorithm",
        )
    if settings.dtype not in ("float32", "float64"):
        raise typer.BadParameter(f"{settings.dtype!r} is neither float32 nor float64.", param_hint="--dtype")
    if settings.num_prompts < Ranks().count:
        raise typer.BadParameter(
            f"{settings.num_prompts} problems per step for {Ranks().count} ranks: a rank would have none. Start fewer ranks.",
            param_hint="--num-prompts",
        )


def settings_of(folder: Path, context: typer.Context) -> Settings:
    """The settings of a saved run; another one on the command line is an error."""
    if not (folder / "run.json").exists():
        raise typer.BadParameter(f"{folder} holds no checkpoint: expected run.json there.", param_hint="--resume")
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in KEPT and source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise typer.BadParameter(
                f"a resumed run keeps its own {option}: leave the option out, or start a new run.", param_hint=option
            )
    settings = Settings(**read_state(folder)["settings"])
    check_ranks(settings)
    return settings


if __name__ == "__main__":
    app()
