"""``templates``: render a conversation with a model's chat template and mark the tokens that are masked in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchrl_llm_kl.cli._console import CommandError, console, print_json, shows_colour
from torchrl_llm_kl.datasets import FileRows, RowError, read_messages, standard_row
from torchrl_llm_kl.masks import AssistantMaskError, Message, encode_with_mask, render_conversation
from torchrl_llm_kl.training import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLE: tuple[Message, ...] = (
    {"role": "system", "content": "You answer briefly."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And twice that?"},
    {"role": "assistant", "content": "It is 8."},
)
_LOCATED_BY = {
    "contents": "the contents of the messages, since the template writes nothing else",
    "marks": "the template's {% generation %} blocks",
    "trace": "the template's loop over the messages",
    "prefixes": "renderings of the conversation up to each turn",
    "no assistant turn": "nothing: the conversation has no assistant turn",
}
#: Brackets around masked-in text, for output without colour.
OPEN, CLOSE = "[[", "]]"


@dataclass(frozen=True)
class Turn:
    """A turn of the assistant: its span in the text, and its masked-in tokens."""

    characters: tuple[int, int]
    num_tokens: int
    last_id: int | None
    last_token: str
    ends_in_special_token: bool


@dataclass(frozen=True)
class TemplateReport:
    """A rendered conversation. ``located_by`` names the method that located the turns."""

    tokenizer: str
    num_messages: int
    num_tokens: int
    num_masked_in: int
    located_by: str
    note: str
    text: str
    turns: list[Turn]


def show_template(name: str, conversation: Path | None, as_json: bool) -> None:
    """Render a conversation and print the report.

    Raises:
        CommandError: if the file holds no conversation.
        AssistantMaskError: if the assistant's tokens cannot be located with the template.
    """
    messages = None if conversation is None else read_conversation(conversation)
    report = describe(load_tokenizer(name), name, messages)
    if as_json:
        print_json(asdict(report))
        return
    turns = report.turns
    print(f"{name}: {report.num_messages} messages, {report.num_tokens} tokens, {report.num_masked_in} masked in")
    print(f"turns found by: {_LOCATED_BY.get(report.located_by, report.located_by)}")
    if report.note:
        print(report.note)
    print()
    _print_text(report.text, [turn.characters for turn in turns])
    print()
    for number, turn in enumerate(turns, 1):
        print(f"turn {number}: {turn.num_tokens} tokens, the last is {turn.last_token!r} (id {turn.last_id})")
    ended = sum(turn.ends_in_special_token for turn in turns)
    if turns and ended == len(turns):
        print("The end-of-turn token is masked in, as the model must emit it.")
    elif turns:
        print(
            f"{len(turns) - ended} of {len(turns)} turns end in no special token, because the template writes none after them. "
            "The model is not scored on ending its turn."
        )


def read_conversation(path: Path) -> list[Message]:
    """Read the messages in a JSON file, or in the first row of a JSONL or Parquet file."""
    row = next(iter(FileRows(path)), None)
    if row is not None and row.problem:
        raise CommandError(f"cannot read {path}: {row.place} {row.problem}.")
    try:
        messages = [] if row is None else read_messages(standard_row(row.value).get("messages"), "messages")
    except RowError:
        messages = []
    if not messages:
        raise CommandError(f"{path} holds no messages: expected a JSON list of objects with `role` and `content`.")
    return messages


def describe(tokenizer: PreTrainedTokenizerBase, name: str, given: Sequence[Message] | None = None) -> TemplateReport:
    """Text, tokens and turns of a conversation with the tokenizer's template. Default: a sample conversation."""
    note, messages = "", list(SAMPLE) if given is None else given
    try:
        rendered = render_conversation(tokenizer, messages)
    except AssistantMaskError:
        raise
    except Exception as error:  # Jinja templates raise errors of any type
        if given is not None:
            raise CommandError(f"the template refuses this conversation: {error}") from error
        # Some templates reject system messages, as the early ones of Gemma do. Show the rest.
        messages = [message for message in messages if message["role"] != "system"]
        note = f"without the system message, which the template refuses: {' '.join(str(error).split())}"
        rendered = render_conversation(tokenizer, messages)
    # Some tokenizers list their end-of-turn token only among the added tokens.
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    turns = []
    for span in rendered.assistant_spans:
        # Encode with one turn masked in at a time, to count its tokens.
        ((ids, mask),) = encode_with_mask(tokenizer, [rendered.text], [[span]])
        own = ids[mask].tolist()
        last = own[-1] if own else None
        token = "" if last is None else str(tokenizer.convert_ids_to_tokens(last))
        turns.append(Turn(span, len(own), last, token, last in special))
    masked_in = int(rendered.assistant_mask.sum())
    counts = len(messages), len(rendered.token_ids), masked_in
    return TemplateReport(name, *counts, rendered.located_by, note, rendered.text, turns)


def _print_text(text: str, spans: Sequence[tuple[int, int]]) -> None:
    """Print the text with its spans in colour, or in brackets without colour. Invisible characters are escaped."""
    from rich.text import Text

    from torchrl_llm_kl.diagnostics import escaped

    colour, at = shows_colour(), 0
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
