"""Token ids rendered from text or conversations, for data that holds no sampled tokens."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import TYPE_CHECKING, Literal, cast

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_llm_kl._private import chat_templates
from torchrl_llm_kl._typing import ImageRows, asked
from torchrl_llm_kl.masks import (
    Message,
    RenderedConversation,
    TemplateArgs,
    Tokenizer,
    encode_images,
    encode_with_mask,
    history_to_messages,
    is_processor,
    render_conversations,
    split_images,
)
from torchrl_llm_kl.ragged import (
    Dense,
    EntryTypeError,
    Jagged,
    Node,
    PaddingSide,
    Ragged,
    Rows,
    Strided,
    check_padding_side,
    has_entry,
    read_column,
)
from torchrl_llm_kl.rollouts._entries import ModelInterface, leaves, sub_key

if TYPE_CHECKING:
    from torchrl.data.llm import History

#: ``"turn"`` selects the response of each step, and ``"full"`` also the assistant's earlier turns.
Scope = Literal["turn", "full"]

# torchrl's defaults for `tokenizer_kwargs`. They match the rendering here and are accepted for that reason.
_IMPLIED: dict[str, tuple[object, ...]] = {
    "return_assistant_tokens_mask": (True,),
    "tokenize": (True,),
    "return_dict": (True,),
    "return_tensors": ("pt", None),
    "padding": (True, False),
}


@dataclass(frozen=True)
class TokenisingOptions:
    """How text becomes tokens. The fields are arguments of the transforms, checked by :meth:`make`.

    Args:
        tokenizer: replaces the model's own tokenizer. A processor for conversations with images.
        padding_side: the side of padding for a model with ``pad_output=True``.
        template_kwargs: the chat template's arguments, which override the model's own.

    Example:
        >>> TokenisingOptions.make(None, {"padding": True, "chat_template": "..."}, "left").template_kwargs
        {'chat_template': '...'}
    """

    tokenizer: Tokenizer | None = None
    padding_side: PaddingSide = "left"
    template_kwargs: TemplateArgs = field(default_factory=dict)

    @classmethod
    def make(
        cls, tokenizer: Tokenizer | None, tokenizer_kwargs: TemplateArgs | None, padding_side: str
    ) -> TokenisingOptions:
        """Check torchrl's arguments. ``tokenizer_kwargs`` is copied, never changed.

        Raises:
            ValueError: for an unsupported argument.
        """
        kwargs = dict(tokenizer_kwargs or {})
        for name, allowed in _IMPLIED.items():
            value = kwargs.pop(name, allowed[0])
            if value not in allowed:
                raise ValueError(f"tokenizer_kwargs[{name!r}]={value!r} is not supported. Leave it out.")
        return cls(tokenizer, check_padding_side(padding_side), kwargs)

    def can_tokenise(self, interface: ModelInterface) -> bool:
        """Whether the transform or the model has a tokenizer."""
        return (self.tokenizer or interface.tokenizer) is not None

    def resolve(self, interface: ModelInterface) -> tuple[Tokenizer, TemplateArgs]:
        """The tokenizer (taken from a processor if necessary) and the template arguments for a model.

        Raises:
            ValueError: if there is no tokenizer.
            KeyError: if there is no chat template of the given name.
        """
        tokenizer = self.tokenizer if self.tokenizer is not None else interface.tokenizer
        if tokenizer is None:
            raise ValueError("rendering needs a tokenizer: pass `tokenizer=` to the transform or the wrapper.")
        kwargs = {**interface.template_kwargs, **self.template_kwargs}
        if is_processor(tokenizer):
            # A processor's own template renders its image placeholders.
            kwargs.setdefault("chat_template", asked(tokenizer, "chat_template", object))
            tokenizer = cast(Tokenizer, vars(tokenizer)["tokenizer"])
        name = kwargs.pop("chat_template_name", None)
        if name is not None and kwargs.get("chat_template") is None:
            own = asked(tokenizer, "chat_template", (Mapping,)) or {}
            kwargs["chat_template"] = {**chat_templates(), **own}[name]
        return tokenizer, kwargs


# ------------------------------------------------------------------ conversations


def render_history(
    td: TensorDictBase,
    interface: ModelInterface,
    options: TokenisingOptions,
    *,
    key: NestedKey,
    scope: Scope,
    assistant_only: bool = True,
    add_generation_prompt: bool = False,
) -> tuple[Ragged, Tensor, ImageRows | None]:
    """Render and tokenise the conversations under ``key`` with the model's own chat template.

    With ``scope="turn"`` and a separate prompt entry, the mask covers only the turns after the prompt.

    Returns:
        Token ids ``[N]``, the mask ``[N]`` of the assistant's tokens (all True without ``assistant_only``), and the
        processor's output for the images of each row, or None without images.
    """
    tokenizer, kwargs = options.resolve(interface)
    processor = options.tokenizer or interface.tokenizer
    apart = [split_images(messages) for messages in conversations_of(td, key)]
    conversations, images = [messages for messages, _ in apart], [some for _, some in apart]
    add_generation_prompt = kwargs.pop("add_generation_prompt", False) or add_generation_prompt
    rendered = render_conversations(
        tokenizer, conversations, add_generation_prompt=add_generation_prompt, assistant_mask=assistant_only, **kwargs
    )
    masks = [r.assistant_mask for r in rendered]
    spans: list[Sequence[tuple[int, int]]] = [r.assistant_spans for r in rendered]
    prompt_key = sub_key(interface.history_key, "prompt")
    if assistant_only and scope == "turn" and key != prompt_key and has_entry(td, prompt_key):
        prompts = [split_images(prompt)[0] for prompt in conversations_of(td, prompt_key)]
        masks, spans = _response_masks(tokenizer, rendered, conversations, prompts, kwargs)
    ids = [r.token_ids for r in rendered]
    inputs: list[Mapping[str, object] | None] = [None] * len(rendered)
    for row, some in enumerate(images):
        if some and not is_processor(processor):
            raise ValueError(f"sequence {row} has {len(some)} images: pass the model's processor as `tokenizer=`.")
        if some:
            ((ids[row], masks[row]),), inputs[row] = encode_images(processor, rendered[row].text, some, spans[row])
    if not assistant_only:
        masks = [torch.ones_like(mask) for mask in masks]
    return *_arrange(td, interface, options, ids, masks), inputs if any(images) else None


def _response_masks(
    tokenizer: Tokenizer,
    rendered: list[RenderedConversation],
    conversations: list[list[Message]],
    prompts: list[list[Message]],
    kwargs: TemplateArgs,
) -> tuple[list[Tensor], list[Sequence[tuple[int, int]]]]:
    """Masks and spans of the turns after the prompt."""
    for row, (conversation, prompt) in enumerate(zip(conversations, prompts, strict=True)):
        if conversation[: len(prompt)] != prompt:
            raise ValueError(f"sequence {row}: the conversation does not start with its prompt: use scope='full'.")
    # The prompt's turns come first in the conversation, so the response's spans are those after that many.
    earlier = [len(r.assistant_spans) for r in render_conversations(tokenizer, prompts, **kwargs)]
    spans: list[Sequence[tuple[int, int]]] = [r.assistant_spans[n:] for r, n in zip(rendered, earlier, strict=True)]
    masks = [mask for _, mask in encode_with_mask(tokenizer, [r.text for r in rendered], spans)]
    for row, (conversation, prompt, mask) in enumerate(zip(conversations, prompts, masks, strict=True)):
        if not mask.any() and any(message["role"] == "assistant" for message in conversation[len(prompt) :]):
            raise ValueError(f"sequence {row}: the chat template renders nothing of the response. Use another.")
    return masks, spans


def read_conversations(td: TensorDictBase, key: NestedKey) -> list[list[Message]] | None:
    """The conversations under ``key`` as lists of messages, one for each row. None if the entry is missing."""
    return conversations_of(td, key) if has_entry(td, key) else None


def conversations_of(td: TensorDictBase, key: NestedKey) -> list[list[Message]]:
    """:func:`read_conversations` for an entry that exists."""
    return [history_to_messages(row) for row in _rows_of(td, key)]


def row_histories(td: TensorDictBase, key: NestedKey) -> list[History]:
    """The conversations under ``key``, one ``History`` of batch size ``[messages]`` for each row, without placeholders."""
    rows = []
    for row in _rows_of(td, key):
        real = [i for i, message in enumerate(row.unbind(0)) if history_to_messages(message)]
        rows.append(row if len(real) == len(row) else row[real])
    return rows


def _rows_of(td: TensorDictBase, key: NestedKey) -> list[History]:
    """A ``History`` for each row of the batch."""
    column = td.get(key, None) if isinstance(key, str) else read_column(td, key)
    rows = [_as_history(row, key) for row in (column if isinstance(column, list) else [column])]
    for _ in range(0 if isinstance(column, list) else td.batch_dims):
        rows = [row for part in rows for row in part.unbind(0)]
    return rows


def _as_history(value: object, key: NestedKey) -> History:
    from torchrl.data.llm import History

    if isinstance(value, TensorDictBase):
        return History.from_tensordict(value)
    if not isinstance(value, History):
        raise EntryTypeError(f"expected a torchrl History under {key!r}, found {type(value).__name__}.")
    return value


# ------------------------------------------------------------------ plain text


def render_text(
    td: TensorDictBase,
    interface: ModelInterface,
    options: TokenisingOptions,
    *,
    key: NestedKey,
    scope: Scope,
    assistant_only: bool = True,
) -> tuple[Ragged, Tensor, None]:
    """Tokenise the texts under ``key``. The assistant's part follows the prompt's text. Returns as :func:`render_history`."""
    tokenizer, _ = options.resolve(interface)
    if options.template_kwargs:
        raise ValueError(f"input_mode='text' renders no template. Leave out {sorted(options.template_kwargs)}.")
    texts = _texts(read_column(td, key), td, key)
    starts = [0] * len(texts)
    if assistant_only:
        prompt_key = sub_key(interface.text_key, "prompt")
        column = read_column(td, prompt_key)
        if column is None or scope == "full":
            reason = f": found no {prompt_key!r} beside it" if column is None else " in earlier turns (scope='full')"
            raise ValueError(
                f"cannot tell which part of {key!r} the assistant wrote{reason}. Use input_mode='history'."
            )
        prompts = _texts(column, td, prompt_key)
        starts = [_common_prefix(text, prompts[row], row) for row, text in enumerate(texts)]
    spans = [[(start, len(text))] if start < len(text) else [] for text, start in zip(texts, starts, strict=True)]
    pairs = encode_with_mask(tokenizer, texts, spans, add_bos=interface.adds_special)
    return *_arrange(td, interface, options, [ids for ids, _ in pairs], [mask for _, mask in pairs]), None


def _texts(column: Node, td: TensorDictBase, key: NestedKey) -> list[str]:
    flat = list(leaves(column))
    if len(flat) != td.batch_size.numel() or not all(isinstance(text, str) for text in flat):
        raise EntryTypeError(f"expected {td.batch_size.numel()} strings under {key!r}, found {flat!r:.60}.")
    return flat


def _common_prefix(text: str, prompt: str, row: int) -> int:
    start = len(commonprefix([text, prompt]))  # noqa: RUF071  # of characters, not of folders
    if start < len(prompt):
        warnings.warn(
            f"sequence {row}: the full text does not start with its prompt. They differ from character {start} on. The text "
            "after the common prefix is scored as the assistant's.",
            stacklevel=2,
        )
    return start


# ------------------------------------------------------------------ layout


def _arrange(
    td: TensorDictBase,
    interface: ModelInterface,
    options: TokenisingOptions,
    ids: list[Tensor],
    masks: list[Tensor],
) -> tuple[Ragged, Tensor]:
    """Put rows in the layout that the model's settings request: padded, nested, or leaves of a lazy stack."""
    device = td.device or torch.device("cpu")
    rows = Ragged.from_list([row.to(device) for row in ids], td.batch_size)
    mask = torch.cat(masks).to(device).bool()
    if interface.pad_output:
        return _padded(rows, options.padding_side), mask
    return _unpadded(rows, interface.layout), mask


