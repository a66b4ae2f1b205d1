"""``score``: log-probs and KLs of the answers in a file.

Answers are scored in batches of consecutive rows. The data and the settings determine the borders of the batches, and the
scores of each batch go to a :class:`ScoreStore`. The next call therefore continues an interrupted one. The output replaces an
earlier file only when it is complete.
"""

from __future__ import annotations

import json
import math
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import combinations, islice
from pathlib import Path
from typing import NamedTuple, cast

import torch
import typer
from torch import Tensor

from torchrl_llm_kl._files import replacing
from torchrl_llm_kl._numerics import all_finite
from torchrl_llm_kl._registry import no_such
from torchrl_llm_kl._typing import Json
from torchrl_llm_kl.cli._console import FOUND, INTERRUPTED, CommandError, ScoreArguments, print_json, print_table, say
from torchrl_llm_kl.datasets import Answer, Encoder, FileRows, Skip, Skipped
from torchrl_llm_kl.diagnostics import TokenColumns
from torchrl_llm_kl.estimators import EstimatorName, get_estimator
from torchrl_llm_kl.masks import MissingChatTemplateError
from torchrl_llm_kl.ragged import Ragged, segment_sum
from torchrl_llm_kl.scoring import (
    LogProbScorer,
    Lookup,
    RememberedModel,
    ScoreRequest,
    Scores,
    ScoreStore,
    check_vocabularies,
    position_limit,
    vocab_size,
)
from torchrl_llm_kl.training import load_model, load_tokenizer, progress

#: The available estimators. Those with a ``+`` would have the same values, and ``corrected_k3`` needs the sampler's log-probs.
ESTIMATORS = ("k1", "k2", "k3", "low_var_kl", "abs", "exact")
_DEFAULT = ("k1", "k3")  # `exact` is added if both models have the same vocabulary
_PACKS_PER_BATCH = 4  # how many forwards an interruption may lose
# Bounds the memory of a batch of very short answers.
_ROWS_PER_BATCH = 1024
HTML_ANSWERS = 200


class ScoredAnswer(NamedTuple):
    """The scores of an answer.

    Args:
        answer: its tokens and mask.
        sums: sums over its scored tokens in nats, by name: ``log_prob``, ``ref_log_prob`` and the estimators.
        per_token: the same scores for each token, ``[T]``, 0 outside the mask.
    """

    answer: Answer
    sums: dict[str, float]
    per_token: dict[str, Tensor]


def score_file(options: ScoreArguments) -> None:
    """Score a file and print a summary.

    Raises:
        CommandError: if an option or the data is wrong.
        typer.Exit: with 1 if nothing could be scored, 130 if interrupted.
    """
    _check_arguments(options)
    source = FileRows(options.data)
    _ = source.layout  # an unreadable file must raise before models are loaded
    scorer = FileScorer(options, source)
    summary = Summary()
    total = source.total if options.limit is None else min(source.total, options.limit)
    at = 0
    try:
        with progress("score", total, stream=sys.stderr) as advance, _output(options.out) as write:
            for items, end in scorer.batches(total):
                scored = scorer.score(items)
                write(_to_json(item, per_token=options.per_token) for item in scored)
                for item in scored:
                    summary.add(item)
                advance(f"{summary.scored_tokens:,} tokens scored", end - at)
                at = end
    except KeyboardInterrupt:
        folder = options.store_folder
        rest = f" {folder} holds them, and the same command continues." if folder else " Use --store to keep them."
        # Finished batches are stored, so little work is lost.
        say(f"interrupted after {at:,} of {total:,} rows.{rest}")
        raise typer.Exit(INTERRUPTED) from None
    except MissingChatTemplateError as error:
        raise CommandError(
            f"the tokenizer of {options.tokenizer or options.model} has no chat template. Pass --chat-template FILE, or "
            "--tokenizer with the name of a tokenizer that has one."
        ) from error
    _print_summary(summary, options, scorer.estimators)
    if options.html is not None:
        scorer.write_html(options.html, total)
    if not summary.scored:
        say(f"nothing in {options.data} could be scored. The reasons are above.")
        raise typer.Exit(FOUND)


