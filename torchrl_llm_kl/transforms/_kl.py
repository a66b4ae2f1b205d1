"""The KL in the reward: the penalty, :class:`KLComputation` and :class:`KLRewardTransform`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import TypeVar, get_args

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor, nn
from torchrl.data import Composite
from torchrl.envs import DeviceCastTransform, DTypeCastTransform, RewardScaling, Transform

from torchrl_llm_kl._numerics import all_finite, check_finite, check_not_a_name, finite_total, send, wide_dtype
from torchrl_llm_kl._typing import asked
from torchrl_llm_kl.estimators import EstimatorName, as_coefficient, get_estimator
from torchrl_llm_kl.masks import Tokenizer
from torchrl_llm_kl.ragged import (
    Dense,
    PaddingSide,
    Ragged,
    check_padding_side,
    on_host,
    read_column,
    read_ragged,
    same_rows,
)
from torchrl_llm_kl.rollouts import (
    ATTENTION_MASK,
    TOKENS_FULL,
    Located,
    MissingEntryError,
    ModelInterface,
    RewardPlacement,
    Scope,
    TokenisingOptions,
    assistant_mask,
    describe_entries,
    find_log_probs,
    leading_unscored,
    per_token,
    read_result,
    response_mask,
    token_reward,
    zeros_of_first_tokens,
)
from torchrl_llm_kl.scoring import (
    EntrySpec,
    Extra,
    Model,
    ScoredStep,
    ScoreOptions,
    ScorerSlot,
    ScoringContext,
    ScoringJob,
)
from torchrl_llm_kl.transforms._base import (
    RayVariant,
    ServiceBackend,
    StepMixin,
    StepTransform,
    TransformSetting,
    declare_entry,
    in_env,
    later_transforms,
    on_device,
    resolve_factory,
)
from torchrl_llm_kl.transforms._retrieve_log_prob import ScoringTransform, check_is_model, no_record, over_kept

T = TypeVar("T")
#: A name for :func:`~torchrl_llm_kl.estimators.get_estimator`, or a function ``(log_prob, ref_log_prob, old_log_prob)``.
Estimator = EstimatorName | Callable[..., Tensor]

# ------------------------------------------------------------------ the penalty


def resolve_estimator(estimator: Estimator) -> Estimator:
    """Resolve a name to its function. ``"exact"`` stays a name, since that KL is read from the data or from a scorer."""
    return get_estimator(estimator) if isinstance(estimator, str) and estimator != "exact" else estimator


class KLPenalty(StepTransform):
    """The base of the transforms that write a KL and charge it to the reward."""

    estimator = TransformSetting(resolve_estimator)  # the function, or "exact"
    reward_placement = TransformSetting[RewardPlacement](choices=get_args(RewardPlacement))
    add_to_reward = TransformSetting[bool]()
    reward_key = TransformSetting[NestedKey]()
    _order_checked = False

    def kl(self, gen: Tensor, ref: Tensor, old: Tensor, scored: Tensor | None) -> Tensor:
        """The estimate at ``scored`` tokens (None: all tokens) and exactly 0 elsewhere, ``[N]``."""
        assert not isinstance(self.estimator, str)
        if scored is None:
            return self.estimator(gen, ref, old)
        # Mask the inputs too: NaN in an unscored log-prob would otherwise reach the gradient through `where`.
        return torch.where(scored, self.estimator(*(torch.where(scored, x, 0) for x in (gen, ref, old))), 0)

    def penalised(self, next_td: TensorDictBase, kl: Ragged, mask: Tensor | None, coeff: nn.Module) -> Ragged:
        """``reward - coeff * KL`` per token, ``[N, 1]``. A missing reward is 0. ``mask`` places an outcome."""
        placed = token_reward(read_column(next_td, self.reward_key), kl, mask, self.reward_placement)
        # An asynchronous copy, so that an accelerator does not wait for the coefficient.
        weight = send(coeff(), kl.values.device)
        return kl.like(torch.addcmul(placed.values, weight, kl.values.unsqueeze(-1), value=-1))

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Declare the penalised reward: one number per token, ``[*B, -1, 1]``."""
        self._order_checked = False  # appending a transform recomputes the specs, so check the order again
        if self.add_to_reward:
            declare_entry(reward_spec, self.reward_key, EntrySpec((1,)))
        return reward_spec

    @property
    def penalised_key(self) -> NestedKey:
        """The key of the penalised reward."""
        return self.reward_key

    def check_order(self) -> None:
        """Warn once about a later transform that writes the reward, since it would change the reward of every token."""
        if self._order_checked or not self.add_to_reward or self.reward_placement == "broadcast":
            return
        self._order_checked = True
        for transform in later_transforms(self):
            if _changes(transform, self.penalised_key):
                name = type(transform).__name__
                warnings.warn(
                    f"{name} comes after the KL was charged to {self.penalised_key!r} and changes the reward of every token. "
                    f"Append {name} before the KL transform to change the outcome only.",
                    stacklevel=2,
                )


