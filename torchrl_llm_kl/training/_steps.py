"""The parts of a training step: the sampler, updates, the learning rate, figures, evaluation and random numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import NormalDist
from typing import Any, TypedDict

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchrl.envs import EnvBase

from torchrl_llm_kl.algorithms import AlgorithmParts
from torchrl_llm_kl.diagnostics import RunMonitor
from torchrl_llm_kl.losses import LossOutput
from torchrl_llm_kl.ragged import has_entry
from torchrl_llm_kl.scoring import LogProbScorer
from torchrl_llm_kl.tasks import whole_episodes
from torchrl_llm_kl.training._config import OptimizerConfig
from torchrl_llm_kl.training._ranks import Ranks, whole
from torchrl_llm_kl.transforms import RetrieveKL, RetrieveLogProb

_Z95 = NormalDist().inv_cdf(0.975)
#: Two-sided 95 % quantiles of Student's t with 1 to 10 degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
#: The entries that the losses read.
LOSS_KEYS = (
    *(("tokens", name) for name in ("full", "prompt")),
    *(("masks", name) for name in ("all_attention_mask", "all_assistant_mask")),
    *(("next", name, "full") for name in ("log_probs", "ref_log_probs", "sampler_log_probs", "behavior_log_probs")),
    *(("next", name) for name in ("entropy", "moments", "state_value", "top_k")),
    *(("kept", name) for name in ("counts", "ids")),
    *("top_k", "routed_experts", "images", "advantage", "value_target", "loss_mask", "expert_mask", "age"),
)

# ------------------------------------------------------------------ answers


def forget_scores(env: nn.Module) -> None:
    """Clear the caches of a transform, or of an env's transforms, so that a step depends only on its own prompts.

    A cached prefix may differ in its last bit from a computed one. A resumed run starts with empty caches, so it would not be
    bit-equal.

    Example:
        >>> forget_scores(env)  # doctest: +SKIP
    """
    for part in env.modules():
        if isinstance(part, RetrieveLogProb):
            for scorer in (part.scorer, part.reference_scorer):
                if isinstance(scorer, LogProbScorer):  # the replicas of a service manage their own caches
                    scorer.forget()


# ------------------------------------------------------------------ updates


def loss_entries(batch: TensorDictBase) -> TensorDictBase:
    """Select the entries that losses read, without text, and dense unless rows differ in length: rows are indexed faster.

    Example:
        >>> from tensordict import TensorDict
        >>> batch = TensorDict(advantage=torch.ones(2, 3), other=torch.ones(2), batch_size=[2])
        >>> list(loss_entries(batch).keys())
        ['advantage']
    """
    chosen = batch.select(*LOSS_KEYS, strict=False)
    ragged = any(-1 in chosen.get_item_shape(key) for key in chosen.keys(True, True))
    return chosen if ragged else chosen.contiguous()


def learn(
    parts: AlgorithmParts,
    batch: TensorDictBase,
    optimizer: torch.optim.Optimizer,
    *,
    epochs: int = 1,
    minibatches: int = 1,
    micro_batch: int | None = None,
    max_grad_norm: float = 1.0,
    monitor: RunMonitor | None = None,
    after_update: Callable[[], object] | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Update the models of an algorithm on a prepared batch.

    Args:
        parts: the result of :func:`~torchrl_llm_kl.make_algorithm`.
        batch: the result of ``parts.prepare``. Only its :func:`loss_entries` are needed, which is faster.
        optimizer: the optimiser of the parameters of ``parts.losses``.

    Keyword Args:
        epochs: the number of passes over the batch.
        minibatches: the number of updates in a pass. torch's generator chooses the rows of each, over which the mean is taken.
        micro_batch: the largest number of rows in one forward, whose gradients add up. None for a whole minibatch.
        max_grad_norm: the gradient of each model is scaled down to this norm. 0 sets no limit.
        monitor: gets the numbers of the losses.
        after_update: called after each update, such as ``ReferenceUpdater.step``.
        ranks: the ranks that share each minibatch. All pass the same batch, with torch's generator in the same state.

    Raises:
        FloatingPointError: if a gradient is not finite. The weights are not changed then.

    Example:
        >>> learn(parts, loss_entries(parts.prepare(batch)), optimizer, minibatches=4)  # doctest: +SKIP
    """
    with _in_training_mode(parts):
        for _ in range(epochs):
            for minibatch in parts.minibatches(batch, minibatches):
                optimizer.zero_grad()
                outputs = [_backward(parts, piece) for piece in _pieces(parts, minibatch, micro_batch, ranks)]
                if ranks is not None:
                    ranks.average_gradients([p for loss in parts.losses for p in _trained(loss)])
                    outputs = [[ranks.means(outputs)]]
                for output in (output for each in outputs for output in each):
                    if monitor is not None:
                        monitor.add(output)
                limit = max_grad_norm or float("inf")
                norms = [clip_gradients(_trained(loss), limit) for loss in parts.losses]
                if monitor is not None:
                    monitor.add({"grad_norm": norms[0]})
                # Before the step: a gradient that is not finite would destroy all weights.
                if not all(bool(norm.isfinite()) for norm in norms):
                    advice = "look at diagnosis.txt and rollouts.html, and at the learning rate"
                    raise FloatingPointError(f"the gradient's norm is {float(norms[0])}: {advice}.")
                optimizer.step()
                if after_update is not None:
                    after_update()