@contextmanager
def _output(path: Path | None) -> Iterator[Callable[[Iterable[Json]], None]]:
    """Yield a function that writes records as lines. The file replaces an earlier one when the block ends."""
    if path is None:
        yield lambda records: None
        return
    # A partial file never replaces a complete one.
    with replacing(path) as part, part.open("w", encoding="utf-8") as file:
        yield lambda records: file.writelines(json.dumps(record) + "\n" for record in records)


def _check_arguments(options: ScoreArguments) -> None:
    """Raise a CommandError for contradictory options, before anything is loaded."""
    for name in options.estimators:
        if name not in ESTIMATORS:
            raise CommandError(no_such("--estimator takes estimators of log-probs only, not", name, ESTIMATORS))
    if options.estimators and options.reference is None:
        raise CommandError("--estimator needs a reference: add --reference MODEL, or leave it out.")
    store, out = options.store_folder, options.out
    for path in (out, options.html):
        if path is not None and not path.parent.is_dir():
            raise CommandError(f"there is no folder {path.parent} for {path.name}: create it first.")
    named = {"DATA": options.data, "--out": out, "--html": options.html, "the folder of scores": store}
    # Resolve links and "..", since two different paths may name one file.
    places = [(name, path.resolve()) for name, path in named.items() if path is not None]
    for (name, path), (other, same) in combinations(places, 2):
        if path == same:
            raise CommandError(f"{name} and {other} are one file, {path}, and it would be lost. Pass another path.")
    # With stored scores, the file is the output of an earlier run. Without them it may be a file of the user's own.
    if out is not None and out.exists() and out.stat().st_size and not (store is not None and store.exists()):
        raise CommandError(f"--out {out} exists, and {store} holds no scores of an earlier run: pass another --out.")


# ------------------------------------------------------------------ the models and their batches


