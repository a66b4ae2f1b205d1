"""The KL of two sets of log-probs in the data, and the penalised reward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn

from torchrl_llm_kl._numerics import finite_total, send, wide_dtype
from torchrl_llm_kl.estimators import as_coefficient
from torchrl_llm_kl.ragged import Ragged, check_padding_side, on_host, read_ragged, same_rows
from torchrl_llm_kl.rollouts import (
    ATTENTION_MASK,
    TOKENS_FULL,
    ModelInterface,
    RewardPlacement,
    assistant_mask,
    describe_entries,
    read_result,
)
from torchrl_llm_kl.scoring import EntrySpec
from torchrl_llm_kl.transforms._base import Setting
from torchrl_llm_kl.transforms._penalty import LOG_PROB_ADVICE, Estimator, KLPenalty, check_pair, match, where_scored

_Entry = tuple[str, NestedKey | None, Ragged]
_DEFAULTS = ModelInterface()
_OTHER_TOKENS = (
    "only one of them has tokens: RetrieveLogProb(policy, extras=[ExactKL(reference)]) writes both on the same data"
)
_EXACT_KL_ADVICE = (
    "It is infinite where the reference excludes a token that the policy allows; check both models' weights and dtypes. "
    "RetrieveLogProb(policy, extras=[ExactKL(reference)]) writes this entry."
)


class KLComputation(KLPenalty):
    r"""Per-token KL between two log-prob entries, and optionally ``reward - coeff * KL``.

    Append it after all transforms that write the reward: the penalised reward has one number per token.

    Args:
        gen_log_probs_full_key: log-probs of the policy, which sampled the tokens. Default ``("log_probs", "full")``.
        ref_log_probs_full_key: log-probs of the reference. Default ``("ref_log_probs", "full")``.

    Keyword Args:
        kl_key: where the KL goes. Default ``"kl_penalty"``.
        add_to_reward: subtract ``coeff * KL`` from the reward; a missing reward is 0. Default True.
        coeff: a number of at least 0, a tensor, or a coefficient module such as ``AdaptiveKLCoefficient``. Default 1.
        padding_side: the side of the padding, where one entry is padded and the other is nested.
        estimator: a name of :func:`~torchrl_llm_kl.estimators.get_estimator` or a function like those. Default ``"k1"``,
            whose use in the reward has the unbiased gradient of the reverse KL. ``"exact"`` reads the KL over the whole
            vocabulary from the attribute ``exact_kl_key``, ``("exact_kl", "full")``, where :class:`ExactKL`
            writes it; the log-probs are then optional (the policy's, if present, must be of the same tokens).
        old_log_probs_key: log-probs at sampling time, for estimators that correct for later policy updates; by default the
            policy's, as right after sampling.
        reward_placement: where an outcome reward (one number per sequence) goes. ``"last"``: on the last assistant token,
            so that the token rewards sum to ``outcome - coeff * sum KL``; ``"broadcast"``: on every token, as in torchrl.
        reward_key: default ``"reward"``.
        charged_key: where to record what was subtracted from each token's reward, ``coeff * KL``. Default None: nowhere.

    Every argument is an attribute that may change at any time; keys and specs follow.

    Shapes:
        log-probs and exact KL ``[*B, T]``, padded or nested; KL in nats in the same layout; reward ``[*B, T, 1]`` in the
        same layout. Padding holds exactly 0. A leading run of NaN (torchrl's marker for "not scored") is padding.

    Raises:
        ValueError: if an entry is missing, the lengths differ (names sequence and lengths), a log-prob or an exact KL is
            NaN or infinite (names sequence and position), or the reward fits neither sequences nor tokens; for
            ``old_log_probs_key`` with an exact KL.

    Example:
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

    gen_log_probs_full_key = Setting[NestedKey]()
    ref_log_probs_full_key = Setting[NestedKey]()
    exact_kl_key = Setting[NestedKey]()
    old_log_probs_key = Setting["NestedKey | None"]()
    kl_key = Setting[NestedKey]()
    charged_key = Setting["NestedKey | None"]()
    coeff = Setting(as_coefficient)
    padding_side = Setting(check_padding_side)

    def __init__(
        self,
        gen_log_probs_full_key: NestedKey = ("log_probs", "full"),
        ref_log_probs_full_key: NestedKey = ("ref_log_probs", "full"),
        *,
        kl_key: NestedKey = "kl_penalty",
        add_to_reward: bool = True,
        coeff: float | Tensor | nn.Module = 1.0,
        padding_side: str = "left",
        estimator: Estimator = "k1",
        old_log_probs_key: NestedKey | None = None,
        reward_placement: RewardPlacement = "last",
        reward_key: NestedKey = "reward",
        charged_key: NestedKey | None = None,
    ) -> None:
        super().__init__()
        self.gen_log_probs_full_key, self.ref_log_probs_full_key = gen_log_probs_full_key, ref_log_probs_full_key
        self.kl_key, self.reward_key, self.add_to_reward = kl_key, reward_key, add_to_reward
        self.coeff, self.charged_key = coeff, charged_key
        self.padding_side, self.reward_placement, self.estimator = padding_side, reward_placement, estimator
        self.old_log_probs_key, self.exact_kl_key = old_log_probs_key, ("exact_kl", "full")
        self.declare()

    def keys(self) -> tuple[list[NestedKey], list[NestedKey]]:
        """In: log-probs or exact KL, and the reward. Out: the KL, and the penalised reward."""
        if self.old_log_probs_key is not None and self.estimator == "exact":
            raise ValueError(
                f"old_log_probs_key={self.old_log_probs_key!r} corrects an estimate from sampled tokens, and estimator='exact' "
                "reads the KL: leave one of them out."
            )
        log_probs = [self.gen_log_probs_full_key, self.ref_log_probs_full_key]
        read = [self.exact_kl_key] if self.estimator == "exact" else log_probs
        reward = [self.reward_key] if self.add_to_reward else []
        return [*read, *reward], [*self.entries, *reward]

    @property
    def entries(self) -> dict[NestedKey, EntrySpec]:
        """The KL, and the record of what was charged."""
        charged = [self.charged_key] if self.charged_key and self.add_to_reward else []
        return dict.fromkeys([self.kl_key, *charged], EntrySpec())

    # ------------------------------------------------------------------ computation

    def outputs(self, td: TensorDictBase, next_td: TensorDictBase) -> dict[NestedKey, Ragged]:
        """Read the log-probs, or the exact KL, and charge the KL to the reward."""
        exact = self.estimator == "exact"
        keys = [self.gen_log_probs_full_key, self.exact_kl_key if exact else self.ref_log_probs_full_key]
        keys += [] if self.old_log_probs_key is None else [self.old_log_probs_key]
        entries = [read_result(td, next_td, key) for key in keys]
        # Masks and prompts come to the host with the answer whether all numbers are finite.
        total = finite_total(*_used(entries[1:] if exact else entries, read_ragged(td, ATTENTION_MASK)))
        host, total = on_host(td, _DEFAULTS.token_keys, total)
        finite, attention = math.isfinite(total), read_ragged(host, ATTENTION_MASK)
        gen, other, *old = (None if x is None else _at_tokens(x, attention) for x in entries)
        for i, key in enumerate(keys):
            if entries[i] is None and (i > 0 or not exact):
                self._missing(td, next_td, key)
        assert other is not None
        if exact:
            if gen is not None:
                gen, other = check_pair(gen, other, "exact_kl", padding_side=self.padding_side, advice=_OTHER_TOKENS)
            kl = self.checked_exact(other, other if gen is None else gen, finite=finite)
        else:
            assert gen is not None
            gen, other = check_pair(gen, other, padding_side=self.padding_side)
            read = [
                ("the log-prob of the policy", self.gen_log_probs_full_key, gen),
                ("the log-prob of the reference", self.ref_log_probs_full_key, other),
            ]
            kl = self.estimate(
                gen,
                other,
                self._matching(gen, old[0]) if old and old[0] is not None else None,
                None if finite else read,
            )
        # The assistant's tokens only matter for placing an outcome.
        return self.charged(next_td, kl, _response(host, kl) if self.add_to_reward else None)

    def charged(self, next_td: TensorDictBase, kl: Ragged, mask: Tensor | None) -> dict[NestedKey, Ragged]:
        """The entries to write for a KL; see :meth:`KLPenalty.penalised`."""
        if not self.add_to_reward:
            return {self.kl_key: kl}
        outputs = {self.kl_key: kl, self.reward_key: self.penalised(next_td, kl, mask, self.coeff)}
        if self.charged_key is not None:
            outputs[self.charged_key] = kl.like(send(self.coeff(), kl.values.device) * kl.values)
        return outputs

    def read_old(self, td: TensorDictBase, next_td: TensorDictBase, gen: Ragged) -> Ragged | None:
        """Log-probs at sampling time, in the layout of ``gen``; None without a key."""
        if self.old_log_probs_key is None:
            return None
        old = read_result(td, next_td, self.old_log_probs_key)
        if old is None:
            self._missing(td, next_td, self.old_log_probs_key)
        return self._matching(gen, _at_tokens(old, read_ragged(td, ATTENTION_MASK)))

    def _matching(self, gen: Ragged, old: Ragged) -> Ragged:
        return match(gen, old, repr(self.old_log_probs_key), padding_side=self.padding_side)

    def estimate(self, gen: Ragged, ref: Ragged, old: Ragged | None, read: Sequence[_Entry] | None = ()) -> Ragged:
        """The KL of matching log-probs of the policy, the reference and, if given, the policy at sampling time.

        ``read`` lists those that come from the data, which may hold NaN; a scorer returns none. None: all are finite.
        """
        if old is not None and read is not None:
            read = [*read, ("the log-prob of the policy at sampling time", self.old_log_probs_key, old)]
        scored = where_scored(read, LOG_PROB_ADVICE) if read else None
        return gen.like(self.kl(gen.values, ref.values, gen.values.detach() if old is None else old.values, scored))

    def checked_exact(self, exact: Ragged, like: Ragged, *, finite: bool = False) -> Ragged:
        """A copy of the exact KL, in float32 or wider, in the layout of ``like``; ``finite`` if that is known of it."""
        entries: list[_Entry] = [("the exact KL", self.exact_kl_key, exact)]
        scored = None if finite else where_scored(entries, _EXACT_KL_ADVICE)
        values = exact.values.to(wide_dtype(exact.values.dtype), copy=True)
        return like.like(values if scored is None else torch.where(scored, values, 0))

    def _missing(self, td: TensorDictBase, next_td: TensorDictBase, key: NestedKey) -> NoReturn:
        shown = describe_entries(td, next_td)
        if key == self.exact_kl_key:
            raise ValueError(
                f"Exact KL not found. Expected key: {key!r}. Found: {shown}. Put RetrieveLogProb(policy, "
                "extras=[ExactKL(reference)]) before, which writes it, or set exact_kl_key to the key that holds it."
            )
        raise ValueError(
            f"Log-probs not found. Expected keys: {self.gen_log_probs_full_key}, {self.ref_log_probs_full_key}. "
            f"Missing: {key!r}. Found: {shown}. Put RetrieveLogProb before, or give the keys that hold them."
        )


def _at_tokens(value: Ragged, attention: Ragged | None) -> Ragged:
    """Values of all slots without those of padding; ``[N]``."""
    if attention is None or not same_rows(attention.container, value.container):
        return value
    return Ragged.from_slots(value.slots(), value.container, attention.slots().bool())


def _used(entries: Sequence[Ragged | None], attention: Ragged | None) -> Iterator[Tensor]:
    """The values of entries, 0 at padding."""
    for value in entries:
        if value is not None and attention is not None and same_rows(attention.container, value.container):
            yield torch.where(attention.slots().bool(), value.slots().detach(), 0)
        elif value is not None:
            yield value.values.detach()


def _response(td: TensorDictBase, kl: Ragged) -> Tensor | None:
    """The assistant's tokens by the masks on the host; ``[N]``, or None if the data does not hold these tokens."""
    tokens = read_ragged(td, TOKENS_FULL)
    if tokens is None:
        return None
    if same_rows(tokens.container, kl.container):
        return assistant_mask(td, Ragged.from_slots(tokens.slots(), tokens.container, kl.host_keep), _DEFAULTS)
    tokens = read_ragged(td, TOKENS_FULL, ATTENTION_MASK)  # the KL may lack their padding
    assert tokens is not None
    return assistant_mask(td, tokens, _DEFAULTS) if tokens.sizes == kl.sizes else None
