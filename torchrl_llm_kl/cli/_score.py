"""``score``: log-probs and KLs of the answers in a file.

The answers are scored in batches of consecutive rows, whose borders depend on the data and the settings alone. Scores go
to a :class:`ScoreStore` batch by batch, so that a run that was ended reads what it had; the output replaces an earlier one
when it is whole.
"""

from __future__ import annotations

import json
import math
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from itertools import combinations, islice
from pathlib import Path
from typing import cast

import torch
import typer
from torch import Tensor

from torchrl_llm_kl._files import replacing
from torchrl_llm_kl._numerics import all_finite
from torchrl_llm_kl._registry import did_you_mean, first_sentence
from torchrl_llm_kl._typing import Json
from torchrl_llm_kl.cli._console import FOUND, INTERRUPTED, CommandError, print_json, print_table, say
from torchrl_llm_kl.cli._options import Scoring
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
from torchrl_llm_kl.training import check_model, load_model, load_tokenizer, progress

#: Estimators of log-probs alone. Those with a ``+`` have the values of these; ``corrected_k3`` needs the sampler's log-probs.
ESTIMATORS = ("k1", "k2", "k3", "low_var_kl", "abs", "exact")
_DEFAULT = ("k1", "k3")  # and `exact`, where both models have one vocabulary
_PACKS_PER_BATCH = 4  # forwards between two writes to the store
_ROWS_PER_BATCH = 1024
HTML_ANSWERS = 200


def score(options: Scoring) -> None:
    """Score a file, and print a summary.

    Raises:
        CommandError: if an option or the data is wrong.
        typer.Exit: with 1 if nothing could be scored, 130 if interrupted.
    """
    _check(options)
    source = FileRows(options.data)
    _ = source.layout  # raises before a model is loaded
    run = Run(options, source)
    summary = Summary()
    total = source.total if options.limit is None else min(source.total, options.limit)
    at = 0
    try:
        with progress("score", total, stream=sys.stderr) as advance, _output(options.out) as write:
            for items, end in run.batches(total):
                records = run.score(items)
                write(records)
                for record in records:
                    summary.add(record)
                advance(f"{summary.scored_tokens:,} tokens scored", end - at)
                at = end
    except KeyboardInterrupt:
        folder = options.store_folder
        rest = f"; {folder} holds them, and the same command continues" if folder else " (--store keeps them)"
        say(f"interrupted after {at:,} of {total:,} rows{rest}.")
        raise typer.Exit(INTERRUPTED) from None
    except MissingChatTemplateError as error:
        advice = "Pass --chat-template FILE, or --tokenizer with the name of a tokenizer that has one"
        raise CommandError(f"{first_sentence(error)} {advice}.") from error
    _print_summary(summary, options, run)
    if options.html is not None:
        run.write_html(options.html, total)
    if not summary.scored:
        say(f"nothing in {options.data} could be scored: the reasons are above.")
        raise typer.Exit(FOUND)


@contextmanager
def _output(path: Path | None) -> Iterator[Callable[[Iterable[Json]], None]]:
    """Yield a function that takes records: lines of the output, which is there once it is whole."""
    if path is None:
        yield lambda records: None
        return
    with replacing(path) as part, part.open("w", encoding="utf-8") as file:
        yield lambda records: file.writelines(json.dumps(record) + "\n" for record in records)


