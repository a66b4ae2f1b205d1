"""An algorithm with its models: transforms in their order, losses, and the preparation of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.envs import Transform

from torchrl_llm_kl.advantages import Advantage
from torchrl_llm_kl.algorithms._algorithm import Algorithm
from torchrl_llm_kl.algorithms._schema import Schema
from torchrl_llm_kl.losses import PolicyLoss, ValueLoss
from torchrl_llm_kl.ragged import own_leaves, read_column, read_ragged, write_ragged
from torchrl_llm_kl.rollouts import find_key, per_sequence
from torchrl_llm_kl.transforms import RetrieveKL, RetrieveLogProb, RetrieveValue

_LOSS_MASK = "loss_mask"
# Beside the rows: marks of what an earlier call of `prepare` scored.
_LOG_PROBS_SCORED = ("prepared", "log_probs")
_VALUES_SCORED = ("prepared", "values")


@dataclass(frozen=True, eq=False)
class AlgorithmParts:
    """What :func:`make_algorithm` returns.

    Args:
        algorithm: the preset, with its overrides.
        schema: what the data holds before :meth:`prepare`.
        loss: the policy's loss.
        kl_transform: scores the policy and the reference, and subtracts the KL from the reward if the algorithm does; scores
            the policy alone for an algorithm without reference; None if the loss reads neither. Append it to the env or the
            collector if the policy is updated before the data is trained on; otherwise :meth:`prepare` applies it.
        value_transform: writes the critic's values; None without critic.
        advantage: writes the advantage; None if the objective needs none.
        selection: masks out what is not trained on; None if everything is.
        critic_loss: the critic's loss; None without critic.
    """

    algorithm: Algorithm
    schema: Schema
    loss: PolicyLoss
    kl_transform: RetrieveKL | RetrieveLogProb | None = None
    value_transform: RetrieveValue | None = None
    advantage: Advantage | None = None
    selection: KeepBest | None = None
    critic_loss: ValueLoss | None = None

    @property
    def transforms(self) -> list[Transform]:
        """The transforms that are not None, in the order in which :meth:`prepare` applies them."""
        parts = (self.kl_transform, self.value_transform, self.advantage, self.selection)
        return [part for part in parts if part is not None]

    def prepare(self, batch: TensorDictBase, *, count: bool = True) -> TensorDictBase:
        """Check a batch, score it, and write its advantages and the denominators of its losses.

        What the env or an earlier call has scored is not scored again. Advantages are computed from the current rewards. A KL
        that was scored but not subtracted yet (the reward is one number per sequence) is subtracted.

        Args:
            batch: the rollouts of one step, whole groups; changed in place where possible.

        Keyword Args:
            count: write denominators, so that the losses of micro-batches (any rows of the result) add up to the loss of the
                batch. False if each minibatch is an optimiser step of its own, with its own mean.

        Returns:
            The batch, ready for :attr:`loss` and :attr:`critic_loss`.

        Raises:
            SchemaError: if an entry is missing or wrong.
        """
        self.schema.check(batch)
        written = [part for part in (self.advantage, self.selection) if part is not None]
        for part in written:
            part.check_groups(batch)  # before models run
        if self.kl_transform is not None:
            batch = self._score(self.kl_transform, batch)
        if self.value_transform is not None:
            if not _is_marked(batch, _VALUES_SCORED) or find_key(batch, ("next", "state_value")) is None:
                batch = self.value_transform(batch)
            _mark(batch, _VALUES_SCORED)
        for part in written:
            batch = part(batch)
        return self.count(batch) if count else batch

    def count(self, batch: TensorDictBase) -> TensorDictBase:
        """Write the denominators for one optimiser step on the whole batch; see :meth:`PolicyLoss.count`."""
        batch = self.loss.count(batch)
        return batch if self.critic_loss is None else self.critic_loss.count(batch)

    def _score(self, transform: RetrieveKL | RetrieveLogProb, batch: TensorDictBase) -> TensorDictBase:
        """Score what neither the env nor an earlier call has scored."""
        if isinstance(transform, RetrieveKL):
            if find_key(batch, ("next", "kl_penalty")) is None:
                return transform(batch)
            # A penalised reward has one number per token.
            reward = find_key(batch, ("next", "reward"))
            penalised = reward is not None and per_sequence(batch, reward) is None
            return batch if penalised or not transform[2].add_to_reward else transform[2](batch)
        # torchrl's wrappers store log-probs at the root, without those of first tokens; ours are marked.
        key = ("next", "log_probs", "full")
        found = find_key(batch, key)
        if found != key and not (found is not None and _is_marked(batch, _LOG_PROBS_SCORED)):
            batch = transform(batch)
        _mark(batch, _LOG_PROBS_SCORED)
        return batch


def _is_marked(batch: TensorDictBase, key: NestedKey) -> bool:
    marks = None if find_key(batch, key) is None else per_sequence(batch, key)
    return marks is not None and bool(marks.all())


def _mark(batch: TensorDictBase, key: NestedKey) -> None:
    own_leaves(batch, key)
    batch.set(key, torch.ones(batch.batch_size, dtype=torch.bool, device=batch.device))


class KeepBest(Advantage):
    """Clear ``loss_mask`` for all but the best answers of each group; what is False already stays False.

    Keyword Args:
        group_key: see :class:`~torchrl_llm_kl.advantages.Advantage`.
        group_size: see :class:`~torchrl_llm_kl.advantages.Advantage`.

    Shapes:
        bool, in the shape of the mask in the data; ``[*B, 1]`` if there is none.
    """

    def __init__(self, *, group_key: NestedKey | None = None, group_size: int | None = None) -> None:
        super().__init__("best_of_group", group_key=group_key, group_size=group_size, keys={"advantage": _LOSS_MASK})

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply to a batch: on a direct call, or when a replay buffer is sampled."""
        self.check_writable(tensordict)
        best = self._of_rows(tensordict, None)[0].reshape(-1).bool()
        given = read_column(tensordict, _LOSS_MASK)
        own_leaves(tensordict, _LOSS_MASK)
        if given is None:
            return tensordict.set(_LOSS_MASK, best.reshape(*tensordict.batch_size, 1))
        whole = per_sequence(tensordict, _LOSS_MASK)
        if whole is not None:
            shape = given[0].shape if isinstance(given, list) else given.shape[tensordict.batch_dims :]
            kept = whole.bool() & best.to(whole.device)
            return tensordict.set(_LOSS_MASK, kept.reshape(*tensordict.batch_size, *shape))
        mask = read_ragged(tensordict, _LOSS_MASK)
        assert mask is not None
        rows = best.to(mask.values.device)[mask.sequence_ids].reshape(-1, *[1] * (mask.values.ndim - 1))
        return write_ragged(tensordict, _LOSS_MASK, mask.like(mask.values.bool() & rows).slots(), mask.container)
