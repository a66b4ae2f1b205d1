"""Write the tables of the pages from the code: ``python docs/build_pages.py [PAGE ...]``.

A page holds its own prose, with tables between ``<!-- name -->`` and ``<!-- end -->``. Each function of :data:`TABLES` returns
one table. A test fails if a page is out of date. The doctor's figures take minutes: they need 280 batches.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import inspect
import io
import json
import math
import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

DOCS = Path(__file__).resolve().parent
CONTRIBUTING = DOCS.parent / "CONTRIBUTING.md"
sys.path[:0] = [str(DOCS), str(DOCS.parent / "tests" / "lab")]

import build_api  # noqa: E402
import build_architecture  # noqa: E402

from torchrl_llm_kl import diagnose  # noqa: E402
from torchrl_llm_kl._foreign import (  # noqa: E402
    NEMO,
    PRIME,
    SLIME,
    TRAINING,
    TRINITY,
    TRL,
    VERL,
    Foreign,
    foreign_hint,
    read_table,
)
from torchrl_llm_kl.advantages import advantage_spec, available_advantages, get_advantage  # noqa: E402
from torchrl_llm_kl.algorithms import ALGORITHMS, SCHEMAS, Entry, algorithm_table, from_trl  # noqa: E402
from torchrl_llm_kl.cli import main as command_line  # noqa: E402
from torchrl_llm_kl.diagnostics import METRICS, Origin  # noqa: E402
from torchrl_llm_kl.estimators import EstimatorName, estimator_table, get_estimator, top_k_divergence  # noqa: E402
from torchrl_llm_kl.losses import available_objectives, get_objective, spec_of  # noqa: E402
from torchrl_llm_kl.training import SETTINGS as RUN_SETTINGS, as_yaml  # noqa: E402


def markdown(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def cell(text: str) -> str:
    """The text of a docstring for a cell: with code in single backticks, roles as code, and escaped bars."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", " ".join(text.split()).replace("``", "`"))
    return text.replace("|", "\\|")


# ------------------------------------------------------------------ algorithms.md

#: Flag -> its meaning.
FLAGS = {
    "use_critic": "a critic of token values is trained",
    "use_reference": "a reference model is scored",
    "use_rollout": "batches mix rollouts with experts' answers",
    "compute_advantage_in_trainer": "advantages need the trainer's whole batch or its scores",
    "can_balance_batch": "single rows may move between micro-batches and ranks",
}


#: Key in algorithms.csv -> title of a group of algorithms.
GROUPS = {
    "policy": "Policy gradients",
    "offpolicy": "Off-policy data and experts",
    "preference": "Preferences",
    "distillation": "Distillation",
    "supervised": "Supervised",
    "steps": "Episodes of several steps",
}


def algorithms() -> str:
    """The algorithms by use: a table for each group, a section with formula, settings and sources for each, shared parts."""
    with open(DOCS / "algorithms.csv", encoding="utf-8", newline="") as file:
        texts = list(csv.DictReader(file))
    header, _, *lines = algorithm_table().splitlines()
    titles = [title.strip() for title in header.strip("|").split(" | ")]
    settings = {line.split("`")[1]: [each.strip() for each in line.strip("|").split(" | ")] for line in lines}
    pages = []
    for group, title in GROUPS.items():
        own = [row for row in texts if row["group"] == group]
        links = [[f"[`{row['algorithm']}`](#{row['algorithm']})", row["when"]] for row in own]
        sections = [_section(row, dict(zip(titles, settings[row["algorithm"]], strict=True))) for row in own]
        pages.append(f"## {title}\n\n{markdown(['algorithm', 'use it when'], links)}\n" + "\n".join(sections))
    return "\n".join([*pages, f"## Shared objectives and advantages\n\n{shared_table()}"])