class FileScorer:
    """The models of a call, and the scores of its rows."""

    def __init__(self, options: ScoreArguments, source: FileRows) -> None:
        self.options, self.source = options, source
        wants_tokenizer = source.layout != "tokens" or options.html is not None or options.tokenizer is not None
        self.tokenizer = load_tokenizer(options.tokenizer or options.model) if wants_tokenizer else None
        if options.chat_template is not None and self.tokenizer is not None:
            self.tokenizer.chat_template = options.chat_template.read_text(encoding="utf-8")
        names = [options.model] if options.reference is None else [options.model, options.reference]
        self.models = [load_model(name, dtype=options.dtype, device=options.device) for name in names]
        self.batch_tokens = options.batch_tokens or (1024 if self.models[0].device.type == "cpu" else 16384)
        # Rows of a file do not continue each other, so a cache between batches (memory=) would only cost memory.
        make = partial(LogProbScorer, tokens_per_batch=self.batch_tokens, memory=0)
        sampling = options.sampling
        settings = (sampling, sampling.of_reference)  # truncation applies to the sampler only
        self.scorers = [make(model, sampling=each) for model, each in zip(self.models, settings, strict=False)]
        check_vocabularies(self.models[0], self.models[-1])
        sizes = [vocab_size(model) for model in self.models]
        self.estimators = self._estimators(sizes)
        self.store = None if options.store_folder is None else ScoreStore(options.store_folder)
        self.contexts = {} if self.store is None else self._contexts(self.store)
        # A sequence must fit both models, and its ids must be in both vocabularies.
        limits = [position_limit(model) for model in self.models] + [options.max_length]
        longest = min((limit for limit in limits if limit is not None), default=None)
        known = min((size for size in sizes if size is not None), default=None)
        self.encoder = Encoder(source.layout, self.tokenizer, vocab_size=known, max_length=longest)

    def _estimators(self, sizes: Sequence[int | None]) -> tuple[str, ...]:
        if len(sizes) < 2:
            return ()
        return self.options.estimators or (*_DEFAULT, *(("exact",) if sizes[0] == sizes[1] else ()))

    def batches(self, end: int) -> Iterator[tuple[list[Answer | Skip], int]]:
        """Batches of the rows before ``end``, each with the number of the next row. Limits tokens and rows of a batch."""
        items: list[Answer | Skip] = []
        tokens = first = last = 0
        for row in self.source.read(0, end):
            encoded = self.encoder.encode(row)
            items += encoded
            tokens += sum(len(item.tokens) for item in encoded if isinstance(item, Answer))
            last = row.index + 1
            if tokens >= _PACKS_PER_BATCH * self.batch_tokens or last - first >= _ROWS_PER_BATCH:
                yield items, last
                items, tokens, first = [], 0, last
        if last > first:
            yield items, last

    @torch.no_grad()
    def score(self, items: Sequence[Answer | Skip]) -> list[ScoredAnswer | Skip]:
        """Scores of the answers, and the skipped sequences at their places. Sums are in float64."""
        answers = [item for item in items if isinstance(item, Answer)]
        if not answers:
            return [item for item in items if isinstance(item, Skip)]
        columns = self.columns(answers)
        lengths = torch.tensor([len(answer.tokens) for answer in answers])
        sums = {name: segment_sum(values, lengths).tolist() for name, values in columns.items()}
        per_token = {name: values.split(lengths.tolist()) for name, values in columns.items()}
        scored = (
            ScoredAnswer(
                answer,
                {name: values[i] for name, values in sums.items()},
                {name: values[i] for name, values in per_token.items()},
            )
            for i, answer in enumerate(answers)
        )
        return [next(scored) if isinstance(item, Answer) else item for item in items]

    def columns(self, answers: Sequence[Answer]) -> dict[str, Tensor]:
        """Scores of all tokens of some answers, by name, float64 ``[N]``, 0 outside the masks."""
        rows = f"rows {answers[0].index} to {answers[-1].index} (from 0)"
        mask = torch.cat([answer.mask for answer in answers])
        request = ScoreRequest.of([answer.tokens for answer in answers], mask)
        if self.store is None:
            scores = self._computed(request, rows)
        else:
            lookup = Lookup(self.store, request, self.contexts)
            if not lookup.complete:
                lookup.take(self._computed(lookup.missing(), rows))
                lookup.store_new()
            scores = lookup.scores(None)
        columns = {name: values.values.double().cpu() for name, values in scores.per_token.items()}
        # The scorer calls the exact KL "kl", and the command line "exact".
        if "kl" in columns:
            columns["exact"] = columns.pop("kl")
        for name in self.estimators:
            if name != "exact":
                estimate = get_estimator(cast(EstimatorName, name))(columns["log_prob"], columns["ref_log_prob"])
                columns[name] = estimate.masked_fill(~mask, 0.0)
        names = ("log_prob", "ref_log_prob", *self.estimators)
        return {name: columns[name] for name in names if name in columns}

    def _contexts(self, store: ScoreStore) -> dict[str, bytes]:
        """For each computed column, a digest of everything besides the tokens that determines it."""
        weights = [RememberedModel(model, store).weights() for model in self.models]
        of = {"log_prob": weights[:1], "ref_log_prob": weights[1:]}
        of |= {"kl": weights} if "exact" in self.estimators else {}
        about = {name: f"{name} {self.options.sampling} {own}" for name, own in of.items() if own}
        return {name: blake2b(text.encode(), digest_size=32).digest() for name, text in about.items()}

    def _computed(self, request: ScoreRequest, rows: str) -> Scores:
        """Log-probs under the models, and their exact KL if it is requested."""
        model, *others = self.scorers
        by = ""
        try:
            if others and "exact" in self.estimators:
                scores = model.run(request, reference=others[0])
            else:
                scores = model.run(request)
                by = f" by {self.options.reference}"
                scores = scores._replace(ref_log_prob=others[0].run(request).log_prob) if others else scores
        except ValueError as error:
            raise CommandError(f"{rows} cannot be scored{by}: {error}") from error
        for name, values in scores.per_token.items():  # the scorer checks only its own model's log-probs
            if not all_finite(values.values):
                raise CommandError(
                    f"{rows} cannot be scored by {self.options.reference}: its {name} is not finite. Look for NaN weights."
                )
        return scores

    def write_html(self, path: Path, total: int) -> None:
        """Write a page with the first answers and their scores."""
        from torchrl_llm_kl.diagnostics import inspect_tokens

        rows = (item for row in self.source.read(0, total) for item in self.encoder.encode(row))
        answers = list(islice((item for item in rows if isinstance(item, Answer)), HTML_ANSWERS))
        if not answers or self.tokenizer is None:
            return
        mask = torch.cat([answer.mask for answer in answers])
        names = {"log_prob": "log_prob", "ref_log_prob": "ref_log_prob", "exact": "kl"}
        scores = self.columns(answers)
        columns = {names[own]: scores[own].float().masked_fill(~mask, math.nan) for own in names if own in scores}
        shown = TokenColumns(Ragged.from_list([answer.tokens for answer in answers]), mask, columns)
        inspect_tokens(shown, self.tokenizer, html=path, title=self.options.model)
        say(f"wrote {path} with {len(answers)} answers.")


