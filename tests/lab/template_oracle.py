"""An oracle for the assistant's turns in a rendered conversation, independent of the package, for comparison with its masks.

The oracle renders the conversation up to a turn with the generation prompt. The turn begins where that text ends, or where it
would end if the template changes earlier turns later. Each part of the turn (content, reasoning, tool calls) is replaced by a
sentinel, which shows its position in the text. The turn ends after the text that the template always writes after the last
part.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

import template_pairs
from template_pairs import CONTROL_TOKEN, assistant, tokenizer_of, user
from torchrl_llm_kl.masks import AssistantMaskError, render_conversation

Message = dict[str, Any]
Span = tuple[int, int]
Turn = tuple[int, int, int]  # start, end, and the latest acceptable start

EOS = "<EOS>"
Z, OTHER = "\U000f1234", "\U000f4321"
_CONTROL = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_THINKING = re.compile(r"(?:\s*(?:</?think>|<\|channel>thought|<channel\|>))+\s*")
_UNIT = re.compile(rf"{_CONTROL.pattern}|\w+|\s|#+|[^\w\s]")
_ARGUMENTS = {"a": {"type": "integer", "description": "x"}, "b": {"type": "integer", "description": "y"}}
_PARAMETERS = {"type": "object", "properties": _ARGUMENTS, "required": ["a", "b"]}
_FUNCTION = {"name": "add", "description": "Add two numbers.", "parameters": _PARAMETERS}
SCHEMA = {"type": "function", "function": _FUNCTION}
CONVERSATIONS = template_pairs.conversations("oracle")
OPTIONS: dict[str, dict[str, Any]] = {"tools: schema": {"tools": [SCHEMA]}, "prompted": {"add_generation_prompt": True}}
# Masks that were checked by hand, for which the oracle has no answer or a different one.
_GEMMA_CALL = "<|tool_call>call:add{a:1,b:2}<tool_call|>"
BY_HAND: dict[str, tuple[tuple[str, ...], ...]] = {
    # gemma-4 writes the tool's answer inside the turn, and the message's content after it. The end token follows the content,
    # or only the next message if that continues the turn.
    "tools: content": tuple(
        (_GEMMA_CALL + stop, "I add." + end, "3<turn|>") for stop in ("<|tool_response>", "") for end in ("<turn|>", "")
    ),
    # Nemotron-Nano-v2 omits an empty answer at the end.
    "empty last": (("Hello\n<SPECIAL_12>",),),
    # gemma-4 writes a newline between the tool's answer and the reasoning that is in no prompt.
    "tools: reasoning": tuple(
        (start + _GEMMA_CALL + "<|tool_response>", "\n<|channel>thought\nit said so\n<channel|>It is 3.<turn|>")
        for start in ("<|channel>thought\na tool\n<channel|>", "a tool\n<channel|>")
    ),
}


class NoOracle(Exception):
    """The correct spans cannot be derived mechanically."""


@dataclass(frozen=True)
class Check:
    """Status ``right``, ``refused`` by the template, ``error`` (a clear one of the package), ``silent`` (wrong) or ``open``."""

    status: str
    found: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    reason: str = ""


class Template:
    """One template with a tokenizer of byte tokens, and whether it reads the content as a list of parts."""

    def __init__(self, name: str, source: str) -> None:
        self.name, self.source = name, source
        self.tokenizer = tokenizer_of(source)
        special = sorted({word for word in CONTROL_TOKEN.findall(source) if "think" not in word})
        self.control = "".join(special[:3]) or "</s>"
        self.parts = False
        shown = [self._shows_content(parts) for parts in (False, True)]
        self.parts = not shown[0] and shown[1]
        # Llama Guard's template quotes a conversation, no turn of which is the model's.
        self.is_chat = any(shown) and "safety assessment" not in source

    def _shows_content(self, parts: bool) -> bool:
        self.parts = parts
        try:
            text = self.render(self.form([user("Hi" + Z), assistant("Ho" + Z)]))
        except Exception:
            return False
        return "Hi" + Z in text and "Ho" + Z in text

    def form(self, messages: Sequence[Message]) -> list[Message]:
        """The messages in the form that the template reads."""
        formed = []
        for message in messages:
            content = message["content"]
            if isinstance(content, str):
                content = content.replace("{0}", self.control)
                content = [{"type": "text", "text": content}] if self.parts else content
            formed.append({**message, "content": content})
        return formed

    def render(self, messages: Sequence[Message], prompt: bool = False, tools: Any = None) -> str:
        # `apply_chat_template` drops keys without a value too
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        variables = {"bos_token": "<BOS>", "eos_token": EOS, "pad_token": EOS, "add_generation_prompt": prompt}
        return render_jinja_template([given], tools=tools, chat_template=self.source, **variables)[0][0]


def check(template: Template, kind: str, mask: Callable[..., Any] = render_conversation) -> Check:
    """Compare the package's mask of one conversation with the oracle's spans."""
    messages, options = CONVERSATIONS[kind], OPTIONS.get(kind, {})
    prompt, tools = options.get("add_generation_prompt", False), options.get("tools")
    try:
        text = template.render(template.form(messages), prompt, tools)
    except Exception as error:  # a template may raise anything
        return Check("refused", reason=f"{type(error).__name__}: {error}")
    try:
        rendered = mask(template.tokenizer, template.form(messages), **options)
    except AssistantMaskError as error:
        return Check("error", reason=f"{type(error).__name__}: {error}")
    except Exception as error:  # an error without mention of masks is as bad as a wrong mask
        return Check("silent", reason=f"{type(error).__name__}: {error}")
    found = [text[a:b] for a, b in rendered.assistant_spans]
    by_hand = tuple(found) in BY_HAND.get(kind, ())
    try:
        spans = expected_spans(template, messages, prompt, tools)
    except NoOracle as error:
        return Check("right" if by_hand else "open", tuple(found), reason=str(error))
    expected = [text[start:end] for start, end, _ in spans]
    either = {at for start, _, latest in spans for at in range(start, latest)}
    # Only the blocks define whether a space after the prompt belongs to the turn.
    if "{% generation" in template.source:
        either |= {at for start, end, _ in spans for at in range(start, end) if not text[start : at + 1].strip()}
    same = _positions(rendered.assistant_spans) - either == _positions([turn[:2] for turn in spans]) - either
    ids = [i for piece in found for i in template.tokenizer(piece, add_special_tokens=False)["input_ids"]]
    same = same and rendered.token_ids[rendered.assistant_mask].tolist() == ids and rendered.text == text
    return Check("right" if same or by_hand else "silent", tuple(found), tuple(expected))


def _positions(spans: Sequence[Span]) -> set[int]:
    return {at for start, end in spans for at in range(start, end)}


# ------------------------------------------------------------------ the oracle
def expected_spans(template: Template, messages: Sequence[Message], prompt: bool, tools: Any = None) -> list[Turn]:
    """The assistant's turns in the rendered text."""
    oracle = Oracle(template, list(messages), prompt, tools)
    turns = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    return [turn for k in turns if (turn := oracle.turn(k)) and turn[0] < turn[1]]


