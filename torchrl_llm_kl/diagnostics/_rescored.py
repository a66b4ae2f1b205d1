"""Scores a few sequences of a batch again under a hypothesis: another temperature, truncation, precision, adapter or prompt."""

from __future__ import annotations

import copy
import csv
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.resources import files
from itertools import combinations
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchrl_llm_kl.diagnostics._columns import TokenColumns
from torchrl_llm_kl.diagnostics._measures import Table
from torchrl_llm_kl.masks import Message, Tokenizer
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring import (
    LogProbScorer,
    ModelOrScorer,
    Ranks,
    Sampling,
    Scores,
    inner_module,
    log_probs_only,
    vocab_size,
)

#: The largest numbers of tokens (with prompts) that are scored again, of top ids per position, and of sequences that are scored
#: with other prompts.
MOST_TOKENS, MOST_TOP, MOST_PROMPTS = 8192, 512, 12
#: The share of its probability that a token outside a truncation keeps. Another kernel rounds differently at the border.
OUTSIDE = 0.01
#: The largest size of a model's copy in bfloat16, in bytes.
LARGEST_COPY = 4 * 2**30


#: Templates that a sampler may have used instead of the tokenizer's, without their default system prompts. All text is inside
#: expressions, since Jinja drops newlines after blocks and at the end.
_ROWS = csv.DictReader((files(__package__) / "templates.csv").read_text(encoding="utf-8").splitlines())
COMMON_TEMPLATES = {row["name"]: row["template"] for row in _ROWS}
_SYSTEM = "You are a helpful assistant."


