"""Train on several ranks with sharded models (FSDP2). The figures are the same on any number of ranks.

Run it with ``torchrun --nproc-per-node 2 tutorials/countdown_fsdp.py``, with gloo on CPU cores or NCCL on GPUs. Without
torchrun it runs in one process. Append changes of :class:`Settings`, such as ``algorithm=ppo out=runs/ppo``. The task is
the demo's. Each rank

1. holds a share of the weights of the policy, the reference and, if there is one, the critic
2. samples and scores answers to its share of a step's problems. The noise depends on the problem's number in the run,
   so an answer does not depend on the rank that samples it.
3. receives all answers, and computes advantages and metrics from them
4. trains on its share of each minibatch. ``count`` divides by the tokens of all ranks, and FSDP adds up the gradients.

Checkpoints are sharded too (``torch.distributed.checkpoint``). The same command resumes a run on any number of ranks, with
the result of an uninterrupted run. Ctrl-C saves a checkpoint. Start reading at :meth:`Run.train`.
"""

from __future__ import annotations

import copy
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tensordict
import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from countdown.algorithms import EPOCHS, MINIBATCHES, SUPPORTED, build, label
from countdown.model import MAX_NEW_TOKENS, WARMUP_STEPS, accuracy, as_policy, make_policy, to_dtype, warm_up
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
from countdown.report import (
    Metrics,
    MetricsFile,
    plot_curves,
    print_table,
    progress,
    silence_dependencies,
    status,
    summarise,
    totals,
)
from countdown.settings import check_positive, read_settings
from countdown.task import all_problems, make_env, split_problems
from torchrl_llm_kl import PIKLCoefficient, RetrieveKL
from torchrl_llm_kl.algorithms import get_algorithm
from torchrl_llm_kl.training import chat_tokenizer, load_model, loss_entries

# Required by torchrl's LLM components, which store lists of strings as stacks.
tensordict.set_list_to_stack(True).set()


@dataclass
class Settings:
    """Settings of a run, which are saved with it. :data:`MAY_CHANGE` lists those that may change when it is resumed."""

    algorithm: str = "grpo"
    seed: int = 0  # seed of the weights, the order of the problems and the sampling
    steps: int = 80
    warmup_steps: int = WARMUP_STEPS
    kl_target: float | None = None  # nats per answer. None takes 0.5 if the algorithm has a reference.
    lr: float = 3e-4  # at the start of RL, from where it falls to 0
    num_prompts: int = 16  # per step, over all ranks
    group_size: int = 8
    max_new_tokens: int = MAX_NEW_TOKENS
    model: str | None = None  # a folder or hub name, which needs no warm-up. None takes the small model.
    dtype: str = (
        "float64"  # gives the same figures on any number of ranks. float32 is faster, and the same up to rounding.
    )
    out: str = "runs/fsdp"
    stop_after: int | None = None  # end after this step, to resume later
    save_every: int = 10


MAY_CHANGE = ("out", "stop_after", "save_every")


