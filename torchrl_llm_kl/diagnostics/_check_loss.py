"""A check of any loss of log-probs: its divergence, its gradient, its sum over tokens, and its treatment of masked tokens.

Nothing is sampled. Expectations are sums over all sequences of two tokens from three words, in float64.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from torchrl_llm_kl.diagnostics._catalog import read_texts
from torchrl_llm_kl.losses import LossInputs, Terms, get_objective, name_of

#: Names of quantities with their coefficients. Empty for 0, None if no sum of two known quantities fits.
Fit = Mapping[str, float] | None
#: The tensors that a loss may read, one value per token.
_INPUTS = ("log_prob", "ref_log_prob", "old_log_prob", "advantage", "kl", "entropy", "mask")
#: Every sequence, and the number of the prefix before each of its tokens: the empty one, or one of three words.
_TOKENS = torch.cartesian_prod(torch.arange(3), torch.arange(3))
_PREFIX = torch.stack([torch.zeros(9, dtype=torch.long), 1 + _TOKENS[:, 0]], -1)
#: Distances of the reference and of the sampler. Close to the policy no clamp is active: log-ratios to the reference are
#: within 2.4, and ratios to the sampler within 0.85 and 1.17.
_DISTANCES = {"on-policy": (0.6, 0.0), "off-policy": (0.6, 0.08), "far": (40.0, 0.0)}.values()
#: Divergences whose value needs their gradient, in both directions of the KL. The value of ``k2`` is not among them, since its
#: gradient is meant to be another one. On-policy the KL of whole sequences has the value of the reverse KL.
_DIVERGENCES = {name: name for name in ("reverse KL", "forward KL", "Jensen-Shannon", "chi2")} | {
    "sequence KL": "reverse KL"
}
#: Faults with their remedies. The first two name the quantities of value and gradient.
_FAULTS = read_texts("loss_faults.ini", "{fault}: {remedy}.".format)


@dataclass(frozen=True)
class LossReport:
    """The result of :func:`check_loss`. ``print(report)`` prints it as text.

    Args:
        name: the loss.
        fits: ``"value"`` and ``"gradient"``, on-policy and with the suffix ``", off-policy"`` -> quantity -> coefficient. Empty
            for 0, None if no sum of two known quantities fits.
        aggregation: how the loss sums over tokens: a name of :func:`~torchrl_llm_kl.losses.aggregate` (``"none"`` for one value
            per token or sequence), ``"sum"``, or ``"other"``.
        findings: name -> fault and remedy.
    """

    name: str
    fits: Mapping[str, Fit]
    aggregation: str
    findings: Mapping[str, str]

    def __str__(self) -> str:
        fits = [f"{key}: {_shown(fit)}" for key, fit in self.fits.items()]
        faults = [f"{name}: {text}" for name, text in self.findings.items()]
        return "\n".join([self.name, *fits, f"sum over tokens: {self.aggregation}", *(faults or ["no fault"])])


def _shown(fit: Fit) -> str:
    if not fit:
        return "no known quantity" if fit is None else "0"
    return " + ".join(name if abs(x - 1) < 1e-6 else f"{x:.4g} * {name}" for name, x in fit.items())


def check_loss(loss: Callable[..., Any] | str) -> LossReport:
    """Find out which divergence a loss estimates, whose gradient it has, and whether masks, padding and splits change it.

    The loss is evaluated for every sequence of a small vocabulary, for several random policies. Its mean value and its mean
    gradient with respect to logits are compared with those of known quantities: the KLs of policy and reference in both
    directions, Jensen-Shannon and chi2 divergence, the KL of whole sequences, the total variation, the KL to the sampler, the
    advantage (``-advantage``: the policy gradient), and sums of two of them. A fit must hold for all policies, to nine digits
    (four in float32). Off-policy the sampler is close to the policy, so that usual clips are not active.

    Quantities are means over tokens. The divergences are those of each position, at the prefixes that the sampler reaches.

    Args:
        loss: a function of some of ``log_prob``, ``ref_log_prob``, ``old_log_prob``, ``advantage``, ``mask`` (bool), ``kl``
            (the exact reverse KL of each position) and ``entropy``, which are ``[B, T]``. It returns a 0-dim loss, ``[B]`` or
            ``[B, T]``. Or a function of :class:`~torchrl_llm_kl.losses.LossInputs`, or the name of an objective. Bind
            hyper-parameters with ``functools.partial``.

    Returns:
        The fits, the aggregation and the faults, by name:

        - ``wrong_gradient``: the value is a divergence, and the gradient belongs to another quantity.
        - ``no_gradient``: the value is a divergence, and its mean gradient is 0.
        - ``clamped``: far from the reference the gradient of the divergence is lost.
        - ``nan_times_mask``: NaN or inf at a masked-out token reaches the loss or the gradient.
        - ``masked_tokens_leak``: finite numbers at masked-out tokens do.
        - ``padding_changes``: more masked-out tokens change the loss.
        - ``mean_of_means``: the loss averages the means of parts of its batch.
        - ``split_changes``: the mean over micro-batches is not the loss of the whole batch.

        Masks are checked only if the loss takes a mask.

    Raises:
        TypeError: if the loss takes none of the inputs.
        MissingInputError: if a function of ``LossInputs`` needs another input.

    Example:
        >>> from torchrl_llm_kl.estimators import k3
        >>> print(check_loss(k3))
        k3
        value: reverse KL
        gradient: forward KL
        value, off-policy: no known quantity
        gradient, off-policy: no known quantity
        sum over tokens: none
        wrong_gradient: the value estimates the reverse KL, the gradient belongs to forward KL: use k2 or the exact KL.
        >>> check_loss("ppo").fits["gradient"]
        {'-advantage': 1.0}

    Source: gradients of KL estimators, arXiv 2512.21852.
    """
    call = _Loss(loss)
    (value, gradient), (value_off, gradient_off), (_, far) = (_fits(call, *each) for each in _DISTANCES)
    aggregation, of_sums = _sums_of_parts(call)
    names = [*_of_gradient(value, gradient, far), *(_of_masks(call) if "mask" in call.names else ()), *of_sums]
    shown = (" and ".join(_divergences(value)), " and ".join(_divergences(gradient)) or _shown(gradient))
    findings = {name: _FAULTS[name].format(*shown) for name in names}
    fits = {"value": value, "gradient": gradient, "value, off-policy": value_off, "gradient, off-policy": gradient_off}
    return LossReport(name_of(call.function), fits, aggregation, findings)


class _Loss:
    """A loss as a function of named tensors. It returns 0-dim, or one value per sequence."""

    def __init__(self, loss: Callable[..., Any] | str) -> None:
        self.function: Callable[..., Any] = get_objective(loss) if isinstance(loss, str) else loss
        read = self.function.forward if isinstance(self.function, nn.Module) else self.function
        parameters = inspect.signature(read).parameters
        self.of_record = "log_prob" not in parameters
        self.names = _INPUTS if self.of_record else tuple(name for name in _INPUTS if name in parameters)
        if self.of_record and sum(x.default is x.empty for x in parameters.values()) != 1:
            raise TypeError(f"the loss takes {', '.join(parameters)}: expected some of {', '.join(_INPUTS)}.")

    def __call__(self, batch: Mapping[str, Tensor]) -> Tensor:
        given = {name: batch[name].clone() for name in self.names}  # the loss may change them in place
        if not self.of_record:
            out: Any = self.function(**given)
            if not isinstance(out, Tensor):
                kind = type(out).__name__
                raise TypeError(
                    f"{name_of(self.function)} returned a {kind}: return a tensor, 0-dim or one value per token."
                )
            out = out.reshape(()) if out.shape == (1,) != batch["mask"].shape[:1] else out
            value: Tensor = _expectation(out, batch["mask"]) if out.ndim > 1 else out
            return value
        terms = cast("Terms", self.function(LossInputs(**given, sampler_log_prob=batch["old_log_prob"])))
        return torch.stack([term.weight * _expectation(term.value, term.mask) for term in terms]).sum(0)


def _expectation(value: Tensor, mask: Tensor) -> Tensor:
    """Mean of each sequence."""
    return torch.where(mask, value, 0).sum(-1) / mask.sum(-1).clamp(min=1)


def _tolerance(value: Tensor) -> float:
    return 1e-9 if value.dtype == torch.float64 else 1e-4


def _with_gradient(value: Tensor, leaf: Tensor) -> Tensor:
    """A 0-dim value, followed by its gradient."""
    gradient = torch.zeros_like(leaf)
    if value.requires_grad:
        (gradient,) = torch.autograd.grad(value, leaf, retain_graph=True, materialize_grads=True)
    return torch.cat([value.detach().reshape(1).double(), gradient.flatten()])


# ------------------------------------------------------------------ values and gradients


def _drawn(seed: int, of_reference: float, of_sampler: float) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Logits of a random policy at each prefix, the inputs of a loss for each sequence, and the known quantities."""
    rng = torch.Generator().manual_seed(seed)
    policy, ref, step = 2 * torch.rand(3, 4, 3, generator=rng, dtype=torch.float64) - 1
    logits = (0.6 * policy).requires_grad_()
    log_p, log_q, log_old = (
        x.log_softmax(-1) for x in (logits, of_reference * ref, logits.detach() + of_sampler * step)
    )
    log_prob, ref_log_prob, old_log_prob = (x[_PREFIX, _TOKENS] for x in (log_p, log_q, log_old))
    advantage = torch.randn(9, 1, generator=rng, dtype=torch.float64).expand(-1, 2)
    p, q, log_m = log_p.exp(), log_q.exp(), ((log_p.exp() + log_q.exp()) / 2).log()
    of_words = {
        "reverse KL": p * (log_p - log_q),
        "forward KL": q * (log_q - log_p),
        "Jensen-Shannon": (p * (log_p - log_m) + q * (log_q - log_m)) / 2,
        "chi2": (p - q).square() / q,
        "squared log-ratio / 2": p * (log_p - log_q).square() / 2,
        "total variation": (p - q).abs(),
        "KL(sampler, policy)": log_old.exp() * (log_old - log_p),
        "entropy": -p * log_p,
    }
    values = {name: x.sum(-1)[_PREFIX] for name, x in of_words.items()}
    rows = {"log_prob": log_prob, "ref_log_prob": ref_log_prob, "old_log_prob": old_log_prob, "advantage": advantage}
    rows |= {"kl": values["reverse KL"], "entropy": values["entropy"], "mask": advantage < torch.inf}
    whole = (log_prob - old_log_prob).sum(-1, keepdim=True).exp()
    values |= {
        "-advantage": -(log_prob - old_log_prob).exp() * advantage,
        "-advantage of sequences": -whole * advantage,
        "-advantage * log_prob": -advantage * log_prob,
        "sequence KL": whole * (log_prob - ref_log_prob),
    }
    weight = old_log_prob.sum(-1).exp()
    return logits, rows, {name: (weight * x.mean(-1)).sum() for name, x in values.items()}


