"""The response tokens of a rollout after another prompt, such as one with a hint for a teacher.

Everything before the assistant's first token is replaced. From that token on, the sequence keeps its ids and its mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_llm_kl.masks import Message, history_to_messages, render_conversations, split_images
from torchrl_llm_kl.ragged import EntryTypeError, Ragged, has_entry, read_ragged
from torchrl_llm_kl.rollouts._entries import (
    MissingEntryError,
    ModelInterface,
    describe_entries,
    require_key,
    sub_key,
)
from torchrl_llm_kl.rollouts._rendered import TokenisingOptions, conversations_of, row_histories
from torchrl_llm_kl.rollouts._tokens import Located, first_difference, locate, response_mask

#: Another prompt for the same response: ``function(history)``, ``function(history, row)``, or the key of its token ids.
Context = Callable[..., object] | str | tuple[str, ...]

_ASSISTANT = "assistant"


@dataclass(frozen=True, eq=False)
class InContext(Located):
    """Located tokens after another prompt.

    Args:
        tokens: each other prompt, followed by the sequence from the assistant's first token on, ``[M]``.
        mask: True at the same tokens as in ``origin``, ``[M]``.
        source: as in ``origin``.
        sampled: as in ``origin``.
        origin: the tokens in the layout of the data.
    """

    origin: Located

    def back(self, scores: Ragged) -> Ragged:
        """Move scores ``[M, *F]`` of these sequences to the tokens of ``origin``, ``[N, *F]``, 0 elsewhere. Differentiable."""
        values = scores.values
        out = values.new_zeros((self.origin.mask.shape[0], *values.shape[1:]))
        at = self.origin.mask.nonzero().squeeze(-1)
        return self.origin.tokens.like(out.index_put((at,), values[self.mask]))


def in_context(
    td: TensorDictBase,
    located: Located,
    context: Context,
    interface: ModelInterface | None = None,
    options: TokenisingOptions | None = None,
) -> InContext:
    """Replace everything before the assistant's first token in each sequence.

    Args:
        td: the step.
        located: its tokens. The mask must select only tokens of the assistant.
        context: a function that returns a conversation with other messages before the assistant's first one, as a
            ``History`` or a list of message dicts. It receives the conversation, and also the row of ``td`` if it takes a
            second argument. Alternatively the key of the other prompts' token ids: nested, lazily stacked, of one length, or
            padded with an ``"attention_mask"`` beside them (``("teacher", "input_ids")`` and ``("teacher",
            "attention_mask")``).
        interface: keys and tokenisation of the model. Default: TorchRL's.
        options: how conversations are tokenised.

    Raises:
        KeyError: if the entry, or the conversation that a function needs, is missing.
        TypeError: if the entry holds floating-point numbers.
        ValueError: if the function changes a message from the assistant's first one on, if the template renders that part to
            other tokens, or if the mask selects tokens of the prompt.

    Example:
        >>> from tensordict import TensorDict
        >>> tokens = TensorDict(prompt=torch.tensor([[3, 4]]), full=torch.tensor([[3, 4, 5, 6]]), batch_size=[1])
        >>> td = TensorDict(tokens=tokens, hint=torch.tensor([[8, 9, 7]]), batch_size=[1])
        >>> moved = in_context(td, locate(td), "hint")
        >>> moved.tokens.values.tolist(), moved.mask.tolist()
        ([8, 9, 7, 5, 6], [False, False, False, True, True])
        >>> moved.back(moved.tokens).values.tolist()
        [0, 0, 5, 6]
    """
    interface = ModelInterface() if interface is None else interface
    options = TokenisingOptions() if options is None else options
    tokens, mask = located.tokens, located.mask
    starts = tokens.first_true(_all_replies(td, located, interface, options))
    early = mask & (tokens.positions < starts[tokens.sequence_ids])
    if bool(early.any()):
        row = int(tokens.sequence_ids[early.nonzero()[0, 0]])
        raise ValueError(f"sequence {row}: a context replaces the prompt, so set assistant_only=True.")
    kept = [row[start:] for row, start in zip(tokens.to_list(), starts.tolist(), strict=True)]
    if callable(context):
        prompts = _prompts_of(td, context, located, kept, interface, options)
    else:
        prompts = _prompts_in_entry(td, context)
    rows, marks = [], []
    for prompt, rest, scored in zip(prompts, kept, tokens.like(mask).to_list(), strict=True):
        scored = scored[len(scored) - len(rest) :]
        rows.append(torch.cat([prompt.to(rest), rest]))
        marks.append(torch.cat([scored.new_zeros(len(prompt)), scored]))
    moved = Ragged.from_list(rows, tokens.container.batch_shape)
    return InContext(moved, torch.cat(marks), located.source, located.sampled, located)


def _all_replies(td: TensorDictBase, located: Located, interface: ModelInterface, options: TokenisingOptions) -> Tensor:
    """The assistant's tokens of all turns that the data identifies, ``[N]``."""
    if not located.sampled:
        is_text = _is_text(located, interface)
        return located.mask if is_text else locate(td, interface, scope="full", options=options).mask
    earlier, history = has_entry(td, interface.assistant_mask), sub_key(interface.history_key, "prompt")
    if not earlier and options.can_tokenise(interface) and has_entry(td, history):
        earlier = any(_replies_from(row) < len(row) for row in conversations_of(td, history))
    if earlier:
        return locate(td, interface, scope="full", options=options).mask
    response = response_mask(td, located.tokens, interface)
    if response is None:
        raise ValueError("a context replaces the prompt, whose end is unknown: add the prompt's tokens or a mask.")
    return response