def _pieces(
    parts: AlgorithmParts, minibatch: TensorDictBase, size: int | None, ranks: Ranks | None
) -> list[TensorDictBase]:
    """The rows of each forward on this rank. All ranks get equally many pieces, since their forwards wait for one another."""
    if ranks is None:
        return [minibatch] if size is None else list(parts.micro_batches(minibatch, size=size))
    own = parts.shares(minibatch, ranks.count)[ranks.number]
    pieces = [parts.count(own)] if size is None or not len(own) else list(parts.micro_batches(own, size=size))
    return pieces + [pieces[0][:0]] * (ranks.most(len(pieces)) - len(pieces))


def _backward(parts: AlgorithmParts, piece: TensorDictBase) -> list[Mapping[str, Any]]:
    """Add up the gradients of the losses of a piece. Returns their numbers."""
    outputs: list[Mapping[str, Any]] = []
    for loss in parts.losses:
        output: LossOutput = loss(piece)
        output.total_loss.backward()
        outputs.append(dict(output.detach().items()))
    return outputs


def clip_gradients(parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
    """Scale gradients down to a norm. Returns their norm before. It is the norm over all ranks of sharded parameters.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_gradients([weight], 1.0)
        tensor(5.)
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _trained(loss: nn.Module) -> list[nn.Parameter]:
    return [p for p in loss.parameters() if p.requires_grad]


@contextmanager
def _in_training_mode(parts: AlgorithmParts) -> Iterator[None]:
    """Put a model with activation checkpointing into training mode, the only one in which transformers uses it."""
    actor = getattr(parts.loss, "actor_network", None)
    if actor is None or not any(getattr(part, "gradient_checkpointing", False) for part in actor.modules()):
        yield
        return
    actor.train()
    try:
        yield
    finally:
        actor.eval()


def make_optimizer(parts: AlgorithmParts, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimiser of the models of an algorithm.

    Example:
        >>> optimizer = make_optimizer(parts, config.optimizer)  # doctest: +SKIP
    """
    groups = [
        {"params": _trained(loss), "lr": lr}
        for loss, lr in zip(parts.losses, (config.lr, config.critic_lr or config.lr), strict=False)
    ]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, weight_decay=config.weight_decay)
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    first, second = config.betas
    return kind(groups, lr=config.lr, betas=(first, second), eps=config.eps, weight_decay=config.weight_decay)