def _check(options: Scoring) -> None:
    """Raise for options that contradict one another, before anything is loaded."""
    for name in options.estimators:
        if name not in ESTIMATORS:
            if name not in ("corrected_k3", "none") and not name.endswith("+"):
                get_estimator(cast(EstimatorName, name))  # the error that suggests the nearest name
            known = f"{did_you_mean(name, ESTIMATORS)} Choose among {', '.join(ESTIMATORS)}."
            raise CommandError(f"--estimator {name} cannot be computed from log-probs alone.{known}")
    if options.estimators and options.reference is None:
        raise CommandError(
            f"--estimator {','.join(options.estimators)} compares with a reference: add --reference MODEL, or leave it out."
        )
    if not (math.isfinite(options.temperature) and options.temperature > 0):
        raise CommandError(f"--temperature {options.temperature:g} is not greater than 0: pass the sampler's.")
    if options.out is not None and options.out.is_dir():
        raise CommandError(f"--out {options.out} is a folder: pass a file, such as {options.out / 'scores.jsonl'}.")
    for path in (options.out, options.html):
        if path is not None and not path.parent.is_dir():
            raise CommandError(f"there is no folder {path.parent} for {path.name}: create it first.")
    store = options.store_folder
    if store is not None and store.exists() and not store.is_dir():
        raise CommandError(f"the folder of scores, {store}, is a file: pass another --store.")
    given = {"DATA": options.data, "--out": options.out, "--html": options.html, "the folder of scores": store}
    files = [(name, path.resolve()) for name, path in given.items() if path is not None]
    for (name, path), (other, same) in combinations(files, 2):
        if path == same:
            raise CommandError(f"{name} and {other} are one file, {path}: it would be overwritten. Pass another path.")
    earlier, out = store is not None and store.exists(), options.out
    if out is not None and out.exists() and out.stat().st_size and not earlier:
        advice = "it would be replaced. Pass another --out, or remove the file"
        raise CommandError(f"--out {out} exists, and {store} holds no scores of an earlier run: {advice}.")
    if options.chat_template is not None and not options.chat_template.is_file():
        raise CommandError(
            f"--chat-template {options.chat_template} is no file: pass one, such as chat_template.jinja."
        )
    for model in (options.model, options.reference):
        if model is not None:
            check_model(model)


# ------------------------------------------------------------------ the models and their batches


