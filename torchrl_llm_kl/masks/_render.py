"""A chat template ready to render: which one it is, its text, its trace and what it puts before the model's answer."""

from __future__ import annotations

import hashlib
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

from torchrl_llm_kl.masks._errors import AssistantMaskError, MissingChatTemplateError
from torchrl_llm_kl.masks._trace import Trace, instrument, read_trace, with_markers

__all__: list[str] = []

Message = Mapping[str, Any]

# Arguments of `apply_chat_template` that are not variables of the template: they would change what is returned, or the
# tokens, behind the mask's back.
_RESERVED = frozenset(
    {
        *("conversation", "tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask"),
        *("padding", "truncation", "max_length", "tokenizer_kwargs"),
        *("continue_final_message", "sanitize_control_tokens"),
    }
)


class Renderer:
    """Renders conversations on one template with one set of template variables.

    Args:
        tokenizer: a transformers tokenizer; its ``apply_chat_template`` does the rendering.
        chat_template: a template, the name of one of the tokenizer's templates, or None for the tokenizer's own.
        tools: passed to the template.
        template_kwargs: further template variables.

    Attributes:
        has_marks: whether the template has ``{% generation %}`` blocks (a mention in a comment is none).
        prompt_is_fixed: whether what stands behind the loop over the messages is the same whatever they say.
        loop_asks: whether asking for an answer may change what that loop writes.
    """

    def __init__(
        self, tokenizer: Any, chat_template: str | None, tools: Sequence[Any] | None, template_kwargs: Mapping[str, Any]
    ) -> None:
        reserved = sorted(_RESERVED & set(template_kwargs))
        if reserved:
            raise TypeError(
                f"{', '.join(reserved)}: not a template variable. The conversation is always rendered whole and "
                "tokenised once; pad, truncate or convert the result."
            )
        self.tokenizer = tokenizer
        self.template, self.name = _resolve(tokenizer, chat_template, tools)
        self._tools = list(tools) if tools is not None else None
        self._kwargs = dict(template_kwargs)
        instrumented = instrument(self.template)
        self._tree, self.has_marks = instrumented.tree, instrumented.has_marks
        self.prompt_is_fixed, self.loop_asks = instrumented.prompt_is_fixed, instrumented.loop_asks

    def text(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        """The plain rendering, as transformers gives it."""
        return self._apply(self.template, [dict(m) for m in messages], generation_prompt, {})

    def trace(
        self,
        messages: Sequence[Message],
        generation_prompt: bool,
        clean: str,
        *,
        turns: bool = True,
        checked: bool = True,
    ) -> Trace | None:
        """The rendering with its borders, or None when asking for them changes it from ``clean``, the plain one."""
        marked, variables, quotes = with_markers(messages, clean, turns=turns)
        try:
            text = self._apply(self._tree, marked, generation_prompt, variables)
        except Exception:  # a template may raise anything at all; the untouched rendering above did not
            return None
        trace = read_trace(text, quotes)
        return trace if trace.text == clean or not checked else None

    def _apply(
        self, template: Any, messages: list[dict[str, Any]], generation_prompt: bool, extra: dict[str, str]
    ) -> str:
        # jinja2 compiles a syntax tree as it does a string, and transformers hands the template on as it is.
        text = self.tokenizer.apply_chat_template(
            messages,
            tools=self._tools,
            chat_template=template,
            add_generation_prompt=generation_prompt,
            tokenize=False,
            **{**self._kwargs, **extra},
        )
        if not isinstance(text, str):
            raise AssistantMaskError(f"expected one rendered text from {self.name}, found {type(text).__name__}.")
        return text


class Conversation:
    """One conversation on one template; each rendering is made when it is first asked for, and once.

    Args:
        renderer: the template.
        messages: the conversation.
        asks: whether it is to end with a generation prompt.

    Attributes:
        whole: the conversation as the model sees it.
        text: ``text(count, asks)``, the plain rendering of the first ``count`` messages.
        trace: ``trace(count, asks)``, the same with its borders, or None.
    """

    def __init__(self, renderer: Renderer, messages: Sequence[Message], asks: bool) -> None:
        self.renderer, self.messages, self.asks = renderer, messages, asks
        self.text = text = cache(lambda count, asks: renderer.text(messages[:count], asks))
        self.trace = cache(lambda count, asks: renderer.trace(messages[:count], asks, text(count, asks)))
        self.whole: str = text(len(messages), asks)

    @cached_property
    def asking(self) -> Trace | None:
        """The trace with a generation prompt at its end, where every turn has the same; None elsewhere.

        Unless the loop asks, this is also the trace of the text without that prompt, as far as the last border.
        """
        if not self.renderer.prompt_is_fixed:
            return None
        trace = self.renderer.trace(self.messages, True, self.whole, checked=self.asks)
        if trace is None or self.asks or self.renderer.loop_asks:
            return trace
        return trace if self.whole.startswith(trace.text[: trace.last_border]) else None

    def prompts(self, count: int, *, fixed: bool) -> Iterator[str]:
        """What the template writes behind the first messages when it asks for an answer, and what asking adds to them.

        The second is the reading for templates that ask inside of their loop. ``fixed`` says that the messages end inside
        of the loop that :attr:`asking` is about, so that its prompt is theirs.
        """
        asking = self.asking if fixed else None
        try:
            trace = asking or self.trace(count, True)
            yield trace.text[trace.last_border :] if trace is not None else ""
            if asking is None or self.renderer.loop_asks:
                asked, plain = self.text(count, True), self.text(count, False)
            else:
                asked, plain = (t[asking.last_border :] for t in (asking.text, self.text(len(self.messages), False)))
            yield asked[common_prefix_length(asked, plain) :]
        except Exception:  # the template refuses the shortened conversation, in its own words
            return


def common_prefix_length(a: str, b: str) -> int:
    """How many leading characters two texts share."""
    return bisect(range(min(len(a), len(b))), False, key=lambda k: a[: k + 1] != b[: k + 1])


def _resolve(tokenizer: Any, chat_template: str | None, tools: Sequence[Any] | None) -> tuple[str, str]:
    """The template's text, and a name for it in messages."""
    own = getattr(tokenizer, "chat_template", None)
    if chat_template is None and not own:
        raise MissingChatTemplateError(
            f"{type(tokenizer).__name__} ({getattr(tokenizer, 'name_or_path', '') or 'unnamed'}) has no chat template. "
            "Pass `chat_template=` (the template of the model, as a string), or set `tokenizer.chat_template`."
        )
    if isinstance(own, Mapping):
        name = chat_template
        if name is None:
            name = "tool_use" if tools is not None and "tool_use" in own else "default"
            if name not in own:
                raise MissingChatTemplateError(
                    f"the tokenizer has the chat templates {sorted(own)} and no default one. Pass the name of one as "
                    "`chat_template=`."
                )
        if name in own:
            return own[name], f"the tokenizer's chat template {name!r} ({_fingerprint(own[name])})"
    template = str(own if chat_template is None else chat_template)
    origin = "the tokenizer's chat template" if chat_template is None else "the chat template passed"
    if "{" not in template:
        raise MissingChatTemplateError(
            f"`chat_template={template!r}` is no template, and the tokenizer has none of that name "
            f"(it has {sorted(own) if isinstance(own, Mapping) else 'one unnamed template' if own else 'none'})."
        )
    return template, f"{origin} ({_fingerprint(template)})"


def _fingerprint(template: str) -> str:
    first_line = next((line.strip() for line in template.splitlines() if line.strip()), "")
    shortened = first_line if len(first_line) <= 60 else first_line[:57] + "..."
    return f"sha256 {hashlib.sha256(template.encode()).hexdigest()[:8]}, begins {shortened!r}"
