"""The KL penalty of two sets of log-probs, and the penalised reward."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from torchrl.data import Composite

from torchrl_llm_kl.estimators import as_coefficient, get_estimator
from torchrl_llm_kl.ragged import Ragged, check_padding_side, read_column, read_ragged, same_rows
from torchrl_llm_kl.transforms._base import Output, StepTransform, declare
from torchrl_llm_kl.transforms._errors import entries
from torchrl_llm_kl.transforms._interface import TOKENS_FULL, ModelInterface
from torchrl_llm_kl.transforms._located import counted_mask
from torchrl_llm_kl.transforms._pairs import check_finite, check_finite_kl, check_pair, estimate_kl, match
from torchrl_llm_kl.transforms._reward import RewardPlacement, check_reward_placement, penalised_reward

__all__ = ["KLComputation"]

_ATTENTION: NestedKey = ("masks", "all_attention_mask")
_OTHER_TOKENS = "only one of them has tokens: RetrieveLogProb(policy, reference=reference) writes both on the same data"


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
            whose use in the reward gives the unbiased gradient of the reverse KL. ``"exact"`` estimates nothing: the KL
            over the whole vocabulary is read from ``exact_kl_key``, and the log-probs need not be there (the policy's, if
            they are, must be of the same tokens).
        old_log_probs_key: log-probs at sampling time, for estimators that correct for a policy that has moved on since;
            by default the policy's, as right after sampling.
        reward_placement: where an outcome reward (one number a sequence) sits. ``"last"``: on the last assistant token,
            so that the token rewards sum to ``outcome - coeff * sum KL``; ``"broadcast"``: on every token, as torchrl.
        reward_key: default ``"reward"``.
        exact_kl_key: where ``RetrieveLogProb(policy, reference=reference)`` wrote the exact KL. Only with
            ``estimator="exact"``, whose default is ``("exact_kl", "full")``.

    Shapes:
        log-probs and exact KL ``[*B, T]``, padded or nested; KL in nats of the same form; reward ``[*B, T, 1]`` of the same
        form. Padding holds exactly 0. A leading run of NaN (torchrl's marker for "not scored") counts as padding.

    Raises:
        ValueError: if an entry is missing, the lengths differ (says sequence and lengths), a log-prob or an exact KL is NaN
            or infinite (says sequence and position), or the reward fits neither sequences nor tokens; at construction,
            for ``exact_kl_key`` with an estimator, and ``old_log_probs_key`` without one.

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
        exact_kl_key: NestedKey | None = None,
    ) -> None:
        exact_kl_key = _checked_exact_key(estimator, exact_kl_key, old_log_probs_key)
        reward_keys = [reward_key] if add_to_reward else []
        read = [gen_log_probs_full_key, ref_log_probs_full_key] if exact_kl_key is None else [exact_kl_key]
        super().__init__(in_keys=[*read, *reward_keys], out_keys=[kl_key, *reward_keys])
        self.gen_log_probs_full_key = gen_log_probs_full_key
        self.ref_log_probs_full_key = ref_log_probs_full_key
        self.kl_key = kl_key
        self.add_to_reward = add_to_reward
        self.coeff = as_coefficient(coeff)
        self.padding_side = check_padding_side(padding_side)
        named = isinstance(estimator, str) and estimator != "exact"
        self.estimator = get_estimator(estimator) if named else estimator
        self.exact_kl_key = exact_kl_key
        self.old_log_probs_key = old_log_probs_key
        self.reward_placement = check_reward_placement(reward_placement)
        self.reward_key = reward_key

    def __setattr__(self, name: str, value: Any) -> None:
        # Later too, a coefficient may be given as a number.
        super().__setattr__(name, as_coefficient(value) if name == "coeff" else value)

    @property
    def token_entries(self) -> dict[NestedKey, tuple[int, ...]]:
        """The KL."""
        return {self.kl_key: ()}

    def outputs(self, td: TensorDictBase, next_td: TensorDictBase) -> list[Output]:
        """Read the entries and compute."""
        kl = self._kl_of_entries(td, next_td)
        # Who spoke matters to the place of the outcome alone.
        assistant = _response(td, kl) if self.add_to_reward else None
        return self._outputs(kl, assistant, next_td)

    def _kl_of_entries(self, td: TensorDictBase, next_td: TensorDictBase) -> Ragged:
        attention = read_ragged(td, _ATTENTION)
        if self.exact_kl_key is not None:
            exact = self._read(td, next_td, self.exact_kl_key, attention)
            gen = _find(td, next_td, self.gen_log_probs_full_key, attention)
            if gen is not None:
                gen, exact = check_pair(gen, exact, "exact_kl", padding_side=self.padding_side, advice=_OTHER_TOKENS)
            return (exact if gen is None else gen).like(self._exact(exact))
        gen = self._read(td, next_td, self.gen_log_probs_full_key, attention)
        ref = self._read(td, next_td, self.ref_log_probs_full_key, attention)
        gen, ref = check_pair(gen, ref, padding_side=self.padding_side)
        return gen.like(self._estimate(gen, ref, self.read_old(td, next_td, gen)))

    def read_old(self, td: TensorDictBase, next_td: TensorDictBase, gen: Ragged) -> Ragged | None:
        """Log-probs at sampling time, in the form of ``gen``; None if no key was given."""
        if self.old_log_probs_key is None:
            return None
        old = self._read(td, next_td, self.old_log_probs_key, read_ragged(td, _ATTENTION))
        return match(gen, old, repr(self.old_log_probs_key), padding_side=self.padding_side)

    def _read(self, td: TensorDictBase, next_td: TensorDictBase, key: NestedKey, attention: Ragged | None) -> Ragged:
        value = _find(td, next_td, key, attention)
        if value is not None:
            return value
        found = entries(td) if td is next_td else f"{entries(td)}; in 'next': {entries(next_td)}"
        if key == self.exact_kl_key:
            raise ValueError(
                f"Exact KL not found. Expected key: {key!r}. Found: {found}. Put RetrieveLogProb(policy, "
                f"reference=reference) before, which writes it, or give the key that holds it."
            )
        raise ValueError(
            f"Log-probs not found. Expected keys: {self.gen_log_probs_full_key}, {self.ref_log_probs_full_key}. "
            f"Missing: {key!r}. Found: {found}. Put RetrieveLogProb before, or give the keys that hold them."
        )

    def compute(
        self,
        gen: Ragged,
        ref: Ragged | None,
        assistant: Tensor | None,
        next_td: TensorDictBase,
        *,
        old: Ragged | None = None,
        exact: Ragged | None = None,
    ) -> list[Output]:
        """KL and reward of two matching sets of log-probs.

        Args:
            gen: the policy's log-probs; ``[N]``.
            ref: the reference's; ``[N]``; None with ``exact``.
            assistant: the assistant's tokens, for the place of the outcome; ``[N]``; None for all.
            next_td: holds the reward.
            old: log-probs at sampling time; ``[N]``.
            exact: the KL over the whole vocabulary; ``[N]``; then nothing is estimated.
        """
        kl = gen.like(self._estimate(gen, ref, old) if exact is None else self._exact(exact))
        return self._outputs(kl, assistant, next_td)

    def _outputs(self, kl: Ragged, assistant: Tensor | None, next_td: TensorDictBase) -> list[Output]:
        outputs = [Output.of(self.kl_key, kl)]
        if self.add_to_reward:
            reward = read_column(next_td, self.reward_key)
            penalised = penalised_reward(reward, kl, assistant, self.coeff, self.reward_placement)
            outputs.append(Output.of(self.reward_key, penalised))
        return outputs

    def _estimate(self, gen: Ragged, ref: Ragged | None, old: Ragged | None) -> Tensor:
        assert ref is not None
        masks = [
            check_finite(gen, "the policy", self.gen_log_probs_full_key),
            check_finite(ref, "the reference", self.ref_log_probs_full_key),
        ]
        if old is not None:
            masks.append(check_finite(old, "the policy at sampling time", self.old_log_probs_key or ""))
        some = [mask for mask in masks if mask is not None]
        scored = reduce(torch.logical_and, some) if some else None
        sampling = gen.values.detach() if old is None else old.values
        return estimate_kl(self.estimator, gen.values, ref.values, sampling, scored)

    def _exact(self, kl: Ragged) -> Tensor:
        scored = check_finite_kl(kl, self.exact_kl_key or "")
        values = kl.values.to(torch.promote_types(kl.values.dtype, torch.float32), copy=True)
        return values if scored is None else torch.where(scored, values, 0)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """The penalised reward: one number for each token, ``[*B, -1, 1]``."""
        if self.add_to_reward:
            declare(reward_spec, self.reward_key, (1,))
        return reward_spec


def _checked_exact_key(estimator: Any, key: NestedKey | None, old_key: NestedKey | None) -> NestedKey | None:
    """Where the exact KL is, None for an estimator of log-probs."""
    if estimator != "exact":
        if key is not None:
            raise ValueError(f"exact_kl_key={key!r} is read with estimator='exact' only, found estimator={estimator!r}")
        return None
    if old_key is not None:
        raise ValueError(
            f"old_log_probs_key={old_key!r} corrects an estimate from sampled tokens; estimator='exact' makes none"
        )
    return ("exact_kl", "full") if key is None else key


def _find(td: TensorDictBase, next_td: TensorDictBase, key: NestedKey, attention: Ragged | None) -> Ragged | None:
    """An entry of the step's result, else of the step, without its padding; ``[N]``."""
    value = read_ragged(next_td, key)
    if value is None and next_td is not td:
        value = read_ragged(td, key)
    if value is None or attention is None:
        return value
    if not same_rows(attention.container, value.container):
        return value
    return Ragged.from_slots(value.slots(), value.container, attention.slots().bool())


def _response(td: TensorDictBase, log_prob: Ragged) -> Tensor | None:
    """Which of these tokens are the assistant's, if the data is a rollout that says so; ``[N]``."""
    tokens = read_ragged(td, TOKENS_FULL)
    if tokens is None or not same_rows(tokens.container, log_prob.container):
        return None
    kept = Ragged.from_slots(tokens.slots(), log_prob.container, log_prob.keep)
    return counted_mask(td, kept, ModelInterface(), every=tokens)
