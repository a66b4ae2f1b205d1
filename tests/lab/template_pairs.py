"""Compare the mask found on a model's own template with the generation blocks that TRL adds to the same template.

TRL ships pairs ``X.jinja`` (as the model has it) and ``X_training.jinja`` (with ``{% generation %}`` blocks). They are
read from the installed package.
"""

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
import yaml

from torchrl_llm_kl.masks import render_conversation
from toy_tokenizer import build_tokenizer

_ROWS = yaml.safe_load(Path(__file__).with_name("conversations.yaml").read_text(encoding="utf-8"))


def message_of(row: dict[str, Any]) -> dict[str, Any]:
    """A message from a row of a table, ``{role: content}`` and further fields."""
    (role, content), *more = row.items()
    answered = {"name": "add", "tool_call_id": "c0"} if role == "tool" else {}
    return {"role": role, "content": content, **answered, **dict(more)}


def conversations(of: str) -> dict[str, list[dict[str, Any]]]:
    """Kind -> messages, for TRL's pairs or for the oracle."""
    return {kind: [message_of(row) for row in rows] for kind, rows in _ROWS[of].items()}


CALL = _ROWS["calls"][:1]
CONVERSATIONS = conversations("pairs")
#: A conversation format and its parts.
END = "<|im_end|>"
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
LOOP = "{% for m in messages %}" + TURN + "{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def marked(template: str, part: str) -> str:
    """The template with generation blocks around a part of the assistant's turns."""
    block = "{% if m.role == 'assistant' %}{% generation %}PART{% endgeneration %}{% else %}PART{% endif %}"
    return template.replace(part, block.replace("PART", part))


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


# Templates that read the content as a list of parts.
_PARTS = {"idefics3", "llava_next", "smolvlm"}
CONTROL_TOKEN = re.compile(r"<[|｜][^<>\s'\"{}]*[|｜]>|</?think>|<(?:start|end)_of_[a-z]+>")


@dataclass(frozen=True)
class Outcome:
    """Status ``agrees`` (except for ``only_trl``), ``texts differ`` or ``refused`` (with the template's reason)."""

    status: str
    only_trl: tuple[str, ...] = ()
    only_ours: tuple[str, ...] = ()
    reason: str = ""


def folder() -> Path | None:
    spec = importlib.util.find_spec("trl")
    return Path(spec.origin).parent / "chat_templates" if spec and spec.origin else None


def version() -> str:
    return importlib.metadata.version("trl")


def read(name: str) -> str:
    root = folder()
    assert root is not None
    return (root / f"{name}.jinja").read_text(encoding="utf-8")


def all_templates() -> list[str]:
    root = folder()
    return sorted(path.stem for path in root.glob("*.jinja")) if root else []


def pairs() -> list[str]:
    names = all_templates()
    return [name for name in names if f"{name}_training" in names]


def conversation(template: str, kind: str) -> list[dict[str, Any]]:
    if template not in _PARTS:
        return CONVERSATIONS[kind]
    return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in CONVERSATIONS[kind]]


def tokenizer_of(source: str) -> Any:
    """A tokenizer of byte tokens and of the control tokens that a template writes."""
    return build_tokenizer(source, sorted(set(CONTROL_TOKEN.findall(source))), eos_token="<EOS>", bos_token="<BOS>")


@cache
def tokenizer_for(template: str):
    return tokenizer_of(read(template))


def masked_by(tokenizer: Any, messages: list[dict[str, Any]], **kwargs: Any) -> list[str]:
    """The masked text, turn by turn."""
    rendered = render_conversation(tokenizer, messages, **kwargs)
    return [rendered.text[start:end] for start, end in rendered.assistant_spans]


@cache
def compare(template: str, kind: str) -> Outcome:
    tokenizer, messages = tokenizer_for(template), conversation(template, kind)
    try:
        ours = render_conversation(tokenizer, messages)
        marked = tokenizer.apply_chat_template(
            messages, chat_template=read(f"{template}_training"), return_assistant_tokens_mask=True, return_dict=True
        )
    except (jinja2.TemplateError, TypeError) as error:
        return Outcome("refused", reason=str(error))
    if marked["input_ids"] != ours.token_ids.tolist():
        return Outcome("texts differ")
    theirs = [bool(flag) for flag in marked["assistant_masks"]]
    where = zip(theirs, ours.assistant_mask.tolist(), ours.token_ids.tolist(), strict=True)
    only: dict[int, set[str]] = {1: set(), 0: set(), -1: set()}
    for difference, run in groupby(where, key=lambda flags: int(flags[0]) - int(flags[1])):
        only[difference].add(tokenizer.decode([token for *_, token in run]))
    return Outcome("agrees", tuple(sorted(only[1])), tuple(sorted(only[-1])))
