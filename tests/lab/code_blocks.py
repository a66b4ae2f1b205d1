"""The code blocks of the documentation, and the loop in TorchRL's own env, run on a tiny model."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import tensordict

from project import PROJECT
from toy_rollouts import make_model, make_tokenizer

_TOP = [PROJECT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = sorted([*PROJECT.glob("docs/*.md"), *PROJECT.glob("benchmarks/*.md"), *_TOP])
_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]*?) -->\n+)?^```(?P<language>[\w.]*)[^\n`]*\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """A fenced block."""

    page: str  # path in the repository
    line: int  # the number of its first line of code, from 1
    language: str  # the word after the fence, or empty
    code: str
    reason: str | None  # the reason why it is not run, or None


def all_blocks(*languages: str) -> list[Block]:
    """All blocks in these languages, in the order of the pages."""
    found = []
    for page in PAGES:
        text, name = page.read_text(encoding="utf-8"), page.relative_to(PROJECT).as_posix()
        for match in _BLOCK.finditer(text):
            line = text.count("\n", 0, match.start("code")) + 1
            found.append(Block(name, line, match["language"], match["code"], match["reason"]))
    return [block for block in found if block.language in languages]


def save_checkpoint(folder: Path, tokenizer: Any = None, family: str = "qwen2") -> None:
    """Save a tiny model with its tokenizer, which the example loads."""
    tokenizer = make_tokenizer() if tokenizer is None else tokenizer
    model = make_model(tokenizer, 0, family)
    model.config.max_position_embeddings = 2048
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def example(folder: Path) -> str:
    """The whole loop of docs/torchrl.md, with the checkpoint in ``folder`` in place of the hub's."""
    blocks = [block.code for block in all_blocks("python") if block.page == "docs/torchrl.md"]
    (text,) = (code for code in blocks if "CountdownEnv" in code)
    hub = '"Qwen/Qwen2.5-0.5B-Instruct"'
    assert hub in text
    return text.replace(hub, repr(str(folder)))


def run_example(folder: Path, tokenizer: Any = None, family: str = "qwen2") -> None:
    save_checkpoint(folder, tokenizer, family)
    with tensordict.set_list_to_stack(tensordict.list_to_stack()):
        exec(compile(example(folder), "docs/torchrl.md", "exec"), {})
