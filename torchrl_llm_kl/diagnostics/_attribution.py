"""The causes of a mismatch between sampler and trainer in shares, and a prediction of the mismatch of a low precision.

A *setup* maps causes to their values, such as ``{"temperature": 0.8, "dtype": "bfloat16"}``. The policy is scored again under a
setup to predict the sampler's log-probs. The causes of the setup that predicts them best share the measured KL.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Literal, get_args

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from typing_extensions import Unpack

from torchrl_llm_kl._numerics import check_choice, check_range
from torchrl_llm_kl.diagnostics._columns import Reading, TokenColumns, check_reading, read_columns
from torchrl_llm_kl.diagnostics._measures import Table
from torchrl_llm_kl.diagnostics._rescored import Rescorer, Top
from torchrl_llm_kl.masks import Tokenizer
from torchrl_llm_kl.rollouts import find_key, per_token, read_routing
from torchrl_llm_kl.scoring import LogProbScorer, ModelOrScorer, Sampling, ScoreRequest, WeightHistory, as_sampling

#: The precision of an engine. ``float8`` (e4m3) and ``int8`` are weights with one scale for each output of a matrix.
Precision = Literal["float32", "bfloat16", "float16", "float8", "int8"]
#: A cause and its value.
Setup = Mapping[str, Any]
#: The share of the KL that is left by which another cause must lower it, and the largest number of causes.
LOWERS, MOST_CAUSES = 0.2, 6
#: The multiple of the policy's own noise (as a KL) below which nothing is attributed.
NOISES = 4.0
_SCALES = {"float8": 448.0, "int8": 127.0}  # the largest number of each type
_KEPT = re.compile(r"(^|\.)(gate|router|lora_\w+)(\.|$)")


def lowered(model: nn.Module, precision: Precision) -> nn.Module:
    """A copy of a model in a precision. With ``float8`` and ``int8`` it computes in the model's own dtype.

    Embeddings, the head, routers and LoRA's matrices keep their precision then, as engines keep them.
    """
    twin = copy.deepcopy(model).requires_grad_(False)
    if precision not in _SCALES:
        return twin.to(getattr(torch, precision))
    head = getattr(twin, "get_output_embeddings", lambda: None)()
    kept = [head, *(layer for layer in twin.modules() if isinstance(layer, nn.Embedding))]
    others = {id(layer.weight) for layer in kept if layer is not None}
    for name, layer in twin.named_modules():
        outputs = 0 if type(layer).__name__ == "Conv1D" else -1  # GPT-2 stores its matrices transposed
        for weight in layer.parameters(recurse=False):
            if weight.ndim > 1 and id(weight) not in others and not _KEPT.search(name):
                scale = weight.abs().amax(outputs, keepdim=True).clamp(min=1e-12) / _SCALES[precision]
                scaled = weight / scale
                rounded = scaled.to(torch.float8_e4m3fn).to(scaled.dtype) if precision == "float8" else scaled.round()
                weight.data = rounded * scale
    return twin


# ------------------------------------------------------------------ shares


@dataclass(frozen=True)
class Attribution:
    """The result of :func:`attribute_mismatch`. ``print`` shows it as bars.

    Args:
        kl: the measured KL of sampler to trainer, in nats per token: the mean of ``exp(d) - 1 - d`` with the trainer's log-prob
            minus the sampler's as ``d``.
        shares: cause -> its share of the KL, in nats per token.
        setup: cause -> the value under which the policy predicts the sampler's log-probs best.
        left_over: the KL that no cause explains. The shares and this add up to ``kl``.
        tokens: the number of compared tokens.
        forwards: how often the tokens were scored.
    """

    kl: float
    shares: dict[str, float] = field(default_factory=dict)
    setup: dict[str, object] = field(default_factory=dict)
    left_over: float = 0.0
    tokens: int = 0
    forwards: int = 0

    def __str__(self) -> str:
        lines = [f"KL of sampler to trainer: {self.kl:.3g} nats per token, over {self.tokens} tokens"]
        parts = sorted(self.shares.items(), key=lambda pair: -pair[1])
        for name, share in [*parts, ("left over", self.left_over)]:
            part = share / self.kl if self.kl else 0.0
            value = self.setup.get(name, "")
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            lines.append(f"{name:<12} {part:7.1%}  {'█' * round(40 * max(part, 0.0)):<40}  {shown}".rstrip())
        return "\n".join(lines)


@torch.no_grad()
def attribute_mismatch(
    batch: TensorDictBase,
    policy: ModelOrScorer,
    /,
    *,
    history: WeightHistory | None = None,
    tokenizer: Tokenizer | None = None,
    **reading: Unpack[Reading],
) -> Attribution:
    """Split the KL between the sampler's and the trainer's log-probs into the shares of its causes.

    The causes are ``temperature``, ``truncation``, ``prompt`` (another template or BOS token), ``version`` (older weights),
    ``routing`` (other experts) and ``dtype``. The search adds the cause that lowers the KL most, and fits its value together
    with the others. Each cause is confirmed by scoring up to 8192 tokens again. Its share is its Shapley value: the mean over
    all orders of the KL that disappears when the trainer takes over this cause too. So it does not depend on an order.

    Args:
        batch: rollouts with the log-probs of the sampler.
        policy: the trainer's policy, in this process, with the present weights.

    Keyword Args:
        history: the versions of its weights, for rows with an entry ``"policy_version"``.
        tokenizer: for other prompts.
        **reading: arguments of :func:`read_columns`. ``temperature`` and ``sampling`` are the trainer's.

    Returns:
        The shares.

    Raises:
        ValueError: if the batch has no log-probs of the sampler, or the policy cannot be scored in this process.

    Example:
        >>> print(attribute_mismatch(batch, policy, tokenizer=tokenizer))  # doctest: +SKIP
        KL of sampler to trainer: 0.0214 nats per token, over 4096 tokens
        temperature    93.1%  █████████████████████████████████████     0.9
        dtype           6.7%  ███                                       bfloat16
        left over       0.2%

    Source: Shapley 1953, "A value for n-person games". The measured KL is Schulman's k3.
    """
    columns, scored = _columns_of_batch(batch, policy, {**reading, "policy": policy})
    table = Table.of(columns)
    recorded = table.first("sampler_log_prob", "old_log_prob")
    if recorded is None:
        raise ValueError(
            "the batch has no log-probs of the sampler: collect with return_log_probs=True, or pass keys=."
        )
    scored = as_sampling(reading.get("temperature", 1.0), reading.get("sampling"))
    rescorer = Rescorer(
        policy, columns, table, policy.options.sampling if isinstance(policy, LogProbScorer) else scored
    )
    tokens, mask, picked = columns.tokens, columns.mask, rescorer.picked
    versions = routing = None
    place = find_key(batch, "policy_version")
    if history is not None and place is not None:
        versions = per_token(batch, place, tokens, None)[mask][picked].long().clamp(min=-1)
    experts = read_routing(batch, "routed_experts", tokens, mask)
    if experts is not None:
        rows = tokens.like(experts).to_list()
        routing = [rows[i] for i in rescorer.rows]
    search = _Search(rescorer, recorded[picked], history, versions, routing, tokenizer)
    setup = search.best()
    shares = search.shapley(setup)
    kl, left = search.kl({}), search.kl(setup)
    return Attribution(kl, shares, dict(setup), left, int(search.known.sum()), search.forwards)


def _columns_of_batch(batch: TensorDictBase, policy: ModelOrScorer, reading: Reading) -> tuple[TokenColumns, Sampling]:
    """The columns of a batch, and the distribution that the trainer scores."""
    check_reading(reading)
    if not Rescorer.can_score(policy):
        raise ValueError(f"{type(policy).__name__} cannot be scored in this process: pass the transformers model.")
    scored = as_sampling(reading.get("temperature", 1.0), reading.get("sampling"))
    if isinstance(policy, LogProbScorer):
        scored = policy.options.sampling
    reading["reference"] = None
    return read_columns(batch, strict=False, **reading), scored


class _Search:
    """Looks for the setup that predicts the recorded log-probs ``[m]`` best.

    Args:
        rescorer: the policy and the tokens.
        recorded: the sampler's log-probs, NaN where they are unknown.
        history: versions of the weights.
        versions: the version of each token ``[m]``.
        routing: the recorded experts of each row.
        tokenizer: for other prompts.
    """

    def __init__(
        self,
        rescorer: Rescorer,
        recorded: Tensor,
        history: WeightHistory | None,
        versions: Tensor | None,
        routing: list[Tensor] | None,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.rescorer, self.recorded, self.known = rescorer, recorded, recorded.isfinite()
        self.history, self.versions, self.routing, self.forwards = history, versions, routing, 0
        if history is not None and versions is not None:
            # Tokens of versions that are not held cannot be scored again.
            self.known &= torch.isin(versions, torch.tensor([-1, *history.versions]))
        self.prompts = {} if routing is not None else self._prompts(tokenizer)
        self._plain = rescorer.scorer()
        self._copy: tuple[object, LogProbScorer | None] = (None, None)  # the last one: several would fill the memory
        self._log_probs: dict[frozenset[tuple[str, object]], Tensor] = {}

    # ------------------------------------------------------------------ predictions

    def _scores(self, setup: Setup, **wanted: Any) -> dict[str, Tensor]:
        """The scores of the tokens under a setup by name, ``[m]`` or ``[m, K]``."""
        rows, masks = self.rescorer.ids, self.rescorer.masks
        if "prompt" in setup:
            rows, masks = self.prompts[setup["prompt"]]
        routing = self.routing if "routing" in setup else None
        # Every version scores all rows, so that tokens of one row may have several versions.
        request = ScoreRequest.of(rows, masks, routing=routing)
        known = [None] if "version" not in setup else self.versions[self.known].unique().tolist()  # type: ignore[index]
        out: dict[str, Tensor] = {}
        for version in known:
            with nullcontext() if version in (None, -1) else self.history.installed(version), warnings.catch_warnings():  # type: ignore[union-attr]
                warnings.simplefilter("ignore")  # tokens outside a truncation that is only tried
                scorer = self._scorer(setup.get("dtype"), version)
                scores = scorer.evaluate(request, sampling=self._sampling(setup), **wanted)
            self.forwards += 1
            own = {name: x.values[torch.cat(masks)].double() for name, x in scores.per_token.items()}
            here = None if version is None else self.versions == version
            out = (
                own
                if here is None or not out
                else {name: torch.where(here.reshape(-1, *[1] * (x.ndim - 1)), x, out[name]) for name, x in own.items()}
            )
        return out

    def _scorer(self, precision: Precision | None, version: int | None) -> LogProbScorer:
        """The scorer of a precision. A copy holds the weights of one version, the model itself any."""
        if precision is None:
            return self._plain
        if self._copy[0] != (precision, version):
            rescorer = self.rescorer
            if rescorer.copies:
                made = LogProbScorer(lowered(rescorer.model, precision), adapters=rescorer.adapters)
            else:
                made = rescorer.scorer(dtype=getattr(torch, precision))
            self._copy = ((precision, version), made)
        assert self._copy[1] is not None
        return self._copy[1]

    def _sampling(self, setup: Setup) -> Sampling:
        own = self.rescorer.sampling
        if "truncation" in setup:
            name, value = setup["truncation"]
            own = Sampling(own.temperature, **{name: value})
        return replace(own, temperature=setup.get("temperature", own.temperature))

    def log_prob(self, setup: Setup) -> Tensor:
        """The predicted log-probs, ``[m]``."""
        key = frozenset(setup.items())
        if key not in self._log_probs:
            self._log_probs[key] = self._scores(setup)["log_prob"]
        return self._log_probs[key]

    def kl(self, setup: Setup) -> float:
        """The KL of the sampler to the prediction, in nats per token."""
        d = (self.log_prob(setup) - self.recorded)[self.known].clamp(max=80.0)
        return float((d.expm1() - d).mean()) if d.numel() else 0.0

    # ------------------------------------------------------------------ values of the causes

    @property
    def precisions(self) -> list[Precision]:
        """The precisions that can be scored, except the policy's own."""
        usable: tuple[Precision, ...] = get_args(Precision) if self.rescorer.copies else ("bfloat16", "float16")
        return [name for name in usable if getattr(torch, name, None) != self.rescorer.dtype]

    def _prompts(self, tokenizer: Tokenizer | None) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
        """Other rows and masks by the name of the rendering, if each row can have another prompt."""
        count, bos = len(self.rescorer.ids), getattr(tokenizer, "bos_token_id", None)
        every = self.rescorer.other_prompts(tokenizer, None, bos, most=count)
        return {name: self.rescorer.after(prompts) for name, prompts in every if len(prompts) == count}

    def _values(self, cause: str, others: Setup) -> Iterator[object]:
        """Possible values of a cause beside the others."""
        records = {"version": self.versions, "routing": self.routing}
        if cause in records:
            yield from [] if records[cause] is None else [True]
        elif cause == "prompt":
            yield from self.prompts
        elif cause == "dtype":
            yield from self.precisions
        elif cause == "temperature":
            yield self._temperature(others)
        elif cause == "truncation" and not self.rescorer.sampling.truncates:
            k = min(self.rescorer.vocab, 512)
            scores = self._scores(others, top_k=k)
            top = Top(scores["log_prob"], scores["top_log_probs"], k >= self.rescorer.vocab).select(self.known)
            mass = (top.log_prob - self.recorded[self.known]).clamp(max=0.0).exp()
            for name, value in sorted(set(top.candidates(mass))):
                usable = value < 1 if name != "top_k" else value < self.rescorer.vocab
                if value > 0 and usable:
                    yield name, int(value) if name == "top_k" else value

    def _temperature(self, others: Setup) -> float:
        """The temperature of the smallest squared error, by Gauss-Newton steps in ``x = -log T``."""
        x = -math.log(self._sampling(others).temperature)
        for _ in range(8):
            scores = self._scores({**others, "temperature": math.exp(-x)}, entropy=True)
            slope = (scores["log_prob"] + scores["entropy"])[self.known]  # the derivative of a log-prob
            error = (self.recorded - scores["log_prob"])[self.known]
            step = float((slope * error).sum() / slope.square().sum().clamp(min=1e-12))
            x += max(-0.7, min(0.7, step))
            if abs(step) < 1e-5:
                break
        return math.exp(-x)

    # ------------------------------------------------------------------ the search

    def best(self) -> Setup:
        """The setup with the smallest KL. A cause is part of it only if the KL is clearly larger without it."""
        floor = (NOISES * self.rescorer.noise) ** 2 / 2  # for small log-ratios, k3 is half of their square
        setup: dict[str, Any] = {}
        # Forward selection: a search over all subsets would fit each value far more often.
        while len(setup) < MOST_CAUSES and self.kl(setup) > floor:
            larger = [self._refined({**setup, cause: value}) for cause, value in self._candidates(setup)]
            better = min(larger, key=self.kl, default=setup)
            if self.kl(better) > (1 - LOWERS) * self.kl(setup):
                break
            setup = dict(better)
        # A cause that was found first may have stood for others that were found later.
        for cause in list(setup):
            without = self._refined({name: x for name, x in setup.items() if name != cause})
            if self.kl(without) <= max(floor, self.kl(setup) / (1 - LOWERS)):
                setup = dict(without)
        return setup

    def _candidates(self, setup: Setup) -> Iterator[tuple[str, object]]:
        """The best value of each cause that is not in the setup."""
        for cause in ("version", "routing", "prompt", "dtype", "truncation", "temperature"):
            values = [] if cause in setup else list(self._values(cause, setup))
            if values:
                yield cause, self._best_value(cause, values, setup)

    def _best_value(self, cause: str, values: Sequence[object], others: Setup) -> object:
        return min(values, key=lambda value: self.kl({**others, cause: value}))

    def _refined(self, setup: Setup) -> Setup:
        """Fit the values of truncation and temperature once more, beside all others."""
        for cause in [name for name in ("truncation", "temperature", "truncation") if name in setup and len(setup) > 1]:
            others = {name: x for name, x in setup.items() if name != cause}
            values = [setup[cause], *self._values(cause, others)]
            setup = {**others, cause: self._best_value(cause, values, others)}
        return setup

    def shapley(self, setup: Setup) -> dict[str, float]:
        """The mean over all orders of the KL that each cause removes."""
        count, shares = len(setup), dict.fromkeys(setup, 0.0)
        for cause in setup:
            others = [name for name in setup if name != cause]
            for size in range(count):
                weight = math.factorial(size) * math.factorial(count - size - 1) / math.factorial(count)
                for some in combinations(others, size):
                    before = {name: setup[name] for name in some}
                    shares[cause] += weight * (self.kl(before) - self.kl({**before, cause: setup[cause]}))
        return shares