def make_schedule(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, *, steps: int, done: int = 0
) -> torch.optim.lr_scheduler.LRScheduler:
    """The schedule of the learning rate, after ``done`` of ``steps`` steps.

    The rate depends only on the step, so a checkpoint does not hold the schedule.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> schedule = make_schedule(optimizer, OptimizerConfig(schedule="linear", warmup_steps=2), steps=6, done=3)
        >>> schedule.get_last_lr()
        [0.75]
    """
    warmup, rest = config.warmup_steps, steps - config.warmup_steps

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / rest)
        return {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2}[config.schedule]

    for group in optimizer.param_groups:  # LambdaLR needs it if it does not start at step 0
        group.setdefault("initial_lr", group["lr"])
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor, last_epoch=done - 1)


# ------------------------------------------------------------------ the first coefficient


def first_coefficient(
    batch: TensorDictBase, target: float, *, charged: bool, coefficient: float = 0.0, compares: bool = True
) -> float | None:
    r"""The coefficient whose optimal policy has about the target KL, estimated from the first answers.

    The policy that maximises ``reward - coefficient * KL`` is the reference times ``exp(reward / coefficient)``. If the rewards
    of a prompt's answers have variance ``v``, its KL is ``v / (2 * coefficient ** 2)`` up to terms of third order. So the
    coefficient is ``sqrt(v / (2 * target))``. A penalty in the loss competes with the advantages, whose variance then
    stands for ``v``.

    Args:
        batch: the prepared answers of the first step, dense, ``[B]``.
        target: KL in nats per answer, positive.

    Keyword Args:
        charged: whether the KL was subtracted from the rewards. Otherwise it is a term of the loss.
        coefficient: the coefficient with which the rewards were charged.
        compares: whether the algorithm compares the answers of a group. Otherwise all answers form one group.

    Returns:
        The coefficient. None if the batch has no advantages, or rewards do not differ.

    Example:
        >>> from tensordict import TensorDict
        >>> first_coefficient(TensorDict(advantage=torch.tensor([[1.0], [-1.0]]), batch_size=[2]), 0.5, charged=False)
        1.0

    Source: Korbak et al. 2022, "RL with KL penalties is better viewed as Bayesian inference" (arXiv 2205.11275) derive the
    optimum. Its expansion for small KLs is our own.
    """
    if charged:
        columns = answer_columns(batch)
        rewards = (columns["reward"] + coefficient * columns.get("kl", 0.0)).double()
        alike = torch.zeros(len(rewards), dtype=torch.long, device=rewards.device)
        groups = episode_groups(batch).to(alike.device) if compares and has_entry(batch, "group") else alike
        _, index, counts = groups.unique(return_inverse=True, return_counts=True)
        means = torch.zeros_like(counts, dtype=torch.double).index_add_(0, index, rewards) / counts
        # Unbiased, since each group has a mean of its own.
        variance = (rewards - means[index]).square().sum() / max(len(rewards) - len(counts), 1)
    elif (advantage := batch.get("advantage", None)) is not None:
        mask = batch.get(("masks", "all_assistant_mask"), torch.ones_like(advantage, dtype=torch.bool)).flatten(1)
        values = advantage.reshape(len(advantage), -1).expand(mask.shape)[mask].double()
        variance = values.var(correction=0)  # a constant baseline changes no gradient
    else:
        return None
    value = (variance / (2 * target)).sqrt().item()
    return value if 1e-6 < value < math.inf else None


# ------------------------------------------------------------------ figures