def _section(row: dict[str, str], settings: dict[str, str]) -> str:
    place = settings["KL to the reference"]
    kl = {"none": "no KL", "in the objective": "KL in the objective"}.get(place, "")
    kl = kl or re.sub(r"^(\w+): (\S+), (\S+)$", r"KL in the \1 (\2 with weight \3)", place)
    answers = f"{settings['answers']} answer{'s' * (settings['answers'] != '1')} to a prompt"
    lines = [
        f"- **Maximises** `{row['formula']}`",
        f"- **Parts**: objective {settings['objective']}, advantage {settings['advantage']}, {kl},"
        f" {settings['sum over tokens']}, {answers}, data {settings['data']}",
        *(f"- {values}: {linked(source)}" for source, values in by_source(row["algorithm"]).items()),
    ]
    return f"### {row['algorithm']}\n\n" + "\n".join(lines) + "\n"


def flag_table() -> str:
    """The algorithms of each flag."""
    rows = []
    for flag, meaning in FLAGS.items():
        on, off = (
            [f"`{n}`" for n, preset in ALGORITHMS.items() if getattr(preset, flag) is value] for value in (True, False)
        )
        rows.append([f"`{flag}`", meaning, ", ".join(on) if len(on) <= len(off) else f"all but {', '.join(off)}"])
    return markdown(["flag", "meaning", "algorithms"], rows)


def schema_table() -> str:
    """Each entry with the schemas that have it. An entry with another meaning in another schema has a row for each."""
    schemas: dict[Entry, list[str]] = {}
    for name, schema in SCHEMAS.items():
        for entry in schema.entries:
            schemas.setdefault(entry, []).append(name)
    rows = []
    for entry, names in schemas.items():
        key = f"`{entry.key}`" if isinstance(entry.key, str) else f"`{', '.join(entry.key)}`"
        listed = "all" if len(names) == len(SCHEMAS) else ", ".join(f"`{name}`" for name in names)
        needed = "yes" if entry.required else ""
        rows.append([key, f"{entry.kind} `{entry.shape}`", entry.note, needed, listed])
    return markdown(["entry", "kind and shape", "meaning", "required", "schemas"], rows)


def schema_users() -> str:
    """The algorithms of each schema."""
    users = {name: [f"`{n}`" for n, preset in ALGORITHMS.items() if preset.schema == name] for name in SCHEMAS}
    most = max(users, key=lambda name: len(users[name]))
    rows = [[f"`{name}`", "all others" if name == most else ", ".join(own)] for name, own in users.items()]
    return markdown(["schema", "algorithms"], rows)


# ------------------------------------------------------------------ estimators.md


def gaussian_bias_and_std(name: EstimatorName, shift: float) -> tuple[float, float]:
    """Bias and standard deviation over the true KL of N(0, 1) and N(shift, 1), by the trapezoid rule on +-12 deviations."""
    x = torch.linspace(-12.0, 12.0, 20_001, dtype=torch.float64)
    log_p, log_q = (-0.5 * (x - mean) ** 2 - 0.5 * math.log(2 * math.pi) for mean in (0.0, shift))
    estimate, density = get_estimator(name)(log_p, log_q), log_p.exp()
    mean = torch.trapezoid(density * estimate, x).item()
    variance = torch.trapezoid(density * (estimate - mean) ** 2, x).item()
    true_kl = shift**2 / 2
    return mean / true_kl - 1, math.sqrt(variance) / true_kl


def spread_table() -> str:
    """Bias and spread of the estimators."""
    shifts = (0.1, 1.0)
    names: tuple[EstimatorName, ...] = ("k1", "k2", "k3", "low_var_kl", "abs")
    titles = [f"{what}, m = {m:g}" for m in shifts for what in ("bias", "std")]
    rows = []
    for name in names:
        # Adding 0.0 turns a rounded -0.0 into 0.0.
        cells = (f"{round(number, 4) + 0.0:.4f}" for m in shifts for number in gaussian_bias_and_std(name, m))
        rows.append([f"`{name}`", *cells])
    return markdown(["name", *titles], rows)


# ------------------------------------------------------------------ distillation.md

