"""The public functions: log-probs, entropy, exact divergences and top-k, with the checks of their arguments."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import TypedDict, Unpack

from torchrl_llm_kl._numerics import check_choice, check_temperature, wide_dtype
from torchrl_llm_kl.head import _fused
from torchrl_llm_kl.head._kept import find_kept, kept_scores, most_kept
from torchrl_llm_kl.head._operators import local_part, sweep, top_k
from torchrl_llm_kl.head._tiles import (
    WHOLE,
    Head,
    HeadOutput,
    Kept,
    OutcomesOutput,
    PairOutput,
    Plan,
    Result,
    Tokens,
    TopKOutput,
    Truncation,
)

#: A divergence of policy and reference. See :func:`linear_pair`.
Direction = Literal["reverse", "forward", "jensen_shannon"]
_SHARES = {"reverse": (1.0, 0.0), "forward": (0.0, 1.0)}

# Positions and tokens of a tile. The CPU's size is measured (benchmarks/head.py), where half and twice of it are hardly slower.
# The other size is a guess.
_CPU_CHUNK = (512, 2048)
_CHUNK = (2048, 8192)


class HeadOptions(TypedDict, total=False):
    """Keyword arguments for a linear head's logits and the size of tiles, as in :func:`linear_log_prob`."""

    bias: Tensor | None
    temperature: float
    scale: float
    soft_cap: float | None
    product_dtype: torch.dtype | None
    chunk: tuple[int, int] | int | None


class PairOptions(HeadOptions, total=False):
    """:class:`HeadOptions` of the policy's head, and the reference's options where they differ. See :func:`linear_pair`."""

    ref_bias: Tensor | None
    ref_scale: float
    ref_soft_cap: float | None
    ref_kept: bool
    added: list[Tensor] | None


def linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    entropy: bool = False,
    truncation: Truncation | None = None,
    kept: Kept | None = None,
    keep_targets: bool = False,
    added: list[Tensor] | None = None,
    fused: bool = False,
    **options: Unpack[HeadOptions],
) -> HeadOutput:
    """Log-probs of given tokens, and the entropy, under ``softcap(scale * (hidden @ weight.T + bias)) / temperature``.

    The forward goes through tiles of positions and tokens with an online softmax in float32 or wider. The backward recomputes
    the logits. Neither holds more than a few tiles besides inputs and gradients. Gradients of hidden states, weight and bias
    are summed in float32 or wider. The result is differentiable once.

    The product is computed as in the model's own head: by default in the dtype of the inputs, under autocast in its dtype. So
    half precision rounds each logit, and everything after is float32. The backward then rounds each tile's part of a
    gradient and the sum, while plain torch rounds once. With ``product_dtype=torch.float32`` only the last rounding remains;
    tiles are converted one at a time.

    In a compiled function each sweep is one operator, without a graph break. One graph serves any number of positions.

    A weight that is a ``DTensor`` with ``Shard(0)`` (tensor parallel) stays sharded. Each rank sweeps its own slice of the
    vocabulary, and the ranks exchange a few numbers per position. All ranks must call this with the same hidden states and
    targets. They get the same results and the whole gradient of the hidden states.

    Args:
        hidden: input of the head, ``[N, H]``.
        weight: weight of the head, ``[V, H]``.
        targets: token ids of any integer dtype, ``[N]``.

    Keyword Args:
        bias: bias of the head, ``[V]``, sharded like the weight. ``-inf`` excludes a token.
        temperature: divides the logits, last.
        scale: multiplies product and bias, first.
        soft_cap: ``c`` of ``c * tanh(logit / c)``, or None for no cap.
        entropy: whether to compute the entropy too, which takes about 2% more time.
        truncation: the sampler's truncation. The distribution is renormalized over the kept tokens, which are found from
            these logits and have no gradient themselves. The forward then uses tiles of all tokens and fewer positions. If few
            tokens are kept, :func:`linear_kept` and then ``kept=`` take less time.
        kept: in place of ``truncation``, the tokens that a sampler recorded or :func:`linear_kept` found. If they are few, no
            other row of the weight is read.
        keep_targets: whether to keep a target that the truncation excludes, beside the other tokens.
        added: a list that receives a mask ``[N]``, True where such a target was kept.
        fused: whether one kernel of liger-kernel computes the log-probs, in place of the sweep. It has no entropy and no
            truncation, and ``docs/device.md`` lists its other limits. A log-prob near 0 has an absolute error of float32's
            epsilon times the largest logit, and the host waits for the device.
        product_dtype: dtype of the matrix products, see above.
        chunk: positions and tokens of a tile, or only positions. It changes only memory and speed. Default: by device.

    Returns:
        :class:`HeadOutput`: nats, ``[N]``; not masked, not reduced. A target that the truncation excludes has ``-inf``.

    Raises:
        ValueError: if shapes or shards disagree, an option is out of range, or ``fused`` is not possible. The log-prob of a
            target outside the vocabulary is NaN: a check would be a host sync.
        TypeError: if dtypes disagree or are not of the right kind.

    Example:
        >>> weight = torch.tensor([[3.0], [1.0]]).log()  # probabilities 3/4 and 1/4 at a hidden state of 1
        >>> linear_log_prob(torch.ones(2, 1), weight, torch.tensor([0, 1]), entropy=True)
        HeadOutput(log_prob=tensor([-0.2877, -1.3863]), entropy=tensor([0.5623, 0.5623]))

    Source: Milakov and Gimelshein, arXiv 1805.02867, for the online softmax. Wijmans et al., arXiv 2411.09009, for logits that
    the backward recomputes.
    """
    head, tile = _prepare(hidden, weight, **options)
    plan = Plan(tile, entropy, truncation=_check_truncation(truncation, kept, head), keep_targets=keep_targets)
    targets = _check_targets(targets, head)
    if fused:
        reason = _fused.obstacle(head)
        if reason or entropy or plan.truncation.active or kept:
            raise ValueError(f"fused=True: {reason or 'the kernel has no entropy and takes all tokens'}.")
        return HeadOutput(_fused.fused_log_prob(head, targets), None)
    if not (entropy or plan.truncation.active or kept or options.get("chunk")):
        log_prob = _log_prob_of_tile(head, targets)
        if log_prob is not None:
            return HeadOutput(log_prob, None)
    out = _sweep_or_kept(plan, head, None, Tokens(targets, kept), added)
    assert out.log_prob is not None
    return HeadOutput(out.log_prob, out.entropy)