def _to_json(item: ScoredAnswer | Skip, *, per_token: bool) -> Json:
    """The output line for an answer or a skipped sequence."""
    if isinstance(item, Skip):
        skipped = {"answer": item.part, "skipped": item.reason, "place": item.place, "detail": item.detail}
        return {"index": item.index, **{name: text for name, text in skipped.items() if text}}
    answer, sums, columns = item
    line: Json = {"index": answer.index} | ({"answer": answer.part} if answer.part else {})
    line |= {"num_tokens": len(answer.tokens), "num_scored": int(answer.mask.sum())}
    line |= {name: value for name, value in sums.items() if name not in ESTIMATORS}
    if "ref_log_prob" in sums:
        line["kl"] = {name: value for name, value in sums.items() if name in ESTIMATORS}
    if per_token:
        line |= {"input_ids": answer.tokens.tolist(), "mask": answer.mask.int().tolist()}
        for name, key in (("log_prob", "log_probs"), ("ref_log_prob", "ref_log_probs"), ("exact", "exact_kl")):
            if name in columns:
                # float32 has about seven significant digits.
                line[key] = [round(value, 7) for value in columns[name].tolist()]
    return line


# ------------------------------------------------------------------ the summary


class AnswerMean(NamedTuple):
    """Means per token and per answer with their standard errors, which are NaN for a single answer."""

    per_token: float
    per_token_error: float
    per_answer: float
    per_answer_error: float


def mean_of_answers(counts: Sequence[float], sums: Sequence[float]) -> AnswerMean:
    """Means per token and per answer.

    Answers are treated as independent, and the tokens of an answer as dependent. The standard error per token is therefore that
    of a ratio of two sums over answers (Cochran 1977, eq. 6.13).

    Args:
        counts: the number of tokens of each answer.
        sums: the sum over the tokens of each answer.

    Example:
        >>> mean_of_answers([1, 2, 3], [2.0, 2.0, 5.0]).per_token
        1.5
    """
    lengths, values = torch.tensor(counts, dtype=torch.float64), torch.tensor(sums, dtype=torch.float64)
    number, tokens = len(lengths), lengths.sum()
    per_token = values.sum() / tokens
    token_error = answer_error = math.nan
    if number > 1:
        spread = (values - per_token * lengths).square().sum()
        token_error = float((spread * number / (number - 1)).sqrt() / tokens)
        answer_error = float(values.std() / number**0.5)
    return AnswerMean(float(per_token), token_error, float(values.mean()), answer_error)