VOCAB = 20_000
SIZES = (1, 4, 16, 64, 256, 1024, VOCAB)
BETAS = {0.0: "forward", 0.5: "beta 0.5", 1.0: "reverse"}
#: How fast the teacher's probabilities fall: the exponent of Zipf's law.
TEACHERS = {"sharp": 2.0, "medium": 1.5, "flat": 1.1}


def distributions(exponent: float) -> tuple[Tensor, Tensor]:
    """Logits of the student and the teacher, ``[VOCAB]`` each, float64. The teacher's tokens are in falling order."""
    rank = torch.arange(1, VOCAB + 1, dtype=torch.float64)
    teacher = -exponent * rank.log()
    return 0.9 * teacher + 0.7 * torch.sin(1.7 * rank), teacher


def outcomes(log_probs: Tensor, k: int) -> Tensor:
    """The first ``k`` log-probs, and the log-prob of the rest."""
    rest = log_probs[k:].logsumexp(-1) if k < VOCAB else log_probs.new_tensor(-torch.inf)
    return torch.cat([log_probs[:k], rest.unsqueeze(-1)])


def measure(exponent: float, k: int, beta: float) -> tuple[float, Tensor, float]:
    """Divergence, its gradient with respect to the student's logits, and the captured mass."""
    logits, teacher = distributions(exponent)
    logits.requires_grad_()
    of_teacher = outcomes(teacher.log_softmax(-1), k)
    value = top_k_divergence(outcomes(logits.log_softmax(-1), k), of_teacher, beta=beta)
    (gradient,) = torch.autograd.grad(value, logits)
    return value.item(), gradient, of_teacher[:-1].exp().sum().item()


def bias_table(exponent: float) -> str:
    """The bias of a divergence over the top k, for several k."""
    exact = {beta: measure(exponent, VOCAB, beta)[:2] for beta in BETAS}
    rows = []
    for k in SIZES:
        measured = {beta: measure(exponent, k, beta) for beta in BETAS}
        values = [measured[beta][0] / exact[beta][0] for beta in BETAS]
        errors = [float((measured[beta][1] - exact[beta][1]).norm() / exact[beta][1].norm()) for beta in BETAS]
        rows.append([f"{k:,}", *(f"{number:.3f}" for number in (measured[0.0][2], *values, *errors))])
    titles = [f"{part}, {name}" for part in ("value", "gradient") for name in BETAS.values()]
    return markdown(["k", "captured mass", *titles], rows)


# ------------------------------------------------------------------ metrics.md


def metric_table(origin: str) -> str:
    """The metrics of one origin. Metrics with the same advice share a row."""
    rows: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for name, metric in METRICS.items():
        if metric.origin == origin:
            unit = "" if metric.unit in ("1", "share", "tokens", "sequences") else f", in {metric.unit}"
            advice = (metric.normal, metric.deviation, metric.remedy)
            rows.setdefault(advice, []).append((f"`{name}`", metric.formula + unit))
    cells = [
        ["; ".join(name for name, _ in own), *map(cell, ("; ".join(formula for _, formula in own), *advice))]
        for advice, own in rows.items()
    ]
    return markdown(["metric", "formula", "normal", "otherwise", "what to do"], cells)


# ------------------------------------------------------------------ losses.md

#: Families whose objectives compare answers. All others have a value for each token.
OF_ANSWERS = ("_preference", "_relative", "_without_reference")


#: Hyper-parameters of many preference losses, which the text describes.
OF_PREFERENCES = ("ld_alpha", "weighting", "f_divergence", "f_alpha")


def objective_table(*, of_answers: bool) -> str:
    """Name, first sentence and defaults of each objective of some families."""
    rows = []
    for name in available_objectives():
        function, spec = get_objective(name), spec_of(name)
        if (function.__module__.rpartition(".")[2] in OF_ANSWERS) == of_answers:
            defaults = {key: value for key, value in spec.defaults.items() if key not in OF_PREFERENCES}
            shown = ", ".join(f"`{key}={value}`" for key, value in defaults.items())
            rows.append([f"`{name}`", first_sentence(function), shown])
    return markdown(["name", "value", "defaults"], rows)


