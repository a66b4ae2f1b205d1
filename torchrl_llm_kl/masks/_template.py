"""Chat templates: template selection, renderings, and traces that assign each character to a message.

A trace is a rendering with invisible markers. Outputs are added to the template's syntax tree at the start and end of every
``for`` body, and after every assignment in a loop. If the loop variable (or the assigned variable) is a message, they print
the marker that this message carries in an extra key. The strings of the messages also carry marks at their edges, which show
where each string is written. If the text without markers and marks differs from the plain rendering, the trace is discarded
and made again with fewer marks.

Renderings are expensive. Most templates write a fixed generation prompt after the loop over the messages ("the message
loop"): the text after the whole conversation is then the prompt of every turn and need not be rendered turn by turn.
The syntax tree shows whether a template is of this kind.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect, bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import count
from typing import Any, NamedTuple, cast

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from torchrl_llm_kl.masks._messages import Message, MissingChatTemplateError, TemplateArgs, Tokenizer
from torchrl_llm_kl.masks._tokens import Span

#: A chat template for base models: the contents of the messages with nothing between them, after BOS if the tokenizer has one.
PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
)

# ------------------------------------------------------------------ renderings

# Arguments of `apply_chat_template` that are not template variables. They would change the text or the tokens, and the mask
# would no longer fit.
_RESERVED = {
    *("conversation", "tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    *("padding", "truncation", "max_length", "continue_final_message", "sanitize_control_tokens"),
}


class Renderer:
    """Renders conversations with one template and one set of template variables. ``name`` describes the template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: str | None,
        tools: Sequence[object] | None,
        template_kwargs: TemplateArgs,
    ) -> None:
        reserved = sorted(_RESERVED & set(template_kwargs))
        if reserved:
            raise TypeError(f"{reserved[0]} is not a template variable: pad, truncate or convert the result instead.")
        self.tokenizer = tokenizer
        self._source, self.name = _resolve(tokenizer, chat_template, tools)
        self._kwargs = {**template_kwargs, "tools": list(tools) if tools is not None else None}
        self.template = instrument(self._source)
        # Templates read the special tokens.
        self.identity = self._source, repr((self._kwargs, tokenizer.special_tokens_map))

    def text(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        """The plain rendering, as transformers returns it."""
        return self._apply(self._source, [dict(m) for m in messages], generation_prompt, {})

    def trace(
        self, messages: Sequence[Message], prompt: bool, plain: str, marking: Marking, *, checked: bool = True
    ) -> Trace | None:
        """Render with markers: the spans of messages and generation blocks, and the marks of the messages' strings.

        Returns None if the template fails with the markers, or if ``checked`` and the text differs from ``plain``.
        """
        quotes, nonce = _unused_quotes(plain), _unused_nonce(plain)
        marked = [
            {**mark_strings(message, index, nonce, marking), **_markers(marking.kinds, index, quotes)}
            for index, message in enumerate(messages)
        ]
        try:
            text = self._apply(self.template.tree, marked, prompt, _markers((BLOCK,), 0, quotes))
        except Exception:  # a template can raise any error, but the plain rendering succeeded
            return None
        trace = replace(read_trace(text, quotes, nonce), marking=marking)
        return trace if trace.text == plain or not checked else None

    def _apply(
        self,
        template: str | nodes.Template,
        messages: Sequence[Message],
        generation_prompt: bool,
        extra: dict[str, str],
    ) -> str:
        # transformers passes the template on unchanged, and jinja2 compiles a syntax tree like a string.
        options = {**self._kwargs, **extra, "add_generation_prompt": generation_prompt, "tokenize": False}
        text = self.tokenizer.apply_chat_template(messages, chat_template=template, **options)  # type: ignore[arg-type]
        return cast(str, text)


class Renderings:
    """The renderings of one conversation. Each is computed on first use and cached.

    ``plain(count, prompt)`` and ``trace(count, prompt)`` render the first ``count`` messages, with a generation prompt if
    ``prompt`` is True. ``text`` is the conversation as the model sees it.
    """

    def __init__(self, renderer: Renderer, messages: Sequence[Message], generation_prompt: bool) -> None:
        self.renderer, self.messages, self.generation_prompt = renderer, messages, generation_prompt
        self.template, self.eos_token = renderer.template, renderer.tokenizer.eos_token
        self.bos_token = renderer.tokenizer.bos_token
        self.plain = cache(lambda count, prompt: renderer.text(messages[:count], prompt))
        self.trace = cache(lambda count, prompt: self._traced(messages[:count], prompt, self.plain(count, prompt)))
        self.prefix, self.prefix_text = cache(self._prefix), cache(self._prefix_text)
        self.text: str = self.plain(len(messages), generation_prompt)
        self._markings: Sequence[Marking] = MARKINGS

    def _traced(self, messages: Sequence[Message], prompt: bool, plain: str) -> Trace | None:
        """The trace with the most marks that do not change the text. A marking that failed is not tried again."""
        for tried, marking in enumerate(self._markings):
            trace = self.renderer.trace(messages, prompt, plain, marking)
            if trace is not None:
                self._markings = self._markings[tried:]
                return trace
        return None

    def _with_next(self, count: int, then: str) -> list[Message]:
        """The first ``count`` messages. With ``then``, one more message of that role with the content :data:`FILLER`."""
        messages: list[Any] = list(self.messages[:count])
        if then:
            in_parts = any(isinstance(message.get("content"), (list, tuple)) for message in self.messages)
            messages.append({"role": then, "content": [{"type": "text", "text": FILLER}] if in_parts else FILLER})
        if then == "tool":  # answers the first call of the last message
            call = messages[-2]["tool_calls"][0]
            messages[-1]["tool_call_id"] = call.get("id", "")
            messages[-1]["name"] = call.get("function", call)["name"]
        return messages

    def _prefix_text(self, count: int, prompt: bool, then: str = "") -> str | None:
        """The text of :meth:`prefix`, without the cost of a trace."""
        try:
            return self.renderer.text(self._with_next(count, then), prompt) if then else self.plain(count, prompt)
        except Exception:  # a template can raise any error
            return None

    def _prefix(self, count: int, prompt: bool, then: str = "") -> Trace | None:
        """Render the first ``count`` messages. With ``then``, one more message of that role with the content :data:`FILLER`.

        Returns None if the template rejects such a conversation.
        """
        plain = self.prefix_text(count, prompt, then)
        if plain is None:
            return None
        trace = self._traced(self._with_next(count, then), prompt, plain) if then else self.trace(count, prompt)
        if then and trace:
            trace = replace(trace, marks=tuple((p, mark) for p, mark in trace.marks if mark.message < count))
        return trace or Trace(plain, (), 0)

    @cached_property
    def prompted(self) -> Trace | None:
        """The trace of the conversation with a generation prompt. None if turns may have different prompts.

        Unless the message loop reads the flag ``add_generation_prompt``, this trace also holds for the text without the
        prompt, up to the end of the messages.
        """
        if not self.template.prompt_is_fixed:
            return None
        for tried, marking in enumerate(self._markings):
            trace = self.renderer.trace(self.messages, True, self.text, marking, checked=self.generation_prompt)
            unchecked = self.generation_prompt or self.template.loop_reads_flag
            if trace is None or not marking.kinds:
                continue
            if unchecked or self.text.startswith(trace.text[: trace.messages_end]):
                self._markings = self._markings[tried:]
                return trace
        return None

    def _ends_in_prompt(self, trace: Trace, count: int) -> bool:
        """Whether a prompt follows the message loop, and not a message. Marks or the effect of the flag decide."""
        end = trace.messages_end
        if not end or any(p > end or not mark.is_end for p, mark in trace.marks_in(end, len(trace.text))):
            return False
        if self.template.prompt_is_fixed or trace.marks_of[count - 1]:
            return True
        return self.plain(count, True) != self.plain(count, False)

    def prompts(self, count: int, *, fixed: bool) -> Iterator[str]:
        """Yield candidates for the generation prompt after the first ``count`` messages.

        The first candidate is the text after the message loop. The second is the text that the flag
        ``add_generation_prompt`` adds, for templates that write the prompt inside the loop. ``fixed`` states that these
        messages end inside the message loop of :attr:`prompted`, so that they have the same prompt.
        """
        prompted = self.prompted if fixed else None
        try:
            trace = prompted or self.trace(count, True)
            if trace is not None and (self._ends_in_prompt(trace, count) or prompted):
                yield trace.text[trace.messages_end :]
            if prompted is None or self.template.loop_reads_flag:
                with_prompt, without = self.plain(count, True), self.plain(count, False)
            else:
                texts = prompted.text, self.plain(len(self.messages), False)
                with_prompt, without = (text[prompted.messages_end :] for text in texts)
            yield with_prompt[common_prefix_length(with_prompt, without) :]
        except Exception:  # the template rejects the shortened conversation
            return


def common_prefix_length(a: str, b: str) -> int:
    """The number of leading characters that two texts share."""
    return bisect(range(min(len(a), len(b))), False, key=lambda k: a[: k + 1] != b[: k + 1])


def _resolve(tokenizer: Tokenizer, chat_template: str | None, tools: Sequence[object] | None) -> tuple[str, str]:
    """Select the template. Returns its text, and a description for messages."""
    own = getattr(tokenizer, "chat_template", None)
    named = own if isinstance(own, Mapping) else {}
    name = chat_template
    if named and name is None:
        name = "tool_use" if tools is not None and "tool_use" in named else "default"
    if name in named:
        return named[name], f"the tokenizer's chat template {name!r} ({_fingerprint(named[name])})"
    template = own if name is None else name
    if not isinstance(template, str) or "{" not in template:
        label = f"{type(tokenizer).__name__} ({tokenizer.name_or_path or 'unnamed'})"
        names = f" or a name of {sorted(named)}" if named else ""
        raise MissingChatTemplateError(
            f"{label} has no chat template{f' {name!r}' if name else ''}: pass `chat_template=`, a template{names}. For a base "
            "model use PLAIN_TEMPLATE of torchrl_llm_kl.masks."
        )
    origin = "the tokenizer's chat template" if chat_template is None else "the chat template passed"
    return template, f"{origin} ({_fingerprint(template)})"


def _fingerprint(template: str) -> str:
    first_line = next((line.strip() for line in template.splitlines() if line.strip()), "")
    shortened = first_line if len(first_line) <= 60 else first_line[:57] + "..."
    return f"sha256 {hashlib.sha256(template.encode()).hexdigest()[:8]}, begins {shortened!r}"


# ------------------------------------------------------------------ traces

FILLER = "\U0010fefe"  # a private-use character, which templates and messages hardly contain
# Kinds of spans: a message in a loop body, a message assigned to a variable in a loop, a generation block.
LOOP, SET, BLOCK = "loop", "set", "block"
_OPEN, _CLOSE = "+", "-"
_PRIVATE_USE = range(0x10FF00, 0x10FFFE, 2)


@dataclass(frozen=True)
class Trace:
    """A rendered text, without markers, with the spans of its messages and generation blocks."""

    text: str
    spans: tuple[tuple[str, int, int, int], ...]  # (kind, message index or -1, start, end) in closing order
    messages_end: int  # position of the last loop marker: text after it was written after the last message
    marks: tuple[tuple[int, Mark], ...] = ()  # edges of the messages' strings with their positions, in text order
    marking: Marking | None = None  # the settings of the marks

    @cached_property
    def of(self) -> Mapping[tuple[str, int], list[Span]]:
        """Spans by kind and message that hold more than white space (generation blocks may be empty)."""
        by_message: dict[tuple[str, int], list[Span]] = defaultdict(list)
        for kind, index, start, end in self.spans:
            if kind == BLOCK or self.text[start:end].strip():
                by_message[kind, index].append((start, end))
        return by_message

    def inside(self, span: Span) -> set[int]:
        """The messages that have a non-blank span inside ``span``."""
        spans = ((index, each) for (kind, index), own in self.of.items() if kind != BLOCK for each in own)
        return {index for index, (start, end) in spans if span[0] <= start and end <= span[1]}

    def first_ending_at(self, position: int, default: int) -> int:
        """The first message whose loop body ends at a position, or ``default``."""
        ends = (index for kind, index, _, end in self.spans if kind == LOOP and end == position)
        return min(ends, default=default)

    @cached_property
    def marks_of(self) -> Mapping[int, list[tuple[int, Mark]]]:
        """The marks of each message, in text order."""
        by_message: dict[int, list[tuple[int, Mark]]] = defaultdict(list)
        for position, mark in self.marks:
            by_message[mark.message].append((position, mark))
        return by_message

    def marks_in(self, low: int, high: int) -> tuple[tuple[int, Mark], ...]:
        """The marks from ``low`` to ``high``, both included."""
        return self.marks[bisect_left(self._positions, low) : bisect_right(self._positions, high)]

    def marks_around(self, low: int, high: int, message: int) -> Span:
        """The last mark of another message up to ``low``, and the first from ``high`` on. Defaults to the ends of the text."""
        before = reversed(self.marks[: bisect_right(self._positions, low)])
        after = self.marks[bisect_left(self._positions, high) :]
        return (
            next((p for p, mark in before if mark.message != message), 0),
            next((p for p, mark in after if mark.message != message), len(self.text)),
        )

    @cached_property
    def _positions(self) -> list[int]:
        return [position for position, _ in self.marks]

    @cached_property
    def places(self) -> dict[Mark, int]:
        """The positions of the marks that occur exactly once."""
        count = Counter(mark for _, mark in self.marks)
        return {mark: position for position, mark in self.marks if count[mark] == 1}


def read_trace(marked_text: str, quotes: tuple[str, str], nonce: str) -> Trace:
    """Remove markers and marks from a rendering, and pair opening with closing markers. Unpaired markers are ignored."""
    pattern = re.compile(f"{quotes[0]}([a-z]+)([+-])([0-9]+){quotes[1]}|{nonce}([0-9]+)_([01])_([0-9]+)_([01])_")
    pieces: list[str] = []
    marks: list[tuple[int, Mark]] = []
    opened: dict[tuple[str, int], list[int]] = {}
    spans: list[tuple[str, int, int, int]] = []
    length = position = messages_end = 0
    for match in pattern.finditer(marked_text):
        pieces.append(marked_text[position : match.start()])
        length += len(pieces[-1])
        position = match.end()
        if match[4]:
            marks.append((length, Mark(int(match[4]), match[5] == "1", int(match[6]), match[7] == "1")))
            continue
        kind, action, index = match[1], match[2], -1 if match[1] == BLOCK else int(match[3])
        if action == _OPEN:
            opened.setdefault((kind, index), []).append(length)
        elif opened.get((kind, index)):
            spans.append((kind, index, opened[kind, index].pop(), length))
        if kind == LOOP:
            messages_end = length
    pieces.append(marked_text[position:])
    return Trace("".join(pieces), tuple(spans), messages_end, tuple(marks))


class Mark(NamedTuple):
    """An edge of a string in a message. ``spoken`` is True for content and reasoning, False for parts of a tool call."""

    message: int
    spoken: bool
    string: int
    is_end: bool


class Marking(NamedTuple):
    """Settings of a trace: the kinds of markers, the marked fields, and whether both edges of a string are marked."""

    kinds: tuple[str, ...]
    fields: tuple[str, ...]
    both_edges: bool


SPOKEN = ("content", "reasoning_content", "reasoning", "thinking")
_MESSAGES = (LOOP, SET)
_ALL = (*SPOKEN, "tool_calls")
# From the most marks to the fewest. A template may test the edges of its strings or trim the text of its loop, and marks
# would then change its output.
MARKINGS = (
    Marking(_MESSAGES, _ALL, True),
    Marking(_MESSAGES, SPOKEN[:1], False),
    Marking(_MESSAGES, (), False),
    Marking((), _ALL, True),
    Marking((), (), False),
)
_TAGS = re.compile(r"(?:\s|<[^<>]*>|\[[^\[\]]*\])*")


def mark_strings(
    message: Message, index: int, nonce: str, marking: Marking, fields: list[str] | None = None
) -> dict[str, object]:
    """Copy a message with marks in its strings, after leading and before trailing white space and tags.

    Inside the tags the marks do no harm: a template still finds ``<think>`` at the start and trims the same text. The field of
    each marked string is appended to ``fields``.
    """
    copy = dict(message)
    marked: list[str] = [] if fields is None else fields

    def mark(value: object, spoken: bool, keys: Sequence[str] = ()) -> object:
        if isinstance(value, Mapping):
            inner = {k: () if k == "arguments" else keys for k in value if not keys or k in keys}
            return {k: mark(v, spoken, inner[k]) if k in inner else v for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [mark(item, spoken, keys) for item in value]
        if not isinstance(value, str):
            return value
        start, end = core_of(value)
        if start >= end:  # the string has only tags
            start, end = len(value) - len(value.lstrip()), len(value.rstrip())
        if start >= end:
            return value
        first, last = (f"{nonce}{index}_{spoken:d}_{len(marked)}_{side}_" for side in (0, 1))
        marked.append(field)
        return value[:start] + (first if marking.both_edges else "") + value[start:end] + last + value[end:]

    for field in marking.fields:
        if copy.get(field):
            spoken = field in SPOKEN
            keys = ("text", "content", "thinking") if spoken else ("function", "name", "arguments")
            copy[field] = mark(copy[field], spoken, keys)
    return copy


def core_of(text: str) -> Span:
    """The span of a text without the white space and the tags at its edges."""
    # The end is scanned by hand, since a regular expression for it would backtrack in quadratic time.
    match = _TAGS.match(text)
    start, end = match.end() if match else 0, len(text)
    while start < end:
        if text[end - 1].isspace():
            end -= 1
            continue
        tag = {">": "<", "]": "["}.get(text[end - 1])
        opened = text.rfind(tag, start, end) if tag else -1
        if opened < 0:
            break
        end = opened
    return start, end


def _unused_nonce(text: str) -> str:
    """A beginning of marks that the text does not contain. Filters such as ``upper`` keep its digits and underscores."""
    # A single scan of the text: testing one nonce after another would take quadratic time.
    used = set(re.findall(r"_0([0-9]+)(?=_)", text)) if "_0" in text else ()
    return next(f"_0{k}_" for k in count(7391) if str(k) not in used)


def _unused_quotes(text: str) -> tuple[str, str]:
    """Two private-use characters that the text does not contain. They enclose markers."""
    return next((chr(c), chr(c + 1)) for c in _PRIVATE_USE if chr(c) not in text and chr(c + 1) not in text)


def _markers(kinds: Sequence[str], index: int, quotes: tuple[str, str]) -> dict[str, str]:
    return {_key(kind, a): f"{quotes[0]}{kind}{a}{index}{quotes[1]}" for kind in kinds for a in (_OPEN, _CLOSE)}


def _key(kind: str, action: str) -> str:
    """The message key or template variable that contains a marker."""
    return f"torchrl_llm_kl_{kind}_{'open' if action == _OPEN else 'close'}"


# ------------------------------------------------------------------ the syntax tree with markers


@dataclass(frozen=True)
class InstrumentedTemplate:
    """A template's syntax tree with markers, and properties of the template that follow from the tree.

    The prompt is fixed if everything after the message loop is independent of the messages and outside generation blocks.
    ``loop_reads_flag`` states that the message loop reads ``add_generation_prompt``. It is meaningful only for a fixed prompt.
    ``variables`` are the names that the template reads and does not set.
    """

    tree: nodes.Template
    has_generation_blocks: bool
    prompt_is_fixed: bool
    loop_reads_flag: bool
    variables: frozenset[str]


def template_variables(tokenizer: Tokenizer, chat_template: str | None = None) -> frozenset[str]:
    """The variables that a chat template reads, besides messages, tools and those that transformers sets."""
    template, _ = _resolve(tokenizer, chat_template, None)
    given = {"messages", "tools", "documents", "add_generation_prompt", *tokenizer.special_tokens_map}
    return instrument(template).variables - given - {"raise_exception", "strftime_now"}


@lru_cache(maxsize=64)
def instrument(template: str) -> InstrumentedTemplate:
    """Parse a chat template (transformers' dialect) and add the markers."""
    extensions: tuple[str | type[Extension], ...] = (_GenerationBlock, "jinja2.ext.loopcontrols")
    # transformers renders with the same settings.
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    tree = environment.parse(template)
    variables = frozenset(meta.find_undeclared_variables(tree))
    has_blocks = any(name.name == _key(BLOCK, _OPEN) for name in tree.find_all(nodes.Name))
    # Loops can pass values on only through a namespace, since the sandbox forbids changing a list or a dict.
    last = max(_dependents(tree.body, {"messages", "namespace", _key(BLOCK, _OPEN)}), default=-1)
    fixed = last >= 0 and isinstance(tree.body[last], nodes.For)
    loop_reads_flag = last in _dependents(tree.body, {"add_generation_prompt"})
    tree.body = _mark_statements(tree.body, loop_target=None, in_loop=False)
    tree.set_environment(environment)
    return InstrumentedTemplate(tree, has_blocks, fixed, loop_reads_flag, variables)


def _dependents(body: Sequence[nodes.Node], names: set[str]) -> set[int]:
    """The statements that read one of the names, directly or through names that other statements set.

    Conservatively, each name that a statement sets depends on every name that the statement reads.
    """
    reads = [_names_in(statement, read=True) for statement in body]
    dependents: set[int] = set()
    while True:  # until no statement is added
        added = {k for k, read in enumerate(reads) if read & names} - dependents
        if not added:
            return dependents
        dependents |= added
        names = names.union(*(_names_in(body[k], read=False) for k in added))


def _names_in(statement: nodes.Node, *, read: bool) -> set[str]:
    """The names that a statement reads or, with ``read=False``, sets."""
    named: Any = nodes.Scope([statement]).find_all((nodes.Name, nodes.NSRef, nodes.Macro))
    return {node.name for node in named if (isinstance(node, nodes.Name) and node.ctx == "load") == read}


class _GenerationBlock(Extension):
    """Parses ``{% generation %}...{% endgeneration %}`` as its body between two markers."""

    tags = {"generation"}  # noqa: RUF012 -- the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        names = (nodes.Name(_key(BLOCK, action), "load", lineno=lineno) for action in (_OPEN, _CLOSE))
        start, end = (nodes.Output([name], lineno=lineno) for name in names)
        return nodes.Scope([start, *body, end], lineno=lineno)


def _mark_statements(statements: Iterable[nodes.Node], loop_target: str | None, in_loop: bool) -> list[nodes.Node]:
    """Add markers to statements. ``loop_target`` is the innermost loop's variable, if that is a single name."""
    marked: list[nodes.Node] = []
    closing: list[nodes.Node] = []
    for node in statements:
        if isinstance(node, (nodes.Continue, nodes.Break)) and loop_target:
            # The loop body ends here, before its own closing marker.
            marked.append(_emit_message(loop_target, LOOP, _CLOSE, node.lineno))
        marked.append(node)
        if isinstance(node, nodes.For):
            target = node.target.name if isinstance(node.target, nodes.Name) else None
            body = _mark_statements(node.body, target, True)
            if target:
                before, after = (_emit_message(target, LOOP, a, node.lineno) for a in (_OPEN, _CLOSE))
                body = [before, *body, after]
            node.body = body
            node.else_ = _mark_statements(node.else_, loop_target, in_loop)
        elif isinstance(node, nodes.Assign):
            if in_loop and isinstance(node.target, nodes.Name) and not _is_no_message(node.node, loop_target):
                marked.append(_emit_message(node.target.name, SET, _OPEN, node.lineno))
                closing.append(_emit_message(node.target.name, SET, _CLOSE, node.lineno))
        else:
            inner = (None, False) if isinstance(node, (nodes.Macro, nodes.CallBlock)) else (loop_target, in_loop)
            for field, value in node.iter_fields():
                if isinstance(value, list) and value and all(isinstance(item, nodes.Stmt) for item in value):
                    setattr(node, field, _mark_statements(value, *inner))
    return marked + closing[::-1]


def _is_no_message(value: nodes.Node, loop_target: str | None) -> bool:
    """Whether an assigned value cannot be a message, such as a constant, a message's field or the result of a text method."""
    if isinstance(value, nodes.Call) and isinstance(value.node, nodes.Getattr):
        return hasattr(str, value.node.attr) and not hasattr(dict, value.node.attr)
    if isinstance(value, (nodes.Getattr, nodes.Getitem)):
        key = nodes.Const(value.attr) if isinstance(value, nodes.Getattr) else value.arg
        of_message = isinstance(value.node, nodes.Name) and value.node.name == loop_target
        return of_message and isinstance(key, nodes.Const) and key.value in ("role", *SPOKEN)
    return isinstance(value, (nodes.Const, nodes.TemplateData, nodes.Concat, nodes.Compare, nodes.Not))


def _emit_message(variable: str, kind: str, action: str, lineno: int) -> nodes.Output:
    """Build ``{{ variable[key] if variable is mapping else "" }}``, which prints the marker of a marked message."""
    name = nodes.Name(variable, "load", lineno=lineno)
    test = nodes.Test(name, "mapping", [], [], None, None, lineno=lineno)
    item = nodes.Getitem(name, nodes.Const(_key(kind, action), lineno=lineno), "load", lineno=lineno)
    nothing = nodes.Const("", lineno=lineno)
    return nodes.Output([nodes.CondExpr(test, item, nothing, lineno=lineno)], lineno=lineno)