def fused_obstacle(hidden: Tensor, weight: Tensor, **options: Unpack[HeadOptions]) -> str | None:
    """The reason why ``fused=True`` of :func:`linear_log_prob` is not possible for a head, or None if it is."""
    return _fused.obstacle(_prepare(hidden, weight, **options)[0])


def fused_failure(hidden: Tensor, weight: Tensor, **options: Unpack[HeadOptions]) -> str | None:
    """How ``fused=True`` differs from the tiles in values or gradients for a head, or None if it does not."""
    return _fused.failure(*_prepare(hidden.detach(), weight.detach(), **options))


def _log_prob_of_tile(head: Head, targets: Tensor) -> Tensor | None:
    """Log-probs where one tile holds all logits, to the bit as from a sweep. None if the sweep has more to do."""
    device = head.hidden.device.type
    sweeps = device != "cpu" or torch.compiler.is_compiling() or torch.is_autocast_enabled(device)
    fits = 0 < head.positions <= _CPU_CHUNK[0] and head.vocab <= _CPU_CHUNK[1] and head.part is None
    if sweeps or not fits or (torch.is_grad_enabled() and head.requires_grad):
        return None
    out, every = head.hidden.new_empty(head.positions, head.vocab, dtype=head.wide), slice(None)
    logits = head.logits(every, every, head.columns(every), out)
    top, best, (first, last) = logits.amax(-1), logits.softmax(-1).amax(-1), targets.aminmax()
    # The sweep sums all but the largest probability where that is near 1. It also takes ids outside the vocabulary.
    if not (float(best.max()) <= 0.9 and float(top.min()) > -math.inf and int(first) >= 0 and int(last) < head.vocab):
        return None
    chosen = logits.gather(1, targets.unsqueeze(1)).squeeze(1)
    return chosen - top - best.reciprocal().sub_(1.0).log1p()