def _changes(transform: Transform, key: NestedKey) -> bool:
    """Whether a transform writes ``key`` in a way that is wrong for one reward per token."""
    if isinstance(transform, (StepMixin, DTypeCastTransform, DeviceCastTransform)):
        return False
    if isinstance(transform, RewardScaling) and not bool(transform.loc.any()):
        return False  # a factor without an offset scales the sum of the rewards by the same factor
    return unravel_key(key) in [unravel_key(out) for out in transform.out_keys or ()]


# ------------------------------------------------------------------ two sets of log-probs

_SAME_TOKENS = (
    "only one model has scored tokens: score the same tokens under both models, with the same tokenizer and template"
)


def check_pair(
    gen: Ragged, other: Ragged, name: str = "ref_log_probs", *, padding_side: PaddingSide, advice: str = _SAME_TOKENS
) -> tuple[Ragged, Ragged]:
    """Convert the policy's log-probs and ``other`` to the layout of ``gen``. Errors call the second one ``name``."""
    if gen.num_sequences == other.num_sequences:
        gen = _without_padding(gen, other, padding_side)
    return gen, match(gen, other, name, padding_side=padding_side, advice=advice)


def match(gen: Ragged, other: Ragged, name: str, *, padding_side: PaddingSide, advice: str = _SAME_TOKENS) -> Ragged:
    """Convert ``other`` to the layout of ``gen``, which is final. Errors call it ``name``."""
    if gen.num_sequences != other.num_sequences:
        raise ValueError(
            f"Batch size mismatch: gen_log_probs has {gen.num_sequences} samples, {name} has {other.num_sequences} samples."
        )
    other = _without_padding(other, gen, padding_side)
    a, b = gen.container, other.container
    both_padded = isinstance(a, Dense) and isinstance(b, Dense)
    same_widths = same_rows(a, b)
    # The mask of the policy's log-probs also fits other entries of the same width.
    if both_padded and same_widths and gen.keep is not None and other.keep is None:
        other = Ragged.from_slots(other.slots(), b, gen.keep)
    # Entries that were read with one mask share the object, so identity is enough.
    if same_widths and gen.keep is other.keep:
        return other
    if gen.sizes != other.sizes:
        # With padded entries of unequal widths the mask fits at most one of them. Report the widths, not the masked lengths.
        padded = both_padded and not same_widths
        ours, theirs = (a.row_sizes, b.row_sizes) if padded else (gen.sizes, other.sizes)
        i, (m, n) = next((i, pair) for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
        raise ValueError(
            f"Sample {i} has different shapes: gen_log_probs[{i}].shape={torch.Size([m])}, {name}[{i}].shape="
            f"{torch.Size([n])}. From position {min(m, n)} on, {advice}."
        )
    return other


def _without_padding(a: Ragged, b: Ragged, side: PaddingSide) -> Ragged:
    """Remove the padding of ``a`` if it is padded and ``b`` holds unpadded rows."""
    if not isinstance(a.container, Dense) or isinstance(b.container, Dense) or a.keep is not None:
        return a
    widths = b.container.row_sizes
    # Rows that are longer than the block do not belong to it. `match` reports their lengths.
    if max(widths) > a.container.width:
        return a
    position, limit = torch.arange(a.container.width), torch.tensor(widths).unsqueeze(-1)
    keep = position < limit if side == "right" else position >= a.container.width - limit
    return Ragged.from_slots(a.slots(), a.container, keep.reshape(-1))


LOG_PROB_ADVICE = (
    "A sampled token cannot have probability 0 under the policy. Check the weights and the dtype, or mask the token."
)


def where_scored(entries: Sequence[tuple[str, NestedKey | None, Ragged]], advice: str) -> Tensor | None:
    """True where all entries (description, key, values) hold a score, ``[N]``. None if all tokens have scores.

    A leading run of NaN is torchrl's marker for unscored tokens.

    Raises:
        ValueError: if any other number is NaN or infinite. The message names the entry, the sequence and the position.
    """
    values = [data.values.detach() for _, _, data in entries]
    if all_finite(*values):
        return None
    scored = []
    for (description, key, data), x in zip(entries, values, strict=True):
        numbers = (~x.isnan()).long().cumsum(0)
        # A token is scored if its sequence has a number at or before it. Subtract the count of all earlier sequences.
        before = torch.nn.functional.pad(numbers, (1, 0))[data.offsets[:-1]]
        scored.append(numbers > before[data.sequence_ids])
        check_finite({f"{description} under {key!r}": x}, read=scored[-1], place=place_in(data), advice=advice)
    return reduce(torch.logical_and, scored)


def place_in(data: Ragged) -> Callable[[int], str]:
    """A function that names the sequence and position of a flat index into ``data``."""
    return lambda at: f"sequence {int(data.sequence_ids[at])}, position {int(data.positions[at])}"


# ------------------------------------------------------------------ KLComputation

_Entry = tuple[str, NestedKey | None, Ragged]
_DEFAULTS = ModelInterface()
_OTHER_TOKENS = "only one of them has tokens: write both with RetrieveLogProb(policy, extras=[ExactKL(reference)])"
_EXACT_KL_ADVICE = (
    "It is infinite where the reference excludes a token that the policy allows. Check both models' weights and dtypes, and "
    "write the entry with RetrieveLogProb(policy, extras=[ExactKL(reference)])."
)


class KLComputation(KLPenalty):
    r"""Per-token KL between two log-prob entries, and optionally ``reward - coeff * KL``.

    Append it after all transforms that write the reward, because the penalised reward has one number per token.

    Args:
        gen_log_probs_full_key: log-probs of the policy, which sampled the tokens. Default ``("log_probs", "full")``.
        ref_log_probs_full_key: log-probs of the reference. Default ``("ref_log_probs", "full")``.

    Keyword Args:
        kl_key: where the KL goes. Default ``"kl_penalty"``.
        add_to_reward: subtract ``coeff * KL`` from the reward. A missing reward is 0. Default True.
        coeff: a number of at least 0, a tensor, or a coefficient module such as ``AdaptiveKLCoefficient``. Default 1.
        padding_side: the side of the padding if one entry is padded and the other is nested.
        estimator: a name for :func:`~torchrl_llm_kl.estimators.get_estimator` or a similar function. Default ``"k1"``, which
            in the reward has the unbiased gradient of the reverse KL. ``"exact"`` reads the KL over the whole vocabulary from
            the entry ``exact_kl_key``, an attribute with the default ``("exact_kl", "full")``. :class:`ExactKL` writes that
            entry. The log-probs are then optional, and the policy's, if present, must belong to the same tokens.
        old_log_probs_key: log-probs at sampling time, for estimators that correct for later policy updates. By default the
            policy's log-probs are used, which is right directly after sampling.
        reward_placement: where an outcome reward (one number per sequence) goes. ``"last"`` puts it on the last assistant
            token, so that the token rewards sum to ``outcome - coeff * sum KL``. ``"broadcast"`` puts it on every token, as
            torchrl does.
        reward_key: default ``"reward"``.
        charged_key: where to record ``coeff * KL``, the amount subtracted from each token's reward. Default None: nowhere.

    Every argument is an attribute that may change at any time. Keys and specs follow.

    Shapes:
        Log-probs and exact KL ``[*B, T]``, padded or nested. The KL in nats and the reward ``[*B, T, 1]`` have the same layout.
        Padding holds exactly 0. A leading run of NaN, torchrl's marker for unscored tokens, is treated as padding.

    Raises:
        ValueError: if an entry is missing, lengths differ, a log-prob or an exact KL is NaN or infinite, or the reward fits
            neither sequences nor tokens. The message names the sequence and the position. Also for ``old_log_probs_key`` with
            an exact KL.

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

    gen_log_probs_full_key = TransformSetting[NestedKey]()
    ref_log_probs_full_key = TransformSetting[NestedKey]()
    exact_kl_key = TransformSetting[NestedKey]()
    old_log_probs_key = TransformSetting["NestedKey | None"]()
    kl_key = TransformSetting[NestedKey]()
    charged_key = TransformSetting["NestedKey | None"]()
    coeff = TransformSetting(as_coefficient)
    padding_side = TransformSetting(check_padding_side)

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
        """In: log-probs or exact KL, and the reward. Out: the KL and the penalised reward."""
        if self.old_log_probs_key is not None and self.estimator == "exact":
            raise ValueError(f"old_log_probs_key={self.old_log_probs_key!r} has no effect with estimator='exact'.")
        log_probs = [self.gen_log_probs_full_key, self.ref_log_probs_full_key]
        read = [self.exact_kl_key] if self.estimator == "exact" else log_probs
        reward = [self.reward_key] if self.add_to_reward else []
        return [*read, *reward], [*self.entries, *reward]

    @property
    def entries(self) -> dict[NestedKey, EntrySpec]:
        """The KL, and the amount charged to the reward if it is recorded."""
        charged = [self.charged_key] if self.charged_key and self.add_to_reward else []
        return dict.fromkeys([self.kl_key, *charged], EntrySpec())

    # ------------------------------------------------------------------ computation

    def outputs(self, td: TensorDictBase, next_td: TensorDictBase) -> dict[NestedKey, Ragged]:
        """Read the log-probs, or the exact KL, and charge the KL to the reward."""
        exact = self.estimator == "exact"
        keys = [self.exact_kl_key] if exact else [self.gen_log_probs_full_key, self.ref_log_probs_full_key]
        keys += [] if self.old_log_probs_key is None else [self.old_log_probs_key]
        entries = [self._read(td, next_td, key) for key in keys]
        beside = read_result(td, next_td, self.gen_log_probs_full_key) if exact else None
        # A single host synchronisation fetches masks and prompts together with the flag whether all numbers are finite.
        total = finite_total(*_used(entries, read_ragged(td, ATTENTION_MASK)))
        host, total = on_host(td, _DEFAULTS.token_keys, total)
        finite, attention = math.isfinite(total), read_ragged(host, ATTENTION_MASK)
        first, *others = (_at_tokens(entry, attention) for entry in entries)
        if exact:
            like = first
            if beside is not None:
                gen = _at_tokens(beside, attention)
                like, first = check_pair(gen, first, "exact_kl", padding_side=self.padding_side, advice=_OTHER_TOKENS)
            kl = self.checked_exact(first, like, finite=finite)
        else:
            gen, ref = check_pair(first, others[0], padding_side=self.padding_side)
            read = [
                ("the log-prob of the policy", self.gen_log_probs_full_key, gen),
                ("the log-prob of the reference", self.ref_log_probs_full_key, ref),
            ]
            old = self._matching(gen, others[1]) if len(others) > 1 else None
            kl = self.estimate(gen, ref, old, None if finite else read)
        # The assistant's tokens are only needed to place an outcome reward.
        return self.charged(next_td, kl, _response(host, kl) if self.add_to_reward else None)

    def charged(self, next_td: TensorDictBase, kl: Ragged, mask: Tensor | None) -> dict[NestedKey, Ragged]:
        """The entries to write for a KL: the KL, the penalised reward and the amount charged."""
        if not self.add_to_reward:
            return {self.kl_key: kl}
        outputs = {self.kl_key: kl, self.reward_key: self.penalised(next_td, kl, mask, self.coeff)}
        if self.charged_key is not None:
            outputs[self.charged_key] = kl.like(send(self.coeff(), kl.values.device) * kl.values)
        return outputs

    def read_old(self, td: TensorDictBase, next_td: TensorDictBase, gen: Ragged) -> Ragged | None:
        """Log-probs at sampling time in the layout of ``gen``, or None if no key is set."""
        if self.old_log_probs_key is None:
            return None
        old = self._read(td, next_td, self.old_log_probs_key)
        return self._matching(gen, _at_tokens(old, read_ragged(td, ATTENTION_MASK)))

    def _matching(self, gen: Ragged, old: Ragged) -> Ragged:
        return match(gen, old, repr(self.old_log_probs_key), padding_side=self.padding_side)

    def estimate(self, gen: Ragged, ref: Ragged, old: Ragged | None, read: Sequence[_Entry] | None = ()) -> Ragged:
        """The KL of log-probs in one layout: the policy's, the reference's and, optionally, the policy's at sampling time.

        ``read`` lists the log-probs that come from the data and may therefore hold NaN. None if all are known to be finite.
        """
        if old is not None and read is not None:
            read = [*read, ("the log-prob of the policy at sampling time", self.old_log_probs_key, old)]
        scored = where_scored(read, LOG_PROB_ADVICE) if read else None
        return gen.like(self.kl(gen.values, ref.values, gen.values.detach() if old is None else old.values, scored))

    def checked_exact(self, exact: Ragged, like: Ragged, *, finite: bool = False) -> Ragged:
        """A copy of the exact KL in the layout of ``like``, float32 or wider. ``finite`` skips the check for NaN."""
        entries: list[_Entry] = [("the exact KL", self.exact_kl_key, exact)]
        scored = None if finite else where_scored(entries, _EXACT_KL_ADVICE)
        # A copy, so that a change of the written KL does not change the entry that was read.
        values = exact.values.to(wide_dtype(exact.values.dtype), copy=True)
        return like.like(values if scored is None else torch.where(scored, values, 0))

    def _read(self, td: TensorDictBase, next_td: TensorDictBase, key: NestedKey) -> Ragged:
        entry = read_result(td, next_td, key)
        if entry is None:
            raise ValueError(
                f"Log-probs not found. Expected keys: {self.gen_log_probs_full_key}, {self.ref_log_probs_full_key}. Missing: "
                f"{key!r}. Found: {describe_entries(td, next_td)}. Put RetrieveLogProb before (for the exact KL, with "
                "extras=[ExactKL(reference)]), or pass the keys that hold them."
            )
        return entry


def _at_tokens(value: Ragged, attention: Ragged | None) -> Ragged:
    """The values without those at padding, ``[N]``."""
    if attention is None or not same_rows(attention.container, value.container):
        return value
    return Ragged.from_slots(value.slots(), value.container, attention.slots().bool())


def _used(entries: Sequence[Ragged], attention: Ragged | None) -> Iterator[Tensor]:
    """The values of each entry, with 0 at padding."""
    for value in entries:
        if attention is not None and same_rows(attention.container, value.container):
            yield torch.where(attention.slots().bool(), value.slots().detach(), 0)
        else:
            yield value.values.detach()


def _response(td: TensorDictBase, kl: Ragged) -> Tensor | None:
    """The mask of the assistant's tokens on the host, ``[N]``, or None if the data does not hold these tokens."""
    tokens = read_ragged(td, TOKENS_FULL)
    if tokens is None:
        return None
    if same_rows(tokens.container, kl.container):
        return assistant_mask(td, Ragged.from_slots(tokens.slots(), tokens.container, kl.host_keep), _DEFAULTS)
    tokens = read_ragged(td, TOKENS_FULL, ATTENTION_MASK)  # the KL may be unpadded beside padded tokens
    assert tokens is not None
    return assistant_mask(td, tokens, _DEFAULTS) if tokens.sizes == kl.sizes else None


# ------------------------------------------------------------------ KLRewardTransform


def _check_estimator(estimator: Estimator) -> Estimator:
    if estimator == "exact":
        raise ValueError("estimator='exact' needs the policy: use RetrieveKL(policy, reference, estimator='exact').")
    return resolve_estimator(estimator)


def _check_reference(model: T) -> T:
    check_not_a_name(ref_model=model)
    check_is_model("ref_model", model)
    if asked(model, "generate", bool):
        raise ValueError("The actor is configured to generate text, not compute the log-probs.")
    if asked(model, "input_mode", str, "tokens") != "tokens":
        raise ValueError(
            "The ref_model must be configured to use tokens as input. Please set the `input_mode` argument to `tokens`."
        )
    return model


class KLRewardTransform(ScoringTransform, KLPenalty, metaclass=RayVariant):
    r"""Penalise the reward with the KL between the policy's log-probs in the data and a reference model's.

    This class serves scripts that use torchrl's class of this name. :class:`RetrieveKL` scores both models and needs no
    log-probs in the data. Append the transform after all transforms that write the reward.

    Args:
        ref_model: the reference, a wrapper with ``input_mode="tokens"`` and ``generate=False`` or a transformers model.

    Keyword Args:
        ref_model_factory: builds ``ref_model``.
        coef: a number of at least 0, a tensor or a coefficient module. Default 1.
        in_keys: the reward's key. Default ``["reward"]``.
        out_keys: where the penalised reward goes, and optionally the KL and the reference's log-probs. Default
            ``["reward", "kl_penalty", "ref_log_probs"]``.
        log_prob_key: the policy's log-probs of the whole sequence. Default ``("log_probs", "full")``. If that entry is
            missing, the ``"response"`` entry beside it is used.
        add_to_reward, padding_side, estimator, reward_placement: see :class:`KLComputation`. ``"exact"`` is not supported
            because this transform does not run the policy.
        options: how the reference is scored, see :class:`RetrieveLogProb`. A truncating ``sampling`` describes the policy,
            whose log-probs belong to the truncated distribution. The reference is scored at the same temperature over all
            tokens. With ``Sampling(reference="kept")`` it is scored over the tokens that the sampler recorded.
        extras: how the request is filled from the data, for example :class:`KeptTokens` with another key than ``"kept"``.
            Extras that write an entry are not supported. See :class:`RetrieveLogProb`.
        device, tokenizer, assistant_only, scope: settings of the reference, see :class:`RetrieveLogProb`.
        service_backend, service_backend_options, use_ray_service: see :class:`RetrieveLogProb`.

    All arguments except ``device``, ``tokenizer`` and ``padding_side`` are attributes that may change at any time.

    Shapes:
        KL, reference log-probs and reward: ``[*B, T, 1]``, in the layout that :class:`RetrieveLogProb` of the reference has.

    Raises:
        ValueError: see :class:`RetrieveLogProb` and :class:`KLComputation`.
        KeyError: if the data lacks the policy's log-probs, or the recorded tokens with ``Sampling(reference="kept")``.

    Example:
        >>> from tensordict import TensorDict
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> model = Qwen2ForCausalLM(Qwen2Config(vocab_size=11, hidden_size=64, num_hidden_layers=1))
        >>> tokens = TensorDict(prompt=torch.tensor([[3, 4]]), full=torch.tensor([[3, 4, 5, 6]]), batch_size=[1])
        >>> log_probs = TensorDict(full=torch.zeros(1, 4), batch_size=[1])
        >>> data = KLRewardTransform(model)(TensorDict(tokens=tokens, log_probs=log_probs, batch_size=[1]))
        >>> (data["kl_penalty"] + data["ref_log_probs"]).abs().sum().item()
        0.0
    """

    DEFAULT_IN_KEYS: tuple[NestedKey, ...] = ("reward",)

    estimator = TransformSetting(_check_estimator)
    ref_model = TransformSetting[Model](_check_reference)
    coef = TransformSetting(as_coefficient)
    log_prob_full_key = TransformSetting[NestedKey]()

    def __init__(
        self,
        ref_model: Model | None = None,
        *,
        ref_model_factory: Callable[[], Model] | None = None,
        coef: float | Tensor | nn.Module = 1.0,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        log_prob_key: NestedKey = ("log_probs", "full"),
        device: torch.device | str | None = None,
        add_to_reward: bool = True,
        tokenizer: Tokenizer | None = None,
        assistant_only: bool = True,
        padding_side: str = "left",
        use_ray_service: bool = False,
        service_backend: ServiceBackend | None = None,
        service_backend_options: Mapping[str, object] | None = None,
        estimator: Estimator = "k1",
        reward_placement: RewardPlacement = "last",
        scope: Scope = "turn",
        options: ScoreOptions | None = None,
        extras: Sequence[Extra] = (),
    ) -> None:
        ref_model = resolve_factory("ref_model", ref_model, ref_model_factory)
        if ref_model is None:
            raise ValueError(
                "Must provide exactly one of 'ref_model' or 'ref_model_factory'. Found neither: pass the reference model."
            )
        read = list(self.DEFAULT_IN_KEYS) if in_keys is None else list(in_keys)
        written = _three_keys(read, None if out_keys is None else list(out_keys))
        super().__init__()
        self.options, self.extras = options, extras
        self.estimator, self.reward_placement = estimator, reward_placement
        self.assistant_only, self.scope = assistant_only, scope
        self.ref_model = on_device(_check_reference(ref_model), device)
        self.reward_key, self.log_prob_full_key, self.add_to_reward = read[0], log_prob_key, add_to_reward
        self.coef = coef
        self._tokenising = TokenisingOptions.make(tokenizer, None, padding_side)
        self._slot = ScorerSlot()
        self.out_keys = written
        self.declare()
        _ = self.scorer  # build it now, so that a model that cannot be scored raises here

    # ------------------------------------------------------------------ keys and specs

    def keys(self) -> tuple[list[NestedKey], list[NestedKey]]:
        """In: the reward and the reference's inputs. Out: the penalised reward, the KL and the reference's log-probs."""
        context = self.context
        for extra in self.extras:
            if extra.specs(context) or extra.reference is not None:
                raise ValueError(f"extras has {type(extra).__name__}, which needs the policy: use RetrieveKL.")
        return [self.reward_key, *self._interface().in_keys, *self.prompt_keys], list(self.out_keys)

    @property
    def entries(self) -> dict[NestedKey, EntrySpec]:
        """KL and reference log-probs, and the penalised reward if its key differs from the reward's."""
        reward_key, *others = self.out_keys
        new_reward = [reward_key] if self.add_to_reward and reward_key != self.reward_key else []
        return dict.fromkeys([*others, *new_reward], EntrySpec((1,)))

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Declare the penalised reward if it replaces the reward."""
        return super().transform_reward_spec(reward_spec) if self.out_keys[0] == self.reward_key else reward_spec

    @property
    def penalised_key(self) -> NestedKey:
        """The first of the ``out_keys``."""
        return self.out_keys[0]

    @property
    def pad_output(self) -> bool:
        """Whether the reference pads its output."""
        return bool(self._interface().pad_output)

    @property
    def tokenizer(self) -> Tokenizer:
        """The ``tokenizer`` argument, else the reference's tokenizer. An AttributeError if neither exists."""
        tokenizer = self._tokenising.tokenizer or self._interface().tokenizer
        if tokenizer is None:
            raise AttributeError(
                "The ref_model does not have a tokenizer. Please pass the tokenizer to the constructor."
            )
        return tokenizer

    # ------------------------------------------------------------------ computation

    def outputs(self, td: TensorDictBase, next_td: TensorDictBase) -> dict[NestedKey, Ragged]:
        """Score the reference and compute the KL to it."""
        located = self.locate(td)
        job = self.job(self.step(td, next_td, located))
        ref = job.in_place(self.scorer.run(job.request, self.scored.but(remember=in_env(self)))).log_prob
        gen, known = self._policy_log_probs(td, next_td, located)
        # The stored log-probs are also those at sampling time.
        kl = ref.like(self.kl(gen, ref.values, gen, located.mask & known))
        reward_key, kl_key, ref_key = self.out_keys
        outputs = {key: x.like(x.values.unsqueeze(-1)) for key, x in ((kl_key, kl), (ref_key, ref))}
        if self.add_to_reward:
            outputs[reward_key] = self.penalised(next_td, kl, located.host_mask, self.coef)
        return outputs

    @property
    def scored(self) -> ScoreOptions:
        """The options for the reference, without the policy's truncation."""
        return super().scored.but(sampling=self.options.sampling.of_reference)

    @property
    def context(self) -> ScoringContext:
        """The settings that extras read."""
        # Extras read the sampler's record only if the options truncate. The reference needs it only for "kept".
        options = self.options if over_kept(self.options) else self.scored
        return ScoringContext(
            self.ref_model, options, self._interface(), self._tokenising, self.log_prob_full_key, in_env(self)
        )

    def job(self, step: ScoredStep) -> ScoringJob:
        """The request, restricted to the tokens that the sampler recorded with ``Sampling(reference="kept")``."""
        job = super().job(step)
        if over_kept(self.options) and job.request.kept is None:
            raise no_record(step.td)
        return job

    def _policy_log_probs(self, td: TensorDictBase, next_td: TensorDictBase, located: Located) -> tuple[Tensor, Tensor]:
        """The policy's log-probs at the located tokens and 0 elsewhere, and a mask of the known ones, both ``[N]``.

        An engine's wrapper stores 0 or NaN for prompts that it did not score, and torchrl stores 0 for the first generated
        token. A KL of ``0 - ref_log_prob`` would charge such a token with the reference's whole log-prob.
        """
        key, tokens, known = self.log_prob_full_key, located.tokens, torch.ones_like(located.mask)
        response = response_mask(td, tokens, self._interface())
        gen = read_result(td, next_td, key)
        if gen is not None:
            # An entry with one value for each slot of the tokens has the same padding.
            if torch.equal(gen.container.row_lengths, tokens.container.row_lengths) and gen.keep is None:
                gen = Ragged.from_slots(gen.slots(), tokens.container, tokens.keep)
            else:
                gen, _ = check_pair(gen, tokens, padding_side=self._tokenising.padding_side)
            values, unscored = gen.values, ~known
            if not self.assistant_only or self.scope == "full":
                unscored = leading_unscored(values, tokens)
                unscored = unscored if response is None else unscored & ~response
            text = "0 or NaN for the first {} tokens of prompts: its engine returned no scores of prompts. Those tokens are"
        else:
            place = find_log_probs(td, key)
            if place is None:
                raise MissingEntryError(
                    f"the policy's log-probs are missing: expected {key!r}, found: {describe_entries(td, next_td)}. Collect "
                    "with return_log_probs=True, put RetrieveLogProb before, or use RetrieveKL, which scores both."
                )
            key, values = place, per_token(td, place, tokens, response, repeats=False).float()
            known = ~values.isnan() if response is None else response
            unscored = zeros_of_first_tokens(values, known, tokens)
            text = "exactly 0 for the first generated token of {} sequences: torchrl never computes it. That token is"
        skipped = int((located.mask & unscored).sum())
        if skipped:
            message = f"{key!r} holds {text.format(skipped)} left out of the KL. RetrieveKL scores every token."
            warnings.warn(message, stacklevel=2)
        known = known & ~unscored
        # Mask before the check: unknown values may be NaN.
        values = torch.where(known & located.mask, values, 0).detach()
        name = f"the log-prob of the policy under {key!r}"
        check_finite({name: values}, place=place_in(located.tokens), advice=LOG_PROB_ADVICE)
        return values, known

    def _scored_model(self) -> Model:
        return self.ref_model


def _three_keys(in_keys: list[NestedKey], out_keys: list[NestedKey] | None) -> list[NestedKey]:
    """The keys of reward, KL and reference log-probs. The error texts are torchrl's."""
    out = in_keys if out_keys is None else out_keys
    if len(out) == len(in_keys):
        out = [*out, "kl_penalty", "ref_log_probs"]
    if len(out) != len(in_keys) + 2:
        raise ValueError(
            "The out_keys must have the same length as the in_keys (plus two additional optional kl entries for logging)."
        )
    if len(in_keys) != 1:
        raise ValueError(f"Only one in_key/out_key is allowed, got in_keys={in_keys}, out_keys={out}.")
    return out
