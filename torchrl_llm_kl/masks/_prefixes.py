"""Borders of a turn in renderings of shortened conversations. They confirm or correct the traced borders.

The model's input before a turn is the rendering of the earlier messages with a generation prompt. The rendering of the
messages up to the turn shows where the output ended. A template may render earlier messages differently in the whole
conversation (it may drop their reasoning, for example). Texts are therefore compared from the last mark that both contain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from torchrl_llm_kl.masks._messages import ASSISTANT, Message, TurnNotFoundError
from torchrl_llm_kl.masks._template import FILLER, LOOP, SPOKEN, Renderings, Trace, common_prefix_length
from torchrl_llm_kl.masks._tokens import Span

# Pattern of control tokens.
CONTROL = r"<[^<>\s]+>|\[[^\[\]\s]+\]"
# Texts are compared in these units, so that "<think>" and "<tool>" do not share "<t".
_UNITS = re.compile(rf"{CONTROL}|\w+|\s|[^\w\s]")
_TOKENS = re.compile(CONTROL)
_HEADER = re.compile(rf"(?:{CONTROL})\s*\w+|{CONTROL}|\w+")


def end_of_shared_units(text: str, other: str, at: int) -> int:
    """The end of the longest run of whole units, from ``at`` on, that the text shares with another text."""
    if text.startswith(other, at):
        return at + len(other)
    for unit in _UNITS.findall(other):
        if not text.startswith(unit, at):
            break
        at += len(unit)
    return at


def not_found(chat: Renderings, turn: int, reason: str) -> TurnNotFoundError:
    """Create the error for a turn. It names the turn, the template and the remedy."""
    return TurnNotFoundError(
        f"message {turn} (assistant) of {len(chat.messages)} cannot be located with certainty in the text that "
        f"{chat.renderer.name} renders: {reason}. Pass a template with {{% generation %}} blocks as `chat_template=`."
    )


def end_of_prompt(chat: Renderings, whole: Trace, turn: int, start: int) -> int:
    """The end of a generation prompt that straddles ``start``, or ``start`` if none does.

    A prompt that ends with a thinking tag can straddle it.
    """
    prompt = _prompt(chat, turn)
    if not turn:  # nothing precedes the turn, so the prompt after a question is used
        prompt = _prompt(chat, 0, "user")
    prompt = prompt.lstrip()
    for cut in range(len(prompt) - 1, 0, -1):
        if whole.text.startswith(prompt[cut:], start) and whole.text.endswith(prompt[:cut], 0, start):
            return start + len(prompt) - cut if prompt[cut:].strip() else start
    return start


def start_of_turn(chat: Renderings, whole: Trace, turn: int, low: int, own: int, traced: int | None) -> int:
    """The end of the model's input before a turn.

    It lies between the mark ``low`` of an earlier message and the mark ``own`` of the turn. ``traced`` is a candidate.
    """
    text, before, prompt = whole.text, chat.prefix(turn, True), _prompt(chat, turn)
    place = shared = 0
    if before is not None:
        at, place = _anchor(before, whole)
        given = before.text[at:]
        headers = headers_of(_known_prompts(chat)) if prompt else set()
        if prompt and text.startswith(given, place) and not holds(text[place + len(given) : own], headers):
            return place + len(given)
        shared = end_of_shared_units(text, given, place)
    headers = headers_of((prompt, *_known_prompts(chat)))
    ended = _end_of_text(chat.prefix(turn, False), whole) if turn else 0
    # Without a header, the turn begins where the prompt ends, somewhere in the white space between two messages.
    exact = None if prompt else _end_of_text(before, whole)
    always = before.text[before.messages_end :].strip() if before is not None and before.messages_end else ""
    if always and exact is not None and exact == traced:  # the template writes the prompt without the flag
        return exact
    if not headers and ended is not None:
        try:  # the template never writes a generation prompt, so the text before any content is the header
            return _after_constant_header(chat, whole, turn, ended if exact is None or exact > own else exact)
        except TurnNotFoundError:
            pass
    split = traced is not None and holds(text[low:own], headers) and not holds(text[low:traced], headers)
    if traced is not None and not (split or holds(text[traced:own], headers)) and (ended is None or traced >= ended):
        near = exact is not None and exact <= own and not text[slice(*sorted((exact, traced)))].strip()
        return exact if exact is not None and near else traced
    if before is None or ended is None:
        raise not_found(chat, turn, "the template rejects the conversation up to it, or renders it differently")
    if prompt:  # the header differs from the prompt, but both contain the role's name
        if text[ended:shared].strip() and not holds(text[shared:own], headers):
            return shared
        raise not_found(chat, turn, f"the turn does not begin with the generation prompt {prompt!r}")
    return _after_constant_header(chat, whole, turn, ended)


def end_of_turn(chat: Renderings, whole: Trace, turn: int, start: int, own: int, traced: int | None) -> int:
    """The end of the model's output. ``own`` is the last mark of the turn's content, and ``traced`` is a candidate."""
    upto, text = chat.prefix(turn + 1, False), whole.text
    if upto is None:
        if traced is None:
            raise not_found(chat, turn, "the template rejects the conversation up to it")
        return traced
    at, place = _anchor(upto, whole)
    tail = upto.text[at:].rstrip()
    end = place + len(tail)
    if turn == len(chat.messages) - 1 and text.startswith(upto.text.rstrip()):
        end = _end_of_last_turn(chat, upto, turn, start, own, traced)
        answered = chat.prefix(turn + 1, False, "tool") if chat.messages[turn].get("tool_calls") else None
        at, place = _anchor(answered, upto) if answered else (0, 0)
        if answered and end_of_shared_units(upto.text, answered.text[at:], place) < end:
            raise not_found(chat, turn, "its end changes when a tool answers its call")
        return end
    after, header = max(start, own), _header_tokens(chat, upto, text[:start])
    if not text.startswith(tail, place):  # the template writes the end differently if another message follows
        end = end_of_shared_units(text, tail, place)
        end = place + len(text[place:end].rstrip())
        if traced is None and (end <= after or not _ends(chat, text[after:end])):
            raise not_found(chat, turn, "the conversation up to it renders differently")
    if traced is None and not _ends(chat, text[after:end]):  # the template may write the end token before the next one
        following = text[end:].lstrip()
        if chat.eos_token and following.startswith(chat.eos_token):
            return len(text) - len(following) + len(chat.eos_token)
        token = _TOKENS.match(following)
        if token and token[0] not in header:
            raise not_found(chat, turn, f"its end token may be {token[0]!r}, which is missing without later messages")
    if traced is None or traced == end:
        return end
    if traced < end:  # the template may write the end token outside its loop, and the next header directly after it
        if _is_end(chat, text[traced:end], header):
            return end
        loop_end = place + len(upto.text[at : upto.messages_end].rstrip())
        if traced == loop_end or _ends(chat, text[after:traced]):
            return traced
    elif text.startswith(tail, place) and _ends(chat, _plain_end(chat, turn)):
        if not _is_end(chat, text[end:traced], header):
            return end  # a separator before the next message
    elif text.startswith(tail, place) or not _ends(chat, tail[max(after - place, 0) :]):
        if not text[end:traced].strip() or _is_end(chat, text[end:traced], header):
            return traced  # the template writes the end token only if another message follows
    else:
        # The end token differs from the last turn's, or other text precedes the same end token.
        last = [match[0] for match in _TOKENS.finditer(tail)][-1]
        final = [match[0] for match in _TOKENS.finditer(text, after, traced)][-2:]
        if end < after or _is_end(chat, text[end:traced], header) or last in final:
            return traced
    ends = f"{text[own:traced]!r} here, and {upto.text[at:]!r} without later messages"
    raise not_found(chat, turn, f"its end is {ends}")


def check_gaps(chat: Renderings, whole: Trace, turn: int, start: int, end: int) -> None:
    """Raise if a region has a header at its edges, or an end token between the turn's own strings."""
    gaps = own_gaps(whole, turn, start, end)
    edges, between = {gaps[0], gaps[-1]}, gaps[1:-1]
    headers = headers_of(_known_prompts(chat))
    upto = chat.prefix(turn + 1, False)
    last = _TOKENS.findall(gaps[-1])[-1:]
    at_end = upto is not None and last and gaps[-1].rstrip().endswith(last[0]) and last[0] != chat.eos_token
    if upto is not None and at_end and last[0] in _header_tokens(chat, upto, whole.text[:start]):
        raise not_found(chat, turn, f"its end token may be {last[0]!r}, a token of the next header")
    if _may_end_earlier(chat.messages[turn], gaps[-1]):
        raise not_found(chat, turn, f"its end token may be any of {_TOKENS.findall(gaps[-1])}")
    ends = {chat.eos_token, *_TOKENS.findall(_plain_end(chat, turn))[-1:]} - {None} if between else set()
    wrong = [gap for gap in edges if holds(gap, headers)]
    wrong += [gap for gap in between if holds(gap, ends) and holds(gap, headers)]
    if wrong:
        raise not_found(chat, turn, f"it holds a header that the model does not write ({wrong[0]!r})")