class Oracle:
    """The text of one conversation, and its turns."""

    def __init__(self, template: Template, messages: list[Message], prompt: bool, tools: Any) -> None:
        self.template, self.messages, self.prompt, self.tools = template, messages, prompt, tools
        self._texts: dict[str, str | None] = {}
        self.text = self.render(messages, prompt) or ""

    def render(self, messages: Sequence[Message], prompt: bool) -> str | None:
        """The text, or None if the template refuses the conversation."""
        key = f"{messages!r}{prompt}"
        if key not in self._texts:
            try:
                self._texts[key] = self.template.render(self.template.form(messages), prompt, self.tools)
            except Exception:  # a template may raise anything
                self._texts[key] = None
        return self._texts[key]

    def turn(self, k: int) -> Turn | None:
        shown = self.shown(self.messages, k, self.prompt)
        if shown is None:
            return None
        start, latest = self.start(k, shown[0])
        between = self.text[start : shown[0]]
        previous = self.messages[k - 1]["role"] if k else ""
        # A tag that closes the tools' answers outside the prompt, or white space between joined turns, may belong to either.
        if (previous == "tool" and re.fullmatch(rf"\s*(?:{_CONTROL.pattern})?\s*", between)) or (
            previous == "assistant" and not between.strip()
        ):
            latest = max(latest, shown[0])
        end = self.end(k, shown[1])
        for other, message in enumerate(self.messages):
            inside = self.shown(self.messages, other, self.prompt) if message["role"] != "assistant" else None
            if inside and start < inside[0] and inside[1] < end:
                raise NoOracle("another message stands inside the turn")
        return start, end, latest

    def shown(self, messages: list[Message], k: int, prompt: bool) -> Span | None:
        """The span of the text of message ``k`` in the rendering. None if the template omits it."""
        text = self.render(messages, prompt)
        if text is None:
            raise NoOracle("refused")
        found = self._sentinels(text, variants(messages, k), prompt)
        if not found and not messages[k].get("content"):
            spoken = [*messages[:k], {**messages[k], "content": Z}, *messages[k + 1 :]]
            found = self._sentinels(text, [(spoken, True)], prompt)
        if not found:
            return None
        starts, ends = ([x for x in column if x is not None] for column in zip(*found, strict=True))
        if not messages[k].get("content"):  # some templates write nothing around an empty content
            starts, ends = starts or ends[:1], ends or starts[-1:]
        if not starts or not ends:
            raise NoOracle("a sentinel changes the text around it")
        return min(starts), max(ends)

    def _sentinels(self, text: str, variants: list[tuple[list[Message], bool]], prompt: bool) -> list[tuple[Any, Any]]:
        """The begin and end of each visible sentinel in the text, as far as the rest is unchanged."""
        found: list[tuple[Any, Any]] = []
        for variant, is_last in variants:
            other = self.render(variant, prompt)
            if other is None or other == text:
                continue
            before, after = other.split(Z)[0], other.split(Z)[-1]
            # white space can only be written before a content
            start = next((len(x) for x in (before, before.rstrip()) if text.startswith(x)), None)
            end = next((len(text) - len(x) for x in (after, after.lstrip()) if text.endswith(x)), None)
            shows = Z in other
            found.append((start if shows else None, end if shows and is_last else None))
        return found

    def start(self, k: int, shown: int) -> Span:
        """The start of the turn after its header, and the latest start if the text lacks the prompt's thinking tags."""
        text = self.text
        before, without = self.render(self.messages[:k], True), self.render(self.messages[:k], False)
        if before is None or without is None:
            raise NoOracle("the template refuses the conversation up to the turn")
        plain = self.render([*self.messages[:k], assistant(Z)], False)
        if text.startswith(before):
            at = len(before)
            no_prompt = before == without and not self.always and text[at:shown].strip()
            if no_prompt or text[at:shown].lstrip().startswith(self.leads):
                # Without a generation prompt, the text that the template writes before any content is the header.
                if plain is None or not plain.startswith(before):
                    raise NoOracle("no generation prompt")
                at += len(_common(plain[at:].split(Z)[0], text[at:]))
                return at, at
            usual = self.usual_header
            if usual and usual in text[at:shown]:  # it has a header that this prompt lacks, as after another answer
                at = text.rindex(usual, at, shown) + len(usual)
                return at, at + len(text[at:shown]) - len(text[at:shown].lstrip())
            # Tags that close the tool's answer may stand in front of the next turn.
            closed = k and self.messages[k - 1]["role"] == "tool" and plain is not None and plain.startswith(before)
            return at, at + (len(_common(plain[at:].split(Z)[0], text[at:])) if closed else 0)
        if k and not before.startswith(without.rstrip()):  # the prompt changes what stands before it
            before, without = (self.tail(self.messages[:k], k - 1, flag) or "" for flag in (True, False))
        header = (self.always + before[_shared(before, without) :]).lstrip()
        previous = self.shown(self.messages, k - 1, self.prompt) if k else None
        low = previous[1] if previous else 0
        if k and self.messages[k - 1]["role"] == "assistant" and not text[low:shown].strip():
            return low, low  # the template joins the two
        units = _UNIT.findall(header)
        for count in range(len(units), 0, -1):
            part = "".join(units[:count])
            at = text.rfind(part, low, shown)
            if part.strip() and at >= 0 and (plain is None or part in plain.split(Z)[0]):
                return self._either(at + len(part))
        if text.startswith(without):  # the turn continues after a tool's answer, or its header is not the prompt
            at = len(without)
            own = plain[at:].split(Z)[0] if plain is not None and plain.startswith(without) else ""
            return self._either(at if not _THINKING.sub("", own).strip() else at + len(_common(own, text[at:])))
        ending = self.tail(self.messages[:k], k - 1) if k and not header else None
        shared = _common(text[low:shown], ending or "")
        if not shared.strip():
            raise NoOracle("no generation prompt before the turn")
        return low + len(shared), low + len(shared)

    def _either(self, at: int) -> Span:
        tags = _THINKING.match(self.text, at)
        return at, tags.end() if tags else at

    def end(self, k: int, shown: int) -> int:
        """The end of the turn, after the text that the template writes whether or not the conversation continues."""
        rest = self.text[shown:]
        upto = self.messages[: k + 1]
        then = [user(OTHER), assistant(OTHER), {"role": "tool", "name": "add", "tool_call_id": "c0", "content": OTHER}]
        if self.messages[k].get("tool_calls"):
            then.reverse()
        alone = self.tail(upto, k)
        continued = (self.tail([*upto, message], k) for message in then)
        tails = list(islice((tail for tail in continued if tail not in (None, alone)), 2))
        last = k + 1 == len(self.messages) and not self.prompt
        others = tails[:1] if last else [alone]
        if not others or others[0] is None:
            raise NoOracle("the template refuses other continuations")
        others += [] if self.usual_header else tails[:1]
        own, goes_on = self.without_header(_common(rest, *others)), k + 1 < len(self.messages)
        # The last turn may end differently from the others.
        if last and not _CONTROL.search(own):
            own = self.without_header(rest)
        elif not last and len(tails) > 1 and (own.strip() != others[0].strip() or (goes_on and not own.strip())):
            own = self.without_header(_common(rest, *tails))
        if not own.strip() and rest.startswith(EOS):
            own = EOS
        return len(self.text[: shown + len(own)].rstrip())

    @cached_property
    def leads(self) -> tuple[str, ...]:
        """Possible beginnings of a role header: the first unit of a rendering, the last control token before a message."""
        opened = Oracle(self.template, [user(Z)], False, None).text.split(Z)[0].removeprefix("<BOS>").lstrip()
        return (*_UNIT.findall(opened)[:1], *re.findall(rf"(?m)^(?:{_CONTROL.pattern})(?=\w)", opened)[-1:])

    @cached_property
    def usual_header(self) -> str:
        """The generation prompt after a question, without white space around it."""
        question = [user(Z)]
        prompted, opened = self.render(question, True) or "", self.render(question, False) or ""
        return prompted[_shared(prompted, opened) :].strip()

    @cached_property
    def always(self) -> str:
        """The header of the next answer, if the template writes it after each conversation without a request."""
        ending = (self.render([user(Z)], False) or "").split(Z)[-1]
        return ending[len(self.until_header(ending)) :]

    def until_header(self, ending: str) -> str:
        return ending[: min((at for lead in self.leads if (at := ending.find(lead)) >= 0), default=len(ending))]

    def without_header(self, ending: str) -> str:
        """The text without the beginning of the next role header."""
        if self.always:
            return self.until_header(ending)
        return next((cut for x in self.leads if (cut := ending.rstrip().removesuffix(x)) != ending.rstrip()), ending)

    def tail(self, messages: list[Message], k: int, prompt: bool = False) -> str | None:
        """The text that the template writes after message ``k``."""
        try:
            shown = self.shown(messages, k, prompt)
        except NoOracle:
            return None
        text = self.render(messages, prompt)
        return None if shown is None or text is None else text[shown[1] :]