def _is_text(located: Located, interface: ModelInterface) -> bool:
    """Whether the tokens come from plain text, in which turns cannot be distinguished."""
    own = located.source == interface.input_key and interface.input_mode == "text"
    return not located.sampled and (own or located.source == sub_key(interface.text_key, "full"))


# ------------------------------------------------------------------ prompts from an entry


def _prompts_in_entry(td: TensorDictBase, key: NestedKey) -> list[Tensor]:
    """The ids under ``key``, one row for each sequence."""
    entry = require_key(td, key, "the context is missing", "Store the ids of the other prompts, or pass a function.")
    # At the root, "attention_mask" belongs to the sampled tokens, so it is only read beside a nested key.
    nested = isinstance(key, tuple) and len(key) > 1 and isinstance(entry, tuple)
    prompts = read_ragged(td, entry, (*entry[:-1], "attention_mask") if nested else None)
    assert prompts is not None
    if prompts.values.is_floating_point():
        raise EntryTypeError(f"expected token ids under {entry!r}, found {prompts.values.dtype}.")
    return prompts.to_list()


# ------------------------------------------------------------------ prompts from conversations


def _replies_from(messages: list[Message]) -> int:
    """The index of the assistant's first message, or the number of messages if the assistant has none."""
    return next((i for i, message in enumerate(messages) if message.get("role") == _ASSISTANT), len(messages))


def _prompts_of(
    td: TensorDictBase,
    context: Callable[..., object],
    located: Located,
    kept: list[Tensor],
    interface: ModelInterface,
    options: TokenisingOptions,
) -> list[Tensor]:
    """The tokens before the assistant's first token, for the conversations that ``context`` returns."""
    full, prompt = (sub_key(interface.history_key, name) for name in ("full", "prompt"))
    key = located.source if not located.sampled else full if has_entry(td, full) else prompt
    if _is_text(located, interface) or not has_entry(td, key):
        raise MissingEntryError(f"a context function needs {full!r}, found: {describe_entries(td)}.")
    conversations = _called(context, td, key)
    for row, messages in enumerate(conversations):
        if split_images(messages)[1]:
            raise ValueError(f"sequence {row}: a context function takes only text, but the conversation has images.")
    tokenizer, kwargs = options.resolve(interface)
    kwargs.pop("add_generation_prompt", None)
    if located.sampled:  # the sampled answer follows, so render only the prompt, as a sampler would see it
        cut = [messages[: _replies_from(messages)] for messages in conversations]
        rendered = render_conversations(tokenizer, cut, add_generation_prompt=True, assistant_mask=False, **kwargs)
        return [one.token_ids for one in rendered]
    prompts, replies = [], []
    for one in render_conversations(tokenizer, conversations, **kwargs):
        start = [*one.assistant_mask.tolist(), True].index(True)
        prompts.append(one.token_ids[:start])
        replies.append(one.token_ids[start:])
    expected = Ragged.from_list([row.cpu().long() for row in kept])
    # A template may render the replies differently after another prompt.
    difference = first_difference(Ragged.from_list(replies), expected)
    if difference is not None:
        row, _ = difference
        raise ValueError(f"sequence {row}: after the context the template renders other tokens. Store sampled tokens.")
    return prompts


def _called(context: Callable[..., object], td: TensorDictBase, key: NestedKey) -> list[list[Message]]:
    """The conversations that ``context`` returns, as message dicts. Checks that the assistant's part is unchanged."""
    histories = row_histories(td, key)
    data = td.reshape(-1).unbind(0) if _takes_row(context) else None
    out = []
    for i, history in enumerate(histories):
        before = history_to_messages(history)
        given = history.clone()  # the function may change it in place
        returned = context(given) if data is None else context(given, data[i])
        after = returned if isinstance(returned, list) else history_to_messages(returned)
        old, new = before[_replies_from(before) :], after[_replies_from(after) :]
        if old != new:
            raise ValueError(f"sequence {i}: the context function changed the answer {old!r:.160} to {new!r:.160}.")
        out.append(after)
    return out


def _takes_row(function: Callable[..., object]) -> bool:
    """Whether a function requires a second positional argument."""
    try:
        inspect.signature(function).bind(None)
    except TypeError:  # one argument is too few
        return True
    except ValueError:  # some functions in C have no signature
        return False
    return False