def _may_end_earlier(message: Message, tail: str) -> bool:
    """Whether two separate end tokens follow a plain answer. The second one may only close the conversation.

    Closing tags and tokens of the answer itself are not end tokens.
    """
    tokens = _TOKENS.findall(tail)
    if len(tokens) < 2 or message.get("tool_calls") or not re.search(r"\s", tail.rstrip()):
        return False
    own = [value for value in map(message.get, SPOKEN) if isinstance(value, str)]
    return not (tokens[-2].startswith(("</", "[/")) or any(tokens[-2] in value for value in own))


def own_gaps(whole: Trace, turn: int, start: int, end: int) -> tuple[str, ...]:
    """The template's own text around the turn's strings in a region. It includes tags at the edges of the strings."""
    gaps, at, depth = [], start, 0
    for position, mark in whole.marks_of[turn]:
        if start <= position <= end:
            if not mark.is_end:
                gaps += [whole.text[at:position]] if depth == 0 else []
                depth += 1
            elif depth:
                depth -= 1
            at = position
    return (*gaps, whole.text[at:end])


def prompt_is_fixed(chat: Renderings, turn: int) -> bool:
    """Whether the template writes the same generation prompt after any messages, outside its loop."""
    before = chat.prefix(turn, True) if chat.template.prompt_is_fixed and chat.template.loop_reads_flag else None
    outside = before is not None and before.messages_end and before.text[before.messages_end :].strip()
    return chat.template.prompt_is_fixed and (not chat.template.loop_reads_flag or bool(outside))


