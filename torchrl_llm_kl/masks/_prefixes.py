"""The borders of a turn in renderings of shortened conversations, against which the traced borders are checked.

What the model was given before a turn is the rendering of the messages before it with a generation prompt; where its
output ended shows in the rendering of the messages up to the turn. A template may write earlier messages differently in
the whole conversation (it drops their reasoning, say), so texts are compared from the last mark on that both contain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchrl_llm_kl.masks._messages import ASSISTANT, TurnNotFoundError
from torchrl_llm_kl.masks._template import FILLER, Renderings, Trace, common_prefix_length

# Pattern of control tokens.
CONTROL = r"<[^<>\s]+>|\[[^\[\]\s]+\]"
# Units in which two texts are compared.
_UNITS = re.compile(rf"{CONTROL}|\w+|\s|[^\w\s]")
_NAMES = re.compile(rf"{CONTROL}|\w+")


def end_of_shared_units(text: str, other: str, at: int) -> int:
    """End of the longest run of whole units that the text shares with another one, from ``at`` on."""
    if text.startswith(other, at):
        return at + len(other)
    for unit in _UNITS.findall(other):
        if not text.startswith(unit, at):
            break
        at += len(unit)
    return at


def not_found(chat: Renderings, turn: int, reason: str) -> TurnNotFoundError:
    """The error for a turn: names it and the template, and says what to do."""
    return TurnNotFoundError(
        f"message {turn} (assistant) of {len(chat.messages)} cannot be located with certainty in the text that "
        f"{chat.renderer.name} renders: {reason}. Pass a template with {{% generation %}} blocks as `chat_template=`."
    )


def start_of_turn(chat: Renderings, whole: Trace, turn: int, own: int, traced: int | None) -> int:
    """The end of what the model was given; ``own`` is the first mark of the turn's content, ``traced`` a candidate."""
    text, before, without = whole.text, chat.prefix(turn, True), chat.prefix(turn, False)
    prompt = _prompt(before, without)
    place = shared = 0
    if before is not None:
        at, place = _anchor(before, whole)
        given = before.text[at:]
        if prompt and text.startswith(given, place):
            return place + len(given)
        shared = end_of_shared_units(text, given, place)
    names = {match[0] for p in (prompt, *_known_prompts(chat)) if (match := _NAMES.search(p))}
    ended = _end_of_text(without, whole) if turn else 0
    if traced is not None and not _has_name(text[traced:own], names) and (ended is None or traced >= ended):
        return traced
    if before is None or ended is None:
        raise not_found(chat, turn, "it rejects the conversation up to that turn, or renders it differently")
    if prompt:  # the template writes another header than the prompt: they share the role's name
        if text[ended:shared].strip() and not _has_name(text[shared:own], names):
            return shared
        raise not_found(chat, turn, f"the turn does not begin with the generation prompt {prompt!r}")
    return _after_constant_header(chat, whole, turn, ended)


def end_of_turn(chat: Renderings, whole: Trace, turn: int, start: int, own: int, traced: int | None) -> int:
    """The end of the model's output; ``own`` is the last mark of the turn's content, ``traced`` a candidate."""
    upto, text = chat.prefix(turn + 1, False), whole.text
    if upto is None:
        if traced is None:
            raise not_found(chat, turn, "it rejects the conversation up to that turn")
        return traced
    at, place = _anchor(upto, whole)
    tail = upto.text[at:].rstrip()
    end = place + len(tail)
    if text[place:].rstrip() == tail:
        return _end_of_text_end(chat, upto, turn, max(start, own), traced)
    if text.startswith(tail, place):
        if traced is None or traced == end:
            return end
        beyond, ended = text[end:traced].strip(), _ends(chat, text[max(start, own) : end])
        if traced < end and _is_end(chat, text[traced:end]):
            return end
        if traced > end and not ended and beyond == chat.eos_token:
            return traced  # the template writes the end token only before another message
        if traced > end and (ended or not beyond):
            return end
        raise not_found(chat, turn, f"what follows its content depends on the next message ({text[own:traced]!r})")
    shared = end_of_shared_units(text, tail, place)
    shared = place + len(text[place:shared].rstrip())
    if traced is None:
        if shared > max(start, own) and _ends(chat, text[max(start, own) : shared]):
            return shared
        raise not_found(chat, turn, "the conversation up to that turn renders to another text")
    if shared < max(start, own) or traced == shared:
        return traced
    # another end token than at the end of the conversation
    if traced > shared and _is_end(chat, text[shared:traced]):
        return traced
    if traced < shared and _is_end(chat, text[traced:shared]):
        return shared
    if text[max(start, own) : traced].strip() in ("", chat.eos_token):
        return traced
    raise not_found(chat, turn, f"it ends in {text[own:traced]!r} here, and in {upto.text[at:]!r} on its own")


