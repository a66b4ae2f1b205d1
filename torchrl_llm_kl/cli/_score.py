"""``score``: log-probs and KLs of the answers in a file, written as they are computed, and continued after an interruption.

The answers are scored in batches of consecutive rows, whose borders depend on the data and the settings alone. A batch is
appended to the output, and then the record beside it says how far the output holds: what a killed process had half
written is cut off when the run continues, so the file is that of an uninterrupted run.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch
import typer
from torch import Tensor

from torchrl_llm_kl._files import replacing
from torchrl_llm_kl._numerics import all_finite
from torchrl_llm_kl._registry import did_you_mean
from torchrl_llm_kl.cli._console import FOUND, INTERRUPTED, CommandError, print_json, print_table, progress, say
from torchrl_llm_kl.datasets import Answer, Encoder, FileRows, Skip, Skipped
from torchrl_llm_kl.diagnostics import TokenColumns
from torchrl_llm_kl.estimators import EstimatorName, get_estimator
from torchrl_llm_kl.ragged import Ragged, segment_sum
from torchrl_llm_kl.scoring import LogProbScorer, fingerprint_of, position_limit, vocab_size
from torchrl_llm_kl.training import check_model, load_model, load_tokenizer

#: Estimators of log-probs alone. Those with a ``+`` have the values of these; ``corrected_k3`` needs the sampler's log-probs.
ESTIMATORS = ("k1", "k2", "k3", "low_var_kl", "abs", "exact")
_DEFAULT = ("k1", "k3")  # and `exact`, where both models have one vocabulary
_PACKS_PER_BATCH = 4  # forwards between two writes
_ROWS_PER_BATCH = 1024
HTML_ANSWERS = 200


@dataclass(frozen=True)
class ScoreOptions:
    """What ``score`` was asked for; ``docs/cli.md`` explains each."""

    model: str
    data: Path
    reference: str | None = None
    tokenizer: str | None = None
    estimators: tuple[str, ...] = ()
    temperature: float = 1.0
    out: Path | None = None
    overwrite: bool = False
    html: Path | None = None
    limit: int | None = None
    max_length: int | None = None
    batch_tokens: int | None = None
    per_token: bool = False
    dtype: str = "auto"
    device: str | None = None
    as_json: bool = False


def score(options: ScoreOptions) -> None:
    """Score a file, and print a summary.

    Raises:
        CommandError: if an option or the data is wrong, or the output holds another run.
        typer.Exit: with 1 if nothing could be scored, 130 if interrupted.
    """
    _check(options)
    source = FileRows(options.data)
    _ = source.layout  # raises before a model is loaded
    settings = _settings(options, source)
    file = ScoreFile(options.out, overwrite=options.overwrite) if options.out else None
    if file is not None:
        file.check(settings)
    run = Run(options, source)
    if file is not None:
        settings |= run.fingerprints()
        file.check(settings)
    summary = Summary(run.estimators)
    start = 0
    if file is not None:
        for record in file.begin(settings):
            summary.add(record)
        start = file.next_row
    total = source.total if options.limit is None else min(source.total, options.limit)
    if start:
        say(f"{file and file.path} holds {start:,} of {total:,} rows: continuing.")
    at = start
    try:
        with progress("score", total, done=start) as advance:
            for batch in run.batches(start, total):
                records = run.score(batch.items)
                if file is not None:
                    file.append(records, batch.end)
                for record in records:
                    summary.add(record)
                at = batch.end
                advance(at, f"{summary.scored_tokens:,} tokens scored")
    except KeyboardInterrupt:
        rest = f"; {options.out} holds them, and the same command continues" if options.out else " (--out keeps them)"
        say(f"interrupted after {at:,} of {total:,} rows{rest}.")
        raise typer.Exit(INTERRUPTED) from None
    _print_summary(summary, options, run)
    if options.html is not None:
        run.write_html(options.html, total)
    if not summary.scored:
        say(f"nothing in {options.data} could be scored: the reasons are above.")
        raise typer.Exit(FOUND)


def _check(options: ScoreOptions) -> None:
    """Raise for options that contradict one another, before anything is loaded."""
    for name in options.estimators:
        if name not in ESTIMATORS:
            if name not in ("corrected_k3", "none") and not name.endswith("+"):
                get_estimator(cast(EstimatorName, name))  # the error that suggests the nearest name
            raise CommandError(
                f"--estimator {name} cannot be computed from log-probs alone.{did_you_mean(name, ESTIMATORS)} Choose among "
                f"{', '.join(ESTIMATORS)}."
            )
    if options.estimators and options.reference is None:
        raise CommandError(
            f"--estimator {','.join(options.estimators)} compares with a reference: add --reference MODEL, or leave it out."
        )
    if not (math.isfinite(options.temperature) and options.temperature > 0):
        raise CommandError(f"--temperature {options.temperature:g} is not greater than 0: pass that of the sampler.")
    if options.out is not None and options.out.is_dir():
        raise CommandError(f"--out {options.out} is a folder: pass a file, such as {options.out / 'scores.jsonl'}.")
    for path in (options.out, options.html):
        if path is not None and not path.parent.is_dir():
            raise CommandError(f"there is no folder {path.parent} for {path.name}: create it first.")
    given = {"DATA": options.data, "--out": options.out, "--html": options.html}
    files = [(name, path.resolve()) for name, path in given.items() if path is not None]
    if options.out is not None:
        files.append(("the record of --out", ScoreFile.record_of(options.out).resolve()))
    for i, (name, path) in enumerate(files):
        for other, same in files[:i]:
            if path == same:
                raise CommandError(
                    f"{other} and {name} are one file, {path}: it would be overwritten. Pass another path."
                )
    check_model(options.model)
    if options.reference is not None:
        check_model(options.reference)


def _settings(options: ScoreOptions, source: FileRows) -> dict[str, Any]:
    """What decides the output besides weights, by the name under which a change is reported."""
    return {
        "data": source.digest,
        "--estimator": ",".join(options.estimators) or "default",
        "--reference": options.reference is not None,
        "--temperature": options.temperature,
        "--limit": options.limit,
        "--max-length": options.max_length,
        "--per-token": options.per_token,
        "--dtype": options.dtype,
    }


# ------------------------------------------------------------------ the models and their batches


@dataclass(frozen=True)
class Batch:
    """The answers and skips of consecutive rows."""

    items: list[Answer | Skip]
    end: int  #: number of the row after the last


class Run:
    """The loaded models, and what they make of rows."""

    def __init__(self, options: ScoreOptions, source: FileRows) -> None:
        self.options, self.source = options, source
        text = source.layout != "tokens"
        wants_tokenizer = text or options.html is not None or options.tokenizer is not None
        self.tokenizer = load_tokenizer(options.tokenizer or options.model) if wants_tokenizer else None
        names = [options.model] if options.reference is None else [options.model, options.reference]
        self.models = [load_model(name, dtype=options.dtype, device=options.device) for name in names]
        forward = options.batch_tokens or (1024 if self.models[0].device.type == "cpu" else 16384)
        self.batch_tokens = forward
        self.scorers = [
            LogProbScorer(model, temperature=options.temperature, tokens_per_batch=forward, memory=0)
            for model in self.models
        ]
        sizes = [vocab_size(model) for model in self.models]
        self.estimators = self._estimators(sizes)
        limits = [position_limit(model) for model in self.models] + [options.max_length]
        longest = min((limit for limit in limits if limit is not None), default=None)
        known = min((size for size in sizes if size is not None), default=None)
        self.encoder = Encoder(source.layout, self.tokenizer, vocab_size=known, max_length=longest)

    def _estimators(self, sizes: Sequence[int | None]) -> tuple[str, ...]:
        if len(sizes) < 2:
            return ()
        same = sizes[0] == sizes[1]
        if "exact" in self.options.estimators and not same:
            raise CommandError(
                f"--estimator exact compares whole vocabularies, but {self.options.model} has {sizes[0]} tokens and "
                f"{self.options.reference} {sizes[1]}: leave exact out."
            )
        return self.options.estimators or (*_DEFAULT, *(("exact",) if same else ()))

    def fingerprints(self) -> dict[str, Any]:
        """Digests of the weights and the tokenizer, and the size of batches, which decides the last bits."""
        found: dict[str, Any] = {"--batch-tokens": self.batch_tokens}
        found |= {
            name: fingerprint_of(model)
            for name, model in zip(("the model's weights", "the reference's weights"), self.models, strict=False)
        }
        if self.tokenizer is not None and self.source.layout != "tokens":
            backend = getattr(self.tokenizer, "backend_tokenizer", None)
            text = repr(self.tokenizer.get_vocab()) if backend is None else backend.to_str()
            text += f"{self.tokenizer.chat_template!r}{self.tokenizer.special_tokens_map!r}"
            found["the tokenizer"] = sha256(text.encode()).hexdigest()
        return found

    def batches(self, start: int, end: int) -> Iterator[Batch]:
        """Batches of rows ``start`` to ``end``, of at least so many tokens, or so many rows."""
        items: list[Answer | Skip] = []
        tokens, first, last = 0, start, start
        for row in self.source.read(start, end):
            encoded = self.encoder.encode(row)
            items += encoded
            tokens += sum(len(item.tokens) for item in encoded if isinstance(item, Answer))
            last = row.index + 1
            if tokens >= _PACKS_PER_BATCH * self.batch_tokens or last - first >= _ROWS_PER_BATCH:
                yield Batch(items, last)
                items, tokens, first = [], 0, last
        if last > first:
            yield Batch(items, last)

    @torch.no_grad()
    def score(self, items: Sequence[Answer | Skip]) -> list[dict[str, Any]]:
        """One record for each answer or skip; sums over its scored tokens in nats, added in float64."""
        answers = [item for item in items if isinstance(item, Answer)]
        columns = self.columns(answers) if answers else {}
        scored = iter(self._records(answers, columns) if answers else [])
        return [next(scored) if isinstance(item, Answer) else _skip_record(item) for item in items]

    def columns(self, answers: Sequence[Answer]) -> dict[str, Tensor]:
        """Scores of all tokens of some answers, by name; float64 ``[N]``, 0 outside the masks."""
        tokens = Ragged.from_list([answer.tokens for answer in answers])
        mask = torch.cat([answer.mask for answer in answers])
        model, reference = self.scorers[0], self.scorers[1] if len(self.scorers) > 1 else None
        by = ""
        try:
            if reference is not None and "exact" in self.estimators:
                scores = model.evaluate(tokens, mask, reference=reference)
                assert scores.ref_log_prob is not None
                assert scores.kl is not None
                found = {"log_prob": scores.log_prob, "ref_log_prob": scores.ref_log_prob, "exact": scores.kl}
            else:
                found = {"log_prob": model.score(tokens, mask)}
                by = f" by {self.options.reference}"
                found |= {} if reference is None else {"ref_log_prob": reference.score(tokens, mask)}
        except ValueError as error:
            first, last = answers[0].index, answers[-1].index
            raise CommandError(f"rows {first} to {last} (from 0) cannot be scored{by}: {error}") from error
        columns = {name: values.values.double() for name, values in found.items()}
        for name, values in columns.items():  # the model's own have been looked at
            if not all_finite(values):
                rows = f"rows {answers[0].index} to {answers[-1].index} (from 0)"
                raise CommandError(
                    f"{rows} cannot be scored by {self.options.reference}: its {name} is "
                    f"{float(values[~values.isfinite()][0])} at a token. Look for NaN weights, or a token that it forbids."
                )
        for name in self.estimators:
            if name != "exact":
                estimate = get_estimator(cast(EstimatorName, name))(columns["log_prob"], columns["ref_log_prob"])
                columns[name] = estimate.masked_fill(~mask, 0.0)
        return columns

    def _records(self, answers: Sequence[Answer], columns: Mapping[str, Tensor]) -> Iterator[dict[str, Any]]:
        lengths = torch.tensor([len(answer.tokens) for answer in answers])
        sums = {name: segment_sum(values, lengths).tolist() for name, values in columns.items()}
        by_row = {name: values.split(lengths.tolist()) for name, values in columns.items()}
        for i, answer in enumerate(answers):
            record: dict[str, Any] = {"index": answer.index}
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

        answers: list[Answer] = []
        for row in self.source.read(0, total):
            answers += [item for item in self.encoder.encode(row) if isinstance(item, Answer)]
            if len(answers) >= HTML_ANSWERS:
                break
        if answers:
            shown = answers[:HTML_ANSWERS]
            inspect_tokens(self._columns_to_show(shown), self.tokenizer, html=path, title=self.options.model)
            say(f"wrote {path} with {len(shown)} answers.")

    def _columns_to_show(self, answers: Sequence[Answer]) -> TokenColumns:
        mask = torch.cat([answer.mask for answer in answers])
        names = {"log_prob": "log_prob", "ref_log_prob": "ref_log_prob", "exact": "kl"}
        found = self.columns(answers)
        columns = {name: found[own].float().masked_fill(~mask, math.nan) for own, name in names.items() if own in found}
        return TokenColumns(Ragged.from_list([answer.tokens for answer in answers]), mask, columns)


def _skip_record(skip: Skip) -> dict[str, Any]:
    record: dict[str, Any] = {"index": skip.index}
    record |= {"answer": skip.part} if skip.part else {}
    record |= {"skipped": skip.reason, "place": skip.place}
    return record | ({"detail": skip.detail} if skip.detail else {})


# ------------------------------------------------------------------ the output


class ScoreFile:
    """The output, and beside it the record of what it holds: settings, bytes and rows.

    Args:
        path: the output.

    Keyword Args:
        overwrite: begin again, whatever the output holds.

    Raises:
        CommandError: if there is an output without a record.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self.path, self.record = path, self.record_of(path)
        self._bytes, self.next_row = 0, 0
        self._earlier: dict[str, Any] | None = None
        self._advice = f"pass the same to continue it, --overwrite to begin again, or another --out than {path}"
        if overwrite:
            return
        if self.record.exists():
            try:
                held = json.loads(self.record.read_text(encoding="utf-8"))
                self._earlier, self._bytes, self.next_row = held["settings"], int(held["bytes"]), int(held["rows"])
            except (ValueError, KeyError, TypeError) as error:
                raise CommandError(f"{self.record} is damaged: pass --overwrite, or another --out.") from error
            found = path.stat().st_size if path.exists() else 0
            if found < self._bytes:
                raise CommandError(
                    f"{path} has {found} bytes, and {self.record.name} says {self._bytes}: the file was changed, so it cannot "
                    "be continued. Pass --overwrite, or another --out."
                )
        elif path.exists() and path.stat().st_size:
            raise CommandError(
                f"{path} exists, but not {self.record.name}, which says what it holds: pass --overwrite, or another --out."
            )

    @staticmethod
    def record_of(path: Path) -> Path:
        """The record beside an output."""
        return path.with_name(f"{path.name}.run.json")

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise if the earlier run had other settings; those that it lacks are checked as soon as they are known."""
        for name, value in settings.items():
            if self._earlier is None or name not in self._earlier or self._earlier[name] == value:
                continue
            old = self._earlier[name]
            what = f"{name} was {old}, now {value}" if name.startswith("--") else f"{name} changed"
            raise CommandError(f"{self.path} was begun by another run ({what}): {self._advice}.")

    def begin(self, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Cut off what was half written, and yield the earlier records."""
        self._settings = dict(settings)
        with self.path.open("ab") as file:
            file.truncate(self._bytes)
        self._write_record()
        with self.path.open("rb") as file:
            for line in file:
                yield json.loads(line)

    def append(self, records: Sequence[Mapping[str, Any]], next_row: int) -> None:
        """Write a batch of records, then the record that counts them."""
        data = "".join(json.dumps(record) + "\n" for record in records).encode()
        with self.path.open("ab") as file:
            if file.tell() != self._bytes:
                raise CommandError(f"another process writes to {self.path}: end it, or pass another --out.")
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._bytes, self.next_row = self._bytes + len(data), next_row
        self._write_record()

    def _write_record(self) -> None:
        held = {"settings": self._settings, "bytes": self._bytes, "rows": self.next_row}
        with replacing(self.record) as part:
            part.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")


