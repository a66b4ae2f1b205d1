"""An algorithm with its models: transforms in their order, and losses."""

from __future__ import annotations

from dataclasses import dataclass

from tensordict import TensorDictBase
from torchrl.envs import Transform

from torchrl_llm_kl.advantages import Advantage
from torchrl_llm_kl.algorithms._algorithm import Algorithm
from torchrl_llm_kl.algorithms._schema import Schema
from torchrl_llm_kl.losses import PolicyLoss, ValueLoss
from torchrl_llm_kl.losses._entries import find_key
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
    selection: Advantage | None = None
    critic_loss: ValueLoss | None = None

    @property
    def transforms(self) -> list[Transform]:
        """In the order in which they are applied; those that are None left out."""
        parts = (self.kl_transform, self.value_transform, self.advantage, self.selection)
        return [part for part in parts if part is not None]

    def prepare(self, batch: TensorDictBase, *, count: bool = True) -> TensorDictBase:
        """Check a batch, score it, and write its advantages and the denominators of its losses.

        What was scored in the env already is not scored again.

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
        for transform in self.transforms:
            if transform is not self.kl_transform or not self._is_scored(batch):
                batch = transform(batch)
        return self.count(batch) if count else batch

    def count(self, batch: TensorDictBase) -> TensorDictBase:
        """Write the denominators of what one step of the optimiser takes; see :meth:`PolicyLoss.count`."""
        batch = self.loss.count(batch)
        return batch if self.critic_loss is None else self.critic_loss.count(batch)

    def _is_scored(self, batch: TensorDictBase) -> bool:
        if isinstance(self.kl_transform, RetrieveKL):
            return find_key(batch, ("next", "kl_penalty")) is not None
        # Log-probs at the root are those that torchrl's wrappers store, which miss first tokens.
        key = ("next", "log_probs", "full")
        return find_key(batch, key) == key