def advantage_table() -> str:
    """Name and first sentence of each advantage."""
    return markdown(
        ["name", "value"], [[f"`{name}`", first_sentence(get_advantage(name))] for name in available_advantages()]
    )


def first_sentence(function: Callable[..., object]) -> str:
    """The first paragraph of a function's docstring."""
    return cell((inspect.getdoc(function) or "").partition("\n\n")[0])


# ------------------------------------------------------------------ rollouts.md


def rollout_table() -> str:
    """The known columns of each role, with the frameworks that write them."""
    rows: dict[str, list[str]] = defaultdict(list)
    for row in read_table("datasets/rollout_columns.csv"):
        rows[row["role"]].append(f"`{row['column']}` ({row['source']})")
    return markdown(["role", "columns"], [[f"`{role}`", ", ".join(columns)] for role, columns in rows.items()])


# ------------------------------------------------------------------ elsewhere.md

EXAMPLE = {"beta": 0.04, "epsilon_high": 0.28, "num_generations": 8, "top_p": 0.95, "learning_rate": 1e-6}
#: Title of a table -> the places of its settings.
PLACES = {"translated": ("override", "sampling"), "set by your loop": ("outside",), "refused": ("refused",)}
LIBRARIES = {"Trinity-RFT": TRINITY, "verl": VERL, "prime-rl": PRIME, "NeMo-RL": NEMO, "slime": SLIME}


def shown_default(row: Foreign) -> str:
    """The default, for settings that are translated."""
    return f"`{row.default!r}`" if row.place in ("override", "sampling") and not row.name.endswith("*") else ""


def foreign_rows(library: str) -> list[Foreign]:
    """A library's settings. Equal settings of several TRL trainers are listed once."""
    if library != "TRL":
        return [*LIBRARIES[library].values()]
    rows: dict[tuple[str, ...], Foreign] = {}
    for row in (*(row for trainer in TRL.values() for row in trainer.values()), *TRAINING.values()):
        key = (row.name, row.place, row.here, row.note, *((shown_default(row),) if row.place == "override" else ()))
        rows.setdefault(key, row)
    return [*rows.values()]


def library_tables(library: str) -> str:
    """A table of the translated settings, and tables of the others, in which settings with the same advice share a row."""
    parts = []
    for title, places in PLACES.items():
        rows = [row for row in foreign_rows(library) if row.place in places]
        if rows:
            table = translated_rows(rows) if title == "translated" else advice_rows(rows, title)
            parts.append(f"\n### {library}: {title}\n\n{table}")
    return "".join(parts)


def translated_rows(rows: list[Foreign]) -> str:
    """A library's name and default, the name here, and a note."""
    cells = [
        [setting_name(row), shown_default(row), ", ".join(f"`{path}`" for path in row.here.split()), cell(row.note)]
        for row in rows
    ]
    return markdown(["theirs", "default", "here", "note"], cells)


def advice_rows(rows: list[Foreign], title: str) -> str:
    """The settings that share a piece of advice, and the advice."""
    settings: dict[str, list[str]] = {}
    for row in rows:
        advice = f"{row.note}: `{row.here}`" if row.here else row.note
        settings.setdefault(advice, []).append(setting_name(row))
    return markdown(
        ["setting", "reason or replacement" if title == "refused" else "what to do"],
        [[", ".join(names), cell(text)] for text, names in settings.items()],
    )


def setting_name(row: Foreign) -> str:
    """The name of a setting, with its trainer if it is not GRPO's."""
    return f"`{row.name}`" + (f" ({row.section})" if row.section not in ("", "GRPO") else "")


# ------------------------------------------------------------------ doctor.md