def _fits(loss: _Loss, of_reference: float, of_sampler: float) -> list[Fit]:
    """The fits of the mean value and of the mean gradient."""
    terms, known, digits = [], [], 0.0
    for seed in range(6):
        logits, rows, quantities = _drawn(seed, of_reference, of_sampler)
        out = [loss({name: x[i : i + 1] for name, x in rows.items()}).sum() for i in range(len(_TOKENS))]
        weight, digits = rows["old_log_prob"].sum(-1, keepdim=True).exp(), _tolerance(out[0])
        terms.append(weight * torch.stack([_with_gradient(x, logits) for x in out]))
        known.append(torch.stack([_with_gradient(x, logits) for x in quantities.values()]))
    every, columns = torch.stack(terms, 1), dict(zip(quantities, torch.stack(known, 1), strict=True))
    parts = slice(1), slice(1, None)
    return [_fit(every[..., x], {name: column[..., x] for name, column in columns.items()}, digits) for x in parts]


def _fit(terms: Tensor, columns: Mapping[str, Tensor], digits: float) -> Fit:
    """The fewest columns, at most two, whose least-squares fit to the sum of terms is exact."""
    target, tolerance = terms.sum(0).flatten(), digits * float(terms.abs().max())
    if not target.isfinite().all():
        return None
    names = [name for name, column in columns.items() if column.abs().max() > tolerance]
    for chosen in (each for size in range(3) for each in combinations(names, size)):
        matrix = torch.stack([columns[name].flatten() for name in chosen] or [0 * target], -1)
        solution = torch.linalg.lstsq(matrix, target[:, None]).solution[:, 0]
        if (matrix @ solution - target).abs().max() <= tolerance:
            return {name: round(x, 9) for name, x in zip(chosen, solution.tolist(), strict=False)}
    return None