def linear_outcomes(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ids: Tensor,
    *,
    entropy: bool = False,
    **options: Unpack[HeadOptions],
) -> OutcomesOutput:
    """Log-probs of given tokens, of ``k`` more ids at each position, and of all other tokens together, in one sweep.

    This is the student's side of a distillation from a teacher's top ``k`` (:func:`linear_top_k`). There are ``k + 1``
    outcomes, and the last one is "any other token". Its probability is the sum over the other tokens, never ``1 - x``, so the
    log-prob and its gradient are as accurate at ``1e-30`` as at one half. An outcome of probability 0 has ``-inf`` and no
    gradient.

    Memory, precision and all other arguments are as in :func:`linear_log_prob`. The head is swept once for any number of
    ids. ``ids`` are the ``k`` different ids of each list, ``[N, *M, k]``, with any number of lists at a position, such as one
    per teacher. A negative id pads a shorter list and has probability 0.

    Returns:
        :class:`OutcomesOutput`: nats; ``outcomes`` is ``[N, *M, k + 1]``; not masked, not reduced.

    Raises:
        ValueError: as :func:`linear_log_prob`; or if ``ids`` has another shape. The log-prob of an id outside the vocabulary
            is NaN.
        TypeError: as :func:`linear_log_prob`.

    Example:
        >>> weight = torch.tensor([[5.0], [2.0], [1.0]]).log()  # probabilities 5/8, 2/8 and 1/8 at a hidden state of 1
        >>> out = linear_outcomes(torch.ones(1, 1), weight, torch.tensor([2]), torch.tensor([[0]]))
        >>> out.log_prob.exp(), out.outcomes.exp()
        (tensor([0.1250]), tensor([[0.6250, 0.3750]]))
    """
    head, tile = _prepare(hidden, weight, **options)
    tokens = Tokens(_check_targets(targets, head), ids=_check_ids(ids, head))
    out = sweep(Plan(tile, entropy), head, None, tokens)
    assert out.log_prob is not None
    assert out.outcomes is not None
    return OutcomesOutput(out.log_prob, out.entropy, out.outcomes.view(*ids.shape[:-1], ids.shape[-1] + 1))


def linear_pair(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    targets: Tensor | None = None,
    *,
    direction: Direction = "reverse",
    beta: float = 0.5,
    entropy: bool = False,
    truncation: Truncation | None = None,
    kept: Kept | None = None,
    keep_targets: bool = False,
    **options: Unpack[PairOptions],
) -> PairOutput:
    r"""Exact KL of policy and reference, log-probs of given tokens under both, and the policy's entropy, in one sweep.

    ``"reverse"`` is :math:`KL(\pi \| \pi_{ref})`, ``"forward"`` is :math:`KL(\pi_{ref} \| \pi)`, and
    ``"jensen_shannon"`` is :math:`\beta KL(\pi_{ref} \| m) + (1-\beta) KL(\pi \| m)` with
    :math:`m = \beta\pi_{ref} + (1-\beta)\pi`. The mixture is known only once a row is complete. So its forward uses tiles of
    all tokens and fewer positions (64, or more if the tile does not grow then), and converts a whole head if
    ``product_dtype`` differs from the head's dtype.

    Value and *gradient* come from the exact sum over the vocabulary, without sampling. Gradients reach the tensors of both
    heads. Memory, precision, errors and all other arguments are as in :func:`linear_log_prob`. Names with
    ``ref_`` belong to the reference, the others to the policy. ``temperature`` divides the logits of both models, as in
    sampling. ``product_dtype`` is each head's own by default.

    ``truncation`` and ``kept`` restrict only the policy. The result is then the KL from the sampler to the whole reference,
    which is finite for ``"reverse"``. With ``ref_kept`` the reference is renormalized over the same tokens. The KL is then 0
    where both agree on these tokens, and ``"forward"`` is finite too. The reference's log-prob of an excluded target is
    ``-inf``.

    ``targets``, ``[N]``, are optional token ids whose log-probs are computed too. ``beta`` in (0, 1) is the weight of the
    reference in the mixture and is used only by ``"jensen_shannon"``.

    Returns:
        :class:`PairOutput`: nats, ``[N]`` each; not masked, not reduced. A token of probability 0 only in the second
        distribution of a KL makes it ``inf``, with a NaN gradient. A token of probability 0 in the first one adds 0.

    Example:
        >>> weight, ref_weight = torch.zeros(2, 1), torch.tensor([[3.0], [1.0]]).log()
        >>> linear_pair(torch.ones(1, 1), weight, torch.ones(1, 1), ref_weight, torch.tensor([0])).ref_log_prob
        tensor([-0.2877])

    Source: Amini et al., arXiv 2504.10637, for the exact inner sum. Agarwal et al., arXiv 2306.13649, for ``beta``, with the
    teacher as first distribution.
    """
    bias, scale, cap = options.pop("ref_bias", None), options.pop("ref_scale", 1.0), options.pop("ref_soft_cap", None)
    ref_kept, added = options.pop("ref_kept", False), options.pop("added", None)
    own: HeadOptions = options
    policy, tile = _prepare(hidden, weight, **own)
    of_ref: HeadOptions = {**own, "bias": bias, "scale": scale, "soft_cap": cap}
    ref, _ = _prepare(ref_hidden, ref_weight, "ref_", **of_ref)
    if (policy.positions, policy.whole_vocab) != (ref.positions, ref.whole_vocab):
        raise ValueError(
            f"The policy has {policy.positions} positions and {policy.whole_vocab} tokens, the reference {ref.positions} and "
            f"{ref.whole_vocab}. Score the same positions, and cut a padded head to the common vocabulary."
        )
    left = _check_truncation(truncation, kept, policy)
    truncated = kept is not None or left.active
    if truncated and direction != "reverse" and not (ref_kept and direction == "forward"):
        raise ValueError(f'direction={direction!r} is infinite where only the policy is truncated: use "reverse".')
    plan = Plan(tile, entropy, _shares(direction, beta), left, keep_targets, ref_kept and truncated)
    if policy.part is not None or ref.part is not None:
        ref = _same_slice(plan, policy, ref)
    tokens = Tokens(None if targets is None else _check_targets(targets, policy), kept)
    return PairOutput._make(_sweep_or_kept(plan, policy, ref, tokens, added)[:4])