# ------------------------------------------------------------------ the summary


@dataclass
class Totals:
    """The sums of each answer, in the order of the file."""

    counts: array[float] = field(default_factory=lambda: array("d"))
    sums: dict[str, array[float]] = field(default_factory=dict)

    def add(self, count: int, values: Mapping[str, float]) -> None:
        """Add one answer."""
        self.counts.append(count)
        for name, value in values.items():
            self.sums.setdefault(name, array("d")).append(value)

    def means(self) -> dict[str, dict[str, float]]:
        """Means per token and per answer with standard errors, by name.

        Answers are taken as independent, the tokens of an answer as dependent: the error per token is that of a ratio of two
        sums over answers (Cochran 1977, eq. 6.13). NaN for a single answer.
        """
        counts = torch.tensor(self.counts, dtype=torch.float64)
        number, tokens = len(counts), counts.sum()
        out = {}
        for name, held in self.sums.items():
            sums = torch.tensor(held, dtype=torch.float64)
            per_token, per_answer = sums.sum() / tokens, sums.mean()
            spread = (sums - per_token * counts).square().sum()
            out[name] = {
                "per_token": float(per_token),
                "per_token_error": float((spread * number / (number - 1)).sqrt() / tokens) if number > 1 else math.nan,
                "per_answer": float(per_answer),
                "per_answer_error": float(sums.std() / number**0.5) if number > 1 else math.nan,
            }
        return out


