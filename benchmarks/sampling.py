"""Time of scoring under truncated sampling, relative to scoring without: ``python -m benchmarks.sampling``.

A model of random weights with the layers, width and vocabulary of Qwen2.5-0.5B, whose head is scaled until its distributions
have a given entropy. The tokens are random, which costs the same as likely ones.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.environment import machine
from benchmarks.measure import Contender, HostMeter, Measured, alternate
from benchmarks.models import ModelSize, qwen2
from torchrl_llm_kl import LogProbScorer, Ragged, SamplerMismatchWarning, Sampling

PLAIN = "no truncation"
KINDS = {
    "top-k 50": Sampling(top_k=50),
    "top-p 0.9": Sampling(top_p=0.9),
    "min-p 0.05": Sampling(min_p=0.05),
    "temperature 0.7, top-k 20, top-p 0.8": Sampling(0.7, top_k=20, top_p=0.8),
}


@dataclass(frozen=True)
class Found:
    """Times by kind, and the mean entropy of a position in nats."""

    entropy: float
    times: dict[str, Measured]


def measure(size: ModelSize, tokens: int, entropy: float, repeats: int) -> Found:
    """Score one sequence without gradient, all kinds in turn."""
    model = qwen2(size)
    with torch.no_grad():
        ids = torch.randint(size.vocab, (tokens,))
        prompt = min(8, tokens // 2)
        logits = model(ids[None]).logits[0, prompt:][-64:]
        low, high = 0.0, 1e4
        for _ in range(50):
            scale = (low + high) / 2
            low, high = (scale, high) if _entropy(scale * logits) > entropy else (low, scale)
        model.lm_head.weight.mul_(scale)
        entropy = _entropy(model(ids[None]).logits[0, prompt - 1 : -1])
    row, mask = Ragged.from_list([ids]), torch.arange(tokens) >= prompt
    scorers = {PLAIN: LogProbScorer(model, memory=0)}
    scorers |= {name: LogProbScorer(model, memory=0, sampling=kind) for name, kind in KINDS.items()}

    def score(scorer: LogProbScorer) -> None:
        with warnings.catch_warnings():  # the tokens are random: the kept sets hold few of them
            warnings.simplefilter("ignore", SamplerMismatchWarning)
            scorer.score(row, mask)

    contenders = {name: Contender(lambda _, scorer=scorer: score(scorer)) for name, scorer in scorers.items()}
    times = alternate(contenders, HostMeter(), repeats=repeats, warm_up=1, memory_apart=True)
    return Found(entropy, times)


def _entropy(logits: Tensor) -> float:
    log_probs = logits.log_softmax(-1)
    return float(-(log_probs.exp() * log_probs).sum(-1).mean())


def table(found: Found) -> Table:
    """Seconds and ratios."""
    shown = Table("sampling", "seconds", "ratio", title=f"{found.entropy:.1f} nats a position")
    for name, measured in found.times.items():
        shown.add_row(name, f"{measured.seconds:.2f}", f"{measured.seconds / found.times[PLAIN].seconds:.2f}")
    return shown


def main(
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 24,
    hidden: Annotated[int, typer.Option(help="Its hidden size.")] = 896,
    vocab: Annotated[int, typer.Option(help="Its vocabulary.")] = 151_936,
    tokens: Annotated[int, typer.Option(help="Tokens of the sequence.")] = 256,
    entropy: Annotated[float, typer.Option(help="Nats of a position.")] = 2.0,
    repeats: Annotated[int, typer.Option(help="Runs of each; the median counts.")] = 7,
) -> None:
    """Print the times of all kinds, on one core."""
    torch.set_num_threads(1)
    size = ModelSize(vocab, hidden, layers)
    console = Console()
    console.print(f"{size}, {tokens} tokens, float32, {machine(torch.device('cpu'))['processor']}, one core")
    console.print(table(measure(size, tokens, entropy, repeats)))


if __name__ == "__main__":
    typer.run(main)
