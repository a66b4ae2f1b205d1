"""The explanation of one log-prob: its route, its numbers, and a comparison with a plain forward."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from torchrl_llm_kl._numerics import send, widen
from torchrl_llm_kl.head import dropped, log_softmax
from torchrl_llm_kl.scoring._model import Setup, call, frequency_switches, has_window, locked, read_output, whole_logits
from torchrl_llm_kl.scoring._options import Sampling, ScoreOptions
from torchrl_llm_kl.scoring._packs import PackedPass
from torchrl_llm_kl.scoring._passes import RunScorer, ScoringRun
from torchrl_llm_kl.scoring._request import ScoreRequest
from torchrl_llm_kl.scoring._routing import Routing
from torchrl_llm_kl.scoring._scores import HeadReading, Scores
from torchrl_llm_kl.scoring._wrapping import Ranks


class ExplainedScorer(RunScorer, Protocol):
    """The attributes of a :class:`~torchrl_llm_kl.LogProbScorer` that an explanation uses."""

    share_prefixes: bool
    _complaint: str | None

    @property
    def model(self) -> nn.Module:
        """The scored model."""

    @property
    def path(self) -> str | None:
        """The route for log-probs."""

    def run(self, request: ScoreRequest, options: ScoreOptions) -> Scores: ...
    def _ranks(self, reference: None) -> Ranks: ...
    def _routing(self, request: ScoreRequest, record: Tensor | None) -> Routing | None: ...


@dataclass(frozen=True)
class Explanation:
    """The steps of one log-prob, see :meth:`~torchrl_llm_kl.LogProbScorer.explain`. ``str`` formats them as a table.

    Attributes:
        row: the index of the sequence.
        token: the index of the token in the sequence.
        token_id: the id of the token.
        path: ``"head"`` runs the body, then the head at scored positions. ``"full"`` is the model's own forward.
        kind: ``"pack"`` or ``"step"``, which forward a shared prefix once, or ``"micro-batch"``, which is padded.
        why: the reason for ``path`` and ``kind``.
        head: how the head computed this log-prob. Other scores, such as the entropy, may take another way.
        attention: how the last layer attended. The reason follows if a faster kernel was not used.
        batch: the index of the pack or micro-batch, from 0.
        batches: the number of packs or micro-batches.
        attended: the number of earlier positions that the token's distribution depends on.
        elsewhere: how many of these positions were forwarded by an earlier pack.
        in_mask: whether the token is scored. A masked-out token has the score 0, and the numbers here are hypothetical.
        sampling: temperature and truncation.
        kept: the number of tokens that the sampler keeps at this position. Without truncation, the whole vocabulary.
        is_kept: whether the token itself is one of them. If not, the scorer adds it.
        logit: the token's logit, before the temperature.
        log_normaliser: the log of the sum of ``exp(logit / temperature)`` over the kept tokens.
        log_prob: the scorer's result, which is ``logit / temperature - log_normaliser`` up to rounding.
        plain: the same log-prob from a forward of only this sequence, by the model itself.

    Example:
        >>> from torchrl_llm_kl import LogProbScorer
        >>> class Uniform(torch.nn.Module):
        ...     def forward(self, input_ids):
        ...         return (torch.zeros(*input_ids.shape, 4),)
        >>> explained = LogProbScorer(Uniform()).explain([[0, 1, 2]], row=0, token=2)
        >>> explained.kept, f"{explained.log_normaliser:.4f}", explained.difference
        (4, '1.3863', 0.0)
    """

    row: int
    token: int
    token_id: int
    path: str
    kind: Literal["pack", "step", "micro-batch"]
    why: str
    head: str
    attention: str
    batch: int
    batches: int
    attended: int
    elsewhere: int
    in_mask: bool
    sampling: Sampling
    kept: int
    is_kept: bool
    logit: float
    log_normaliser: float
    log_prob: float
    plain: float

    @property
    def difference(self) -> float:
        """The scorer's log-prob minus the plain one."""
        return self.log_prob - self.plain

    def __str__(self) -> str:
        shared = self.kind != "micro-batch"
        apart = f", {self.elsewhere} in earlier {self.kind}s" if shared else ""
        rows = {
            "token": f"{self.token_id}, token {self.token} of sequence {self.row}",
            "route": f"{self.path}, {'shared prefixes' if shared else 'padded'}: {self.why}",
            "head": self.head,
            "attention": self.attention,
            self.kind: f"{self.batch + 1} of {self.batches}",
            "positions attended": f"{self.attended}{apart}",
            "in the mask": "yes" if self.in_mask else "no: its score is 0, the log-prob is what it would be",
            "sampling": str(self.sampling),
            "kept tokens": f"{self.kept}, {'with' if self.is_kept else 'without'} this one",
            "logit": f"{self.logit:.6f}",
            "log-normaliser": f"{self.log_normaliser:.6f}",
            "log-prob": f"{self.log_prob:.6f}",
            "plain forward": f"{self.plain:.6f}",
            "difference": f"{self.difference:.2e}",
        }
        return "\n".join(f"{name:<20}{value}" for name, value in rows.items())