def step_figures(
    batch: TensorDictBase, *, coefficient: nn.Module | None = None, charged: bool = False, compares: bool = True
) -> dict[str, float]:
    """Means over the answers of a step.

    Args:
        batch: prepared answers, ``[B]``.

    Keyword Args:
        coefficient: the coefficient of the KL.
        charged: whether coefficient times KL was subtracted from the rewards.
        compares: whether the algorithm compares the answers of a group. Otherwise all answers of the step form one group.

    Returns:
        The figures that the batch allows:

        - ``reward``, each named part ``reward/<name>``, and ``reward_failures``
        - ``equal_rewards``, the share of groups whose answers all have the same reward before a KL is charged, if the batch
          has an entry ``"group"``
        - ``kl`` in nats per answer, ``coefficient``, and ``penalised_reward`` if the KL is charged to the reward
        - the sums over all answers ``answer_tokens`` and ``tokens``

    Example:
        >>> from tensordict import TensorDict
        >>> reward, kl = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.1, 0.3], [0.2, 0.2]])
        >>> step_figures(TensorDict(next=TensorDict(reward=reward, kl_penalty=kl, batch_size=[2]), batch_size=[2]))
        {'reward': 0.5, 'kl': 0.4...}
    """
    columns, after = answer_columns(batch), batch["next"]
    figures: dict[str, float] = {}
    rewards, kl = columns.get("reward"), columns.get("kl")
    value = 0.0 if coefficient is None else coefficient().item()
    if rewards is not None:
        rounding = torch.zeros_like(rewards)
        if charged and kl is not None:  # add the KL back, to get the rewards before it was charged
            figures["penalised_reward"] = rewards.mean().item()
            # Adding it back rounds, so rewards that differ by less than this bound count as equal.
            size = _episode_sums(batch, after["kl_penalty"].flatten(1).abs().sum(-1))
            rounding = 1e-5 * (rewards.abs() + value * size)
            rewards = rewards + value * kl
        figures["reward"] = rewards.mean().item()
        if "group" in batch.keys():  # noqa: SIM118
            group = episode_groups(batch)
            figures["equal_rewards"] = _equal_share(rewards, rounding, group if compares else torch.zeros_like(group))
    if kl is not None:
        of_sampler = sampled_kl(batch) if has_entry(batch, "policy_version") else None
        figures["kl"] = (kl if of_sampler is None else of_sampler).mean().item()
        if coefficient is not None:
            figures["coefficient"] = value
    figures |= {name: values.mean().item() for name, values in columns.items() if name.startswith("reward/")}
    if "reward_failures" in after.keys() and after["reward_failures"].any():  # noqa: SIM118
        figures["reward_failures"] = float(after["reward_failures"].sum())
    if "answer_tokens" in columns:
        figures["answer_tokens"] = int(columns["answer_tokens"].sum())
        figures["tokens"] = batch["masks", "all_attention_mask"].sum().item()
    return figures


def sampled_kl(batch: TensorDictBase) -> Tensor | None:
    """The ``k1`` of a sampler with weights of its own, sampler minus reference, for each episode, ``[episodes]``.

    The trainer's log-probs of older tokens would estimate another number: the sampler's KL to the reference less its KL to the
    trainer.

    Returns:
        None if the batch lacks the log-probs of one of them.
    """
    names = (("next", "sampler_log_probs", "full"), ("log_probs", "full"))
    key = next((name for name in names if has_entry(batch, name)), None)
    if key is None or not has_entry(batch, ("next", "ref_log_probs", "full")):
        return None
    sampler = batch[key]
    off = sampler - batch["next", "ref_log_probs", "full"]
    # 0 and NaN stand at tokens that the sampler did not draw.
    return _episode_sums(batch, torch.where((sampler != 0) & sampler.isfinite(), off, 0).flatten(1).sum(-1))


def answer_columns(batch: TensorDictBase) -> dict[str, Tensor]:
    """The numbers of each episode of a batch by name, as far as the batch has them: sums over its turns, ``[episodes]``.

    Example:
        >>> from tensordict import TensorDict
        >>> answer_columns(TensorDict(next=TensorDict(reward=torch.ones(2, 1), batch_size=[2]), batch_size=[2]))
        {'reward': tensor([1., 1.])}
    """
    after = batch["next"]
    sums = {name: after.get(key, None) for name, key in (("reward", "reward"), ("kl", "kl_penalty"))}
    columns = {name: values.flatten(1).sum(-1) for name, values in sums.items() if values is not None}
    parts = after.get("rewards", None)
    if parts is not None:
        columns |= {f"reward/{name}": parts[name].flatten().float() for name in parts.keys()}  # noqa: SIM118
    names = ("all_assistant_mask", "all_attention_mask")  # a conversation's row also has tokens of tools and users
    real = next((batch["masks", name] for name in names if has_entry(batch, ("masks", name))), None)
    if real is not None:
        if has_entry(batch, "expert_mask") and batch["expert_mask"].shape == real.shape:
            real = real & ~batch["expert_mask"]  # echo also trains tokens of tools
        columns["answer_tokens"] = real[:, batch["tokens", "prompt"].shape[-1] :].sum(-1).float()
    return {name: _episode_sums(batch, values) for name, values in columns.items()}


