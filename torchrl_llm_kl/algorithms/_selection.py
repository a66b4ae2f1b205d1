"""Train the best of each group alone."""

from __future__ import annotations

from tensordict import NestedKey, TensorDictBase

from torchrl_llm_kl.advantages import Advantage
from torchrl_llm_kl.ragged import own_leaves, read_column, read_ragged, write_ragged
from torchrl_llm_kl.rollouts import per_sequence

__all__ = ["KeepBest"]

_KEY = "loss_mask"


class KeepBest(Advantage):
    """Take all but the best answers of each group out of ``loss_mask``; what is out already stays out.

    Keyword Args:
        group_key: see :class:`~torchrl_llm_kl.advantages.Advantage`.
        group_size: see there too.

    Shapes:
        bool: that of the mask in the data, ``[*B, 1]`` if there is none.
    """

    def __init__(self, *, group_key: NestedKey | None = None, group_size: int | None = None) -> None:
        super().__init__("best_of_group", group_key=group_key, group_size=group_size, keys={"advantage": _KEY})

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply to a batch: on a direct call, or when a replay buffer is sampled."""
        self.check_writable(tensordict)
        best = self._of_rows(tensordict, None)[0].reshape(-1).bool()
        given = read_column(tensordict, _KEY)
        own_leaves(tensordict, _KEY)
        if given is None:
            return tensordict.set(_KEY, best.reshape(*tensordict.batch_size, 1))
        whole = per_sequence(tensordict, _KEY)
        if whole is not None:
            shape = given[0].shape if isinstance(given, list) else given.shape[tensordict.batch_dims :]
            kept = whole.bool() & best.to(whole.device)
            return tensordict.set(_KEY, kept.reshape(*tensordict.batch_size, *shape))
        mask = read_ragged(tensordict, _KEY)
        assert mask is not None
        rows = best.to(mask.values.device)[mask.sequence_ids]
        flat = rows.reshape(-1, *[1] * (mask.values.ndim - 1))
        return write_ragged(tensordict, _KEY, mask.like(mask.values.bool() & flat).slots(), mask.container)
