"""``templates``: a conversation on a model's chat template, with the tokens that are masked in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from torchrl_llm_kl._typing import Json
from torchrl_llm_kl.cli._console import CommandError, console, print_json, shows_colour
from torchrl_llm_kl.training import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLE = (
    {"role": "system", "content": "You answer briefly."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And twice that?"},
    {"role": "assistant", "content": "It is 8."},
)
_FOUND_BY = {
    "marks": "the template's {% generation %} blocks",
    "trace": "the template's loop over the messages",
    "prefixes": "renderings of the conversation up to each turn",
    "no assistant turn": "nothing: the conversation has no assistant turn",
}
#: Written around masked-in text without colour.
OPEN, CLOSE = "[[", "]]"


def show_template(name: str, conversation: Path | None, as_json: bool) -> None:
    """Render and print.

    Raises:
        CommandError: if the file holds no conversation.
        AssistantMaskError: if the template does not show which tokens are the assistant's.
    """
    tokenizer = load_tokenizer(name)
    messages = list(SAMPLE) if conversation is None else read_conversation(conversation)
    found = describe(tokenizer, messages, sample=conversation is None)
    if as_json:
        print_json({"tokenizer": name, **found})
        return
    turns = found["turns"]
    print(f"{name}: {found['num_messages']} messages, {found['num_tokens']} tokens, {found['num_masked_in']} masked in")
    print(f"turns found by: {_FOUND_BY.get(found['located_by'], found['located_by'])}")
    if found["note"]:
        print(found["note"])
    print()
    _print_text(found["text"], [tuple(turn["characters"]) for turn in turns])
    print()
    for number, turn in enumerate(turns, 1):
        print(f"turn {number}: {turn['num_tokens']} tokens, the last is {turn['last_token']!r} (id {turn['last_id']})")
    ended = sum(turn["ends_in_special_token"] for turn in turns)
    if turns and ended == len(turns):
        print("The end-of-turn token is masked in, as the model must emit it.")
    elif turns:
        print(
            f"{len(turns) - ended} of {len(turns)} turns end in no special token: the template writes none after them, so "
            "the model is not scored on ending its turn."
        )


def read_conversation(path: Path) -> list[Json]:
    """The messages of a JSON file: a list, an object with ``messages``, or the first such line of a JSONL file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise CommandError(f"{path} is not UTF-8: save it as such.") from error
    for part in (text, text.strip().partition("\n")[0]):
        with suppress(ValueError):
            value = json.loads(part)
            break
    else:
        raise CommandError(f"{path} is not JSON: expected a list of messages, or an object with `messages`.")
    if isinstance(value, Mapping):
        value = value.get("messages")
    if not isinstance(value, list) or not value:
        raise CommandError(f"{path} holds no messages: expected a list of objects with `role` and `content`.")
    return value


def describe(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Json], *, sample: bool = False) -> Json:
    """Text, tokens and turns of a conversation on the tokenizer's template; a sample is changed if the template refuses it."""
    from torchrl_llm_kl.masks import AssistantMaskError, encode_with_mask, render_conversation

    note = ""
    try:
        rendered = render_conversation(tokenizer, messages)
    except AssistantMaskError:
        raise
    except Exception as error:  # whatever a template raises
        if not sample:
            raise CommandError(f"the template refuses this conversation: {error}") from error
        messages = [message for message in messages if message["role"] != "system"]
        note = f"without the system message, which the template refuses: {' '.join(str(error).split())}"
        rendered = render_conversation(tokenizer, messages)
    special = set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", {}))
    turns = []
    for span in rendered.assistant_spans:
        ((ids, mask),) = encode_with_mask(tokenizer, [rendered.text], [[span]])
        own = ids[mask].tolist()
        last = own[-1] if own else None
        turn = {"characters": list(span), "num_tokens": len(own), "last_id": last}
        turn |= {"last_token": tokenizer.convert_ids_to_tokens(own[-1]) if own else ""}
        turns.append({**turn, "ends_in_special_token": last in special})
    return {
        "num_messages": len(messages),
        "num_tokens": len(rendered.token_ids),
        "num_masked_in": int(rendered.assistant_mask.sum()),
        "located_by": rendered.located_by,
        "note": note,
        "text": rendered.text,
        "turns": turns,
    }


def _print_text(text: str, spans: Sequence[tuple[int, ...]]) -> None:
    """The text with its spans in colour, or in brackets without colour; what is invisible is escaped."""
    colour, at = shows_colour(), 0
    from rich.text import Text

    from torchrl_llm_kl.diagnostics import escaped

    opened, closed, outside, inside = ("", "", "dim", "bold green") if colour else (OPEN, CLOSE, "", "")
    out = Text()
    for start, end in spans:
        out.append(escaped(text[at:start]), style=outside)
        out.append(f"{opened}{escaped(text[start:end])}{closed}", style=inside)
        at = end
    out.append(escaped(text[at:].rstrip("\n")), style=outside)
    if colour:
        console().print(out, soft_wrap=True)
    else:
        print(out.plain)