def _episode_sums(batch: TensorDictBase, values: Tensor) -> Tensor:
    """Sum a column ``[B]`` over the turns of each episode, whose rows are neighbours."""
    if not has_entry(batch, "run"):
        return values
    _, index = batch["run"].flatten().to(values.device).unique_consecutive(return_inverse=True)
    return values.new_zeros(int(index[-1]) + 1).index_add_(0, index, values)


def count_episodes(batch: TensorDictBase) -> int:
    """The number of episodes of a batch.

    Example:
        >>> from tensordict import TensorDict
        >>> count_episodes(TensorDict(run=torch.tensor([[4], [4], [5]]), batch_size=[3]))
        2
    """
    return len(batch["run"].flatten().unique_consecutive()) if has_entry(batch, "run") else len(batch)


def episode_groups(batch: TensorDictBase) -> Tensor:
    """The number of each episode's prompt, ``[episodes]``. Without several turns each row is an episode."""
    groups = batch["group"].flatten()
    if has_entry(batch, "run"):
        runs = batch["run"].flatten()
        groups = groups[runs.diff(prepend=runs.new_full((1,), -1)) != 0]
    return groups


def _equal_share(rewards: Tensor, rounding: Tensor, group: Tensor) -> float:
    """The share of groups whose rewards are equal up to ``rounding``. All arguments are ``[B]``."""
    groups, index = group.to(rewards.device).unique(return_inverse=True)
    # A group is equal if its largest reward is at most its smallest one plus the slack.
    nothing = rewards.new_full((len(groups),), -math.inf)
    largest, less, slack = (
        nothing.scatter_reduce(0, index, values, "amax") for values in (rewards, -rewards, rounding)
    )
    return (largest + less <= slack).float().mean().item()


