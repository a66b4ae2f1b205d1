"""Conversations as token ids with the assistant's tokens masked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchrl_llm_kl.masks._errors import EmptyAssistantMaskError
from torchrl_llm_kl.masks._render import Message, Renderer
from torchrl_llm_kl.masks._tokens import encode_with_mask
from torchrl_llm_kl.masks._turns import ASSISTANT, Turns, locate_turns

__all__ = ["RenderedConversation", "render_conversation", "render_conversations"]


@dataclass(frozen=True)
class RenderedConversation:
    """A conversation as the model sees it.

    Attributes:
        text: the rendered template.
        token_ids: int64 ``[T]``, the tokens of ``text`` with nothing added.
        assistant_mask: bool ``[T]``, True on what the assistant produced; False on the first token.
        assistant_spans: the same in characters of ``text``: ``(start, end)``, sorted and disjoint.
        located_by: how the spans were found: ``"marks"`` (the template's ``{% generation %}`` blocks), ``"trace"``
            (following the template's loop over the messages), ``"prefixes"`` (rendering the conversation up to each
            turn), ``"no assistant turn"``, or ``"not asked"``.
    """

    text: str
    token_ids: Tensor
    assistant_mask: Tensor
    assistant_spans: tuple[tuple[int, int], ...]
    located_by: str


def render_conversation(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    chat_template: str | None = None,
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = False,
    assistant_mask: bool = True,
    **template_kwargs: Any,
) -> RenderedConversation:
    r"""Renders one conversation on the tokenizer's own template and masks what the assistant produced.

    The mask is True on what the model itself emits after the generation prompt: reasoning, text and tool calls, up to
    and including the end-of-turn token. It is False on the role header and on the white space that the template adds
    after the end-of-turn token. What part of a turn is the header is decided by the generation prompt: where that ends
    with an opening thinking tag, so does the header. Turns are found by where the template writes them, never by
    looking for their text; a message may therefore repeat other messages or hold the template's own control tokens.

    The marks of a template with ``{% generation %}`` blocks decide which parts of each turn count, brought to the same
    definition: a header and trailing white space are taken out, an end-of-turn token left outside is taken in.

    A token that lies across the border of a turn counts as the assistant's (see the module ``_tokens`` for the one
    exception). A template that writes no end-of-turn token of its own (the next role's header stops the model) has none
    in the mask.

    Args:
        tokenizer: a transformers tokenizer, fast if at all possible.
        messages: dicts with ``role`` and ``content`` (text or a list of parts), ``tool_calls``, ``reasoning_content``
            and whatever else the template reads. Not changed.
        chat_template: a template or the name of one of the tokenizer's; default: the tokenizer's own, always.
        tools: tool schemas or functions for the template.
        add_generation_prompt: whether to end the text with the prompt for a further answer (never masked).
        assistant_mask: whether to look for the assistant's turns at all. Without, the mask is False everywhere, no turn
            is looked for, and so none can be missing.
        **template_kwargs: further variables of the template, such as ``enable_thinking=False``.

    Returns:
        Text, token ids and mask. Nothing is truncated or padded.

    Raises:
        MissingChatTemplateError: if there is no template to use.
        TurnNotFoundError: if an assistant turn can't be located with certainty.
        EmptyAssistantMaskError: if there are assistant turns but no token of theirs.

    Example:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = Tokenizer(models.WordLevel({"yes": 0, "no": 1, "or": 2, "<user>": 3, "<bot>": 4, "<end>": 5}))
        >>> words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
        >>> tokenizer.chat_template = (
        ...     "{% for m in messages %}{{ '<bot> ' if m.role == 'assistant' else '<user> ' }}{{ m.content }} <end>\n"
        ...     "{% endfor %}{% if add_generation_prompt %}<bot> {% endif %}")
        >>> chat = [{"role": "user", "content": "yes or no"}, {"role": "assistant", "content": "yes"}]
        >>> rendered = render_conversation(tokenizer, chat)
        >>> rendered.text
        '<user> yes or no <end>\n<bot> yes <end>\n'
        >>> tokenizer.decode(rendered.token_ids[rendered.assistant_mask])
        'yes <end>'
    """
    (rendered,) = render_conversations(
        tokenizer,
        [messages],
        chat_template=chat_template,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        assistant_mask=assistant_mask,
        **template_kwargs,
    )
    return rendered


def render_conversations(
    tokenizer: Any,
    conversations: Sequence[Sequence[Message]],
    *,
    chat_template: str | None = None,
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = False,
    assistant_mask: bool = True,
    **template_kwargs: Any,
) -> list[RenderedConversation]:
    """Renders several conversations, tokenised in one batch; see :func:`render_conversation`.

    Args:
        tokenizer: as there.
        conversations: one list of messages per conversation.
        chat_template: as there.
        tools: as there; the same for all.
        add_generation_prompt: as there.
        assistant_mask: as there.
        **template_kwargs: as there.

    Returns:
        One result per conversation, in order; lengths differ, nothing is padded.

    Raises:
        AssistantMaskError: as there; the message names the conversation.
        TypeError: if a conversation is not a list of dicts.
    """
    for index, messages in enumerate(conversations):
        _check_messages(messages, index)
    renderer = Renderer(tokenizer, chat_template, tools, template_kwargs)
    located = [
        locate_turns(renderer, messages, add_generation_prompt)
        if assistant_mask
        else Turns(renderer.text(messages, add_generation_prompt), (), "not asked")
        for messages in conversations
    ]
    encoded = encode_with_mask(tokenizer, [t.text for t in located], [t.spans for t in located]) if located else []
    results = [
        RenderedConversation(turns.text, token_ids, mask, turns.spans, turns.located_by)
        for turns, (token_ids, mask) in zip(located, encoded, strict=True)
    ]
    for index, (messages, result) in enumerate(zip(conversations, results, strict=True)):
        turns = sum(message.get("role") == ASSISTANT for message in messages)
        if assistant_mask and turns and not result.assistant_mask.any():
            raise EmptyAssistantMaskError(
                f"conversation {index} has {turns} assistant turn{'s' * (turns > 1)}, but {renderer.name} leaves no "
                f"token of theirs (found by: {result.located_by}). "
                + (
                    "Its {% generation %} blocks mark nothing here: correct them, or pass a template without any."
                    if renderer.has_marks
                    else "It writes neither their content nor an end-of-turn token: pass the model's own template as "
                    "`chat_template=`."
                )
            )
    return results


def _check_messages(messages: Any, index: int) -> None:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TypeError(
            f"conversation {index} is a {type(messages).__name__}; expected a list of message dicts. "
            "Convert a History with history_to_messages()."
        )
    if not messages:
        raise ValueError(f"conversation {index} has no messages; expected at least one.")
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise TypeError(
                f"message {position} of conversation {index} is {message!r:.80}; expected a dict with a 'role'."
            )
