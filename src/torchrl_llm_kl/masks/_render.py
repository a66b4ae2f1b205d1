"""A chat template ready to render: which one it is, its text, its trace and what it puts before the model's answer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
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
        self._instrumented = instrument(self.template)

    @property
    def has_marks(self) -> bool:
        """Whether the template has ``{% generation %}`` blocks (a mention in a comment is none)."""
        return self._instrumented.has_marks

    def text(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        """The plain rendering, as transformers gives it."""
        return self._apply(self.template, [dict(m) for m in messages], generation_prompt, {})

    def trace(
        self, messages: Sequence[Message], generation_prompt: bool, *, clean: str | None = None, turns: bool = True
    ) -> Trace | None:
        """The rendering with its borders, or None when asking for them changes what the template renders."""
        clean = self.text(messages, generation_prompt) if clean is None else clean
        marked, variables, quotes = with_markers(messages, clean, turns=turns)
        try:
            text = self._apply(self._instrumented.tree, marked, generation_prompt, variables)
        except Exception:  # a template may raise anything at all; the untouched rendering above did not
            return None
        trace = read_trace(text, quotes)
        return trace if trace.text == clean else None

    def prompt_after_loop(self, prefix: Sequence[Message]) -> str:
        """What the template writes behind the last message when it asks for an answer."""
        trace = self.trace(prefix, True)
        return trace.text[trace.last_border :] if trace is not None else ""

    def prompt_added(self, prefix: Sequence[Message]) -> str:
        """What asking for an answer adds to the text: the reading for templates that ask inside of their loop."""
        asked = self.text(prefix, True)
        return asked[common_prefix_length(asked, self.text(prefix, False)) :]

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


def common_prefix_length(a: str, b: str) -> int:
    """How many leading characters two texts share."""
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


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
