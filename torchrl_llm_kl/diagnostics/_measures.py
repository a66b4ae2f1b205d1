"""The measures of the doctor. They are pure functions of a batch's columns and need no model.

Every number is computed over the masked-in tokens. Names are ``family/quantity``. A suffix selects a part of the tokens:
``@1-3`` means places 1 to 3 of the answers, ``@positive`` and ``@negative`` mean the sign of the advantage, and ``@turn0``
means the first turn.
Shapes: ``S`` sequences, ``T`` the largest number of masked-in tokens of a sequence, ``N`` tokens of all sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torchrl_llm_kl.diagnostics._columns import TokenColumns
from torchrl_llm_kl.losses import LossInputs, importance_weights, mismatch_metrics
from torchrl_llm_kl.masks import Tokenizer
from torchrl_llm_kl.ragged import segment_sum
from torchrl_llm_kl.rollouts import ResponseTokens

#: The first place of each bucket of places: the first token of an answer, the next three tokens, and so on.
PLACES = (0, 1, 4, 16, 64, 256, 1024, 4096)
#: The number of turns that are measured separately. Later turns are only in the totals.
MOST_TURNS = 8
_LARGEST = 80.0  # nats; exp(80) is finite in float32
_TRIED = 64  # the number of answers that are decoded and encoded again


@dataclass(frozen=True)
class Mean:
    """A mean over tokens with its standard error.

    Args:
        value: the mean. NaN without tokens.
        error: the larger of two standard errors, one from sums over sequences and one from single tokens. NaN for one sequence.
        z: the standard score of the mean against 0. Student's t is converted to a normal score, since sequences may be few.
        count: the number of tokens.
    """

    value: float
    error: float
    z: float
    count: int


def clustered_mean(values: Tensor, sequences: Tensor) -> Mean:
    r"""The mean of ``values [n]`` and its standard error, clustered by sequence.

    :math:`e_i` is the deviation of token :math:`i` from the mean. The clustered error is
    :math:`\sqrt{S/(S-1) \sum_s (\sum_{i \in s} e_i)^2} / n`. It allows any dependence within a sequence, but is unreliable for
    few sequences. If the error of independent tokens, :math:`\sqrt{\sum e_i^2} / n`, is larger, the larger one is returned.

    Args:
        values: numbers of tokens, ``[n]``.
        sequences: the sequence of each token, ids from 0, int64 ``[n]``.

    Returns:
        The mean. Its ``z`` has ``S - 1`` degrees of freedom.

    Example:
        >>> mean = clustered_mean(torch.tensor([1.0, 1.0, 3.0, 3.0]), torch.tensor([0, 0, 1, 1]))
        >>> mean.value, round(mean.error, 4)
        (2.0, 1.0)

    Source: Liang and Zeger 1986 (the errors) and Wallace 1959 (Student's t as a normal score).
    """
    count = values.numel()
    if count == 0:
        return Mean(math.nan, math.nan, 0.0, 0)
    values = values.double()
    mean = values.mean()
    deviations = values - mean
    _, number = sequences.unique(return_inverse=True)
    clusters = int(number.max()) + 1
    if clusters < 2:
        return Mean(float(mean), math.nan, 0.0, count)
    sums = deviations.new_zeros(clusters).index_add(0, number, deviations)
    between = clusters / (clusters - 1) * sums.square().sum()
    error = float(torch.maximum(between, deviations.square().sum()).sqrt()) / count
    if error == 0:
        return Mean(float(mean), 0.0, 0.0 if float(mean) == 0 else math.copysign(math.inf, float(mean)), count)
    return Mean(float(mean), error, _normal_score(float(mean) / error, clusters - 1), count)


def _normal_score(t: float, degrees: int) -> float:
    """Convert Student's t to the normal score with the same tail probability."""
    size = (8 * degrees + 1) / (8 * degrees + 3) * math.sqrt(degrees * math.log1p(t * t / degrees))
    return math.copysign(size, t)


# ------------------------------------------------------------------ the batch on the CPU


@dataclass(frozen=True, eq=False)
class Table:
    """The masked-in tokens of a batch in float64 on the CPU.

    Args:
        columns: numbers by name, ``[n]``, NaN where a token has no number.
        sequences: the sequence of each token, int64 ``[n]``.
        places: the index of each token among the masked-in tokens of its sequence, from 0, int64 ``[n]``.
        turns: the turn of each token, int64 ``[n]``.
        response: the arrangement of the tokens as ``[S, T]``.
    """

    columns: dict[str, Tensor]
    sequences: Tensor
    places: Tensor
    turns: Tensor
    response: ResponseTokens

    @classmethod
    def of(cls, columns: TokenColumns) -> Table:
        """Select the masked-in tokens of a batch."""
        mask = columns.mask
        masked = {name: x[mask].double() for name, x in columns.columns.items()}
        rows, places, turns = (x[mask] for x in (columns.tokens.sequence_ids, columns.places, columns.turns))
        return cls(masked, rows, places, turns, ResponseTokens(columns.tokens, mask))

    def get(self, name: str) -> Tensor | None:
        """A column ``[n]``. None if it is missing or has only NaN."""
        column = self.columns.get(name)
        return None if column is None or not column.numel() or bool(column.isnan().all()) else column

    def first(self, *names: str) -> Tensor | None:
        """The first of these columns that has numbers, or None."""
        return next((column for column in map(self.get, names) if column is not None), None)

    @property
    def trainer(self) -> tuple[str, Tensor] | None:
        """The name and values of the trainer's log-probs. They are stored in the batch, or computed by the given policy."""
        # Without a separate column of the sampler, the stored log-probs may be the sampler's own.
        own = self.get("sampler_log_prob") is None and self.get("log_prob") is not None
        name = "log_prob" if own or self.get("old_log_prob") is None else "old_log_prob"
        column = self.get(name)
        return None if column is None else (name, column)

    @property
    def recorded(self) -> tuple[str, Tensor] | None:
        """The name and values of the sampler's log-probs. The stored log-probs count if the trainer has another column."""
        for name in ("sampler_log_prob", "old_log_prob"):
            column = self.get(name)
            if column is not None and (self.trainer is None or self.trainer[0] != name):
                return name, column
        return None

    def dense(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Arrange values ``[n]`` as ``[S, T]``. Also returns a mask of the values that are not NaN, bool ``[S, T]``."""
        at, shape = (self.sequences, self.response.columns), self.response.mask.shape
        out = values.new_full(shape, math.nan).index_put(at, values)
        return out.nan_to_num(nan=0.0), ~out.isnan()

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parts of the tokens. Each is the suffix of its measures, and a mask of its tokens, bool ``[n]``."""
        last = int(self.places.max()) if self.places.numel() else -1
        for first, after in zip(PLACES, (*PLACES[1:], 10**9), strict=True):
            if first <= last:
                name = f"{first}" if after == first + 1 else f"{first}-{after - 1}" if after < 10**9 else f"{first}+"
                yield f"@{name}", (self.places >= first) & (self.places < after)
        advantage = self.get("advantage")
        if advantage is not None:
            yield "@positive", advantage > 0
            yield "@negative", advantage < 0
        turns = int(self.turns.max()) + 1 if self.turns.numel() else 0
        for turn in range(min(turns, MOST_TURNS) if turns > 1 else 0):
            yield f"@turn{turn}", self.turns == turn


def _mean(values: Tensor) -> float:
    return float(values.mean()) if values.numel() else math.nan


def _largest(values: Tensor) -> float:
    known = values[values.isfinite()]
    return float(known.max()) if known.numel() else math.nan


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_LARGEST, _LARGEST).exp()


def _k3(log_ratio: Tensor) -> float:
    return _mean(_ratio(log_ratio) - 1 - log_ratio)


# ------------------------------------------------------------------ families of measures


def measure(
    columns: TokenColumns,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    end: Sequence[int] | None = None,
    ended: Tensor | None = None,
) -> dict[str, float]:
    """Compute all measures for which the batch has the columns.

    Args:
        columns: the batch.

    Keyword Args:
        clip_low: the objective clips the ratio below ``1 - clip_low``.
        clip_high: the objective clips the ratio above ``1 + clip_high``.
        end: ids of tokens that end an answer, for the share of truncated answers.
        ended: True for answers that are known to be complete, bool ``[S]``.

    Returns:
        Numbers by name. ``docs/doctor.md`` lists them. A family is missing if its columns are missing.

    Example:
        >>> from torchrl_llm_kl import Ragged
        >>> tokens = Ragged.from_list([torch.tensor([5, 6, 7]), torch.tensor([5, 8])])
        >>> columns = {"log_prob": torch.tensor([0.0, -1.0, -1.0, 0.0, -2.0]), "entropy": torch.ones(5)}
        >>> measures = measure(TokenColumns(tokens, tokens.positions > 0, columns))
        >>> round(measures["surprisal/gap"], 4), measures["mask/coverage"]
        (0.3333, 0.6)
    """
    table = Table.of(columns)
    out = answer_measures(columns, end, ended)
    for family in (_of_numbers, mismatch_measures, surprisal_measures, drift_measures, kl_measures):
        out |= family(table)
    out |= clip_measures(table, clip_low, clip_high)
    return {name: value for name, value in out.items() if not math.isnan(value)}  # NaN: a part without tokens


def _of_numbers(table: Table) -> dict[str, float]:
    """The shares of NaN, infinities and exact zeros in each column. At NaN the sampler gave no score."""
    out: dict[str, float] = {}
    for name, values in table.columns.items():
        if name == "sampler_log_prob":
            out["mask/not_recorded"] = _mean(values.isnan().double())
        if name.endswith("log_prob") or name in ("kl", "kl_penalty", "entropy"):
            bad = values.isinf() if name == "sampler_log_prob" else ~values.isfinite()
            out[f"nan/{name}"] = _mean(bad.double())
            out[f"zeros/{name}"] = _mean((values == 0).double())
    return out


#: Functions of the values of some tokens, by name of the measure.
Statistics = dict[str, Callable[[Tensor], float]]


def _split(table: Table, values: Tensor, names: Statistics) -> dict[str, float]:
    """Compute statistics of ``values [n]`` over all finite values, and over each part."""
    known = values.isfinite()
    parts = [("", known), *((suffix, known & part) for suffix, part in table.parts())]
    return {f"{name}{suffix}": statistic(values[part]) for suffix, part in parts for name, statistic in names.items()}


def mismatch_measures(table: Table) -> dict[str, float]:
    """Compare trainer and sampler on the same tokens, in total and by part.

    The result contains :func:`~torchrl_llm_kl.losses.mismatch_metrics` and more. ``mismatch/ess_token`` and
    ``mismatch/ess_seq`` are ``(mean w)**2 / mean(w**2)``, with the ratios ``w`` of tokens or of sequences. ``rms`` is the root
    mean square of the log-ratio. ``ratio`` is the mean ratio of trainer to sampler. The mean ratio is 1 up to noise if both
    are distributions over all tokens and the sampler drew the tokens.
    """
    if table.trainer is None or table.recorded is None:
        return {}
    trainer, sampler = table.trainer[1], table.recorded[1]
    known = trainer.isfinite() & sampler.isfinite()
    sampler = torch.where(known, sampler, math.nan)
    old, _ = table.dense(torch.where(known, trainer, math.nan))
    dense, mask = table.dense(sampler)
    metrics = mismatch_metrics(old, dense, mask).items()
    out = {f"mismatch/{name.removeprefix('mismatch_')}": float(x) for name, x in metrics}
    inputs = LossInputs(old, mask, old_log_prob=old, sampler_log_prob=dense)
    levels: dict[str, Literal["token", "sequence"]] = {"token": "token", "seq": "sequence"}
    for name, level in levels.items():
        weights = importance_weights(inputs, level=level, high=None)[1]
        out[f"mismatch/ess_{name}"] = float(weights["effective_sample_size"])
    log_ratio = torch.where(known, trainer - sampler, math.nan)
    out["mismatch/max_abs"] = _largest(log_ratio.abs())
    statistics: Statistics = {"mismatch/k1": lambda d: _mean(-d), "mismatch/k3": _k3}
    statistics |= {"mismatch/rms": lambda d: _mean(d.square()) ** 0.5, "mismatch/ratio": lambda d: _mean(_ratio(d))}
    return _split(table, log_ratio, statistics) | out


def surprisal_measures(table: Table) -> dict[str, float]:
    """Measure surprisal minus entropy. The difference has the mean 0 for tokens sampled from the scored distribution.

    ``surprisal/error`` is the standard error of the mean, and ``surprisal/z`` is its standard score.
    See :func:`clustered_mean`.
    """
    gap = surprisal_gap(table)
    if gap is None:
        return {}
    known, entropy = gap.isfinite(), table.columns["entropy"]
    mean = clustered_mean(gap[known], table.sequences[known])
    out = {"surprisal/error": mean.error, "surprisal/z": mean.z}
    out["surprisal/entropy"] = _mean(entropy[entropy.isfinite()])
    return _split(table, gap, {"surprisal/gap": _mean}) | out


def surprisal_gap(table: Table) -> Tensor | None:
    """Surprisal minus entropy of each token, in nats, ``[n]``. None if one of the columns is missing."""
    entropy, trainer = table.get("entropy"), table.first("log_prob", "old_log_prob")
    return None if entropy is None or trainer is None else -trainer - entropy


def drift_measures(table: Table) -> dict[str, float]:
    """Compare the current policy with the log-probs that were stored before the policy was updated."""
    now, old = table.get("log_prob"), table.get("old_log_prob")
    if now is None or old is None:
        return {}
    drift = now - old
    statistics: Statistics = {"drift/mean": _mean, "drift/mean_abs": lambda d: _mean(d.abs()), "drift/k3": _k3}
    return _split(table, drift, statistics) | {"drift/max_abs": _largest(drift.abs())}


def clip_measures(table: Table, clip_low: float, clip_high: float) -> dict[str, float]:
    """The shares of tokens whose ratio is outside the bounds, in total and where clipping stops the gradient."""
    now, old, advantage = table.get("log_prob"), table.get("old_log_prob"), table.get("advantage")
    if now is None or old is None:
        return {}
    ratio = _ratio(now - old)
    above, below, known = ratio > 1 + clip_high, ratio < 1 - clip_low, ratio.isfinite()
    out = {"clipped/outside": _mean((above | below)[known].double())}
    if advantage is not None:
        out["clipped/positive"] = _mean(above[known & (advantage > 0)].double())
        out["clipped/negative"] = _mean(below[known & (advantage < 0)].double())
    return out


def kl_measures(table: Table) -> dict[str, float]:
    """The KL to the reference: the estimates from samples, the exact value, and their difference with its standard error."""
    policy, reference, exact = table.first("log_prob", "old_log_prob"), table.get("ref_log_prob"), table.get("kl")
    out: dict[str, float] = {}
    if policy is not None and reference is not None:
        log_ratio = policy - reference
        out |= _split(table, log_ratio, {"kl/k1": _mean, "kl/k3": lambda d: _k3(-d)})
        out["kl/max"] = _largest(log_ratio)
        if exact is not None:
            difference = log_ratio - exact
            known = difference.isfinite()
            mean = clustered_mean(difference[known], table.sequences[known])
            out |= {"kl/k1_minus_exact": mean.value, "kl/k1_minus_exact_error": mean.error}
    if exact is not None:
        out |= _split(table, exact, {"kl/exact": _mean})
    return out


def answer_measures(
    columns: TokenColumns, end: Sequence[int] | None = None, ended: Tensor | None = None
) -> dict[str, float]:
    """Measure mask, answers and groups: lengths, truncated answers, duplicated prompts, groups of equal rewards.

    An answer is truncated if its last token is not in ``end`` and the answer is not ``ended``. ``answers/at_limit`` is the
    share of answers as long as the longest one. A group holds the answers to one prompt.
    """
    tokens, mask = columns.tokens, columns.mask
    counts = segment_sum(mask.long(), tokens.lengths)
    answered = counts > 0
    out = {"mask/tokens": float(mask.sum()), "mask/sequences": float(tokens.num_sequences)}
    out["mask/coverage"] = float(mask.sum()) / max(mask.numel(), 1)
    out["mask/empty_sequences"] = _mean((~answered).double())
    if bool(answered.any()):
        lengths = counts[answered]
        out["answers/length"] = _mean(lengths.double())
        out["answers/at_limit"] = _mean((lengths == lengths.max()).double())
        if end is not None:
            last = mask.nonzero().squeeze(-1)[counts.cumsum(0)[answered] - 1]
            # The template may write white space after the end token, so the last two tokens are checked.
            near = torch.stack([tokens.values[(last - back).clamp(min=0)] for back in (0, 1)], 1)
            whole = torch.isin(near, torch.tensor(end)).any(-1)
            whole |= False if ended is None else ended[answered]
            out["answers/truncated"] = _mean((~whole).double())
    reward = columns.rows.get("reward")
    if columns.prompts is not None and columns.prompts.numel():
        _, group, sizes = columns.prompts.unique(return_inverse=True, return_counts=True)
        out |= {"groups/number": float(sizes.numel()), "groups/size": _mean(sizes.double())}
        common = int(sizes.mode().values)  # the usual number of answers per prompt
        out["groups/duplicated_prompts"] = _mean((sizes >= 2 * common).double()) if sizes.numel() > 1 else 0.0
        if reward is not None:
            low = reward.new_full(sizes.shape, math.inf).scatter_reduce(0, group, reward, "amin")
            high = reward.new_full(sizes.shape, -math.inf).scatter_reduce(0, group, reward, "amax")
            out["groups/without_spread"] = _mean((low == high)[sizes > 1].double())
    if reward is not None:
        out["reward/mean"], out["reward/std"] = _mean(reward.double()), float(reward.double().std(correction=0))
    return out


def retokenised(columns: TokenColumns, tokenizer: Tokenizer) -> dict[str, float]:
    """Decode the first 64 answers to text, encode the text again, and measure how many tokens change.

    Args:
        columns: the batch.
        tokenizer: a transformers tokenizer.

    Returns:
        ``retokenised/tokens`` is the share of all tokens that lie at or after the first changed token of their answer.
        ``retokenised/answers`` is the share of changed answers. ``retokenised/first`` is the mean place of the first changed
        token.
    """
    masks = columns.tokens.like(columns.mask).to_list()[:_TRIED]
    answers = [ids[mask].tolist() for ids, mask in zip(columns.tokens.to_list(), masks, strict=False) if mask.any()]
    largest = max((max(answer) for answer in answers), default=0)
    if largest >= len(tokenizer):
        raise ValueError(
            f"token id {largest} is outside the tokenizer's vocabulary of {len(tokenizer)}: pass the model's own."
        )
    changed, first = 0, []
    for answer in answers:
        again = list(tokenizer.encode(tokenizer.decode(answer, skip_special_tokens=False), add_special_tokens=False))
        if again != answer:
            differing = (i for i, (a, b) in enumerate(zip(answer, again, strict=False)) if a != b)
            first.append(next(differing, min(len(answer), len(again))))
            changed += len(answer) - first[-1]
    if not answers:
        return {}
    out = {"retokenised/tokens": changed / sum(map(len, answers)), "retokenised/answers": len(first) / len(answers)}
    return out | ({"retokenised/first": sum(first) / len(first)} if first else {})


def worst_tokens(columns: TokenColumns, *, most: int = 8) -> list[dict[str, float]]:
    """The tokens with the largest KL to the reference or, without a reference, with the largest mismatch.

    Returns:
        One dict per token: ``sequence``, ``position`` in the sequence, ``token`` (the id), and ``kl`` or ``mismatch``.
    """
    stored = columns.columns
    policy = stored.get("log_prob", stored.get("old_log_prob"))
    if "kl" in stored:
        name, values = "kl", stored["kl"]
    elif policy is not None and "ref_log_prob" in stored:
        name, values = "kl", policy - stored["ref_log_prob"]
    elif policy is not None and "sampler_log_prob" in stored:
        name, values = "mismatch", (policy - stored["sampler_log_prob"]).abs()
    else:
        return []
    known = (columns.mask & values.isfinite()).nonzero().squeeze(-1)
    worst = known[values[known].argsort(descending=True, stable=True)[:most]]
    tokens = columns.tokens
    fields = {"sequence": tokens.sequence_ids, "position": tokens.positions, "token": tokens.values, name: values}
    rows = zip(*(field[worst].tolist() for field in fields.values()), strict=True)
    return [dict(zip(fields, row, strict=True)) for row in rows]