def logits_kl(
    logits: Tensor,
    ref_logits: Tensor,
    *,
    direction: Direction = "reverse",
    beta: float = 0.5,
    temperature: float = 1.0,
    chunk: tuple[int, int] | int | None = None,
) -> Tensor:
    """Exact divergence of policy and reference at each position, from existing logits.

    Works like :func:`linear_pair`, without the product. Besides inputs and gradients it holds only a few tiles in float32 or
    wider. ``logits`` are the policy's and ``ref_logits`` the reference's, ``[N, V]`` each. The other arguments, the result and
    the errors are as in :func:`linear_pair`.

    Example:
        >>> logits_kl(torch.tensor([[3.0, 1.0]]).log(), torch.zeros(1, 2), direction="forward")
        tensor([0.1438])
    """
    if logits.ndim != 2 or logits.shape != ref_logits.shape or logits.shape[1] == 0:
        shapes = f"{tuple(logits.shape)} and {tuple(ref_logits.shape)}"
        raise ValueError(f"logits and ref_logits have shapes {shapes}: expected the same [N, V] with V at least 1.")
    check_temperature(temperature)
    dtype = wide_dtype(logits.dtype, ref_logits.dtype)
    policy, ref = (Head(each, None, None, dtype, float(temperature)) for each in (logits, ref_logits))
    kl = sweep(Plan(_tile_sizes(chunk, logits), shares=_shares(direction, beta)), policy, ref).kl
    assert kl is not None
    return kl