def fault_summary() -> str:
    """How often the doctor names the cause of a seeded fault first, and how often a clean batch raises an alarm."""
    from seeded import FAMILIES, FAULTS, SETTINGS, clean_batches, make_tokenizer

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    right, least = 0, 1.0
    for seed_it, causes in FAULTS.values():
        for seed, family in enumerate(FAMILIES):
            batch, given = seed_it(family, seed)
            worst = diagnose(batch, tokenizer=make_tokenizer(), **given).worst
            if worst is not None and worst.cause in causes:
                right, least = right + 1, min(least, worst.confidence)
    alarms, scores, each = 0, [0.0], 40
    for family in FAMILIES:
        for batch, given in clean_batches(family, 1, each):
            diagnosis = diagnose(batch, tokenizer=make_tokenizer(), **given)
            alarms += bool(diagnosis.faults)
            scores.append(abs(diagnosis.measures["surprisal/z"]))
    settings = ", ".join(f"`{setting}`" for setting in SETTINGS)
    return (
        f"- The cause was named first in {right} of {len(FAULTS) * len(FAMILIES)} batches with a fault made on purpose "
        f"({len(FAULTS)} faults, {len(FAMILIES)} model families), with a confidence of {least:.2f} or more.\n"
        f"- {alarms} of {len(scores) - 1} batches without a fault raised an alarm. They were sampled and scored with "
        f"{settings}. The largest `surprisal/z` among them is {max(scores):.1f}.\n"
    )


# ------------------------------------------------------------------ papers.md

#: Papers that the sources name only by number.
CITED = {"2512.21852": "Shah et al. 2025, 'A Comedy of Estimators'"}
_ARXIV = r"arXiv:? ?(\d{4}\.\d{4,5})"
_SAME = re.compile(r"\bthe (?:same (?:paper|papers|section|algorithm)|paper|authors)\b")


class Use(NamedTuple):
    """A source of one thing, as the code states it."""

    name: str
    text: str
    cites: bool = True  # False if the text says "the same paper", and its number was appended