class Rescorer:
    """Scores some of a batch's sequences again.

    The sequences are spread over the batch and have up to :data:`MOST_TOKENS` tokens. ``m`` of these are masked in.

    Args:
        policy: a model in this process, a wrapper around one, or a scorer.
        columns: the batch.
        table: its ``n`` masked-in tokens.
        sampling: the scored distribution.

    Attributes:
        picked: True at the masked-in tokens that are scored again, bool ``[n]``.
        sequences: the sequences of these tokens, ``[m]``.
        dtype: the dtype of the policy's weights.
        forwards: how often the sequences were scored.
    """

    def __init__(self, policy: ModelOrScorer, columns: TokenColumns, table: Table, sampling: Sampling) -> None:
        self.policy = policy.model if isinstance(policy, LogProbScorer) else policy
        self.adapters = policy.options.adapters if isinstance(policy, LogProbScorer) else True
        self.sampling = sampling
        tokens = columns.tokens
        candidates = (tokens.like(columns.mask.long()).sum() > 0).nonzero().squeeze(-1)
        mean = float(tokens.lengths[candidates].double().mean())
        number = max(1, min(len(candidates), int(MOST_TOKENS / mean)))
        at = torch.linspace(0, len(candidates) - 1, number).round().long()
        self.rows: list[int] = candidates[at].unique().tolist()
        every, masks = tokens.to_list(), tokens.like(columns.mask).to_list()
        self.ids, self.masks = [every[i] for i in self.rows], [masks[i] for i in self.rows]
        chosen = torch.zeros(tokens.num_sequences, dtype=torch.bool)
        chosen[self.rows] = True
        self.picked = chosen[table.sequences]
        self.sequences = table.sequences[self.picked]
        self.model = cast(nn.Module, inner_module(self.policy))
        dtypes = (weight.dtype for weight in self.model.parameters() if weight.is_floating_point())
        self.dtype = next(dtypes, torch.float32)
        self.vocab = vocab_size(self.model) or 64
        self.forwards = 0
        self._at: dict[float, tuple[Tensor, Tensor]] = {}
        known = [table.get(name) for name in ("log_prob", "entropy")]
        if not sampling.truncates and known[0] is not None and known[1] is not None:
            self._at[sampling.temperature] = (known[0][self.picked], known[1][self.picked])

    @staticmethod
    def can_score(policy: ModelOrScorer) -> bool:
        """Whether the policy's distributions are available in this process, without other ranks."""
        model = policy.model if isinstance(policy, LogProbScorer) else policy
        # Ranks of a sharded model must score together, but only some of them may have a deviation.
        alone = not Ranks([model]).groups and not log_probs_only(model)
        return alone and isinstance(inner_module(model), nn.Module)

    @cached_property
    def _scorer(self) -> LogProbScorer:
        return self.scorer()

    @property
    def copies(self) -> bool:
        """Whether the policy is small enough for a temporary copy."""
        return sum(weight.numel() for weight in self.model.parameters()) * 2 <= LARGEST_COPY

    def scorer(self, **settings: Any) -> LogProbScorer:
        """A scorer of the policy with these settings."""
        return LogProbScorer(self.policy, **{"adapters": self.adapters, **settings})

    def _run(self, scorer: LogProbScorer, **wanted: Any) -> Scores:
        self.forwards += 1
        return scorer.evaluate(self.ids, self.masks, **wanted)

    def _flat(self, scores: Ragged | None) -> Tensor:
        assert scores is not None
        return scores.values[torch.cat(self.masks)].double()

    def at(self, temperature: float) -> tuple[Tensor, Tensor]:
        """The log-probs and entropies of the whole distribution at a temperature, in nats, ``[m]`` each."""
        if temperature not in self._at:
            scores = self._run(self._scorer, entropy=True, temperature=temperature)
            self._at[temperature] = (self._flat(scores.log_prob), self._flat(scores.entropy))
        return self._at[temperature]

    @property
    def log_prob(self) -> Tensor:
        """The log-probs at the scored temperature, in nats, ``[m]``."""
        return self.at(self.sampling.temperature)[0]

    @cached_property
    def noise(self) -> float:
        """The policy's own noise in nats: the largest root mean square of differences between three ways of packing."""
        scorers = (self._scorer, self.scorer(tokens_per_batch=64), self.scorer(share_prefixes=False))
        scores = [self._run(scorer, temperature=self.sampling.temperature) for scorer in scorers]
        log_probs = [self._flat(each.log_prob) for each in scores]
        return max(float((a - b).square().mean().sqrt()) for a, b in combinations(log_probs, 2))

    @cached_property
    def top(self) -> Top:
        """The most probable tokens at each position, at the scored temperature."""
        k = min(self.vocab, MOST_TOP)
        scores = self._run(self._scorer, top_k=k, temperature=self.sampling.temperature)
        return Top(self._flat(scores.log_prob), self._flat(scores.top_log_probs), k >= self.vocab)

    def as_scored(self) -> Tensor:
        """The log-probs of the tokens under the scored truncation, ``[m]``. Outside it they keep the share :data:`OUTSIDE`."""
        if not self.sampling.truncates:
            return self.log_prob
        mass, inside = self.top.kept(self.sampling)
        return self.top.log_prob + torch.where(inside, -mass.log(), math.log(OUTSIDE))

    def without_adapters(self) -> Tensor | None:
        """The log-probs of the base model ``[m]``. None if the policy has no adapters, or if they are already off."""
        if self.adapters is not True:
            return None
        try:
            scorer = self.scorer(adapters=False, sampling=self.sampling)
        except ValueError:  # the model has no adapters, or they are merged
            return None
        return self._flat(self._run(scorer).log_prob)

    @property
    def narrow(self) -> bool:
        """Whether the policy's own weights are in half precision, so that its rounding errors are unknown."""
        return self.dtype not in (torch.float32, torch.float64)

    def in_bfloat16(self) -> Tensor | None:
        """The log-probs ``[m]`` of a temporary copy of the policy in bfloat16.

        A large model is not copied. Its matrix products are computed in bfloat16 instead. None if its weights are not wider.
        """
        if self.narrow:
            return None
        if not self.copies:
            scorer = self.scorer(dtype=torch.bfloat16, sampling=self.sampling)
        else:
            rounded = copy.deepcopy(self.model).to(torch.bfloat16)
            scorer = LogProbScorer(rounded, adapters=self.adapters, sampling=self.sampling)
        return self._flat(self._run(scorer).log_prob)

    # ------------------------------------------------------------------ temperatures

    def fit_recorded(self, recorded: Tensor, inner: Tensor) -> tuple[float, Tensor]:
        r"""Find the temperature at which the policy's log-probs are closest to recorded ones.

        Uses Gauss-Newton steps in :math:`x = -\log T`, since the derivative of a log-prob is then :math:`\log p + H`.

        Args:
            recorded: the sampler's log-probs ``[k]``.
            inner: True at their tokens, bool ``[m]``.

        Returns:
            The temperature, and the log-probs ``[m]`` at this temperature.
        """

        def step(x: float, log_prob: Tensor, entropy: Tensor) -> float:
            slope = (log_prob + entropy)[inner]
            residual = recorded - log_prob[inner]
            return float((slope * residual).sum() / slope.square().sum().clamp(min=1e-12))

        return self._fit(step, close=1e-4)

    def fit_tokens(self) -> tuple[float, Tensor]:
        """Find the temperature of the highest likelihood of the tokens, at which mean surprisal equals mean entropy.

        Returns:
            The temperature, and the log-probs ``[m]`` at this temperature.
        """
        before: list[tuple[float, float]] = []

        def step(x: float, log_prob: Tensor, entropy: Tensor) -> float:
            slope = log_prob + entropy
            value, curvature = float(slope.mean()), float(slope.square().mean())
            if before and abs(x - before[-1][0]) > 1e-6:
                # A secant is more accurate than the Gauss-Newton curvature. The bound keeps noise from making it tiny.
                curvature = max((before[-1][1] - value) / (x - before[-1][0]), 0.1 * curvature)
            before.append((x, value))
            return value / max(curvature, 1e-12)

        return self._fit(step, close=1e-3)

    def _fit(self, step_of: Callable[[float, Tensor, Tensor], float], *, close: float) -> tuple[float, Tensor]:
        """Take up to six bounded Newton steps in ``x = -log T``, until a step is smaller than ``close``."""
        x = -math.log(self.sampling.temperature)
        for _ in range(6):
            # At most a factor of 2 in temperature per step.
            step = max(-0.7, min(0.7, step_of(x, *self.at(math.exp(-x)))))
            x += step
            if abs(step) < close:
                break
        temperature = math.exp(-x)
        return temperature, self.at(temperature)[0]

    def calibration(self, temperature: float) -> Tensor:
        """The probability of each token minus the expected probability of a new draw, ``[m]``. Its mean is 0 for samples."""
        scores = self._run(self._scorer, moments=True, temperature=temperature)
        return self._flat(scores.log_prob).exp() - self._flat(scores.collision)

    # ------------------------------------------------------------------ prompts

    def other_prompts(
        self, tokenizer: Tokenizer | None, conversations: list[list[Message]] | None, bos: int | None, *, most: int
    ) -> Iterator[tuple[str, dict[int, list[int]]]]:
        """Other renderings of the prompts of up to ``most`` rows that end with their only answer.

        Without a tokenizer, only the number of beginning-of-text tokens changes.

        Yields:
            The name of a rendering, and row -> the token ids of its prompt.
        """
        prompts: dict[int, list[int]] = {}
        parsed: dict[int, list[Message]] = {}
        for i, (ids, mask) in enumerate(zip(self.ids, self.masks, strict=True)):
            first = int(mask.long().argmax())
            prompt = ids[:first].tolist()
            messages: list[Message] | None = None
            if tokenizer is not None:
                stored = None if conversations is None else conversations[self.rows[i]]
                messages = stored or prompt_messages(tokenizer, prompt, bos)
            if bool(mask[first:].all()) and prompt:
                prompts[i] = prompt
                parsed |= {i: messages} if messages else {}
            if len(parsed) == most:
                break
        chosen = list(prompts)[:most]
        shifted = [(name, render, chosen) for name, render in other_beginnings(bos)]
        rendered = [(name, render, list(parsed)) for name, render in renderers(tokenizer, bos)] if parsed else []
        seen = [{i: prompts[i] for i in each} for each in (chosen, parsed)]
        for name, render, rows in [*shifted, *rendered]:
            try:
                others = {i: render(prompts[i], parsed.get(i, [])) for i in rows}
            except Exception:  # a template can raise any error
                continue
            if others not in seen and all(others.values()):
                seen.append(others)
                yield name, others

    def after(self, prompts: Mapping[int, list[int]]) -> tuple[list[Tensor], list[Tensor]]:
        """The rows of some answers after other prompts, and their masks."""
        answers = [self.ids[i][int(self.masks[i].long().argmax()) :] for i in prompts]
        rows = [torch.cat([own.new_tensor(p), own]) for p, own in zip(prompts.values(), answers, strict=True)]
        starts = [len(p) for p in prompts.values()]
        return rows, [torch.arange(len(row), device=row.device) >= n for row, n in zip(rows, starts, strict=True)]

    def renderings(
        self, tokenizer: Tokenizer | None, conversations: list[list[Message]] | None, bos: int | None
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Score the first answers of a single turn after other renderings of their prompts.

        Yields:
            The name of the rendering, log-probs ``[m]``, and True where they are known, bool ``[m]``.
        """
        scorer = self.scorer(sampling=self.sampling)
        for name, prompts in self.other_prompts(tokenizer, conversations, bos, most=MOST_PROMPTS):
            rows, masks = self.after(prompts)
            try:
                scores = scorer.score(rows, masks)
            except ValueError:  # the new prompt is too long for the model
                continue
            self.forwards += 1
            known = torch.cat([torch.full((int(mask.sum()),), i in prompts) for i, mask in enumerate(self.masks)])
            out = torch.full(known.shape, math.nan, dtype=torch.float64)
            out[known] = scores.values[torch.cat(masks)].double()
            yield name, out, known


Renderer = Callable[[list[int], list[Message]], list[int]]


def other_beginnings(bos: int | None) -> Iterator[tuple[str, Renderer]]:
    """Yield renderings with one BOS token more or less. Template and tokenizer may each add one, so duplicates are common."""
    if bos is not None:
        yield "one beginning-of-text token more", lambda prompt, _: [bos, *prompt]
        yield "one beginning-of-text token less", lambda prompt, _: prompt[prompt[0] == bos :]


def renderers(tokenizer: Any, bos: int | None) -> Iterator[tuple[str, Renderer]]:
    """Yield renderings: a name, and a function of a prompt's token ids and messages that returns other token ids."""

    def render(_: list[int], messages: list[Message], **options: object) -> list[int]:
        options = {"add_generation_prompt": True, "tokenize": False, **options}
        return list(tokenizer.encode(tokenizer.apply_chat_template(messages, **options), add_special_tokens=False))

    def with_system_prompt(prompt: list[int], messages: list[Message]) -> list[int]:
        if messages[0]["role"] == "system":
            return prompt
        return render(prompt, [{"role": "system", "content": _SYSTEM}, *messages])

    def common(prompt: list[int], messages: list[Message], template: str) -> list[int]:
        # These templates have no BOS token, so the rendering begins with those of the prompt.
        return prompt[: _beginning(prompt, bos)] + render(prompt, messages, chat_template=template)

    if getattr(tokenizer, "chat_template", None):
        yield "the tokenizer's template", render
        yield "the tokenizer's template without generation prompt", partial(render, add_generation_prompt=False)
        yield "the tokenizer's template with a system prompt", with_system_prompt
        yield "the tokenizer's template with enable_thinking=False", partial(render, enable_thinking=False)
    for name, text in COMMON_TEMPLATES.items():
        yield name, partial(common, template=text)


def _beginning(prompt: list[int], bos: int | None) -> int:
    """The number of BOS tokens at the beginning of a prompt."""
    return next((i for i, token in enumerate(prompt) if token != bos), len(prompt))


def prompt_messages(tokenizer: Any, prompt: list[int], bos: int | None) -> list[Message] | None:
    """Recover the user's message from a prompt that the tokenizer's or a common template rendered from a single message.

    The last template is the text alone, so that a prompt without a template is a message. None if no template fits.
    """
    mark = "4f1c9b27"  # a text that no template contains
    asked = [{"role": "user", "content": mark}]
    whole = tokenizer.decode(prompt, skip_special_tokens=False)
    without_bos = tokenizer.decode(prompt[_beginning(prompt, bos) :], skip_special_tokens=False)
    for template, text in ((None, whole), *((template, without_bos) for template in COMMON_TEMPLATES.values())):
        options = {} if template is None else {"chat_template": template}
        try:
            rendered = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True, **options)
        except Exception:  # the tokenizer has no template, or the template rejects the message
            continue
        before, marked, after = rendered.partition(mark)
        fits = text.startswith(before) and text.endswith(after) and len(text) >= len(before) + len(after)
        if marked and fits:
            return [{"role": "user", "content": text[len(before) : len(text) - len(after)]}]
    return None


