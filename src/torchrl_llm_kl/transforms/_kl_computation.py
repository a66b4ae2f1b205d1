"""The KL penalty of two sets of log-probs, and the penalised reward."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from torchrl.data import Composite

from torchrl_llm_kl.estimators import as_coefficient, get_estimator
from torchrl_llm_kl.ragged import Ragged, check_padding_side, has_entry, read_column, read_ragged
from torchrl_llm_kl.transforms._base import Output, StepTransform, declare
from torchrl_llm_kl.transforms._errors import entries
from torchrl_llm_kl.transforms._interface import TOKENS_FULL, ModelInterface
from torchrl_llm_kl.transforms._located import counted_mask
from torchrl_llm_kl.transforms._pairs import check_finite, check_pair, estimate_kl, match
from torchrl_llm_kl.transforms._reward import RewardPlacement, check_reward_placement, penalised_reward

__all__ = ["KLComputation"]


class KLComputation(StepTransform):
    r"""Per-token KL between two log-prob entries, and optionally ``reward - coeff * KL``.

    Args:
        gen_log_probs_full_key: log-probs of the policy, which sampled the tokens. Default ``("log_probs", "full")``.
        ref_log_probs_full_key: log-probs of the reference. Default ``("ref_log_probs", "full")``.

    Keyword Args:
        kl_key: where the KL goes. Default ``"kl_penalty"``.
        add_to_reward: subtract ``coeff * KL`` from ``"reward"``; a missing reward counts as 0. Default True.
        coeff: a number, a tensor, or a coefficient module such as ``AdaptiveKLCoefficient``. Default 1.
        padding_side: the side of the padding, where one entry is padded and the other is nested.
        estimator: a name of :func:`~torchrl_llm_kl.estimators.get_estimator` or a function like those. Default ``"k1"``,
            whose use in the reward gives the unbiased gradient of the reverse KL.
        old_log_probs_key: log-probs at sampling time, for estimators that correct for a policy that has moved on since;
            by default the policy's, as right after sampling.
        reward_placement: where an outcome reward (one number a sequence) sits. ``"last"``: on the last assistant token,
            so that the token rewards sum to ``outcome - coeff * sum KL``; ``"broadcast"``: on every token, as torchrl.
        reward_key: default ``"reward"``.

    Shapes:
        log-probs ``[*B, T]``, padded or nested; KL in nats of the same form; reward ``[*B, T, 1]`` of the same form.
        Padding holds exactly 0. A leading run of NaN (torchrl's marker for "not scored") counts as padding.

    Raises:
        ValueError: if an entry is missing, the lengths differ (says sequence and lengths), a log-prob is NaN or infinite
            (says sequence and position), or the reward fits neither sequences nor tokens.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> data = TensorDict({
        ...     ("next", "log_probs", "full"): torch.tensor([[0.0, -1.0, -2.0]]),
        ...     ("next", "ref_log_probs", "full"): torch.tensor([[0.0, -1.5, -1.0]]),
        ...     ("next", "reward"): torch.tensor([[1.0]]),
        ... }, batch_size=[1])
        >>> data = KLComputation(coeff=0.5)(data)
        >>> data["next", "kl_penalty"].tolist(), data["next", "reward"].squeeze(-1).tolist()
        ([[0.0, 0.5, -1.0]], [[0.0, -0.25, 1.5]])
    """

    def __init__(
        self,
        gen_log_probs_full_key: NestedKey = ("log_probs", "full"),
        ref_log_probs_full_key: NestedKey = ("ref_log_probs", "full"),
        *,
        kl_key: NestedKey = "kl_penalty",
        add_to_reward: bool = True,
        coeff: float | Tensor | nn.Module = 1.0,
        padding_side: str = "left",
        estimator: Any = "k1",
        old_log_probs_key: NestedKey | None = None,
        reward_placement: RewardPlacement = "last",
        reward_key: NestedKey = "reward",
    ) -> None:
        if estimator == "exact":
            raise ValueError(
                "estimator='exact' needs both full distributions, not two log-probs per token: call "
                "torchrl_llm_kl.estimators.exact_kl on hidden states and heads"
            )
        reward_keys = [reward_key] if add_to_reward else []
        in_keys = [gen_log_probs_full_key, ref_log_probs_full_key, *reward_keys]
        super().__init__(in_keys=in_keys, out_keys=[kl_key, *reward_keys])
        self.gen_log_probs_full_key = gen_log_probs_full_key
        self.ref_log_probs_full_key = ref_log_probs_full_key
        self.kl_key = kl_key
        self.add_to_reward = add_to_reward
        self.coeff = as_coefficient(coeff)
        self.padding_side = check_padding_side(padding_side)
        self.estimator = get_estimator(estimator) if isinstance(estimator, str) else estimator
        self.old_log_probs_key = old_log_probs_key
        self.reward_placement = check_reward_placement(reward_placement)
        self.reward_key = reward_key

    @property
    def token_entries(self) -> dict[NestedKey, tuple[int, ...]]:
        """The KL."""
        return {self.kl_key: ()}

    def outputs(self, td: TensorDictBase, next_td: TensorDictBase) -> list[Output]:
        """Read the two entries and compute."""
        gen = self._read(td, next_td, self.gen_log_probs_full_key)
        ref = self._read(td, next_td, self.ref_log_probs_full_key)
        gen, ref = check_pair(gen, ref, padding_side=self.padding_side)
        # Who spoke matters to the place of the outcome alone.
        assistant = _response(td, gen) if self.add_to_reward else None
        return self.compute(gen, ref, assistant, next_td, old=self.read_old(td, next_td, gen))

    def read_old(self, td: TensorDictBase, next_td: TensorDictBase, gen: Ragged) -> Ragged | None:
        """Log-probs at sampling time, in the form of ``gen``; None if no key was given."""
        if self.old_log_probs_key is None:
            return None
        old = self._read(td, next_td, self.old_log_probs_key)
        return match(gen, old, repr(self.old_log_probs_key), padding_side=self.padding_side)

    def _read(self, td: TensorDictBase, next_td: TensorDictBase, key: NestedKey) -> Ragged:
        attention = ("masks", "all_attention_mask")
        source = next_td if has_entry(next_td, key) else td
        value = read_ragged(source, key)
        if value is None:
            found = entries(td) if td is next_td else f"{entries(td)}; in 'next': {entries(next_td)}"
            raise ValueError(
                f"Log-probs not found. Expected keys: {self.gen_log_probs_full_key}, {self.ref_log_probs_full_key}. "
                f"Missing: {key!r}. Found: {found}. Put RetrieveLogProb before, or give the keys that hold them."
            )
        mask = read_ragged(td, attention)
        if mask is None or not torch.equal(mask.container.row_lengths, value.container.row_lengths):
            return value
        return Ragged.from_slots(value.slots(), value.container, mask.slots().bool())

    def compute(
        self,
        gen: Ragged,
        ref: Ragged,
        assistant: Tensor | None,
        next_td: TensorDictBase,
        *,
        old: Ragged | None = None,
    ) -> list[Output]:
        """KL and reward of two matching sets of log-probs.

        Args:
            gen: the policy's log-probs; ``[N]``.
            ref: the reference's; ``[N]``.
            assistant: the assistant's tokens, for the place of the outcome; ``[N]``; None for all.
            next_td: holds the reward.
            old: log-probs at sampling time; ``[N]``.
        """
        kl = gen.like(self._kl(gen, ref, old))
        outputs = [Output.of(self.kl_key, kl)]
        if self.add_to_reward:
            mask = torch.ones_like(kl.values, dtype=torch.bool) if assistant is None else assistant
            reward = read_column(next_td, self.reward_key)
            penalised = penalised_reward(reward, kl, mask, self.coeff, self.reward_placement)
            outputs.append(Output.of(self.reward_key, penalised))
        return outputs

    def _kl(self, gen: Ragged, ref: Ragged, old: Ragged | None) -> Tensor:
        scored = check_finite(gen, "the policy", self.gen_log_probs_full_key)
        scored = scored & check_finite(ref, "the reference", self.ref_log_probs_full_key)
        if old is None:
            old = gen.like(gen.values.detach())
        else:
            scored = scored & check_finite(old, "the policy at sampling time", self.old_log_probs_key or "")
        return estimate_kl(self.estimator, gen.values, ref.values, old.values, scored)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """The penalised reward: one number for each token, ``[*B, -1, 1]``."""
        if self.add_to_reward:
            declare(reward_spec, self.reward_key, (1,))
        return reward_spec


def _response(td: TensorDictBase, log_prob: Ragged) -> Tensor | None:
    """Which of these tokens are the assistant's, if the data is a rollout that says so; ``[N]``."""
    tokens = read_ragged(td, TOKENS_FULL)
    if tokens is None or not torch.equal(tokens.container.row_lengths, log_prob.container.row_lengths):
        return None
    return counted_mask(td, Ragged.from_slots(tokens.slots(), log_prob.container, log_prob.keep), ModelInterface())