@cache
def settings(name: str) -> dict[str, dict[str, Any]]:
    """The settings of a preset with value and source, as the command line prints them."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = command_line(["algorithms", name, "--json"])
    if code:
        raise RuntimeError(f"torchrl-llm-kl algorithms {name} --json ended with code {code}: see its message above.")
    return dict(json.loads(out.getvalue())["settings"])


def part_source(kind: str, name: str) -> str:
    """The source of an objective or an advantage."""
    spec = spec_of(get_objective(name)) if kind == "objective" else advantage_spec(get_advantage(name))  # type: ignore[call-overload]
    return spec.source.replace("`", "")


@cache
def shared_parts() -> list[tuple[str, str]]:
    """The kind and name of each objective and advantage of more than one preset."""
    used = Counter(
        (kind, name)
        for preset in ALGORITHMS.values()
        for kind in ("objective", "advantage")
        if (name := getattr(preset, kind)) is not None
    )
    return [part for part, count in used.items() if count > 1]


def by_source(name: str) -> dict[str, str]:
    """Source -> the values of a preset that it prescribes. Left out: settings without a source, defaults of shared parts."""
    preset = ALGORITHMS[name]
    parts = {kind: part for kind in ("objective", "advantage") if (part := getattr(preset, kind)) is not None}
    values: dict[str, list[str]] = defaultdict(list)
    for setting, row in settings(name).items():
        source, kind = row["source"].replace("`", ""), setting.partition(".")[0]
        if source.startswith("default of"):
            source = part_source(kind, parts[kind])
        if kind in parts and (kind, parts[kind]) in shared_parts() and source == part_source(kind, parts[kind]):
            continue
        if source not in ("default", "follows from the others", "") and not source.startswith("from "):
            values[source].append(f"`{setting}={row['value']}`")
    return {source: ", ".join(some) for source, some in values.items()}


def shared_table() -> str:
    """Defaults and source of the parts that several presets share."""
    rows = []
    for kind, name in shared_parts():
        preset = next(preset for preset in ALGORITHMS.values() if getattr(preset, kind) == name)
        values = {
            setting.partition(".")[2]: row["value"]
            for setting, row in settings(preset.name).items()
            if setting.startswith(f"{kind}.") and row["source"].startswith("default of")
        }
        shown = ", ".join(f"`{key}={value}`" for key, value in values.items())
        rows.append([f"{kind} `{name}`", shown, linked(part_source(kind, name))])
    return markdown(["part", "defaults", "source"], rows)


def documented() -> Iterator[Use]:
    """Public names whose docstring states a source, except objectives and advantages."""
    registered = {get_objective(name) for name in available_objectives()}
    registered |= {get_advantage(name) for name in available_advantages()}
    seen = set[str]()
    for layer in build_api.ORDER:
        for name, thing in build_api.public_names(layer).items():
            if thing in registered if inspect.isfunction(thing) else not inspect.isclass(thing):
                continue
            source = re.search(r"^Sources?: (.*?)(?:\n\n|\Z)", inspect.getdoc(thing) or "", re.DOTALL | re.MULTILINE)
            if source and name not in seen:
                seen.add(name)
                yield Use(name, re.sub(r"\s+", " ", source[1]).replace("``", "`"))


def every_use() -> Iterator[Use]:
    """All statements of sources."""
    for name, preset in ALGORITHMS.items():
        before = ""
        for text in preset.sources.values():
            own = bool(re.search(_ARXIV, text))
            before = text if own else before
            numbers = re.findall(_ARXIV, before) if _SAME.search(text) and not own else []
            yield Use(name, " ".join([text, *(f"arXiv {number}" for number in numbers)]), cites=own)
    for name in available_objectives():
        yield Use(name, spec_of(get_objective(name)).source)
    for name in available_advantages():
        yield Use(name, advantage_spec(get_advantage(name)).source)
    yield from documented()


def citation(text: str, number: str) -> str:
    """The authors, the year and, if stated, the name of a paper, from the text of a source."""
    number = re.escape(number)
    text = text.replace("`", "")
    named = re.search(rf"([A-Z][^;:()]*?),? \((?:([^();]*?):? )?arXiv:? ?{number}", text)
    if named:
        name = (named[2] or "").strip(" ,")
        authors = re.split(r"\. (?=[A-Z])", named[1].strip())[-1]  # of several sources the last one has this number
        authors = re.sub(r"^.*\b(?:from|of) (?=[A-Z]\w+ et al)", "", authors)
        authors = re.sub(r'"(.*)"?$', r"'\1'", authors).replace("\"'", "'")
        return f"{authors} ({name})" if name and not name.startswith("arXiv") else authors
    bare = re.search(rf"([A-Z][^;:()]*?), arXiv:? ?{number}", text)
    return re.split(r"\. (?=[A-Z])", bare[1])[-1] if bare else ""


def paper_table() -> str:
    """The papers, oldest first, each with its citation and the names that use it."""
    cited: dict[str, list[str]] = defaultdict(list)
    users: dict[str, list[str]] = defaultdict(list)
    for name, text, cites in every_use():
        for number in re.findall(_ARXIV, text):
            cited[number].append(citation(text, number) if cites else "")
            if name not in users[number]:
                users[number].append(name)
    rows = []
    for number, names in sorted(users.items()):
        authors = max([*cited[number], CITED.get(number, "")], key=len)
        uses = ", ".join(f"`{name}`" for name in names)
        rows.append([f"[{number}](https://arxiv.org/abs/{number})", authors.replace("|", "\\|"), uses])
    return markdown(["paper", "authors", "used by"], rows)


def linked(text: str) -> str:
    """The text of a source for a cell, with arXiv numbers as links."""
    return re.sub(_ARXIV, r"[arXiv \1](https://arxiv.org/abs/\1)", text).replace("|", "\\|")


def unused(kind: str) -> str:
    """The sources of the objectives or advantages that no preset uses."""
    used = {getattr(preset, kind) for preset in ALGORITHMS.values()}
    names = set(available_objectives() if kind == "objective" else available_advantages()) - used
    return source_table(kind, [Use(name, part_source(kind, name)) for name in sorted(names)])


#: Functions that prepare the inputs of an objective, whose paper is the objective's.
_PREPARES = re.compile(r"select_|\w+_(?:reference_point|match|threshold)$")


def other_sources() -> str:
    """Other public names whose docstring states a paper or an article with its year."""
    dated = (use for use in documented() if re.search(rf"{_ARXIV}|\b(?:19|20)\d\d\b", use.text))
    return source_table("name", [use for use in dated if not _PREPARES.match(use.name)])


def source_table(title: str, uses: list[Use]) -> str:
    """Sources. Names with the same source share a row."""
    names: dict[str, list[str]] = {}
    for use in uses:
        names.setdefault(use.text.rstrip("."), []).append(f"`{use.name}`")
    return markdown([title, "source"], [[", ".join(some), linked(text)] for text, some in names.items()])


# ------------------------------------------------------------------ chat_templates.md


def corpus_table() -> str | None:
    """The totals over the chat templates of the packages, and the templates with an error; None without the packages."""
    import template_corpus
    import template_oracle

    statuses = ("right", "refused", "error", "silent", "open")
    totals: Counter[str] = Counter()
    wrong, versions, left_out = [], Counter[str](), []
    for name, source in template_corpus.templates().items():
        package, _, template = name.partition("__")
        tested = template_oracle.Template(name, source)
        if not tested.is_chat:
            left_out.append(f"`{template}`")
            continue
        checked = {kind: template_oracle.check(tested, kind) for kind in template_oracle.CONVERSATIONS}
        count = Counter(outcome.status for outcome in checked.values())
        totals += count
        versions[package] += 1
        errors = [kind for kind, outcome in checked.items() if outcome.status in statuses[2:]]
        if errors:
            wrong.append((" ".join(package.rsplit("-", 1)), template, errors, count["silent"], count["open"]))
    if not versions:
        return None
    summary = ", ".join(f"{totals[status]} {status}" for status in statuses)
    packages = ", ".join(f"{' '.join(package.rsplit('-', 1))} ({count})" for package, count in versions.items())
    return (
        f"**{versions.total()} templates, {sum(totals.values())} masks: {summary}.**\n\nPackages: {packages}.\n\n"
        + wrong_templates(wrong, list(template_oracle.CONVERSATIONS))
        + f"\nNot counted, since they do not show both a question and its answer: {', '.join(left_out)}.\n"
    )


def wrong_templates(wrong: Iterable[tuple[str, str, list[str], int, int]], every: list[str]) -> str:
    """A row for templates of one package that fail on the same conversations. ``every`` has all kinds of conversations."""
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for package, template, kinds, silent, unknown in wrong:
        others = [kind for kind in every if kind not in kinds]
        listed = ", ".join(kinds)
        if len(others) < len(kinds):
            listed = f"all but {', '.join(others)}" if others else "all"
        for word, count in (("silent", silent), ("open", unknown)):
            listed += f" ({count} {word})" if count else ""
        rows[package, listed].append(f"`{template}`")
    cells = [[package, ", ".join(templates), listed] for (package, listed), templates in rows.items()]
    return markdown(["package", "templates", "no mask for"], cells)


def pair_table() -> str:
    """TRL's marked templates compared with the masks of this package. Templates with equal results share a row."""
    import template_pairs

    every = list(template_pairs.CONVERSATIONS)
    rows: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for template in template_pairs.pairs():
        compared = {kind: template_pairs.compare(template, kind) for kind in every}
        kinds: dict[str, list[str]] = defaultdict(list)
        for kind, outcome in compared.items():
            kinds[outcome.status].append(kind)
        only_trl = sorted({text for outcome in compared.values() for text in outcome.only_trl})
        marked = ", ".join(f"`{text!r}`".replace("|", "\\|") for text in only_trl)
        agrees = "all" if kinds["agrees"] == every else ", ".join(kinds["agrees"])
        columns = [agrees, marked, ", ".join(kinds["texts differ"]), ", ".join(kinds["refused"])]
        rows[tuple(column or "-" for column in columns)].append(template)
    return markdown(
        ["template", "agrees on", "only TRL marks", "texts differ", "refused"],
        [[", ".join(names), *columns] for columns, names in rows.items()],
    )