def variants(messages: Sequence[Message], k: int) -> list[tuple[list[Message], bool]]:
    """Conversations with a sentinel in message ``k``, and whether it may be at the end of the message's text."""
    message = messages[k]
    found: list[tuple[Message, bool]] = []
    for field in ("content", "reasoning_content"):
        value = message.get(field)
        if value or (value is not None and not message.get("tool_calls")):
            found += [({field: given}, True) for given in (Z, Z + value, value + Z)]
            thought = re.search(r"\w[^<>\n]*(?=\n</think>)", value)
            if thought:
                found.append(({field: value.replace(thought[0], Z)}, True))
    given = message.get("tool_calls", ())
    for i, call in enumerate(given):
        arguments = call["function"]["arguments"]
        new = arguments.replace("b", Z) if isinstance(arguments, str) else {**arguments, Z: arguments["b"]}
        if isinstance(new, dict):
            del new["b"]
        # a template may repeat the name in the tool's answer
        for function, is_last in (({"name": Z}, False), ({"arguments": new}, True)):
            changed = {**call, "function": {**call["function"], **function}}
            found.append(({"tool_calls": [*given[:i], changed, *given[i + 1 :]]}, is_last))
    return [([*messages[:k], {**message, **fields}, *messages[k + 1 :]], is_last) for fields, is_last in found]


def _common(*texts: str) -> str:
    """The whole units that the texts have in common at the beginning."""
    shared = _shared(*texts)
    boundaries = [{0, *accumulate(len(unit) for unit in _UNIT.findall(text))} for text in texts]
    return texts[0][: max(x for x in set.intersection(*boundaries) if x <= shared)]


def _shared(*texts: str) -> int:
    """The number of leading characters that the texts have in common."""
    unequal = (at for at, characters in enumerate(zip(*texts, strict=False)) if len(set(characters)) > 1)
    return next(unequal, min(map(len, texts)))