def is_omitted(chat: Renderings, whole: Trace, turn: int) -> bool:
    """Whether the text holds nothing of the turn: another content changes nothing, or without the turn it is equal."""
    if any(mark.message == turn and mark.spoken for _, mark in whole.marks):
        return False
    message = dict(chat.messages[turn])
    content = message.get("content")
    more = [*content, {"type": "text", "text": FILLER}] if isinstance(content, list) else f"{content or ''}{FILLER}"
    others = [dict(m) for m in chat.messages]
    changed = [*others[:turn], {**message, "content": more, "tool_calls": None}, *others[turn + 1 :]]
    removed = others[:turn] + others[turn + 1 :]
    for messages in (changed, removed) if not content or not content.strip() else (changed,):
        try:
            if chat.renderer.text(messages, chat.generation_prompt) == chat.text:
                return True
        except Exception:  # a template may raise anything
            continue
    return False


# ------------------------------------------------------------------ comparisons


def _anchor(part: Trace, whole: Trace) -> tuple[int, int]:
    """Positions in both texts of the last mark of ``part`` that each contains once; the starts of both if there is none."""
    for position, mark in reversed(part.marks):
        if mark in part.places and mark in whole.places:
            return position, whole.places[mark]
    return 0, 0


def _end_of_text(part: Trace | None, whole: Trace) -> int | None:
    """Where the text of a prefix ends in the whole; None if the whole does not continue it."""
    if part is None:
        return None
    at, place = _anchor(part, whole)
    tail = part.text[at:]
    return place + len(tail) if whole.text.startswith(tail, place) else None


def _prompt(before: Trace | None, without: Trace | None) -> str:
    """The visible text that the flag ``add_generation_prompt`` adds, or nothing."""
    if before is None:
        return ""
    prompt = before.text[common_prefix_length(before.text, without.text if without else "") :]
    return prompt if prompt.strip() else ""


def _known_prompts(chat: Renderings) -> Iterator[str]:
    for count, message in enumerate(chat.messages):
        if message.get("role") == ASSISTANT and count and chat.messages[count - 1].get("role") != ASSISTANT:
            yield _prompt(chat.prefix(count, True), chat.prefix(count, False))
            return


def _has_name(text: str, names: set[str]) -> bool:
    return any(unit in names for unit in _NAMES.findall(text))


def _is_end(chat: Renderings, text: str) -> bool:
    return text.strip() == chat.eos_token or re.fullmatch(CONTROL, text.strip()) is not None


def _ends(chat: Renderings, text: str) -> bool:
    return re.search(CONTROL, text) is not None or bool(chat.eos_token and chat.eos_token in text)


def _after_constant_header(chat: Renderings, whole: Trace, turn: int, ended: int) -> int:
    """The end of the text that the template writes before any content, for a template that shows no generation prompt."""
    constant = chat.prefix(turn, False, ASSISTANT)
    if constant is None or FILLER not in constant.text:
        raise not_found(chat, turn, "it shows no generation prompt")
    at, place = _anchor(constant, whole)
    lead = constant.text[at : constant.text.index(FILLER)]
    end = place + len(lead)
    if not whole.text.startswith(lead, place) or end < ended:
        raise not_found(chat, turn, "it shows no generation prompt, and its header depends on the content")
    header = whole.text[ended:end].strip()
    prompts = [p.strip() for p in _known_prompts(chat) if p]
    if header and prompts and not any(p.startswith(header) for p in prompts):
        raise not_found(chat, turn, f"it begins with {header!r}, elsewhere the generation prompt is {prompts[0]!r}")
    return end if header else ended


def _end_of_text_end(chat: Renderings, upto: Trace, turn: int, after: int, traced: int | None) -> int:
    """The end of a turn that ends the text: what follows it if the conversation continues shows its end token."""
    text = upto.text
    everything = len(text.rstrip())
    for longer in (chat.prefix(turn + 1, True), chat.prefix(turn + 1, False, "user")):
        if longer is None or longer.text == text:
            continue
        at, place = _anchor(longer, upto)
        shared = end_of_shared_units(text, longer.text[at:], place)
        shared = place + len(text[place:shared].rstrip())
        if shared >= after and _ends(chat, text[after:shared]):
            if traced is None or traced <= shared or not _is_end(chat, text[shared:traced]):
                return shared
            # Another control token instead of the prompt's: the same turn with the end token of an unfinished conversation.
            prompt = _NAMES.search(_prompt(longer, upto))
            rest = re.match(CONTROL, longer.text[at + shared - place :].lstrip())
            return traced if rest and prompt and rest[0] != prompt[0] else shared
    if traced is not None:
        return traced
    if not text[after:everything].strip() or _is_end(chat, text[after:everything]):
        return everything
    raise not_found(chat, turn, f"its end cannot be told from the conversation's ({text[after:everything]!r})")