# ------------------------------------------------------------------ train.md


def settings_table() -> str:
    """Key, default and meaning of every setting of a run."""
    rows = []
    for key, setting in RUN_SETTINGS.items():
        default = "" if setting.default == "???" else f"`{as_yaml(setting.default)}`"
        rows.append([f"`{key}`", default, setting.text])
    return markdown(["key", "default", "meaning"], rows)


# ------------------------------------------------------------------ the pages

#: Page -> name of a table in it -> the function that writes it.
TABLES: dict[str, dict[str, Callable[[], str | None]]] = {
    "algorithms": {
        "algorithms": algorithms,
    },
    "algorithm_data": {
        "users": schema_users,
        "schemas": schema_table,
        "flags": flag_table,
    },
    "api": {layer: partial(build_api.table, layer) for layer in build_api.ORDER},
    "architecture": {"layers": build_architecture.table},
    "chat_templates": {"corpus": corpus_table, "pairs": pair_table},
    "distillation": {"medium": partial(bias_table, TEACHERS["medium"])},
    "doctor": {"faults": fault_summary},
    "elsewhere": {
        "hint": lambda: f"> {foreign_hint('num_generations').strip()}\n",
        "translation": lambda: f"`print(from_trl({EXAMPLE!r}))`:\n\n```\n{from_trl(EXAMPLE)}\n```\n",
        **{name: partial(library_tables, name) for name in ("TRL", *LIBRARIES)},
    },
    "estimators": {"estimators": estimator_table, "spread": spread_table},
    "losses": {
        "objectives": partial(objective_table, of_answers=False),
        "preferences": partial(objective_table, of_answers=True),
        "advantages": advantage_table,
    },
    "metrics": {origin: partial(metric_table, origin) for origin in get_args(Origin)},
    "papers": {
        "papers": paper_table,
        "objectives": partial(unused, "objective"),
        "advantages": partial(unused, "advantage"),
        "others": other_sources,
    },
    "rollouts": {"rollout_columns": rollout_table},
    "train": {"settings": settings_table},
}