def is_omitted(chat: Renderings, whole: Trace, turn: int) -> bool:
    """Whether the text contains nothing of the turn: changing its content, or removing it, leaves the text unchanged."""
    if any(mark.spoken for _, mark in whole.marks_of[turn]):
        return False
    if _with_filler(chat, turn) == chat.text:
        return True
    without = [*chat.messages[:turn], *chat.messages[turn + 1 :]]
    return not chat.messages[turn].get("content") and _text(chat, without) == chat.text


def has_only_header(chat: Renderings, trace: Trace, turn: int, written: Span) -> bool:
    """Whether the template writes only a header for the turn. Nothing may follow another content either."""
    text, end = trace.text, written[1]
    before, _, after = (_with_filler(chat, turn) or "").partition(FILLER)
    following = text[end:]
    token = _TOKENS.match(following.lstrip())
    if chat.eos_token and following.lstrip().startswith(chat.eos_token):
        return False
    if token:  # it may end the turn, unless messages begin with it and no conversation ends with it
        first = min((a for kind, _, a, b in trace.spans if kind == LOOP and text[a:b].strip()), default=0)
        if not text.startswith(token[0], first) or _plain_end(chat, turn).strip() == token[0]:
            return False
    unfollowed = after.endswith(following) and not after.removesuffix(following).strip()
    return unfollowed and before.rstrip() == text[:end].rstrip()


def _with_filler(chat: Renderings, turn: int) -> str | None:
    """The rendering with :data:`FILLER` appended to the turn's content, and without its tool calls."""
    content = chat.messages[turn].get("content")
    more = [*content, {"type": "text", "text": FILLER}] if isinstance(content, list) else f"{content or ''}{FILLER}"
    changed = {**chat.messages[turn], "content": more, "tool_calls": None}
    return _text(chat, [*chat.messages[:turn], changed, *chat.messages[turn + 1 :]])


def _text(chat: Renderings, messages: Sequence[Message]) -> str | None:
    """The rendering of other messages, or None if the template rejects them."""
    try:
        return chat.renderer.text(messages, chat.generation_prompt)
    except Exception:  # a template can raise any error
        return None


# ------------------------------------------------------------------ comparisons


def _anchor(part: Trace, whole: Trace) -> tuple[int, int]:
    """The positions, in both texts, of the last mark of ``part`` that each text contains once. (0, 0) without such a mark."""
    for position, mark in reversed(part.marks):
        if mark in part.places and mark in whole.places:
            return position, whole.places[mark]
    return 0, 0


def _end_of_text(part: Trace | None, whole: Trace) -> int | None:
    """The position in the whole text where a prefix ends, or None if the whole text does not continue the prefix."""
    if part is None:
        return None
    at, place = _anchor(part, whole)
    tail = part.text[at:]
    return place + len(tail) if whole.text.startswith(tail, place) else None


def _prompt(chat: Renderings, count: int, then: str = "") -> str:
    """The text that the flag ``add_generation_prompt`` adds after a prefix. Empty if it adds only white space."""
    before = chat.prefix(count, True, then)
    if before is None:
        return ""
    prompt = before.text[common_prefix_length(before.text, chat.prefix_text(count, False, then) or "") :]
    after_loop = before.text[before.messages_end :]
    if before.messages_end and after_loop.strip() and prompt.endswith(after_loop):
        return after_loop  # the flag may also add an end token to the last message
    return prompt if prompt.strip() else ""