@torch.no_grad()
def linear_top_k(
    hidden: Tensor, weight: Tensor, k: int, targets: Tensor | None = None, **options: Unpack[HeadOptions]
) -> TopKOutput:
    """The ``k`` most probable tokens of each position, and the log-probability of all others together.

    The tail is the log-sum-exp of the logits outside the top ``k``, never ``log(1 - x)``, so it is as accurate at ``1e-30`` as
    at one half. The result has no graph. ``k`` is from 1 to ``V``. ``targets``, ``[N]``, are optional token ids whose
    log-probs are computed in the same sweep. All other arguments and the errors are as in :func:`linear_log_prob`. By
    default tiles have at least ``128 k`` tokens, since torch selects few of many faster.

    Returns:
        :class:`TopKOutput`: ``indices [N, k]``, ``log_probs [N, k]`` (nats, descending), ``tail_log_prob [N]`` and
        ``log_prob [N]`` of the targets.

    Example:
        >>> weight = torch.tensor([[1.0], [5.0], [2.0]]).log()
        >>> top = linear_top_k(torch.ones(1, 1), weight, 1)
        >>> top.indices, top.log_probs.exp(), top.tail_log_prob.exp()
        (tensor([[1]]), tensor([[0.6250]]), tensor([0.3750]))
    """
    head, (n, v) = _prepare(hidden, weight, **options)
    if not 1 <= k <= head.whole_vocab:
        raise ValueError(f"k is {k}: expected 1 to {head.whole_vocab}, the size of the vocabulary.")
    if options.get("chunk") is None and 128 * k > v:
        n, v = max(1, n * v // (128 * k)), 128 * k
    return top_k(head, k, (n, v), None if targets is None else _check_targets(targets, head))


@torch.no_grad()
def linear_kept(
    hidden: Tensor,
    weight: Tensor,
    truncation: Truncation,
    targets: Tensor | None = None,
    *,
    most: int | None = None,
    **options: Unpack[HeadOptions],
) -> Kept | None:
    """Find the tokens that truncated sampling keeps at each position, and their logits, in one sweep of whole rows.

    Pass them as ``kept`` to :func:`linear_log_prob` or :func:`linear_pair` with the same head and options. Their sums and
    gradients then run only over these tokens. All other arguments and the errors are as in :func:`linear_log_prob`.

    Args:
        hidden: input of the head, ``[N, H]``.
        weight: weight of the head, ``[V, H]``.
        truncation: the sampler's truncation.
        targets: token ids ``[N]`` to keep even if the truncation excludes them.

    Keyword Args:
        most: maximum number of tokens per position, on average over a tile of positions. Default: 64, or a 64th of the
            vocabulary if that is more.
        options: options of the head, as for :func:`linear_log_prob`.

    Returns:
        The tokens by position, with their logits and ``added``, or None if there are more than ``most``.

    Example:
        >>> weight = torch.tensor([[4.0], [1.0], [2.0], [1.0]]).log()  # probabilities 1/2, 1/8, 1/4, 1/8
        >>> kept = linear_kept(torch.ones(2, 1), weight, Truncation(top_p=0.7), torch.tensor([2, 3]))
        >>> kept.ids.tolist(), kept.offsets.tolist(), kept.added.tolist()
        ([0, 2, 0, 2, 3], [0, 2, 5], [False, True])
    """
    head, tile = _prepare(hidden, weight, **options)
    left = _check_truncation(truncation, None, head)
    checked = None if targets is None else _check_targets(targets, head)
    return find_kept(head, left, tile, checked, most_kept(head.vocab) if most is None else most)


def _sweep_or_kept(plan: Plan, policy: Head, ref: Head | None, tokens: Tokens, added: list[Tensor] | None) -> Result:
    if tokens.recorded is not None and _few(tokens.recorded, policy, ref, plan):
        return kept_scores(plan, policy, ref, tokens.recorded, tokens.targets)
    if added is None or not plan.truncation.active:
        return sweep(plan, policy, ref, tokens)
    statistics: list[Tensor] = []
    out = sweep(plan, policy, ref, tokens, statistics)
    (top, log_total, *_), floor = statistics, statistics[plan.statistics(1 if ref is None else 2) - 1]
    assert out.log_prob is not None
    # The target's logit, with a new rounding error. A logit that equals the floor is kept, hence the tolerance.
    added.append(out.log_prob.detach() + top + log_total < floor - 1e-5 * floor.abs().clamp(min=1.0))
    return out


def _few(kept: Kept, policy: Head, ref: Head | None, plan: Plan) -> bool:
    """Whether to score only the kept tokens. In a compiled graph their number is unknown, so all tokens are scored."""
    if torch.compiler.is_compiling() or policy.part is not None or (plan.keep_targets and kept.logits is None):
        return False
    if ref is not None and ref.requires_grad:
        return False
    return kept.logits is not None or len(kept.ids) <= most_kept(policy.vocab) * policy.positions


# ------------------------------------------------------------------ checks


def _prepare(
    hidden: Tensor,
    weight: Tensor,
    prefix: str = "",
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    soft_cap: float | None = None,
    product_dtype: torch.dtype | None = None,
    chunk: tuple[int, int] | int | None = None,
) -> tuple[Head, tuple[int, int]]:
    """The head (its slice on this rank if it is sharded) and the size of a tile. ``prefix`` begins names in messages."""
    weight, bias, part = local_part(prefix, weight, bias)
    vocab = weight.shape[:1]
    fits = hidden.ndim == 2 and weight.shape[1:] == hidden.shape[1:] and vocab != (0,)
    if not fits or (bias is not None and bias.shape != vocab):
        shapes = ", ".join(str(tuple(x.shape)) for x in (hidden, weight, bias) if x is not None)
        names = f"{prefix}hidden, {prefix}weight and {prefix}bias"
        raise ValueError(f"{names} have shapes {shapes}: expected [N, H], [V, H] and [V] with V at least 1.")
    check_temperature(temperature)
    if soft_cap is not None and not 0 < soft_cap < float("inf"):
        raise ValueError(f"{prefix}soft_cap must be positive and finite, or None for no cap, got {soft_cap}.")
    device = hidden.device.type
    if product_dtype is None:
        autocast = torch.is_autocast_enabled(device) and torch.float64 not in (hidden.dtype, weight.dtype)
        product_dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
        if not autocast and hidden.dtype != weight.dtype:
            raise TypeError(f"{prefix}hidden is {hidden.dtype}, {prefix}weight {weight.dtype}: set product_dtype.")
    if not product_dtype.is_floating_point:
        raise TypeError(f"product_dtype must be a floating dtype, got {product_dtype}.")
    numbers = float(temperature), float(scale), soft_cap
    return Head(hidden, weight, bias, product_dtype, *numbers, part), _tile_sizes(chunk, hidden)


def _same_slice(plan: Plan, policy: Head, ref: Head) -> Head:
    """The reference's head over the same slice of the vocabulary as the policy's on this rank."""
    if plan.mixture:
        raise ValueError('direction="jensen_shannon" needs whole rows, but a head is sharded: use "reverse".')
    part, ref_part = policy.part, ref.part
    if part is not None and ref_part is None and not ref.requires_grad:
        assert ref.weight is not None
        own = slice(part.first, part.first + part.size)
        return ref._replace(weight=ref.weight[own], bias=None if ref.bias is None else ref.bias[own], part=part)
    if part is None or ref_part is None or part[1:] != ref_part[1:] or part.ranks != ref_part.ranks:
        raise ValueError(
            "weight and ref_weight: shard both over the same ranks, or only weight with a frozen reference."
        )
    return ref


def _check_truncation(truncation: Truncation | None, kept: Kept | None, head: Head) -> Truncation:
    """The truncation of the policy's logits. Recorded tokens replace it."""
    if kept is not None:
        if truncation is not None:
            raise ValueError("truncation and kept both restrict the tokens: pass one of them.")
        if kept.offsets.shape != (head.positions + 1,):
            raise ValueError(f"kept.offsets has shape {tuple(kept.offsets.shape)}: expected ({head.positions + 1},).")
        return WHOLE
    truncation = truncation or WHOLE
    if truncation.top_k < 0 or not 0 < truncation.top_p <= 1 or not 0 <= truncation.min_p <= 1:
        raise ValueError(f"{truncation}: expected top_k of at least 0, top_p in (0, 1] and min_p in [0, 1].")
    if head.part is not None and truncation.active:
        raise ValueError(f"{truncation} needs whole rows, but the head is sharded: record the sampler's tokens.")
    return truncation


def _check_targets(targets: Tensor, head: Head) -> Tensor:
    """Targets as int64."""
    if targets.shape != (head.positions,):
        raise ValueError(
            f"targets has shape {tuple(targets.shape)}: expected ({head.positions},), one for each position."
        )
    return _check_tokens("targets", targets)


def _check_ids(ids: Tensor, head: Head) -> Tensor:
    """The ids of outcomes as int64 ``[N, M, k]``."""
    if ids.ndim < 2 or ids.shape[0] != head.positions or ids.numel() == 0 < head.positions:
        raise ValueError(f"ids has shape {tuple(ids.shape)}: expected ({head.positions}, ..., k) with k at least 1.")
    return _check_tokens("ids", ids).reshape(head.positions, ids.shape[1:-1].numel(), ids.shape[-1])


def _check_tokens(name: str, ids: Tensor) -> Tensor:
    """Token ids as int64. Ids outside the vocabulary give NaN, since a check would be a host sync."""
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError(f"{name} has dtype {ids.dtype}: expected an integer dtype for token ids.")
    return ids.long()


def _shares(direction: Direction, beta: float) -> tuple[float, float]:
    """``Plan.shares`` of a divergence."""
    check_choice((*_SHARES, "jensen_shannon"), direction=direction)
    if not 0 < beta < 1:
        raise ValueError(f"beta must be inside (0, 1), got {beta}; the ends are direction='forward' and 'reverse'.")
    return _SHARES.get(direction, (1.0 - beta, float(beta)))


def _tile_sizes(chunk: tuple[int, int] | int | None, hidden: Tensor) -> tuple[int, int]:
    default = _CPU_CHUNK if hidden.device.type == "cpu" else _CHUNK
    sizes = default if chunk is None else (chunk, default[1]) if isinstance(chunk, int) else chunk
    if len(sizes) != 2 or min(sizes) < 1:
        raise ValueError(f"chunk is {chunk}: expected at least 1 position and at least 1 token of a tile.")
    return sizes
