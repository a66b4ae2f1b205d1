"""The demo of tools: a language model learns to call a calculator, while a KL penalty keeps it near its initial weights.

Run it with ``make demo-tools``. It takes a few minutes on two CPU cores and needs no network. It

1. builds a tokenizer and a small Qwen2, and warms the model up on demonstrations of products. Few of them call the tool
   ``multiply`` of ``calculator.py``, and some of these calls lack an argument. The other ones give the product at once, which
   a model of this size can only guess. Model and prompts are written to ``runs/tools/warm-up-SEED``, only once.
2. runs ``torchrl-llm-kl train tutorials/calculator.yaml`` with your changes, such as ``kl.target=0.5``. The reward is 1 for the
   right product. The policy has to discover that it gets the reward by calling the tool and copying the result.
3. prints held-out prompts before and after.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from calculator import multiply
from countdown.model import Rows, build_model, imitate, train_tokenizer
from countdown.report import progress, silence_dependencies
from torchrl_llm_kl import tiny_chat_model
from torchrl_llm_kl.masks import call_id, call_message, render_conversations
from torchrl_llm_kl.training import TrainResult, read_config, train

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "tutorials/calculator.yaml"
HELD_OUT = 300
DEMONSTRATIONS = 4000
WARMUP_STEPS, BATCH = 500, 32
CALLS, INCOMPLETE = 0.25, 0.25  # the share of demonstrations with a call, and of calls that lack an argument

# As in Hermes' and Qwen's templates. Its tags are tokens, so a call has ten tokens.
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: The rows of the table: the figure of an evaluation, and whether it is a share.
FIGURES = {
    "right": ("reward", True),
    "with a call": ("reward/called", True),
    "with a failed call": ("reward/failed", True),
    "turns": ("reward/turns", False),
    "KL in nats": ("kl", False),
}
#: Where to look after the demo.
WRITTEN = {
    "run.html": "the run in one page",
    "curves.png": "reward, KL and coefficient",
    "metrics.jsonl": "the figures of each step, such as turns, tools/multiply and tool_errors",
    "rollouts.html": "conversations, token by token",
}

Messages = list[dict[str, Any]]


def question(a: int, b: int) -> str:
    """The user's message."""
    return f"What is {a} * {b}?"


def demonstration(a: int, b: int, rng: random.Random) -> Messages:
    """A conversation that ends with the product. Some of them call the tool, and some of the calls lack an argument."""
    asks, answers = {"role": "user", "content": question(a, b)}, {"role": "assistant", "content": str(a * b)}
    if rng.random() >= CALLS:
        return [asks, answers]
    arguments, result = {"a": a, "b": b}, str(multiply(a, b))
    if rng.random() < INCOMPLETE:
        arguments.pop("b")
        result = "Error: TypeError: multiply() missing 1 required positional argument: 'b'"
    calls = {"role": "assistant", "content": "", "tool_calls": [call_message(0, "multiply", arguments)]}
    return [asks, calls, {"role": "tool", "tool_call_id": call_id(0), "name": "multiply", "content": result}, answers]


def build_tokenizer(conversations: Sequence[Messages]) -> PreTrainedTokenizerBase:
    """A tokenizer with a token for each phrase between the digits of the conversations."""
    _, letters = tiny_chat_model()  # only to render the template, since a tokenizer needs the texts first
    letters.chat_template = CHAT_TEMPLATE
    texts = [str(letters.apply_chat_template(each, tools=[multiply], tokenize=False)) for each in conversations]
    marks = "|".join(map(re.escape, (*TAGS, "<|im_start|>", "<|im_end|>")))
    return train_tokenizer([part for text in texts for part in re.split(marks, text)], CHAT_TEMPLATE, tags=TAGS)


def prepare(folder: Path, *, seed: int, steps: int = WARMUP_STEPS, held_out: int = HELD_OUT) -> None:
    """Warm up the model and write the files of ``calculator.yaml``, unless they exist."""
    if (folder / "held_out.jsonl").exists():
        return
    silence_dependencies()
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # more threads only wait for each other on a model this small, and change the numbers
    rng = random.Random(seed)
    factors = list(product(range(10, 100), repeat=2))
    rng.shuffle(factors)
    hidden = set(factors[:held_out])
    train = [(a, b) for a, b in factors[held_out:] if (b, a) not in hidden]
    demonstrations = [demonstration(a, b, rng) for a, b in train[:DEMONSTRATIONS]]
    tokenizer = build_tokenizer(demonstrations[:200])  # they have every phrase
    model = build_model(tokenizer)
    rendered = render_conversations(tokenizer, demonstrations, tools=[multiply])
    rows: Rows = [(each.token_ids.tolist(), each.assistant_mask.tolist()) for each in rendered]

    def batches() -> Iterator[Rows]:
        while True:
            yield rng.sample(rows, BATCH)

    with progress("warm-up", steps) as advance:
        for loss in imitate(model, tokenizer, batches(), steps=steps, lr=2e-3):
            advance(f"loss {loss:.2f}")
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for name, some in (("prompts", train), ("held_out", factors[:held_out])):
        lines = [json.dumps({"question": question(a, b), "answer": str(a * b)}) + "\n" for a, b in some]
        (folder / f"{name}.jsonl").write_text("".join(lines))


def report(result: TrainResult) -> None:
    """Print held-out prompts before and after the training, with 95 % intervals, and where to look."""
    first, last = result.evaluations[0], result.evaluations[-1]
    title = f"{first['num_prompts']} held-out products, sampled answers (95 % interval)"
    table = Table(title=title, title_justify="left")
    for name in ("", "before", f"after {last['step']} steps"):
        table.add_column(name, justify="right" if name else "left")
    for label, (key, share) in FIGURES.items():
        table.add_row(label, *(_with_interval(row, key, "{:.1%}" if share else "{:.2f}") for row in (first, last)))
    Console().print(table)
    half = result.rows[len(result.rows) // 2 :]
    print(
        f"KL in the last half of the steps: {fmean(row['kl'] for row in half):.2f}. {result.rows[-1]['seconds']:.0f} s"
    )
    for name, contents in WRITTEN.items():
        print(f"see {result.folder / name}: {contents}")


def _with_interval(row: dict[str, float], key: str, form: str) -> str:
    ends = [form.format(row[f"{end}/{key}"]) for end in ("low", "high") if f"{end}/{key}" in row]
    return form.format(row[key]) + (f" ({ends[0]} to {ends[1]})" if ends else "")


def main(arguments: Sequence[str]) -> int:
    """Warm up, train and report. Returns the exit code."""
    silence_dependencies()
    config = read_config(CONFIG, [each for each in arguments if each != "--fresh"])
    if config.data.held_out is not None:
        prepare(Path(config.data.held_out).parent, seed=config.run.seed)
    result = train(config, fresh="--fresh" in arguments)
    if result.outcome == "finished":
        report(result)
    return {"finished": 0, "stopped": 1, "interrupted": 130}[result.outcome]


if __name__ == "__main__":
    os.chdir(ROOT)  # the paths in calculator.yaml are relative to it
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        sys.exit(str(error))