# ------------------------------------------------------------------ a prediction


@dataclass(frozen=True)
class PredictedMismatch:
    """The result of :func:`predict_mismatch`.

    Args:
        k3: the KL of the low precision to the policy, in nats per token.
        weight_error: the mean of ``|w - 1|`` over tokens, with the importance weight ``w`` of a token.
        weight_max: the largest weight.
        high: the smallest limit of weights with which :class:`~torchrl_llm_kl.losses.ImportanceWeights` changes the mean of any
            token loss between -1 and 1 by at most the tolerance. None if no correction is needed for that.
    """

    k3: float
    weight_error: float
    weight_max: float
    high: float | None

    @property
    def correction(self) -> str:
        """The smallest correction that bounds the error."""
        return "none" if self.high is None else f"ImportanceWeights(high={math.ceil(self.high * 100) / 100:g})"


@torch.no_grad()
def predict_mismatch(
    batch: TensorDictBase,
    policy: ModelOrScorer,
    precision: Precision,
    /,
    *,
    tolerance: float = 0.01,
    **reading: Unpack[Reading],
) -> PredictedMismatch:
    """Predict the mismatch of an engine with weights of a low precision, before it is used.

    The tokens stand for samples of the engine. Only the rounding of weights is predicted. Engines with other kernels, or with
    activations and keys of a low precision, differ more.

    Args:
        batch: rollouts. Their log-probs are not read.
        policy: the policy in its own precision, in this process.
        precision: see :data:`Precision`.

    Keyword Args:
        tolerance: the largest change of the mean of a token loss between -1 and 1.
        **reading: arguments of :func:`read_columns`.

    Returns:
        Numbers over up to 8192 tokens.

    Raises:
        ValueError: for another precision, or a policy that cannot be scored in this process.

    Example:
        >>> predict_mismatch(batch, policy, "float8").correction  # doctest: +SKIP
        'ImportanceWeights(high=1.4)'
    """
    check_range(above=0.0, tolerance=tolerance)
    columns, scored = _columns_of_batch(batch, policy, {**reading, "policy": None})
    search = _Search(Rescorer(policy, columns, Table.of(columns), scored), torch.zeros(0), None, None, None, None)
    check_choice(search.precisions, precision=precision)  # fewer for a model that is too large for a copy
    search.recorded = search.log_prob({"dtype": precision})
    search.known = search.recorded.isfinite()
    weights = (search.log_prob({}) - search.recorded).exp()
    error, most = float((weights - 1).abs().mean()), float(weights.max())
    high = None if error <= tolerance else _smallest_limit(weights, tolerance)
    return PredictedMismatch(search.kl({}), error, most, high)


def _smallest_limit(weights: Tensor, tolerance: float) -> float:
    """The smallest ``c`` for which the mean of ``max(w - c, 0)`` is at most the tolerance."""
    ordered = weights.sort(descending=True).values
    number = torch.arange(1, len(ordered) + 1)
    # With c at the n-th largest weight, the mean is (the sum of the n largest - n c) / N, which grows with n.
    excess = (ordered.cumsum(0) - number * ordered) / len(ordered)
    n = int((excess <= tolerance).sum())
    limit = float((ordered[:n].sum() - tolerance * len(ordered)) / n)
    return max(1.0, limit)  # a lower one would truncate equal weights