def _divergences(fit: Fit) -> list[str]:
    return [_DIVERGENCES[name] for name in fit or () if name in _DIVERGENCES]


def _of_gradient(value: Fit, gradient: Fit, far: Fit) -> Iterator[str]:
    """Names of faults of the gradient on-policy."""
    claimed, followed = _divergences(value), _divergences(gradient)
    if claimed and claimed != followed:
        yield "wrong_gradient" if followed or gradient is None else "no_gradient"
    if followed and followed != _divergences(far):
        yield "clamped"


# ------------------------------------------------------------------ masks and sums

_LENGTHS = torch.tensor([1, 2, 4, 3])


def _enumerated(filler: float = 0.0, padding: int = 0, lengths: Tensor = _LENGTHS) -> dict[str, Tensor]:
    """Four sequences of up to four tokens, with ``filler`` at masked-out tokens."""
    mask = torch.arange(4 + padding) < lengths[:, None]
    one, *others = torch.rand(6, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = (-one - 0.1, -one - others[0], -one - 0.1 * others[1], others[2][:, :1].expand(-1, 4) - 0.5, *others[3:])
    # Slightly different for each input, or log-ratios of masked-out tokens would be 0.
    fillers = filler * torch.linspace(1, 1.001, len(values), dtype=torch.float64)
    filled = [torch.where(mask, pad(x, (0, padding)), fill) for x, fill in zip(values, fillers, strict=True)]
    return dict(zip(_INPUTS, [*filled, mask], strict=True))


def _close(one: Tensor, other: Tensor, digits: float) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=digits, atol=digits)


