"""The example of the README, on a tiny checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import tensordict

from project import PROJECT
from toy_rollouts import make_model, make_tokenizer

README = PROJECT / "README.md"


def save_checkpoint(folder: Path) -> None:
    """A tiny model with its tokenizer, for the example to load."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed=0)
    model.config.max_position_embeddings = 2048
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def example(folder: Path, **changes: str) -> str:
    """Its text with the checkpoint in ``folder`` in place of the hub's, and other changes: text -> new text."""
    (text,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(text.strip().splitlines()) <= 20, "the README promises a short example"
    for old, new in {'"Qwen/Qwen2.5-0.5B-Instruct"': repr(str(folder)), **changes}.items():
        assert old in text
        text = text.replace(old, new)
    return text


def run_example(folder: Path, changes: dict[str, str] | None = None, **names: Any) -> None:
    """Run it, with changes and names that are given."""
    save_checkpoint(folder)
    with tensordict.set_list_to_stack(tensordict.list_to_stack()):
        exec(compile(example(folder, **changes or {}), "README.md", "exec"), names)