class Run:
    """The loaded models, and what they make of rows."""

    def __init__(self, options: Scoring, source: FileRows) -> None:
        self.options, self.source = options, source
        text = source.layout != "tokens"
        wants_tokenizer = text or options.html is not None or options.tokenizer is not None
        self.tokenizer = load_tokenizer(options.tokenizer or options.model) if wants_tokenizer else None
        if options.chat_template is not None and self.tokenizer is not None:
            self.tokenizer.chat_template = options.chat_template.read_text(encoding="utf-8")
        names = [options.model] if options.reference is None else [options.model, options.reference]
        self.models = [load_model(name, dtype=options.dtype, device=options.device) for name in names]
        forward = options.batch_tokens or (1024 if self.models[0].device.type == "cpu" else 16384)
        self.batch_tokens = forward
        make = partial(LogProbScorer, temperature=options.temperature, tokens_per_batch=forward, memory=0)
        self.scorers = [make(model) for model in self.models]
        check_vocabularies(self.models[0], self.models[-1])
        sizes = [vocab_size(model) for model in self.models]
        self.estimators = self._estimators(sizes)
        self.store = None if options.store_folder is None else ScoreStore(options.store_folder)
        self.contexts = {} if self.store is None else self._contexts(self.store)
        limits = [position_limit(model) for model in self.models] + [options.max_length]
        longest = min((limit for limit in limits if limit is not None), default=None)
        known = min((size for size in sizes if size is not None), default=None)
        self.encoder = Encoder(source.layout, self.tokenizer, vocab_size=known, max_length=longest)

    def _estimators(self, sizes: Sequence[int | None]) -> tuple[str, ...]:
        if len(sizes) < 2:
            return ()
        same = sizes[0] == sizes[1]
        if "exact" in self.options.estimators and not same:
            found = f"{self.options.model} has {sizes[0]} tokens and {self.options.reference} {sizes[1]}"
            raise CommandError(f"--estimator exact compares whole vocabularies, but {found}: leave exact out.")
        return self.options.estimators or (*_DEFAULT, *(("exact",) if same else ()))

    def batches(self, end: int) -> Iterator[tuple[list[Answer | Skip], int]]:
        """The rows before ``end`` in batches of so many tokens or rows, each with the number of the row after its last."""
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
    def score(self, items: Sequence[Answer | Skip]) -> list[Json]:
        """One record for each answer or skip; sums over its scored tokens in nats, added in float64."""
        answers = [item for item in items if isinstance(item, Answer)]
        columns = self.columns(answers) if answers else {}
        scored = iter(self._records(answers, columns) if answers else [])
        return [next(scored) if isinstance(item, Answer) else _skip_record(item) for item in items]

    def columns(self, answers: Sequence[Answer]) -> dict[str, Tensor]:
        """Scores of all tokens of some answers, by name; float64 ``[N]``, 0 outside the masks."""
        rows = f"rows {answers[0].index} to {answers[-1].index} (from 0)"
        mask = torch.cat([answer.mask for answer in answers])
        request = ScoreRequest.of([answer.tokens for answer in answers], mask)
        if self.store is None:
            found = self._computed(request, rows)
        else:
            lookup = Lookup(self.store, request, self.contexts)
            if not lookup.complete:
                lookup.take(self._computed(lookup.missing(), rows))
                lookup.store_new()
            found = lookup.scores(None)
        columns = {name: values.values.double().cpu() for name, values in found.per_token.items()}
        if "kl" in columns:
            columns["exact"] = columns.pop("kl")
        for name in self.estimators:
            if name != "exact":
                estimate = get_estimator(cast(EstimatorName, name))(columns["log_prob"], columns["ref_log_prob"])
                columns[name] = estimate.masked_fill(~mask, 0.0)
        return columns

    def _contexts(self, store: ScoreStore) -> dict[str, bytes]:
        """For each column that is computed, the digest of all that it depends on besides the tokens."""
        weights = [RememberedModel(model, store).weights() for model in self.models]
        of = {"log_prob": weights[:1], "ref_log_prob": weights[1:]}
        of |= {"kl": weights} if "exact" in self.estimators else {}
        about = {name: f"{name} {self.options.temperature} {own}" for name, own in of.items() if own}
        return {name: blake2b(text.encode(), digest_size=32).digest() for name, text in about.items()}

    def _computed(self, request: ScoreRequest, rows: str) -> Scores:
        """Log-probs by the models, and their exact KL if it is asked for."""
        model, *others = self.scorers
        by = ""
        try:
            if others and "exact" in self.estimators:
                found = model.run(request, reference=others[0])
            else:
                found = model.run(request)
                by = f" by {self.options.reference}"
                found = found._replace(ref_log_prob=others[0].run(request).log_prob) if others else found
        except ValueError as error:
            raise CommandError(f"{rows} cannot be scored{by}: {error}") from error
        for name, values in found.per_token.items():  # the model's own have been looked at
            if not all_finite(values.values):
                by, value = f"by {self.options.reference}", float(values.values[~values.values.isfinite()][0])
                where = f"its {'exact' if name == 'kl' else name} is {value} at a token"
                advice = "Look for NaN weights, or a token that it forbids."
                raise CommandError(f"{rows} cannot be scored {by}: {where}. {advice}")
        return found

    def _records(self, answers: Sequence[Answer], columns: Mapping[str, Tensor]) -> Iterator[Json]:
        lengths = torch.tensor([len(answer.tokens) for answer in answers])
        sums = {name: segment_sum(values, lengths).tolist() for name, values in columns.items()}
        by_row = {name: values.split(lengths.tolist()) for name, values in columns.items()}
        for i, answer in enumerate(answers):
            record: Json = {"index": answer.index}
            record |= {"answer": answer.part} if answer.part else {}
            record |= {"num_tokens": len(answer.tokens), "num_scored": int(answer.mask.sum())}
            record |= {name: sums[name][i] for name in ("log_prob", "ref_log_prob") if name in sums}
            if self.estimators:
                record["kl"] = {name: sums[name][i] for name in self.estimators}
            if self.options.per_token:
                record |= {"input_ids": answer.tokens.tolist(), "mask": answer.mask.int().tolist()}
                for name, key in (("log_prob", "log_probs"), ("ref_log_prob", "ref_log_probs"), ("exact", "exact_kl")):
                    if name in by_row:
                        record[key] = [round(value, 7) for value in by_row[name][i].tolist()]
            yield record

    def write_html(self, path: Path, total: int) -> None:
        """A page of the first answers with their scores."""
        from torchrl_llm_kl.diagnostics import inspect_tokens

        rows = (item for row in self.source.read(0, total) for item in self.encoder.encode(row))
        answers = list(islice((item for item in rows if isinstance(item, Answer)), HTML_ANSWERS))
        if not answers or self.tokenizer is None:
            return
        mask = torch.cat([answer.mask for answer in answers])
        names = {"log_prob": "log_prob", "ref_log_prob": "ref_log_prob", "exact": "kl"}
        found = self.columns(answers)
        columns = {name: found[own].float().masked_fill(~mask, math.nan) for own, name in names.items() if own in found}
        shown = TokenColumns(Ragged.from_list([answer.tokens for answer in answers]), mask, columns)
        inspect_tokens(shown, self.tokenizer, html=path, title=self.options.model)
        say(f"wrote {path} with {len(answers)} answers.")


def _skip_record(skip: Skip) -> Json:
    record: Json = {"index": skip.index}
    record |= {"answer": skip.part} if skip.part else {}
    record |= {"skipped": skip.reason, "place": skip.place}
    return record | ({"detail": skip.detail} if skip.detail else {})