def explain(scorer: ExplainedScorer, request: ScoreRequest, row: int, token: int, options: ScoreOptions) -> Explanation:
    """See :meth:`~torchrl_llm_kl.LogProbScorer.explain`."""
    lengths = request.tokens.lengths.tolist()
    if not 0 <= row < len(lengths) or not 1 <= token < lengths[row]:
        raise ValueError(f"token {token} of sequence {row} has no log-prob: the lengths are {lengths}.")
    if scorer.path == "wrapper" or scorer._ranks(None).groups:
        raise ValueError("explain needs a whole model in this process: no other backend, and no shards.")
    element = int(request.tokens.offsets[row]) + token
    in_mask = bool(request.mask[element])
    if not in_mask:
        scored = request.mask.clone()
        scored[element] = True
        request = replace(request, mask=scored, kept=None)  # a masked-out token may have no record
    # Keep only the options that change a log-prob.
    options = ScoreOptions(options.sampling, options.adapters, options.dtype, options.deterministic)
    log_prob = scorer.run(request, options).log_prob.values[element]
    with locked(scorer.model), torch.no_grad():
        run = ScoringRun([scorer], Ranks([]), request, [scorer._routing(request, request.routing)], options)
        (setup,), (forwards,) = run.setups, run.passes()
        batch, at = next(
            (i, int(hit[0])) for i, x in enumerate(forwards.elements) if len(hit := (x == element).nonzero())
        )
        states = [forwards.run(i) for i in range(batch + 1)][-1]  # packs must run in order
        unfused = HeadReading(replace(states, kept=request.kept), states.source, options).unfused
        kind = "tiles" if states.head is not None else "whole logits"
        head = f"{kind}, since {unfused}" if unfused else "liger-kernel's fused kernel"
        logits = states.tempered(torch.tensor([at])).cpu()
        out, added = _left_out(run, logits, element)
        plain = _plain_logits(run, row, token)
        plain_out, _ = _left_out(run, plain, element)
        target = int(request.tokens.values[element])
        normaliser = logits.masked_fill(out, -torch.inf).logsumexp(-1)[0]
        plain = log_softmax(plain.masked_fill(plain_out, -torch.inf))
    return Explanation(
        row=row,
        token=token,
        token_id=target,
        path=setup.route.path,
        kind=forwards.kind,
        why=_why(scorer, setup, run),
        head="the model's own" if setup.route.path == "full" else head,
        attention=forwards.attention if isinstance(forwards, PackedPass) else "the model's own",
        batch=batch,
        batches=len(forwards.elements),
        attended=token,  # a causal model sees all earlier positions
        elsewhere=forwards.elsewhere(torch.tensor([element - 1])),
        in_mask=in_mask,
        sampling=options.sampling,
        kept=int((~out).sum()) - int(added),
        is_kept=not bool(added),
        logit=float(logits[0, target]) * options.temperature,
        log_normaliser=float(normaliser),
        log_prob=float(log_prob),
        plain=float(plain[0, target]),
    )


def _left_out(run: ScoringRun, logits: Tensor, element: int) -> tuple[Tensor, Tensor]:
    """The mask of the dropped tokens of logits ``[1, V]``, and whether the target had to be added."""
    truncation, kept = run.options.sampling.truncation, run.request.kept
    if kept is None and not truncation.active:
        return torch.zeros_like(logits, dtype=torch.bool), torch.zeros(1, dtype=torch.bool)
    own = None if kept is None else kept.take(torch.tensor([element]))
    return dropped(logits, truncation, own, run.request.tokens.values[element : element + 1])


def _plain_logits(run: ScoringRun, row: int, token: int) -> Tensor:
    """Logits ``[1, V]`` over the temperature, from the model's own forward of only this sequence. On the CPU."""
    (setup,), (routing,), tokens = run.setups, run.routings, run.request.tokens
    first, images = int(tokens.offsets[row]), next(iter(run.images), None)
    # Positions may depend on the whole length, and images must not be cut.
    last = int(tokens.lengths[row]) if run.request.whole or images is not None else token
    here = torch.arange(first, first + last)
    with setup.active(), routing.forward(here, setup.device) if routing else nullcontext():
        ids = send(tokens.values[here], setup.device)
        with nullcontext() if images is None else images.forward():
            given = {} if images is None else images.arguments([row], ids[None])
            logits = read_output(call(setup.model, ids[None], use_cache=False, **given), "logits")
        logits = whole_logits(setup.model, logits)
    # Counted from the end, since prompt tuning puts virtual tokens before the sequence.
    (logits,) = widen(logits[:, logits.shape[1] - len(here) + token - 1].cpu())
    return logits / run.options.temperature


def _why(scorer: ExplainedScorer, setup: Setup, run: ScoringRun) -> str:
    name = type(setup.model).__name__
    if run.images and run.tree is None and setup.route.sharing is not None:
        why = f"{name} cannot attend to images within a pack"
    elif setup.route.path == "full":
        why = scorer._complaint or f"{name} does not expose its body and head"
    elif setup.route.sharing is not None:
        why = f"the body and head of {name} reproduce its own log-probs, and a shared prefix is forwarded once"
    elif not scorer.share_prefixes:
        why = "share_prefixes=False"
    elif frequency_switches(setup.model):
        why = f"the positions of {name} depend on the length of its sequences (longrope)"
    else:
        why = f"the body of {name} can neither attend within a pack nor continue a state"
    return why + (", some layers see only a sliding window of the past" if has_window(setup.model) else "")
