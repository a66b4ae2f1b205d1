"""Render conversations to token ids and the mask of the assistant's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from torchrl_llm_kl.masks._lost import LostText
from torchrl_llm_kl.masks._messages import ASSISTANT, EmptyAssistantMaskError, Message, Tokenizer
from torchrl_llm_kl.masks._prepared import prepared
from torchrl_llm_kl.masks._template import Renderer
from torchrl_llm_kl.masks._tokens import encode_with_mask
from torchrl_llm_kl.masks._turns import LocatedTurns, locate_turns


@dataclass(frozen=True)
class RenderedConversation:
    """A rendered conversation.

    ``located_by`` is the method that found the spans: ``"contents"`` (the text is only the contents of the messages, after BOS
    at most), ``"marks"`` (the template's ``{% generation %}`` blocks), ``"trace"`` (following the template's loop over the
    messages) or ``"prefixes"`` (rendering the conversation up to each turn). It is ``"no assistant turn"`` if there is nothing
    to find, and ``"not asked"`` with ``assistant_mask=False``.
    """

    text: str  #: the rendered template
    token_ids: Tensor  #: int64 ``[T]``, the tokens of ``text``, without added special tokens
    assistant_mask: Tensor  #: bool ``[T]``, True for the assistant's tokens, always False for the first token
    assistant_spans: tuple[tuple[int, int], ...]  #: the assistant's ``(start, end)`` in ``text``, sorted and disjoint
    located_by: str
    messages: tuple[int, ...] = ()  #: the number of the message of each span
    lost: tuple[LostText, ...] = ()  #: texts of messages that the template does not write or changes


def render_conversation(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    chat_template: str | None = None,
    tools: Sequence[object] | None = None,
    add_generation_prompt: bool = False,
    assistant_mask: bool = True,
    **template_kwargs: object,
) -> RenderedConversation:
    r"""Render one conversation with the tokenizer's own template and mask the assistant's tokens.

    The mask is True for everything the model emits after the generation prompt: reasoning, text and tool calls, up to
    and including the end-of-turn token. It is False for the role header and for white space that the template adds
    after the end-of-turn token. The generation prompt defines the header: if the prompt ends with an opening thinking
    tag, so does the header. Turns are located by tracing the template's output, not by searching for their text, so a
    message may repeat other messages or contain the template's control tokens.

    In a template with ``{% generation %}`` blocks, the blocks select the parts of each turn. The same definition applies:
    headers and trailing white space are removed, and an end-of-turn token directly after a block is added.

    If the text is only the contents of the messages, as with :data:`PLAIN_TEMPLATE`, a turn is exactly its content, including
    white space at its edges.

    A token that straddles the border of a turn is masked in, unless it is a special token of the header that extends
    into the turn only by absorbing white space. If the template writes no end-of-turn token (the next role's header
    stops the model), the mask has none.

    Args:
        tokenizer: a transformers tokenizer, preferably a fast one.
        messages: dicts with ``role`` and ``content`` (text or a list of parts), ``tool_calls``, ``reasoning_content``
            and other keys that the template reads. Not modified.
        chat_template: a template, or the name of one of the tokenizer's templates. Default: the tokenizer's own.
        tools: tool schemas or functions for the template.
        add_generation_prompt: whether to end the text with the prompt for another answer (never masked in).
        assistant_mask: whether to locate the assistant's turns. If False, the mask is False everywhere, and a turn
            that cannot be located raises no error.
        **template_kwargs: further template variables, such as ``enable_thinking=False``.

    Returns:
        Text, token ids and mask, neither truncated nor padded.

    Raises:
        MissingChatTemplateError: if no template is available.
        TurnNotFoundError: if an assistant turn cannot be located with certainty.
        EmptyAssistantMaskError: if there are assistant turns but the mask is empty.

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
    tokenizer: Tokenizer,
    conversations: Sequence[Sequence[Message]],
    *,
    chat_template: str | None = None,
    tools: Sequence[object] | None = None,
    add_generation_prompt: bool = False,
    assistant_mask: bool = True,
    **template_kwargs: object,
) -> list[RenderedConversation]:
    """Render several conversations (lists of messages) and tokenise them in one batch.

    Returns one result per conversation, in order, without padding. See :func:`render_conversation` for arguments and errors.
    The arguments apply to all conversations, and an error names its conversation.

    Example:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = Tokenizer(models.WordLevel({"yes": 0, "no": 1, "<bot>": 2}))
        >>> words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
        >>> template = "{% for m in messages %}<bot> {{ m.content }} {% endfor %}"
        >>> chats = [[{"role": "assistant", "content": "yes"}], [{"role": "assistant", "content": "no yes"}]]
        >>> [r.assistant_mask.tolist() for r in render_conversations(tokenizer, chats, chat_template=template)]
        [[False, True], [False, True, True]]
    """
    for index, messages in enumerate(conversations):
        if not messages or not all("role" in message for message in messages):
            raise TypeError(f"conversation {index} is {messages!r:.80}, expected a list of dicts with `role`.")
    renderer = Renderer(tokenizer, chat_template, tools, template_kwargs)
    conversations = [prepared(renderer, messages) for messages in conversations]
    located = [
        locate_turns(renderer, messages, add_generation_prompt)
        if assistant_mask
        else LocatedTurns(renderer.text(messages, add_generation_prompt), (), (), "not asked")
        for messages in conversations
    ]
    if not located:
        return []
    encoded = encode_with_mask(tokenizer, [each.text for each in located], [each.spans for each in located])
    results = []
    for index, (each, (token_ids, mask)) in enumerate(zip(located, encoded, strict=True)):
        turns = sum(message.get("role") == ASSISTANT for message in conversations[index])
        if assistant_mask and turns and not mask.any():
            raise EmptyAssistantMaskError(
                f"conversation {index} has {turns} assistant turns, but {renderer.name} renders none of their tokens (located "
                f"by: {each.located_by}). Pass the model's own template (`chat_template=`), or correct its generation blocks."
            )
        results.append(
            RenderedConversation(each.text, token_ids, mask, each.spans, each.located_by, each.messages, each.lost)
        )
    return results