# ------------------------------------------------------------------ the summary


def means(counts: Sequence[float], sums: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Means per token and per answer with standard errors, by name.

    Answers are taken as independent, the tokens of an answer as dependent: the error per token is the error of a ratio of two
    sums over answers (Cochran 1977, eq. 6.13). NaN for a single answer.

    Args:
        counts: tokens of each answer.
        sums: over the tokens of each answer, by name.
    """
    lengths = torch.tensor(counts, dtype=torch.float64)
    number, tokens = len(lengths), lengths.sum()
    out = {}
    for name, held in sums.items():
        values = torch.tensor(held, dtype=torch.float64)
        per_token, per_answer = values.sum() / tokens, values.mean()
        spread = (values - per_token * lengths).square().sum()
        out[name] = {
            "per_token": float(per_token),
            "per_token_error": float((spread * number / (number - 1)).sqrt() / tokens) if number > 1 else math.nan,
            "per_answer": float(per_answer),
            "per_answer_error": float(values.std() / number**0.5) if number > 1 else math.nan,
        }
    return out


class Summary:
    """Counts and means of a run, from its records."""

    def __init__(self) -> None:
        self.scored = self.scored_tokens = self.tokens = 0
        self.skipped = Skipped()
        #: All answers, and the chosen and the rejected ones -> name -> a number for each answer.
        self.answers: dict[str, dict[str, array[float]]] = {}

    def add(self, record: Json) -> None:
        """Count one record."""
        if "skipped" in record:
            part, detail = record.get("answer", ""), record.get("detail", "")
            self.skipped.add(record["skipped"], record["place"], part=part, detail=detail)
            return
        self.scored += 1
        self.scored_tokens += record["num_scored"]
        self.tokens += record["num_tokens"]
        values: Json = {name: record[name] for name in ("num_scored", "log_prob", "ref_log_prob") if name in record}
        values |= {f"KL {name}": value for name, value in record.get("kl", {}).items()}
        for part in {"all", record.get("answer") or "all"}:
            for name, value in values.items():
                self.answers.setdefault(part, {}).setdefault(name, array("d")).append(value)

    def to_dict(self) -> Json:
        """All of it, for JSON."""
        return {
            "scored": self.scored,
            "skipped": self.skipped.to_dict(),
            "tokens": self.tokens,
            "scored_tokens": self.scored_tokens,
            "answers": {part: self._measures(**self.answers[part]) for part in sorted(self.answers)},
        }

    @staticmethod
    def _measures(num_scored: Sequence[float], **sums: Sequence[float]) -> Json:
        found: Json = {"count": len(num_scored), **means(num_scored, sums)}
        for name, key in (("perplexity", "log_prob"), ("ref_perplexity", "ref_log_prob")):
            if key in found:
                value = math.exp(min(-found[key]["per_token"], 700.0))  # NaN stays one
                found[name] = {"value": value, "error": value * found[key]["per_token_error"]}
        return found


_LABELS = {"log_prob": "log-prob", "ref_log_prob": "log-prob, reference"}


def _print_summary(summary: Summary, options: Scoring, run: Run) -> None:
    if options.as_json:
        about = {"model": options.model, "reference": options.reference, "data": str(options.data)}
        print_json({**about, "temperature": options.temperature, **summary.to_dict()})
        return
    found = summary.to_dict()
    for part, measures in found["answers"].items():
        if len(found["answers"]) > 1:
            print(f"{part} answers: {measures['count']:,}")
        rows = [
            [_LABELS.get(name, name), *(_number(mean[key]) for key in mean)]
            for name, mean in measures.items()
            if isinstance(mean, dict) and "per_token" in mean
        ]
        rows += [
            [label, _number(measures[name]["value"]), _number(measures[name]["error"]), "", ""]
            for name, label in (("perplexity", "perplexity"), ("ref_perplexity", "perplexity, reference"))
            if name in measures
        ]
        print_table(["nats", "per token", "s.e.", "per answer", "s.e."], rows, right=1)
        print()
    print(f"scored {summary.scored:,} answers, {summary.scored_tokens:,} of their {summary.tokens:,} tokens")
    if summary.skipped.total:
        print(summary.skipped)
    if run.estimators:
        print(
            f"The KLs estimate KL({options.model} || {options.reference}) if the former sampled the answers, at temperature "
            f"{options.temperature:g}."
        )


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4g}" if abs(value) < 1e-3 and value else f"{value:,.4f}"
