"""The parts of a run: its step, its evaluations and its checkpoints."""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase

from torchrl_llm_kl._typing import asked
from torchrl_llm_kl.diagnostics import RunMonitor, log_metrics
from torchrl_llm_kl.estimators import AdaptiveKLCoefficient, DualKLCoefficient, PIKLCoefficient
from torchrl_llm_kl.ragged import has_entry
from torchrl_llm_kl.rollouts import drop_stale
from torchrl_llm_kl.scoring import PolicyVersions, ScoreOptions, VersionedScorer
from torchrl_llm_kl.tasks import PromptOrder, Prompts, turn_counts, turn_figures, whole_episodes
from torchrl_llm_kl.training import _report, _steps
from torchrl_llm_kl.training._alarms import alarms_of, since_change
from torchrl_llm_kl.training._answers import (
    Answers,
    CopiedWeights,
    Weights,
    age_figures,
    record_log_probs,
    sampler_gap,
)
from torchrl_llm_kl.training._build import BEHAVIOR, Reference, load_reference, measured_kl, sampling_of
from torchrl_llm_kl.training._changes import at_step, changed_state, changes_of, prompts_used
from torchrl_llm_kl.training._checkpoints import Checkpoint, Checkpoints
from torchrl_llm_kl.training._config import TrainConfig
from torchrl_llm_kl.training._engine import EngineSampler, StartedEngine, check_engine, open_engine
from torchrl_llm_kl.training._inputs import RunInputs, env_of, load_inputs
from torchrl_llm_kl.training._models import device_of_setting, load_policy, save_policy
from torchrl_llm_kl.training._ranks import (
    Ranks,
    load_shards,
    on_the_cpu,
    save_shards,
    shard,
    whole,
    whole_weights,
)
from torchrl_llm_kl.training._report import Figures, FiguresFile
from torchrl_llm_kl.training._samplers import keyed_generator, make_sampler
from torchrl_llm_kl.transforms import RetrieveLogProb

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: The coefficients whose value is the weight of the KL. A controller of the user may mean something else by it.
_ADAPTIVE = (AdaptiveKLCoefficient, DualKLCoefficient, PIKLCoefficient)
#: The coefficients that average the KL over the ranks unless they are told that it is averaged.
_OVER_RANKS = (DualKLCoefficient, PIKLCoefficient)

#: The entries of a sampler's own log-probs.
_OF_SAMPLER = (("log_probs", "full"), ("next", "sampler_log_probs"))
#: Nats per token up to which a difference of the sampler's log-probs is rounding.
_LARGEST_GAP = 0.05

Say = Callable[[str], None]