@torch.no_grad()
def evaluate(
    env: EnvBase,
    sampler: TensorDictModuleBase,
    num_prompts: int,
    *,
    seed: int = 0,
    kl: RetrieveKL | None = None,
    rows: Callable[[TensorDictBase], TensorDictBase] | None = None,
    ranks: Ranks | None = None,
) -> dict[str, float]:
    """Evaluate a policy's answers to the first prompts of an env.

    The state of the random generators is restored afterwards.

    Args:
        env: a new env of :func:`~torchrl_llm_kl.tasks.make_env` with one answer to each prompt and ``PromptOrder(seed=None)``.
        sampler: the policy, such as :func:`make_sampler`.
        num_prompts: the number of prompts.

    Keyword Args:
        seed: the seed of the answers.
        kl: a transform that scores the answers, if the env has none.
        rows: applied to the answers before they are scored, such as :func:`~torchrl_llm_kl.tasks.join_turns`.
        ranks: the ranks that share the prompts by the ``rank`` and ``world_size`` of their envs' orders.

    Returns:
        - the means over the answers ``reward``, ``reward/<name>`` of each named part, and ``answer_tokens``
        - ``reward_error``, the standard error of the reward, with several prompts
        - the ends of the 95 % intervals of the rewards, ``low/reward``, ``high/reward`` and so on, if they exist
          (:func:`interval`)
        - ``kl`` in nats per answer, if the env writes ``("next", "kl_penalty")``
        - ``num_prompts``

    Example:
        >>> env = make_env(held_out, reward, tokenizer, group_size=1, order=PromptOrder(seed=None))  # doctest: +SKIP
        >>> evaluate(env, sampler, 200)  # doctest: +SKIP
    """
    columns: dict[str, list[float]] = {}
    done, ranks = 0, ranks or Ranks()
    with apart(seed):
        while done < num_prompts:
            with whole(sampler):
                batch = whole_episodes(env, sampler)
            batch = batch if rows is None else rows(batch)
            own = answer_columns(batch if kl is None else kl(batch))
            shares = ranks.gather({name: values.flatten().tolist() for name, values in own.items()})
            for name in own:
                values = [value for share in shares for value in share[name]]
                columns.setdefault(name, []).extend(values[: num_prompts - done])
            done += env.batch_size.numel() * ranks.count
    figures = {name: mean_and_error(values)[0] for name, values in columns.items()}
    if num_prompts > 1:
        figures["reward_error"] = mean_and_error(columns["reward"])[1]
    for name in [name for name in columns if name.startswith("reward")]:
        ends = interval(columns[name])
        if ends is not None:
            figures[f"low/{name}"], figures[f"high/{name}"] = ends
    return {**figures, "num_prompts": num_prompts}


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of the mean of independent values.

    It is Wilson's score interval if all values are 0 or 1, otherwise the interval of Student's t.

    Returns:
        The ends of the interval. None for a single value, and for equal values other than 0 and 1, which give no estimate of
        the deviation.

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
    half = (_T95[n - 2] if n - 2 < len(_T95) else _Z95 + 2.5 / (n - 1)) * error  # approximates the quantile to 1 %
    return mean - half, mean + half


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean of independent values, and its standard error.

    Example:
        >>> mean_and_error([0.0, 1.0, 1.0, 0.0])
        (0.5, 0.288...)
    """
    data = torch.tensor(values, dtype=torch.float64)
    error = data.std().item() / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return data.mean().item(), error


# ------------------------------------------------------------------ random numbers


class RandomState(TypedDict):
    """The states of the random generators, as :func:`random_state` returns them."""

    torch: Tensor
    accelerators: list[Tensor]
    python: tuple[object, ...]
    numpy: tuple[Any, ...]


def random_state() -> RandomState:
    """The state of the generators of torch (CPU and accelerators), Python and NumPy, as tensors and plain values.

    Example:
        >>> state = random_state()
        >>> first = torch.rand(1), random.random()
        >>> set_random_state(state)
        >>> (torch.rand(1), random.random()) == first
        True
    """
    import numpy as np

    name, keys, *rest = np.random.get_state(legacy=True)  # reward functions may use NumPy's generator
    return {
        "torch": torch.get_rng_state(),
        "accelerators": [each.get_state() for each in _generators()],
        "python": random.getstate(),
        "numpy": (str(name), np.asarray(keys).tolist(), *rest),
    }


def _generators() -> Sequence[torch.Generator]:
    """The generators of the accelerator's devices. Empty before the process uses the accelerator."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    module = None if accelerator is None else torch.get_device_module(accelerator)
    return getattr(module, "default_generators", ())


def set_random_state(state: RandomState) -> None:
    """Restore the states that :func:`random_state` returned.

    Example:
        >>> set_random_state(random_state())
    """
    import numpy as np

    torch.set_rng_state(state["torch"].cpu())
    for generator, saved in zip(_generators(), state["accelerators"], strict=False):
        generator.set_state(saved.cpu())
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])


def seed_everything(seed: int) -> None:
    """Seed the generators of torch, Python and NumPy.

    Example:
        >>> seed_everything(0)
    """
    import numpy as np

    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # NumPy takes 32 bits


@contextmanager
def apart(seed: int) -> Iterator[None]:
    """Seed the generators in a block, and restore their states afterwards.

    Example:
        >>> seed_everything(0)
        >>> with apart(1):
        ...     _ = torch.rand(3)
        >>> inside = torch.rand(1)
        >>> seed_everything(0)
        >>> bool(inside == torch.rand(1))
        True
    """
    state = random_state()
    seed_everything(seed)
    try:
        yield
    finally:
        set_random_state(state)