class Run:
    """Sharded models, an algorithm, an optimizer, and the number of finished steps.

    Args:
        settings: the settings, which must be the same on all ranks.
        out: the folder of the run. With ``resume`` it holds a checkpoint.
        device: the device of this rank.
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
        check(settings, self.ranks)
        torch.manual_seed(settings.seed)
        problems = all_problems()
        self.problems, self.held_out = split_problems(problems)
        policy, self.tokenizer = make_policy(problems) if settings.model is None else open_policy(settings.model)
        # Rounding depends on the number of ranks. In float64 it never changes a sampled token. In float32 it changes one at
        # some step, and from then on runs differ like runs with different seeds.
        self.policy = to_dtype(policy.to(device or "cpu"), getattr(torch, settings.dtype))
        rows: list[Metrics] = []
        if resume:
            saved = read_state(out)
            self.step, self.accuracies = saved["step"], saved["accuracies"]
            rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()[: self.step]]
            self.ranks.wait()  # before the first rank rewrites the file
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
        steps = settings.warmup_steps if settings.model is None else 0
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
        """Train until the last step or step ``until``, and save. Returns False if the user ended the run before."""
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
                self._learn(loss_entries(batch).to(self.policy.device))
                row = summarise(
                    batch, step=self.step, coefficient=self.coefficient, seconds=time.perf_counter() - start
                )
                self.metrics.append(row)
                if self.coefficient is not None:
                    self.coefficient.update(row["kl"], n=len(batch), all_ranks=False)  # a mean over all ranks
                self.step += 1
                advance(status(row))
                stopped = ranks.any(bool(self.stop))
                if stopped or self.step == last or self.step % save_every == 0:
                    self._save()
        return not stopped

    def _learn(self, answers: TensorDictBase) -> None:
        """Update the models on minibatches of all answers. Each rank computes the gradient of its share."""
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
                # A collector would fetch problems ahead, which a resumed run would have to skip.
                return env.rollout(1, policy).reshape(-1)

        return sample

    def accuracy(self) -> float:
        """The share of the held-out problems that greedy decoding solves. Each rank decodes its share of them."""
        own = self.held_out[self.ranks.number :: self.ranks.count]
        with whole(self.policy):
            share = accuracy(self.policy, self.tokenizer, own, max_new_tokens=self.settings.max_new_tokens)
        return self.ranks.add_up(share * len(own)) / len(self.held_out)

    # ------------------------------------------------------------------ output and checkpoints

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
        print(f"wrote {self.metrics.path}, {self.out / f'checkpoint-{self.step}'}, {plot}")


def check(settings: Settings, ranks: Ranks) -> None:
    """Raise a ValueError for invalid settings."""
    if settings.algorithm not in SUPPORTED:
        raise ValueError(f"algorithm is {settings.algorithm}: choose one of {', '.join(SUPPORTED)}")
    if settings.kl_target is not None and not get_algorithm(settings.algorithm).use_reference:
        raise ValueError(f"{settings.algorithm} has no KL penalty that could hold kl_target: leave it out")
    if settings.dtype not in ("float32", "float64"):
        raise ValueError(f"dtype is {settings.dtype}: expected float32 or float64")
    check_positive(kl_target=settings.kl_target, lr=settings.lr, steps=settings.steps, save_every=settings.save_every)
    if settings.num_prompts < ranks.count:
        raise ValueError(f"num_prompts is {settings.num_prompts} for {ranks.count} ranks: start fewer ranks")


def open_policy(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load any causal language model of transformers and its tokenizer."""
    return load_model(name, dtype="float32", device="cpu").requires_grad_(True), chat_tokenizer(name)


def is_saved(settings: Settings) -> bool:
    """Whether the folder holds a run to resume. Raises a ValueError if the run has other settings."""
    if not Path(settings.out, "run.json").exists():
        return False
    saved, now = read_state(Path(settings.out))["settings"], asdict(settings)
    kept = [name for name in now if name not in MAY_CHANGE]
    different = [f"{name} was {saved[name]}, now {now[name]}" for name in kept if saved[name] != now[name]]
    if different:
        raise ValueError(f"{settings.out} holds a run with other settings ({'; '.join(different)}): pass another out")
    return True


def main(changes: Sequence[str]) -> int:
    """Teach a language model to play Countdown on several ranks, with sharded models. Returns the exit code."""
    stop, begin = Stop(), time.perf_counter()
    silence_dependencies()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    device = start_ranks()
    try:
        with stop.on_signals():
            settings = read_settings(Settings, changes)
            run = Run(settings, Path(settings.out), resume=is_saved(settings), device=device, stop=stop)
            finished = run.train(settings.stop_after, save_every=settings.save_every)
            if run.step == settings.steps and len(run.accuracies) < 2:
                run.accuracies.append(run.accuracy())
        if run.ranks.first:
            run.report(time.perf_counter() - begin)
            if run.step < settings.steps:
                print(f"{run.step} of {settings.steps} RL steps are done: the same command continues")
        return 0 if finished else 130
    except (InterruptedError, ValueError) as error:
        if Ranks().first:
            print(f"\n{error}")  # one rank reports the error
        return 130 if isinstance(error, InterruptedError) else 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