# ------------------------------------------------------------------ truncation


@dataclass(frozen=True, eq=False)
class Top:
    """The most probable tokens at ``m`` positions.

    Args:
        log_prob: the log-probs of the sampled tokens ``[m]``.
        top_log_probs: the log-probs of the most probable tokens, in descending order, ``[m, K]``.
        whole: whether ``K`` is the whole vocabulary.

    Example:
        >>> top = Top(torch.tensor([0.3]).log(), torch.tensor([[0.5, 0.3, 0.2]]).log(), True)
        >>> {name: round(value, 4) for name, value in top.tightest().items()}
        {'top_k': 2, 'top_p': 0.5, 'min_p': 0.6}
        >>> [x.item() for x in top.kept(Sampling(top_p=0.4))]  # keeps only the first token, but another was sampled
        [0.5, False]
    """

    log_prob: Tensor
    top_log_probs: Tensor
    whole: bool

    def select(self, where: Tensor) -> Top:
        """Select positions, bool ``[m]``."""
        return Top(self.log_prob[where], self.top_log_probs[where], self.whole)

    def mass(self, cause: str, value: float) -> Tensor:
        """The probability mass that one truncation keeps, ``[m]``. 1 where it keeps more than the ``K`` known tokens."""
        setting: Any = int(value) if cause == "top_k" else value
        return self.kept(Sampling(**{cause: setting}))[0]

    def kept(self, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """The probability mass that the truncations keep, and whether they keep the sampled token, ``[m]`` each.

        Each truncation keeps the most probable tokens. Where more than the ``K`` known tokens are kept, the results are 1 and
        True.
        """
        top = self.top_log_probs
        sums = top.exp().cumsum(-1)  # the mass of the first 1, 2, ... tokens
        number = torch.full_like(sums[:, 0], sums.shape[1], dtype=torch.long)
        left = torch.ones_like(sums[:, 0])
        if sampling.top_k:
            number = number.clamp(max=sampling.top_k)
            left = sums.gather(-1, number.unsqueeze(-1) - 1).squeeze(-1)
        if sampling.top_p < 1:
            # The token that reaches top_p is kept too.
            before = (sums < sampling.top_p * left.unsqueeze(-1) - 1e-9).sum(-1)
            number = torch.minimum(number, before + 1)
        if sampling.min_p > 0:
            number = torch.minimum(number, (top - top[:, :1] >= math.log(sampling.min_p) - 1e-9).sum(-1))
        last = number.unsqueeze(-1) - 1
        beyond = (number == sums.shape[1]) & (not self.whole)
        mass, inside = sums.gather(-1, last).squeeze(-1), self.log_prob >= top.gather(-1, last).squeeze(-1) - 1e-5
        return torch.where(beyond, 1.0, mass), inside | beyond

    def tightest(self) -> dict[str, float]:
        """The tightest top-k, top-p and min-p that keep every sampled token. These have the highest likelihood."""
        above = self.top_log_probs > self.log_prob.unsqueeze(-1) + 1e-5
        out: dict[str, float] = {}
        rank = int(above.sum(-1).max()) + 1
        if rank <= self.top_log_probs.shape[1]:
            out["top_k"] = rank
        mass = float((self.top_log_probs.exp() * above).sum(-1).max())
        if mass < 1:
            out["top_p"] = max(mass, 1e-6)
        out["min_p"] = min(1.0, math.exp(float((self.log_prob - self.top_log_probs[:, 0]).min())))
        return out

    def candidates(self, kept: Tensor) -> list[tuple[str, float]]:
        """Values of top-k, top-p and min-p that may explain the kept mass at each position.

        The first ``j`` tokens have the kept mass. For top-k, ``j`` is the same everywhere. For top-p, ``j`` is the first
        number of tokens that reaches ``p``. If rounding hides ``j``, the ranks of nearly all sampled tokens bound the values.

        Args:
            kept: the kept probability mass ``[m]``.
        """
        out = list(self.tightest().items())
        above = self.top_log_probs > self.log_prob.unsqueeze(-1) + 1e-5
        out.append(("top_k", float(above.sum(-1).double().quantile(0.98).ceil()) + 1))
        out.append(("top_p", max(1e-6, float((self.top_log_probs.exp() * above).sum(-1).quantile(0.98)))))
        sums = self.top_log_probs.exp().cumsum(-1)
        distance, at = (sums - kept.unsqueeze(-1)).abs().min(-1)
        usable = (distance < 2e-3) & (kept < 1 - 1e-4)
        if int(usable.sum()) < 8:
            return out
        at, sums, top = at[usable], sums[usable], self.top_log_probs[usable]
        here = torch.arange(len(at))
        relative = (top - top[:, :1]).exp()
        after = (at + 1).clamp(max=top.shape[1] - 1)
        p = _between(torch.where(at > 0, sums[here, (at - 1).clamp(min=0)], 0.0), sums[here, at])
        m = _between(relative[here, after], relative[here, at])
        return [("top_k", float(at.mode().values + 1)), ("top_p", min(p, 1.0)), ("min_p", m), *out]


def _between(low: Tensor, high: Tensor) -> float:
    """A number between ``low`` and ``high`` at (nearly) all positions."""
    if float(low.max()) <= float(high.min()):
        return float(low.max() + high.min()) / 2
    return float(low.quantile(0.97) + high.quantile(0.03)) / 2
