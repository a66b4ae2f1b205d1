"""An algorithm with its models: transforms in their order, and losses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.envs import Transform

from torchrl_llm_kl.advantages import Advantage
from torchrl_llm_kl.algorithms._algorithm import Algorithm
from torchrl_llm_kl.algorithms._schema import Schema
from torchrl_llm_kl.algorithms._selection import KeepBest
from torchrl_llm_kl.losses import PolicyLoss, ValueLoss
from torchrl_llm_kl.ragged import own_leaves
from torchrl_llm_kl.rollouts import find_key, per_sequence
from torchrl_llm_kl.transforms import RetrieveKL, RetrieveLogProb, RetrieveValue

__all__ = ["AlgorithmParts"]


@dataclass(frozen=True, eq=False)
class AlgorithmParts:
    """What :func:`make_algorithm` returns.

    Args:
        algorithm: the preset, with its overrides.
        schema: what the data holds before :meth:`prepare`.
        kl_transform: scores the policy and the reference, and puts the KL into the reward where the algorithm has it there;
            the policy alone for an algorithm without reference; None if the loss reads neither. Belongs in the env or the
            collector when the policy moves on before the data is trained on, else :meth:`prepare` does it.
        value_transform: what the critic expects, None without critic.
        advantage: the advantage, None if the objective needs none.
        selection: takes away what is not trained, None if all is.
        loss: the policy's loss.
        critic_loss: the critic's, None without critic.
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
        """In the order in which they are applied; those that are None left out."""
        parts = (self.kl_transform, self.value_transform, self.advantage, self.selection)
        return [part for part in parts if part is not None]

    def prepare(self, batch: TensorDictBase, *, count: bool = True) -> TensorDictBase:
        """Check a batch, score it, and write its advantages and the denominators of its losses.

        What was scored in the env already is not scored again, nor is what an earlier call scored; advantages are of the
        rewards that are there now. What it scored itself is marked under ``"prepared"``. A KL that was scored but not charged
        yet (the reward is an outcome) is charged.

        Args:
            batch: the rollouts of one step, whole groups; changed in place where it can be.

        Keyword Args:
            count: one step of the optimiser takes all of it: the losses of micro-batches (any rows of the result) add up to
                that of the batch. False if each minibatch is a step of its own, with its own mean.

        Returns:
            The batch, ready for :attr:`loss` and :attr:`critic_loss`.

        Raises:
            SchemaError: if an entry is missing or wrong.
        """
        self.schema.check(batch)
        for part in (self.advantage, self.selection):
            if part is not None:
                part.check_groups(batch)  # before models run
        if self.kl_transform is not None:
            batch = self._score(self.kl_transform, batch)
        if self.value_transform is not None:
            if not (_is_marked(batch, _VALUES) and find_key(batch, ("next", "state_value")) is not None):
                batch = self.value_transform(batch)
            _mark(batch, _VALUES)
        for part in (self.advantage, self.selection):
            if part is not None:
                batch = part(batch)
        return self.count(batch) if count else batch

    def count(self, batch: TensorDictBase) -> TensorDictBase:
        """Write the denominators of what one step of the optimiser takes; see :meth:`PolicyLoss.count`."""
        batch = self.loss.count(batch)
        return batch if self.critic_loss is None else self.critic_loss.count(batch)

    def _score(self, transform: RetrieveKL | RetrieveLogProb, batch: TensorDictBase) -> TensorDictBase:
        """What is not scored yet, by the env or by an earlier call."""
        if isinstance(transform, RetrieveKL):
            if find_key(batch, ("next", "kl_penalty")) is None:
                return transform(batch)
            # The penalised reward has a number for each token.
            reward = find_key(batch, ("next", "reward"))
            charged = reward is not None and per_sequence(batch, reward) is None
            return batch if charged or not transform[2].add_to_reward else transform[2](batch)
        # Log-probs at the root, unless written here, are those that torchrl's wrappers store, which miss first tokens.
        key = ("next", "log_probs", "full")
        found = find_key(batch, key)
        if found != key and not (found is not None and _is_marked(batch, _LOG_PROBS)):
            batch = transform(batch)
        _mark(batch, _LOG_PROBS)
        return batch


# Beside the rows: what an earlier call of prepare wrote.
_LOG_PROBS = ("prepared", "log_probs")
_VALUES = ("prepared", "values")


def _is_marked(batch: TensorDictBase, key: NestedKey) -> bool:
    found = None if find_key(batch, key) is None else per_sequence(batch, key)
    return found is not None and bool(found.all())


def _mark(batch: TensorDictBase, key: NestedKey) -> None:
    own_leaves(batch, key)
    batch.set(key, torch.ones(batch.batch_size, dtype=torch.bool, device=batch.device))