def in_layout(data: Ragged, interface: ModelInterface, side: PaddingSide) -> Ragged:
    """Put ``data`` in the layout of a model's output. A model without ``pad_output`` leaves it unchanged.

    ``pad_output=False`` gives nested rows or the leaves of a lazy stack. ``pad_output=True`` pads a nested tensor on ``side``.
    The leaves of a lazy stack keep their own widths.

    Example:
        >>> ids = torch.tensor([[3, 4, 5], [6, 0, 0]])
        >>> data = Ragged.from_padded(ids, mask=ids > 0)
        >>> in_layout(data, ModelInterface(pad_output=False), "left").restore()
        [tensor([3, 4, 5]), tensor([6])]
    """
    nested = isinstance(data.container, (Strided, Jagged))
    if interface.pad_output and nested:
        return _padded(data, side)
    if interface.pad_output is False and (data.keep is not None or isinstance(data.container, Dense)):
        rows = Rows(data.sizes, data.container.batch_shape, data.values.device)
        return _unpadded(Ragged(data.values, None, rows), interface.layout)
    return data


def _padded(rows: Ragged, side: PaddingSide) -> Ragged:
    padded, keep, batch = rows.to_padded(side=side), rows.padding_mask(side=side), rows.container.batch_shape
    shape = (*batch, padded.shape[1])
    return Ragged.from_padded(
        padded.reshape(*shape, *padded.shape[2:]), mask=keep.reshape(shape), batch_dims=len(batch)
    )


def _unpadded(rows: Ragged, layout: torch.layout) -> Ragged:
    if layout == torch.jagged and len(rows.container.batch_shape) == 1:
        return Ragged.from_nested(rows.to_nested(torch.jagged))
    return rows