class Run:
    """The parts of a run, and its steps.

    Args:
        config: the settings of the run.

    Keyword Args:
        saved: the checkpoint to resume from. None starts a new run.
        say: a function that gets messages for the user.
        inputs: the inputs of the run except its models. None loads them.
        begin: called after everything is loaded, before the first file is written.

    Example:
        >>> run = Run(read_config("config.yaml"))  # doctest: +SKIP
        >>> run.take_step()["reward"]  # doctest: +SKIP
        0.25
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        saved: Checkpoint | None = None,
        say: Say = print,
        inputs: RunInputs | None = None,
        begin: Callable[[], None] | None = None,
    ) -> None:
        self.config, self.out, self.say, self.ranks = config, Path(config.run.out), say, Ranks.current()
        if config.run.threads is not None:
            torch.set_num_threads(config.run.threads)
        self.step, self.begun, self.seconds = 0 if saved is None else saved.step, time.perf_counter(), 0.0
        self.changes, self.alarms = changes_of(saved), alarms_of(config)
        self.inputs = load_inputs(config) if inputs is None else inputs
        self.tokenizer = self.inputs.tokenizer
        _steps.seed_everything(config.run.seed)
        self.sharded = self.ranks.shards(config)
        loading = on_the_cpu(config) if self.sharded else config
        with self.ranks.together():
            self.policy = load_policy(loading, None if saved is None else saved.folder / "model")
            self.reference: Reference | None = load_reference(loading)
        device = device_of_setting(config.model.device)
        self.parts, self.kl, self.updater = replace(self.inputs.plan, config=loading).build(
            self.policy, self.reference, shard=partial(shard, device=device) if self.sharded else None
        )
        self.behavior: RetrieveLogProb | None = None
        if config.algorithm.exact_old:
            options = ScoreOptions(sampling_of(config))
            self.versions = VersionedScorer(self.policy, options, keep=config.algorithm.max_staleness + 1)
            self.behavior = RetrieveLogProb(
                self.versions, log_probs_full_key=BEHAVIOR[1:], options=options, extras=[PolicyVersions()]
            )
        self.optimizer = _steps.make_optimizer(self.parts, config.optimizer)
        self.schedule = _steps.make_schedule(self.optimizer, config.optimizer, steps=config.run.steps, done=self.step)
        _steps.seed_everything(config.run.seed)  # loading the parts above may have used random numbers
        if saved is not None:
            self._load(saved)
        self._record()
        self.ranks.of_first(partial(check_engine, config))
        if begin is not None:
            self.ranks.of_first(begin)
        names = ("metrics.jsonl", "evaluations.jsonl")
        before = [[] if saved is None else _report.read_figures(saved.folder / name) for name in names]
        self.rows, self.evaluations = (
            FiguresFile(self.out / name, rows, writes=self.ranks.first)
            for name, rows in zip(names, before, strict=True)
        )
        self.engine, served = None, None
        if config.sampler.is_server:
            self.engine, served = open_engine(config, self.policy, self.tokenizer, self.ranks, say)
        try:
            self.answers = self._answers(served)
            self.monitor = self._monitor()
        except BaseException:
            if isinstance(self.engine, StartedEngine):  # nobody else would end it
                self.engine.close()
            raise

    # ------------------------------------------------------------------ parts

    def _env(
        self, inputs: RunInputs, prompts: Prompts, order: PromptOrder, num_prompts: int, group_size: int
    ) -> EnvBase:
        """The env of this rank's share of the prompts."""
        order, count = replace(order, rank=self.ranks.number, world_size=self.ranks.count), self.ranks.count
        make = partial(env_of, self.config, inputs, prompts, order=order)
        return make(num_prompts=-(-num_prompts // count), group_size=group_size)

    def _answers(self, weights: Weights | None) -> Answers:
        """The source of the batches of the training. ``weights`` belong to a server."""
        config, inputs, policy = self.config, self.inputs, self.policy
        data, ahead = config.data, config.algorithm.max_staleness
        copied = CopiedWeights(policy) if ahead and weights is None else None
        if ahead:  # tokenizers cannot be used by two threads
            inputs = replace(inputs, tokenizer=copy.deepcopy(inputs.tokenizer))
            policy = policy if copied is None else copied.copy
        used = prompts_used(self.step, data.num_prompts, self.changes)
        order = PromptOrder(config.run.seed if data.shuffle else None, used)
        env = self._env(inputs, inputs.prompts, order, data.num_prompts, data.group_size)
        self.sampler = sampler = self._sampler(inputs.tokenizer, policy, greedy=False)

        def sample() -> TensorDictBase:
            return inputs.rows(whole_episodes(env, sampler))

        if copied is not None:
            sample = record_log_probs(sample, copied.copy, ScoreOptions(sampling_of(config)))
        return Answers(sample, weights=weights or copied, version=self.step, ahead=ahead)

    def _sampler(
        self, tokenizer: PreTrainedTokenizerBase, policy: PreTrainedModel, *, greedy: bool, evaluates: bool = False
    ) -> TensorDictModuleBase:
        settings, seed, ahead = self.config.sampler, self.config.run.seed, self.config.algorithm.max_staleness
        sampling = None if greedy else sampling_of(self.config)
        if self.engine is not None and not (evaluates and ahead):  # a server that samples ahead has older weights
            ends = policy.generation_config.eos_token_id
            given: Any = {"ends": [] if ends is None else torch.tensor([ends]).flatten().tolist(), "seed": seed}
            how = partial(EngineSampler, self.engine, tokenizer, **given)
        else:
            own = ahead or self.ranks.active  # an answer must depend neither on the rank nor on the thread
            how = partial(make_sampler, policy, tokenizer, seed=seed if own else None)
        return how(max_new_tokens=settings.max_new_tokens, sampling=sampling, end=settings.end)

    def _monitor(self) -> RunMonitor:
        every, first = self.config.logging.doctor_every, self.ranks.first
        loggers = _report.make_loggers(self.config, self.out / "logs") if first else []
        earlier = [(row["step"], row) for row in self.rows.rows]  # the rows of earlier processes
        earlier += [(row["step"], _evaluation_log(row)) for row in self.evaluations.rows]
        for logger in loggers:
            if type(logger).__name__ in ("CSVLogger", "TensorboardLogger"):  # W&B and MLflow keep the earlier values
                for step, row in earlier:
                    log_metrics(logger, row, int(step))
        return RunMonitor(
            loggers,
            every=every,
            folder=self.out if every and first else None,
            tokenizer=self.tokenizer,
            policy=self.policy,
            kl_target=self.config.kl.target,
            end=self.config.sampler.end,
            sampling=sampling_of(self.config),
        )

    # ------------------------------------------------------------------ a step

    def take_step(self) -> Figures:
        """Sample answers, learn from them, and adapt the coefficient. Returns the figures of the step."""
        algorithm, plan = self.config.algorithm, self.inputs.plan
        batch = self.sample()
        ages = age_figures(batch, algorithm.max_staleness)
        with _steps.apart(self.step):  # so that the frequency of the doctor does not affect the training
            # Older weights differ by design, and the doctor would name a cause for it.
            old = bool(ages) and ages["age_max"] > 0
            self.monitor.look(self.step, batch.exclude(*_OF_SAMPLER) if old else batch)
        charged, compares = plan.algorithm.kl_reward != "none", plan.algorithm.compares_answers
        if not charged:
            self._start_coefficient(batch, charged=False, compares=compares)
        figures = _steps.step_figures(batch, coefficient=plan.coefficient, charged=charged, compares=compares)
        if charged and figures.get("equal_rewards") != 1:  # this batch was charged with the coefficient before
            self._start_coefficient(batch, charged=True, compares=compares)
        if self.step == 0 and figures.get("equal_rewards") == 1 and algorithm.teacher is None:
            self.say(
                f"warning: all answers of the first step have the same reward, {figures['reward']:.4g}, from which nothing is "
                "learnt: look at the reward function and the prompts, or raise data.group_size."
            )
        figures |= ages | self._turns
        if algorithm.max_staleness:
            figures["wait_seconds"] = self.answers.waited
        self._watch_sampler(batch, figures)
        figures["lr"] = self.optimizer.param_groups[0]["lr"]
        entries = _steps.loss_entries(batch)
        if self.inputs.experts is not None:
            entries = self.inputs.experts.beside(entries, self.step)
        if self.ranks.active:  # the user's code may have drawn different random numbers on each rank
            _steps.seed_everything(keyed_generator(self.config.run.seed, self.step).initial_seed())
        _steps.learn(
            self.parts,
            entries,
            self.optimizer,
            epochs=algorithm.epochs,
            minibatches=algorithm.minibatches,
            micro_batch=algorithm.micro_batch,
            max_grad_norm=self.config.optimizer.max_grad_norm,
            monitor=self.monitor,
            after_update=None if self.updater is None else self.updater.step,
            ranks=self.ranks if self.ranks.active else None,
        )
        self.schedule.step()
        if plan.coefficient is not None and "kl" in figures:
            how = {"all_ranks": False} if self.ranks.active and isinstance(plan.coefficient, _OVER_RANKS) else {}
            plan.coefficient.update(figures["kl"], n=_steps.count_episodes(batch), **how)  # type: ignore[operator]
        row = {"step": self.step, **self.monitor.step(self.step, **figures), "seconds": self.elapsed}
        self.rows.append(row)
        self.step += 1
        # Before the sampler gets these weights, since its answers are scored under their version.
        self._record()
        self.answers.updated()
        return row

    def _record(self) -> None:
        """Keep the present weights, before answers are sampled with them."""
        if self.behavior is not None:
            self.versions.record(self.step)

    def _watch_sampler(self, batch: TensorDictBase, figures: Figures) -> None:
        """Compare the log-probs of a separate sampler with the trainer's, and warn if its weights are not the newest."""
        gap = sampler_gap(batch) if "policy_version" in batch.keys() else None  # noqa: SIM118
        if gap is None:
            return
        figures["sampler_gap"] = gap
        gaps = [row["sampler_gap"] for row in self.rows.rows if "sampler_gap" in row]
        first = gaps[0] if gaps else gap
        limit = max(_LARGEST_GAP, 4 * min(first, _LARGEST_GAP))  # a first value may be wrong, too
        if self.config.algorithm.max_staleness:  # the gap includes the steps between both weights
            limit = 1.0
        if gap > limit and (not gaps or gaps[-1] <= limit):  # once, not at each step
            self.say(
                f"warning: the sampler's log-probs are {gap:.3g} nats per token from the trainer's, at the first step "
                f"{first:.3g}: it may have older weights, or another temperature or truncation."
            )

    def _start_coefficient(self, batch: TensorDictBase, *, charged: bool, compares: bool) -> None:
        """At the first step with different rewards, set a coefficient that adapts to a target and was not given."""
        kl, coefficient = self.config.kl, self.inputs.plan.coefficient
        given = kl.coefficient is not None or "init" in kl.controller_args
        started = any(row.get("equal_rewards") != 1 for row in self.rows.rows)
        if kl.target is None or given or started or not isinstance(coefficient, _ADAPTIVE):
            return
        how = {"coefficient": coefficient().item(), "compares": compares}
        first = _steps.first_coefficient(batch, kl.target, charged=charged, **how)
        if first is not None:
            low, high = (asked(coefficient, name, (int, float)) for name in ("low", "high"))
            coefficient.value.fill_(min(max(first, low or 0.0), math.inf if high is None else high))

    def sample(self) -> TensorDictBase:
        """Sample and score the answers of a step, and compute their advantages."""
        with nullcontext() if self.config.algorithm.max_staleness else whole(self.sampler):
            batch = self.answers.take()
        if has_entry(batch, "policy_version"):
            batch = drop_stale(batch, self.step, max_age=self.config.algorithm.max_staleness)
        self._turns = turn_figures(sum(self.ranks.gather(turn_counts(batch)), Counter[str]()))
        batch = self.parts.prepare(self.score(batch))
        # Scores are kept, and advantages are computed from the answers of all ranks.
        return self.parts.prepare(self.ranks.gather_rows(batch)) if self.ranks.active else batch

    def score(self, batch: TensorDictBase) -> TensorDictBase:
        """Score sampled answers with the policy, the reference and the weights that sampled. Charge the KL if asked to."""
        if self.behavior is not None:  # weights that are too old are not held, and their rows are left out of the loss
            old = batch["age"] > self.config.algorithm.max_staleness
            batch["policy_version"] = batch["policy_version"].masked_fill(old, -1)
        for scores in (self.kl, self.behavior):
            if scores is not None:
                _steps.forget_scores(scores)
                batch = scores(batch)
        return batch

    @property
    def elapsed(self) -> float:
        """The seconds of the run in this process and earlier ones."""
        return self.seconds + time.perf_counter() - self.begun

    # ------------------------------------------------------------------ evaluations

    def evaluation_is_due(self) -> bool:
        """Whether an evaluation is due at this step and not done yet."""
        every, step = self.config.evaluation.every, self.step
        due = every > 0 and (step % every == 0 or step >= self.config.run.steps)
        return due and self.inputs.held_out is not None and all(row["step"] != step for row in self.evaluations.rows)

    def evaluate(self) -> Figures:
        """Evaluate the held-out prompts, and store the figures."""
        settings, kl, held_out = self.config.evaluation, None, self.inputs.held_out
        assert held_out is not None
        # k1 is unbiased only for sampled answers, and a service cannot compute the exact KL that greedy answers need.
        if self.reference is not None and (isinstance(self.reference, (str, torch.nn.Module)) or not settings.greedy):
            kl = measured_kl(self.config, self.policy, self.reference, "exact" if settings.greedy else "k1")
        size, seed = min(settings.batch_size, len(held_out)), self.config.run.seed
        env = self._env(self.inputs, held_out, PromptOrder(seed=None), size, 1)
        sampler = self._sampler(self.tokenizer, self.policy, greedy=settings.greedy, evaluates=True)
        row = {
            "step": self.step,
            **_steps.evaluate(env, sampler, len(held_out), seed=seed, kl=kl, rows=self.inputs.rows, ranks=self.ranks),
        }
        self.evaluations.append(row)
        for logger in self.monitor.loggers:
            log_metrics(logger, _evaluation_log(row), self.step)
        return row

    @property
    def best(self) -> int | None:
        """The step with the best reward on held-out prompts. The first one if several are equal."""
        rows = self.evaluations.rows
        return int(max(rows, key=lambda row: row["reward"])["step"]) if rows else None

    # ------------------------------------------------------------------ the end

    def blow_up(self) -> str:
        """The reason why the KL or another figure ends the run. Empty if none does."""
        rows = since_change(self.rows.rows, self.changes)
        return next(filter(None, (alarm.met(rows) for alarm in self.alarms)), "")

    def close(self) -> None:
        """End the sampler, and leave the service of the reference. The service ends with its last run."""
        self.answers.close()
        if isinstance(self.engine, StartedEngine):
            self.engine.close()
        close = getattr(self.reference, "close", None)
        if close is not None:
            close()

    # ------------------------------------------------------------------ checkpoints

    def save(self, checkpoints: Checkpoints) -> None:
        """Write a checkpoint of everything that the next step depends on. All ranks call it."""
        numbers: dict[str, object] = {"config": self.config.to_dict(), "files": self.inputs.files}
        numbers |= {"versions": _report.versions(), "seconds": self.elapsed, "best": self.best}
        numbers["ranks"], numbers["changes"] = self.ranks.count if self.ranks.active else None, self.changes
        with self.ranks.writing(lambda: checkpoints.writing(self.step, numbers, best=self.best)) as folder:
            weights = None
            if self.sharded:
                weights = whole_weights(self.policy)
                save_shards(folder / "shards", self.optimizer, self._models(), self.updater)
            if self.ranks.first:
                self._write(folder, weights)

    def _write(self, folder: Path, weights: dict[str, torch.Tensor] | None) -> None:
        """Write everything that one rank can write. ``weights`` are the gathered weights of a sharded policy."""
        save_policy(self.policy, self.tokenizer, folder / "model", weights=weights)
        state = {"random": _steps.random_state(), "parts": self.parts.state_dict()}
        if not self.sharded:
            state["optimizer"] = self.optimizer.state_dict()
            if self.updater is not None:
                state["reference"] = self.updater.state_dict()
        torch.save(state, folder / "state.pt")
        if self.parts.critic_loss is not None and not self.sharded:
            from safetensors.torch import save_model

            save_model(self.parts.critic_loss.critic_network, str(folder / "critic.safetensors"))
        for file in (self.rows, self.evaluations):
            (folder / file.path.name).write_text(file.text, encoding="utf-8")

    def _models(self) -> torch.nn.ModuleDict:
        """The models that are trained, by name."""
        critic = self.parts.critic_loss
        models = {"policy": self.policy} | ({} if critic is None else {"critic": critic.critic_network})
        return torch.nn.ModuleDict(models)

    def _load(self, saved: Checkpoint) -> None:
        """Restore everything except the policy's weights, which are already loaded."""
        # `weights_only` runs no code of the file.
        state = torch.load(saved.folder / "state.pt", map_location="cpu", weights_only=True)
        # The rate and other settings of the configuration, since run.steps or they may have changed after the checkpoint.
        settings = [{**group, "params": None} for group in self.optimizer.param_groups]
        if self.sharded:
            load_shards(saved.folder / "shards", self.optimizer, self._models(), self.updater)
        else:
            self.optimizer.load_state_dict(state["optimizer"])
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(own | {"params": group["params"]})
        keys = at_step(self.changes, self.step)
        if keys:
            state["parts"] = changed_state(state["parts"], self.parts, self.inputs.plan.coefficient, keys)
        self.parts.load_state_dict(state["parts"])
        if self.updater is not None and not self.sharded:
            self.updater.load_state_dict(state["reference"])
        if self.parts.critic_loss is not None and not self.sharded:
            from safetensors.torch import load_model

            load_model(self.parts.critic_loss.critic_network, str(saved.folder / "critic.safetensors"))
        self.seconds = float(saved.numbers["seconds"])
        _steps.set_random_state(state["random"])


def _evaluation_log(row: Mapping[str, float]) -> dict[str, float]:
    return {f"evaluation/{name}": value for name, value in row.items() if name not in ("step", "num_prompts")}