def render(page: str, text: str | None = None) -> str:
    """A page with current tables. A table that cannot be computed here stays unchanged."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8") if text is None else text
    for name, make in TABLES[page].items():
        table = make()
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not mark or not end:
            raise ValueError(
                f"docs/{page}.md has no place for the table {name!r}: add <!-- {name} --> and <!-- end -->."
            )
        if table is not None:
            text = f"{before}{mark}{table.rstrip()}\n{end}{after}" if table.strip() else text
    return text


# ------------------------------------------------------------------ places in the code

#: A name of the package and its place, as CONTRIBUTING.md writes them.
_PLACE = re.compile(r"`([A-Za-z_][\w.]*)`(\s+)\(`([\w/]+\.py):\d+`\)")


def line_of(name: str, file: str) -> int:
    """The line of a file of the package in which a function, a class, a method or a field is defined."""
    body = ast.parse((build_architecture.ROOT / file).read_text(encoding="utf-8")).body
    for part in name.split("."):
        owner = next((node for node in body if part in _defined(node)), None)
        if owner is None:
            raise ValueError(f"{file} defines no {name}: correct its place.")
        body = getattr(owner, "body", [])
    return owner.lineno


def _defined(node: ast.AST) -> set[str]:
    """The names that a statement defines."""
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return {getattr(node, "name", ""), *(target.id for target in targets if isinstance(target, ast.Name))}


def with_lines(text: str) -> str:
    """A text in which each named place has its line of today."""
    return _PLACE.sub(lambda place: f"`{place[1]}`{place[2]}(`{place[3]}:{line_of(place[1], place[3])}`)", text)


if __name__ == "__main__":
    CONTRIBUTING.write_text(with_lines(CONTRIBUTING.read_text(encoding="utf-8")), encoding="utf-8")
    for page in sys.argv[1:] or TABLES:
        (DOCS / f"{page}.md").write_text(render(page), encoding="utf-8")
