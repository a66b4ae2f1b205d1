"""Time of templates with assistant masks, compared with templates without: ``python -m benchmarks.masks``.

The conversations have real questions and answers. They use chat templates that TRL ships, and a tokenizer trained on their
text. A mask by turn needs a second rendering, in which each message is marked. "Two renderings" is the lower bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from importlib import resources
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.data import texts
from benchmarks.environment import machine
from benchmarks.measure import Contender, HostMeter, Measured, alternate
from torchrl_llm_kl.masks import render_conversations

TEMPLATES = ("qwen2_5", "qwen3", "llama3_1", "gptoss", "deepseekv3", "glm4moe", "gemma3", "phi3")
SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<think>",
    "</think>",
]
RENDERED, TOKENS, PLAIN, OURS = "template", "tokens", "both", "with masks"


def conversations(count: int, turns: int) -> list[list[dict[str, str]]]:
    """Conversations of several questions, each with its answer."""
    pairs = texts(count * turns)
    made = []
    for i in range(count):
        own = pairs[i * turns : (i + 1) * turns]
        roles = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in own]
        made.append([message for pair in roles for message in pair])
    return made


def tokenizer_of(chats: list[list[dict[str, str]]], vocab: int = 8000) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on the conversations."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((message["content"] for chat in chats for message in chat), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<|im_start|>")


def measure(name: str, chats: list[list[dict[str, str]]], repeats: int) -> dict[str, Measured]:
    """Seconds of each part and of both ways, for all conversations."""
    tokenizer: Any = tokenizer_of(chats)
    tokenizer.chat_template = (resources.files("trl") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    rendered = tokenizer.apply_chat_template(chats, tokenize=False)
    steps: dict[str, Callable[..., object]] = {
        RENDERED: partial(tokenizer.apply_chat_template, chats, tokenize=False),
        TOKENS: partial(tokenizer, rendered, add_special_tokens=False),
        PLAIN: partial(tokenizer.apply_chat_template, chats),
        OURS: partial(render_conversations, tokenizer, chats),
    }
    contenders = {what: Contender(lambda _, step=step: step()) for what, step in steps.items()}
    return alternate(contenders, HostMeter(), repeats=repeats, warm_up=1, memory_apart=True, clock=time.process_time)


def main(
    count: Annotated[int, typer.Option(min=1, help="Conversations.")] = 64,
    turns: Annotated[int, typer.Option(min=1, help="Answers of each.")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each; the median counts.")] = 7,
    only: Annotated[list[str] | None, typer.Option(help="Templates of TRL; may be repeated.")] = None,
) -> None:
    """Print milliseconds of a conversation, in the processor's time."""
    chats, console = conversations(count, turns), Console()
    console.print(f"{count} conversations of {turns} answers, {machine(torch.device('cpu'))['processor']}")
    table = Table("template of", *(RENDERED, TOKENS, PLAIN, OURS), "ratio", "two renderings")
    for name in only or TEMPLATES:
        found = {what: measured.seconds for what, measured in measure(name, chats, repeats).items()}
        least = (found[PLAIN] + found[RENDERED]) / found[PLAIN]
        times = [f"{found[what] / count * 1e3:.2f}" for what in (RENDERED, TOKENS, PLAIN, OURS)]
        table.add_row(name, *times, f"{found[OURS] / found[PLAIN]:.2f}", f"{least:.2f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