@dataclass
class Summary:
    """Counts and means of the answers of a file.

    Args:
        scored: the number of scored answers.
        scored_tokens: the number of their scored tokens.
        tokens: the number of all their tokens, including prompts.
        skipped: the skipped sequences.
        answers: for ``"all"``, ``"chosen"`` and ``"rejected"``, by name of the score, a number for each answer.
    """

    scored: int = 0
    scored_tokens: int = 0
    tokens: int = 0
    skipped: Skipped = field(default_factory=Skipped)
    answers: dict[str, dict[str, array[float]]] = field(default_factory=dict)

    def add(self, item: ScoredAnswer | Skip) -> None:
        """Count one answer."""
        if isinstance(item, Skip):
            self.skipped.add(item)
            return
        count = int(item.answer.mask.sum())
        self.scored += 1
        self.scored_tokens += count
        self.tokens += len(item.answer.tokens)
        for part in {"all", item.answer.part or "all"}:
            columns = self.answers.setdefault(part, {})
            for name, value in {"num_scored": count, **item.sums}.items():
                # 8 bytes for each number, since a file may have millions of answers.
                columns.setdefault(name, array("d")).append(value)

    def means(self, part: str) -> dict[str, AnswerMean]:
        """The mean of each score, by its label in JSON."""
        columns = self.answers[part]
        means = {name: mean_of_answers(columns["num_scored"], sums) for name, sums in columns.items()}
        del means["num_scored"]
        return {f"KL {name}" if name in ESTIMATORS else name: mean for name, mean in means.items()}

    def to_dict(self) -> Json:
        """The summary for JSON."""
        return {
            "scored": self.scored,
            "skipped": self.skipped.to_dict(),
            "tokens": self.tokens,
            "scored_tokens": self.scored_tokens,
            "answers": {part: self._measures(part) for part in sorted(self.answers)},
        }

    def _measures(self, part: str) -> Json:
        means = self.means(part)
        perplexities = {name: {"value": value, "error": error} for name, (value, error) in _perplexities(means).items()}
        count = len(self.answers[part]["num_scored"])
        return {"count": count, **{name: mean._asdict() for name, mean in means.items()}, **perplexities}


def _perplexities(means: Mapping[str, AnswerMean]) -> dict[str, tuple[float, float]]:
    """The perplexity of each model with its standard error, by its name in JSON."""
    # exp overflows beyond 709, so a hopeless model gets a huge finite perplexity instead of an error.
    names = {"perplexity": "log_prob", "ref_perplexity": "ref_log_prob"}
    values = {name: math.exp(min(-means[key].per_token, 700.0)) for name, key in names.items() if key in means}
    return {name: (value, value * means[names[name]].per_token_error) for name, value in values.items()}


_LABELS = {"log_prob": "log-prob", "ref_log_prob": "log-prob, reference"}
_LABELS |= {"perplexity": "perplexity", "ref_perplexity": "perplexity, reference"}


def _print_summary(summary: Summary, options: ScoreArguments, estimators: Sequence[str]) -> None:
    if options.as_json:
        about = {"model": options.model, "reference": options.reference, "data": str(options.data)}
        print_json({**about, "temperature": options.temperature, **summary.to_dict()})
        return
    for part in sorted(summary.answers):
        if len(summary.answers) > 1:
            print(f"{part} answers: {len(summary.answers[part]['num_scored']):,}")
        means = summary.means(part)
        rows = [[_LABELS.get(name, name), *map(_four_digits, mean)] for name, mean in means.items()]
        rows += [[_LABELS[name], *map(_four_digits, pair), "", ""] for name, pair in _perplexities(means).items()]
        print_table(["nats", "per token", "s.e.", "per answer", "s.e."], rows, right=1)
        print()
    print(f"scored {summary.scored:,} answers, {summary.scored_tokens:,} of their {summary.tokens:,} tokens")
    if summary.skipped.total:
        print(summary.skipped)
    if estimators:
        print(
            f"The KLs estimate KL({options.model} || {options.reference}) if the former sampled the answers, at temperature "
            f"{options.temperature:g}."
        )


def _four_digits(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4g}" if abs(value) < 1e-3 and value else f"{value:,.4f}"
