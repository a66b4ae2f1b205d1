"""Compare the mask found on a model's own template with the generation blocks that TRL adds to the same template.

TRL ships pairs ``X.jinja`` (as the model has it) and ``X_training.jinja`` (with ``{% generation %}`` blocks). They are
read from the installed package.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2

from torchrl_llm_kl.masks import render_conversation
from toy_tokenizer import build_tokenizer


def calls(*arguments: Any) -> list[dict[str, Any]]:
    functions = [{"name": "add", "arguments": given} for given in arguments]
    return [{"type": "function", "id": f"c{i}", "function": function} for i, function in enumerate(functions)]


CALL = calls({"a": 1, "b": 2})
#: One conversation format, and its parts.
END = "<|im_end|>"
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
LOOP = "{% for m in messages %}" + TURN + "{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def tool(content: str, call: str = "c0") -> dict[str, Any]:
    return {"role": "tool", "name": "add", "tool_call_id": call, "content": content}


def chat(*contents: str) -> list[dict[str, Any]]:
    """User and assistant in turn."""
    return [(assistant if i % 2 else user)(content) for i, content in enumerate(contents)]


def called(content: Any = "", answer: str = "It is 3.", then: str = "", **fields: Any) -> list[dict[str, Any]]:
    """A question, a call of a tool, its answer, and the assistant's, with the reasoning ``then``."""
    reasoning = {"reasoning_content": then} if then else {}
    message = assistant(content, **{"tool_calls": CALL, **fields})
    return [user("1+2?"), message, tool("3"), assistant(answer, **reasoning)]


_REASONS = [("1+2?", "3", "one and two"), ("2+2?", "4", "two and two")]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "single": chat("Answer yes or no", "yes"),
    "multi": chat("Hi", "Hello there", "Hello there", "Hi"),
    "system": [system("Be brief."), *chat("Hi", "Hello", "Bye", "é😀")],
    "tools": [*called(), *chat("Thanks", "Welcome")],
    "reasoning": [m for ask, say, why in _REASONS for m in (user(ask), assistant(say, reasoning_content=why))],
}
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
    """Of byte tokens, and the control tokens that a template writes."""
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