def _of_masks(loss: _Loss) -> Iterator[str]:
    """Names of faults at masked-out tokens."""

    def outcome(filler: float = 0.0, padding: int = 0) -> tuple[Tensor, float]:
        batch = _enumerated(filler, padding)
        leaf = batch["log_prob"].requires_grad_()
        out = loss(batch).sum()
        both = _with_gradient(out, leaf)
        return torch.cat([both[:1], both[1:].reshape(leaf.shape)[:, :4].flatten()]), _tolerance(out)

    usual, digits = outcome()
    if not all(_close(outcome(filler)[0], usual, digits) for filler in (torch.nan, torch.inf, -torch.inf)):
        yield "nan_times_mask"
    if not _close(outcome(-9999.0)[0], usual, digits):
        yield "masked_tokens_leak"
    if not _close(outcome(padding=3)[0], usual, digits):
        yield "padding_changes"


def _sums_of_parts(loss: _Loss) -> tuple[str, Iterable[str]]:
    """The aggregation over tokens, and names of faults of a split into micro-batches."""
    # Without a mask, padding would count as tokens.
    lengths = _LENGTHS if "mask" in loss.names else torch.full((4,), 4)
    batch = _enumerated(lengths=lengths)

    def part(start: int, stop: int) -> Tensor:
        # Each micro-batch is padded to its own longest sequence.
        longest = int(lengths[start:stop].max())
        return loss({name: x[start:stop, :longest] for name, x in batch.items()}).detach()

    whole, rows = part(0, 4), [part(i, i + 1) for i in range(4)]
    digits = _tolerance(whole)
    if whole.ndim:
        return "none", () if _close(torch.cat(rows), whole, digits) else ("split_changes",)
    each, halves = torch.cat([row.reshape(1) for row in rows]), torch.stack([part(0, 2), part(2, 4)])
    twice = loss({name: torch.cat([x[3:, :3]] * 2, -1) for name, x in batch.items()}).detach()
    known = {
        "token-mean": (each * lengths).sum() / lengths.sum(),
        "seq-mean-token-mean" if _close(twice, rows[3], digits) else "seq-mean-token-sum": each.mean(),
        "seq-mean-token-sum-norm": (each * lengths).mean() / lengths.max(),
        "sum": each.sum(),
    }
    aggregation = next((name for name, value in known.items() if _close(value, whole, digits)), "other")
    if not _close(halves.mean(), whole, digits):
        return aggregation, () if aggregation == "sum" else ("split_changes",)
    of_tokens = _close((each * lengths)[:2].sum() / lengths[:2].sum(), halves[0], digits)
    return aggregation, ("mean_of_means",) if of_tokens and aggregation == "other" else ()
