"""Errors of log-probs and KL in bfloat16, on real text: ``python -m benchmarks.precision``."""

from __future__ import annotations

import ast
import copy
import json
import math
import random
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.data import REAL_ANSWERS
from benchmarks.environment import machine
from benchmarks.measure import Contender, HostMeter, alternate
from benchmarks.models import QUICK, ModelSize, qwen2
from torchrl_llm_kl import LogProbScorer, Ragged, get_estimator

DOCS = Path(__file__).parent
PAGE = "PRECISION.md"
START, END = "<!-- measured: `python -m benchmarks.precision --write` -->", "<!-- end of measured -->"
START_CHECKPOINT = "<!-- measured: `python -m benchmarks.precision --checkpoint FOLDER --write` -->"

Document = tuple[str, list[str], str]  # a prompt, answers for training, and one answer for tuning or held out

MODEL = ModelSize(vocab=2000, hidden=256, layers=4)


@dataclass(frozen=True)
class Sizes:
    """Sizes of the experiment. The KL is measured after each number of ``tuning_steps``."""

    model: ModelSize = MODEL
    training_steps: int = 250
    training_rate: float = 8e-3
    tuning_steps: tuple[int, ...] = (1, 8, 64)
    tuning_rate: float = 3e-5
    batch: tuple[int, int] = (8, 128)
    held_out: int = 64
    documents: int | None = None
    repeats: int = 3
    checkpoint: str | None = None  # a pre-trained model instead of one that is trained here


OF_CHECKPOINT = Sizes(
    training_steps=0, tuning_steps=(1, 4, 16), tuning_rate=2e-6, batch=(4, 64), held_out=12, documents=60, repeats=1
)
SMALLEST = Sizes(
    replace(QUICK, vocab=300),
    training_steps=20,
    tuning_steps=(1, 8),
    batch=(4, 32),
    held_out=8,
    documents=40,
    repeats=1,
)


# ---------------------------------------------------------------------- text


def documents() -> tuple[list[Document], str]:
    """GSM8K if available, else docstrings of Python's standard library, in a fixed random order."""
    if REAL_ANSWERS.exists():
        rows = [json.loads(line) for line in REAL_ANSWERS.read_text(encoding="utf-8").splitlines()]
        models = [name for name, value in rows[0].items() if isinstance(value, dict)]
        found = [(row["question"], [row[name]["solution"] for name in models], row["ground_truth"]) for row in rows]
        source = "GSM8K, questions and answers"
    else:
        found, source = list(_docstrings()), "docstrings of Python's standard library"
    random.Random(0).shuffle(found)
    return found, source


def _docstrings() -> Iterator[Document]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (text := ast.get_docstring(node)):
                yield f"{path.stem}.{node.name}", [text[:600]], text[:600]


@dataclass(frozen=True)
class Corpus:
    """Token ids: two streams to crop batches from, and ``S`` sequences to score with the mask of their answers."""

    training: Tensor
    tuning: Tensor
    held_out: Ragged
    mask: Tensor
    source: str


def corpus(sizes: Sizes) -> Corpus:
    """Split the documents: training stream, tuning stream and held-out answers have different questions."""
    found, source = documents()
    found = found[: sizes.documents]
    held_out, rest = found[: sizes.held_out], found[sizes.held_out :]
    tuning, training = rest[: len(rest) // 4], rest[len(rest) // 4 :]
    learned = [f"{question}\n{answer}\n\n" for question, answers, _ in training for answer in answers]
    tuned = [f"{question}\n{answer}\n\n" for question, _, answer in tuning]
    encode, begin = _encoder(sizes, learned)

    def ids(text: str) -> Tensor:
        return torch.tensor(encode(text))

    pairs = [(torch.tensor(begin + encode(q + "\n")), ids(answer + "\n\n")) for q, _, answer in held_out]
    mask = torch.cat([torch.arange(len(q) + len(a)) >= len(q) for q, a in pairs])
    return Corpus(
        torch.cat([ids(text) for text in learned]),
        torch.cat([ids(text) for text in tuned]),
        Ragged.from_list([torch.cat(pair) for pair in pairs]),
        mask,
        source,
    )


def _encoder(sizes: Sizes, learned: list[str]) -> tuple[Callable[[str], list[int]], list[int]]:
    """A function from a text to token ids, and the ids before the first text."""
    if sizes.checkpoint is not None:
        pretrained = AutoTokenizer.from_pretrained(sizes.checkpoint)
        return partial(pretrained.encode, add_special_tokens=False), pretrained.encode("")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(learned, vocab_size=sizes.model.vocab, show_progress=False)
    return lambda text: tokenizer.encode(text).ids, []


# ---------------------------------------------------------------------- models


def train(model: Any, stream: Tensor, batch: tuple[int, int], rates: list[float], optimizers: list[Any]) -> None:
    """Take one step per learning rate, in mixed precision on random crops of the stream."""
    rows, length = batch
    model.train()
    for rate in rates:
        crops = stream[torch.randint(len(stream) - length, (rows, 1)) + torch.arange(length)]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=crops, labels=crops).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
    model.eval()