class Summary:
    """Counts and means of a run, from its records."""

    def __init__(self, estimators: Sequence[str]) -> None:
        self.estimators = tuple(estimators)
        self.scored = self.scored_tokens = self.tokens = 0
        self.skipped = Skipped()
        self.totals: dict[str, Totals] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        """Count one record."""
        if "skipped" in record:
            part, detail = record.get("answer", ""), record.get("detail", "")
            self.skipped.add(record["skipped"], record["place"], part=part, detail=detail)
            return
        self.scored += 1
        self.scored_tokens += record["num_scored"]
        self.tokens += record["num_tokens"]
        values = {name: record[name] for name in ("log_prob", "ref_log_prob") if name in record}
        values |= {f"KL {name}": value for name, value in record.get("kl", {}).items()}
        for part in {"all", record.get("answer") or "all"}:
            self.totals.setdefault(part, Totals()).add(record["num_scored"], values)

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        answers = {part: self._measures(part) for part in sorted(self.totals)}
        return {
            "scored": self.scored,
            "skipped": self.skipped.to_dict(),
            "tokens": self.tokens,
            "scored_tokens": self.scored_tokens,
            "answers": answers,
        }

    def _measures(self, part: str) -> dict[str, Any]:
        means = self.totals[part].means()
        found: dict[str, Any] = {"count": len(self.totals[part].counts), **means}
        for name, key in (("perplexity", "log_prob"), ("ref_perplexity", "ref_log_prob")):
            if key in means:
                value = math.exp(min(-means[key]["per_token"], 700.0))  # NaN stays one
                found[name] = {"value": value, "error": value * means[key]["per_token_error"]}
        return found


_LABELS = {"log_prob": "log-prob", "ref_log_prob": "log-prob, reference"}


def _print_summary(summary: Summary, options: ScoreOptions, run: Run) -> None:
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