def _known_prompts(chat: Renderings) -> Iterator[str]:
    """Yield the generation prompt of the first answer, if there is one."""
    for count, message in enumerate(chat.messages):
        if message.get("role") == ASSISTANT and count and chat.messages[count - 1].get("role") != ASSISTANT:
            yield _prompt(chat, count)
            return


def headers_of(prompts: Iterable[str]) -> set[str]:
    """The beginnings of generation prompts: the first control token with a word after it, or the first of either."""
    matches = filter(None, map(_HEADER.search, prompts))
    return {match.string[: match.end()].lstrip() for match in matches}


def holds(text: str, headers: set[str]) -> bool:
    """Whether a text contains one of the headers."""
    return any(header in text for header in headers)


def _header_tokens(chat: Renderings, upto: Trace, before: str) -> set[str]:
    """The control tokens of generation prompts, including a prompt that the template writes without the flag."""
    message_follows = any(p > upto.messages_end for p, _ in upto.marks)  # a last message outside the loop
    always = upto.text[upto.messages_end :].strip() if upto.messages_end and not message_follows else ""
    several = len(_TOKENS.findall(always)) > 1 and not (chat.eos_token and chat.eos_token in always)
    prompts = [*_known_prompts(chat), always if several or before.rstrip().endswith(always) else ""]
    return {token for prompt in prompts for token in _TOKENS.findall(prompt)}


def _plain_end(chat: Renderings, turn: int) -> str:
    """The template's text after a plain answer at the end of the conversation."""
    plain = chat.prefix(turn, False, ASSISTANT)
    return plain.text.partition(FILLER)[2] if plain else ""


def _is_end(chat: Renderings, text: str, header: set[str]) -> bool:
    """Whether a text is a single control token that no header contains."""
    token = text.strip()
    return token == chat.eos_token or (bool(_TOKENS.fullmatch(token)) and token not in header)


def _ends(chat: Renderings, text: str) -> bool:
    """Whether a text contains a token that may end a turn."""
    return re.search(CONTROL, text) is not None or bool(chat.eos_token and chat.eos_token in text)


def _after_constant_header(chat: Renderings, whole: Trace, turn: int, ended: int) -> int:
    """The end of the text that the template writes before any content. For templates without a generation prompt."""
    constant = chat.prefix(turn, False, ASSISTANT)
    if constant is None or FILLER not in constant.text:
        raise not_found(chat, turn, "the template writes no generation prompt")
    at, place = _anchor(constant, whole)
    lead = constant.text[at : constant.text.index(FILLER)]
    end = place + len(lead)
    if not whole.text.startswith(lead, place) or end < ended:
        raise not_found(chat, turn, "the template writes no generation prompt, and the header depends on the content")
    header = whole.text[ended:end].strip()
    prompts = [p.strip() for p in _known_prompts(chat) if p]
    if header and prompts and not any(p.startswith(header) for p in prompts):
        raise not_found(chat, turn, f"it begins with {header!r}, but the generation prompt elsewhere is {prompts[0]!r}")
    return end if header else ended


def _end_of_last_turn(chat: Renderings, upto: Trace, turn: int, start: int, own: int, traced: int | None) -> int:
    """The end of a turn that ends the text. Continuing the conversation shows which token is the end token."""
    text = upto.text
    after, everything, header = max(start, own), len(text.rstrip()), _header_tokens(chat, upto, text[:start])
    for longer in (chat.prefix(turn + 1, False, "user"), chat.prefix(turn + 1, True)):
        if longer is None or longer.text == text:
            continue
        at, place = _anchor(longer, upto)
        shared = end_of_shared_units(text, longer.text[at:], place)
        shared = place + len(text[place:shared].rstrip())
        if shared < after or not _ends(chat, text[after:shared]):
            continue
        if traced is None or traced == shared:
            return shared
        if traced < shared:
            return shared if _is_end(chat, text[traced:shared], header) else traced
        # Another token may replace the end token when the conversation continues. Before a header, it is an additional token.
        rest = longer.text[at + shared - place :].partition(FILLER)[0].lstrip()
        following = _TOKENS.findall(rest) if _TOKENS.match(rest) else []
        if not following or following[0] in header:
            return shared
        if header.intersection(following):
            return traced
        raise not_found(chat, turn, f"its end token is {text[after:shared]!r} or {text[shared:traced]!r}")
    if traced is not None:
        return traced
    if not text[after:everything].strip() or _is_end(chat, text[after:everything], header):
        return everything
    raise not_found(chat, turn, f"it and the conversation have the same end ({text[after:everything]!r})")