def muon_and_adam(model: Any) -> list[Any]:
    """Muon for the layers' matrices, which needs half the steps of AdamW, and AdamW for all other parameters."""
    layers = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or ".layers." not in name]
    muon = torch.optim.Muon(layers, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, weight_decay=0.0)]


def one_cycle(steps: int, peak: float) -> list[float]:
    """Learning rates: linear warm-up over a tenth of the steps, then a cosine decay."""
    warm_up = max(1, steps // 10)
    return [peak * min(1.0, (i + 1) / warm_up) * (0.5 + 0.5 * math.cos(math.pi * i / steps)) for i in range(steps)]


def in_double(model: Any) -> Any:
    """A float64 copy with torch's norms, since transformers' norms always compute in float32."""
    model = copy.deepcopy(model).double()
    for name, module in list(model.named_modules()):
        if (name_of := type(module).__name__).endswith("RMSNorm"):
            eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
            norm = torch.nn.RMSNorm(module.weight.shape, eps=eps, dtype=torch.float64)
            # Gemma stores the weight minus 1.
            norm.weight = torch.nn.Parameter(module.weight + name_of.startswith("Gemma"))
            model.set_submodule(name, norm)
    return model


def in_bfloat16(model: Any) -> Any:
    """A copy as ``from_pretrained(dtype=torch.bfloat16)`` loads it: buffers, such as rotary frequencies, stay float32."""
    narrow = copy.deepcopy(model).bfloat16()
    for buffer, wide in zip(narrow.buffers(), model.buffers(), strict=True):
        buffer.data = wide.clone()
    return narrow


TRUTH = "float64"
SETTINGS: dict[str, Callable[[Any], LogProbScorer]] = {
    "float32": LogProbScorer,
    "bf16 products": lambda model: LogProbScorer(model, dtype=torch.bfloat16),
    "bf16 model": lambda model: LogProbScorer(in_bfloat16(model)),
    ".bfloat16()": lambda model: LogProbScorer(copy.deepcopy(model).bfloat16()),
}
_ALL = {TRUTH: lambda model: LogProbScorer(in_double(model)), **SETTINGS}


# ---------------------------------------------------------------------- measuring

ESTIMATES = ("k1", "k3", "exact")


@dataclass(frozen=True)
class Reading:
    """Per scored token, in float64: log-probs under both models, and the KL by each estimator."""

    log_prob: Tensor
    ref_log_prob: Tensor
    kl: dict[str, Tensor]


def read(policy: LogProbScorer, reference: LogProbScorer, text: Corpus) -> Reading:
    """Score the text under both models. Estimators get the float32 log-probs, as in use."""
    scores = policy.evaluate(text.held_out, text.mask, reference=reference)
    assert scores.ref_log_prob is not None
    assert scores.kl is not None
    log_prob, ref_log_prob, exact = (
        each.values[text.mask] for each in (scores.log_prob, scores.ref_log_prob, scores.kl)
    )
    kl = {name: get_estimator(name)(log_prob, ref_log_prob).double() for name in ESTIMATES[:2]}
    return Reading(log_prob.double(), ref_log_prob.double(), {**kl, "exact": exact.double()})


@dataclass(frozen=True)
class Measured:
    """All measured numbers.

    Args:
        readings: by tuning steps of the policy, then by setting, including the float64 truth.
        against_float32: by setting: the last policy in that setting, with itself in float32 as the reference.
        seconds: by setting: time to score the last policy.
        rows: the sequence of each token.
        source: of the text.
    """

    readings: dict[int, dict[str, Reading]]
    against_float32: dict[str, Reading]
    seconds: dict[str, float]
    rows: Tensor
    source: str

    @property
    def last(self) -> dict[str, Reading]:
        """The readings of the policy after all tuning steps."""
        return self.readings[max(self.readings)]


def measure(sizes: Sizes) -> Measured:
    """Train the reference, tune policies from it, and score the held-out answers under all of them."""
    text = corpus(sizes)
    if sizes.checkpoint is None:
        reference = qwen2(sizes.model)
    else:
        reference = AutoModelForCausalLM.from_pretrained(sizes.checkpoint, dtype=torch.float32)
    rates = one_cycle(sizes.training_steps, sizes.training_rate)
    train(reference, text.training, sizes.batch, rates, muon_and_adam(reference))

    policy, policies = copy.deepcopy(reference), {}
    optimizer, before = torch.optim.AdamW(policy.parameters(), weight_decay=0.0), 0
    for steps in sizes.tuning_steps:
        train(policy, text.tuning, sizes.batch, [sizes.tuning_rate] * (steps - before), [optimizer])
        policies[steps], before = copy.deepcopy(policy), steps
    readings = {
        steps: {name: read(scorer(tuned), scorer(reference), text) for name, scorer in _ALL.items()}
        for steps, tuned in policies.items()
    }
    scorers = {name: scorer(policy) for name, scorer in SETTINGS.items()}
    against = {name: read(scorer, LogProbScorer(policy), text) for name, scorer in scorers.items()}
    timed = {name: Contender(lambda _, s=s: s.score(text.held_out, text.mask)) for name, s in scorers.items()}
    seconds = {name: m.seconds for name, m in alternate(timed, HostMeter(), repeats=sizes.repeats).items()}
    return Measured(readings, against, seconds, text.held_out.sequence_ids[text.mask], text.source)


def by_sequence(values: Tensor, rows: Tensor) -> Tensor:
    """Sum over the tokens of each sequence: ``[K]`` becomes ``[S]``."""
    return values.new_zeros(int(rows.max()) + 1).index_add(0, rows, values)


def mean_and_error(values: Tensor, rows: Tensor) -> tuple[float, float]:
    """The mean over tokens and its standard error, where tokens of one sequence are not independent."""
    mean = values.mean()
    spread = by_sequence(values - mean, rows)
    return mean.item(), (spread.square().sum() * len(spread) / (len(spread) - 1)).sqrt().item() / len(values)


# ---------------------------------------------------------------------- report

Row = tuple[str, list[str]]


def of_last_policy(found: Measured) -> list[Row]:
    """Errors of the last policy against the truth, one cell per setting."""
    truth, rows = found.last[TRUTH], found.rows

    def row(label: str, cell: Callable[[str], str]) -> Row:
        return label, [cell(name) for name in SETTINGS]

    def error(name: str, estimate: str | None = None) -> Tensor:
        mine = found.last[name]
        return mine.kl[estimate] - truth.kl[estimate] if estimate else mine.log_prob - truth.log_prob

    def ratio(name: str) -> Tensor:
        return found.against_float32[name].log_prob - found.against_float32[name].ref_log_prob

    def bias(name: str, estimate: str) -> str:
        mean, spread = mean_and_error(error(name, estimate), rows)
        return f"{mean:.1e} ± {spread:.0e}"

    table = [
        row("log-prob of a token: mean error, absolute", lambda n: f"{error(n).abs().mean():.1e}"),
        row("log-prob of a token: largest error", lambda n: f"{error(n).abs().max():.1e}"),
        row("log-prob of an answer: mean error, absolute", lambda n: f"{by_sequence(error(n), rows).abs().mean():.1e}"),
        row("log-prob of an answer: largest error", lambda n: f"{by_sequence(error(n), rows).abs().max():.1e}"),
    ]
    for e in ESTIMATES:
        table += [
            row(f"{e} of a token: mean error ± its standard error", lambda n, e=e: bias(n, e)),
            row(f"{e} of a token: RMS error", lambda n, e=e: f"{_rms(error(n, e)):.1e}"),
            row(
                f"{e} of an answer: RMS error",
                lambda n, e=e: f"{_rms(by_sequence(error(n, e), rows)):.1e}",
            ),
        ]
    return [
        *table,
        row(
            "KL of the policy to itself in float32, a token",
            lambda n: f"{found.against_float32[n].kl['exact'].mean():.1e}",
        ),
        row("largest importance ratio of a token, less 1", lambda n: f"{ratio(n).expm1().abs().max():.1e}"),
        row(
            "largest importance ratio of an answer, less 1",
            lambda n: f"{by_sequence(ratio(n), rows).expm1().abs().max():.1e}",
        ),
        row("speed", lambda n: f"{found.seconds['float32'] / found.seconds[n]:.1f}x"),
    ]


def of_all_policies(found: Measured) -> list[Row]:
    """Relative errors per policy: of the mean KL, and of k1 beside its own standard deviation."""
    table = []
    for step, readings in found.readings.items():
        true = readings[TRUTH].kl
        mean, deviation = true["exact"].mean(), true["k1"].std()
        policy = f"KL {mean:.1e}, after {step} step{'s' * (step > 1)}"
        errors = {e: {name: readings[name].kl[e] - true[e] for name in SETTINGS} for e in ESTIMATES}
        table += [
            (f"{policy}: mean error of exact / KL", [_percent(x.mean() / mean) for x in errors["exact"].values()]),
            (f"{policy}: mean error of k3 / KL", [_percent(x.mean() / mean) for x in errors["k3"].values()]),
            (
                f"{policy}: RMS error of k1 / its own deviation",
                [_percent(_rms(x) / deviation) for x in errors["k1"].values()],
            ),
        ]
    return table


def _percent(share: Tensor) -> str:
    return f"{round(100 * share.item(), 2) + 0.0:.2f}%"  # adding 0.0 turns -0.0 into 0.0


def _rms(errors: Tensor) -> Tensor:
    return errors.square().mean().sqrt()


def described(found: Measured) -> str:
    """A description of the data and the machine."""
    truth, answers = found.last[TRUTH], int(found.rows.max()) + 1
    kl = truth.kl["exact"]
    return (
        f"{answers} held-out answers of {len(kl)} tokens ({found.source}); the policy gives them {-truth.log_prob.mean():.2f} "
        f"nats a token, and its exact KL to the reference is {kl.mean():.4f} nats a token, {kl.sum() / answers:.2f} an answer. "
        f"torch {torch.__version__}, {machine(torch.device('cpu'))['processor']}, {torch.get_num_threads()} thread."
    )


_TITLES = ("nats, against float64", "relative, as the policy leaves the reference")


def markdown(found: Measured) -> str:
    """The description and both tables as Markdown."""
    lines = [described(found)]
    for title, table in zip(_TITLES, (of_last_policy(found), of_all_policies(found)), strict=True):
        lines += ["", f"| {title} | {' | '.join(SETTINGS)} |", "| --- |" + " ---: |" * len(SETTINGS)]
        lines += [f"| {label} | {' | '.join(cells)} |" for label, cells in table]
    return "\n".join(lines)


def write_page(found: Measured, page: Path, start: str = START) -> None:
    """Write the tables between the markers of the page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(start)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{start}\n\n{markdown(found)}\n\n{END}{after}", encoding="utf-8")


def main(
    write: Annotated[bool, typer.Option("--write", help="Write the tables into benchmarks/PRECISION.md.")] = False,
    quick: Annotated[bool, typer.Option(help="Use the smallest sizes, as a smoke test.")] = False,
    docs: Annotated[Path, typer.Option(help="The folder of the page.")] = DOCS,
    checkpoint: Annotated[str | None, typer.Option(help="A pre-trained model, in place of one trained here.")] = None,
) -> None:
    """Measure the errors of log-probs and KL in bfloat16, on real text and one thread."""
    torch.set_num_threads(1)
    sizes = SMALLEST if quick else Sizes() if checkpoint is None else replace(OF_CHECKPOINT, checkpoint=checkpoint)
    measured = measure(sizes)
    print(markdown(measured))
    if write:
        write_page(measured, docs / PAGE, START if checkpoint is None else START_CHECKPOINT)


if __name__ == "__main__":
    typer.run(main)
