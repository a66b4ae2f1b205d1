"""The response tokens of a rollout after another prompt, such as one with a hint for a teacher.

Everything before the assistant's first token is replaced. From that token on a sequence keeps its ids: replies, later
messages, and which of them are scored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_llm_kl.masks import Message, history_to_messages, render_conversations, split_images
from torchrl_llm_kl.ragged import EntryTypeError, Ragged, has_entry, read_ragged
from torchrl_llm_kl.rollouts._entries import MissingEntryError, describe_entries, require_key
from torchrl_llm_kl.rollouts._keys import ModelInterface, sub_key
from torchrl_llm_kl.rollouts._rendered import TokenisingOptions, read_conversations, row_histories
from torchrl_llm_kl.rollouts._tokens import Located, first_difference, locate, response_mask

#: Another prompt for the same response: ``function(history)``, ``function(history, row)``, or an entry with token ids.
Context = Callable[..., object] | str | tuple[str, ...]

_ASSISTANT = "assistant"


@dataclass(frozen=True, eq=False)
class InContext(Located):
    """Located tokens after another prompt.

    Args:
        tokens: the other prompts, each followed by its sequence from the assistant's first token on, ``[M]``.
        mask: True at the same tokens as in ``origin``, ``[M]``.
        source: as in ``origin``.
        sampled: as in ``origin``.
        origin: the tokens in the layout of the data.
    """

    origin: Located

    def back(self, scores: Ragged) -> Ragged:
        """Scores ``[M, *F]`` of these sequences at the tokens of ``origin``, ``[N, *F]``, 0 at all others. Differentiable."""
        values = scores.values
        out = values.new_zeros((self.origin.mask.shape[0], *values.shape[1:]))
        at = self.origin.mask.nonzero().squeeze(-1)
        return self.origin.tokens.like(out.index_put((at,), values[self.mask]))


def check_context(context: Any) -> Context:
    """Return ``context`` if it is a function or a key, else raise a TypeError."""
    is_key = isinstance(context, str) or (
        isinstance(context, tuple) and bool(context) and all(isinstance(name, str) for name in context)
    )
    if callable(context) or is_key:
        return context
    raise TypeError(f"the prompt must be a function or the key of an entry with token ids, got {context!r}.")


def in_context(
    td: TensorDictBase,
    located: Located,
    context: Context,
    interface: ModelInterface | None = None,
    options: TokenisingOptions | None = None,
) -> InContext:
    """Replace everything before the assistant's first token in each sequence.

    Args:
        td: the step that ``located`` was found in.
        located: its tokens, and which of them are scored: the assistant's.
        context: a function that returns a conversation with other messages before the assistant's first one, as a
            ``History`` or a list of message dicts; it gets the conversation, and the row of ``td`` if it takes a second
            argument. Or the entry of ``td`` that holds the ids of the other prompts: nested, lazily stacked, of one length,
            or padded with an ``"attention_mask"`` beside it (``("teacher", "input_ids")`` and ``("teacher",
            "attention_mask")``).
        interface: keys and tokenisation of the model; TorchRL's defaults if None.
        options: for conversations.

    Raises:
        KeyError: if the entry, or the conversation that a function needs, is missing.
        TypeError: if the entry holds no ids, or the function returns no conversation.
        ValueError: if the function changes a message from the assistant's first one on, its conversation renders to other
            tokens there, tokens of the prompt are to be scored, or a prompt has no tokens.

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
        prompts = _prompt_entry(td, context, tokens)
    rows, marks = [], []
    for i, (prompt, rest, scored) in enumerate(zip(prompts, kept, tokens.like(mask).to_list(), strict=True)):
        scored = scored[len(scored) - len(rest) :]
        if len(prompt) == 0 and bool(scored[:1].any()):
            raise ValueError(f"sequence {i}: the context has no tokens, and the first response token needs a prefix.")
        rows.append(torch.cat([prompt.to(rest), rest]))
        marks.append(torch.cat([scored.new_zeros(len(prompt)), scored]))
    moved = Ragged.from_list(rows, tokens.container.batch_shape)
    return InContext(moved, torch.cat(marks), located.source, located.sampled, located)


def _all_replies(td: TensorDictBase, located: Located, interface: ModelInterface, options: TokenisingOptions) -> Tensor:
    """The assistant's tokens of all turns, as far as the data shows them, ``[N]``."""
    if not located.sampled:
        is_text = _is_text(located, interface)
        return located.mask if is_text else locate(td, interface, scope="full", options=options).mask
    earlier, history = has_entry(td, interface.assistant_mask), sub_key(interface.history_key, "prompt")
    if not earlier and options.can_tokenise(interface) and has_entry(td, history):
        earlier = any(_replies_from(row) < len(row) for row in read_conversations(td, history))
    if earlier:
        return locate(td, interface, scope="full", options=options).mask
    response = response_mask(td, located.tokens, interface)
    if response is None:
        raise ValueError("a context replaces the prompt, whose end is unknown: add its tokens or a mask.")
    return response


def _is_text(located: Located, interface: ModelInterface) -> bool:
    """Whether the tokens were made from plain text, in which turns cannot be told apart."""
    own = located.source == interface.input_key and interface.input_mode == "text"
    return not located.sampled and (own or located.source == sub_key(interface.text_key, "full"))


# ------------------------------------------------------------------ prompts from an entry


def _prompt_entry(td: TensorDictBase, key: NestedKey, tokens: Ragged) -> list[Tensor]:
    """The ids under ``key``, a row for each sequence."""
    entry = require_key(td, key, "the context is missing", "Store the ids of the other prompts, or pass a function.")
    # Beside a key at the root, that name is the mask of the sampled tokens.
    nested = isinstance(key, tuple) and len(key) > 1 and isinstance(entry, tuple)
    prompts = read_ragged(td, entry, (*entry[:-1], "attention_mask") if nested else None)
    assert prompts is not None
    values = prompts.values
    if values.ndim != 1 or values.is_floating_point() or values.dtype == torch.bool:
        raise EntryTypeError(f"expected rows of token ids under {entry!r}, found {values.dtype} {list(values.shape)}.")
    if prompts.num_sequences != tokens.num_sequences:
        raise ValueError(f"{key!r} has {prompts.num_sequences} prompts for {tokens.num_sequences} sequences.")
    return prompts.to_list()


# ------------------------------------------------------------------ prompts from conversations


def _replies_from(messages: list[Message]) -> int:
    """The place of the assistant's first message; the number of messages if there is none."""
    return next((i for i, message in enumerate(messages) if message.get("role") == _ASSISTANT), len(messages))


def _prompts_of(
    td: TensorDictBase,
    context: Callable[..., object],
    located: Located,
    kept: list[Tensor],
    interface: ModelInterface,
    options: TokenisingOptions,
) -> list[Tensor]:
    """The tokens before the assistant's first one in the conversations that ``context`` returns."""
    full, prompt = (sub_key(interface.history_key, name) for name in ("full", "prompt"))
    key = located.source if not located.sampled else full if has_entry(td, full) else prompt
    if _is_text(located, interface) or not has_entry(td, key):
        raise MissingEntryError(f"a context function needs {full!r}, found: {describe_entries(td)}.")
    if not options.can_tokenise(interface):
        raise ValueError("a context function needs a tokenizer: pass tokenizer=, or a key of token ids.")
    conversations = _called(context, td, key)
    for row, messages in enumerate(conversations):
        if split_images(messages)[1]:
            raise ValueError(f"sequence {row}: a context function takes only text, and the conversation has images.")
    tokenizer, kwargs = options.resolve(interface)
    kwargs.pop("add_generation_prompt", None)
    if located.sampled:  # rendered as a sampler's prompt
        cut = [messages[: _replies_from(messages)] for messages in conversations]
        rendered = render_conversations(tokenizer, cut, add_generation_prompt=True, assistant_mask=False, **kwargs)
        return [one.token_ids for one in rendered]
    prompts, replies = [], []
    for one in render_conversations(tokenizer, conversations, **kwargs):
        start = [*one.assistant_mask.tolist(), True].index(True)
        prompts.append(one.token_ids[:start])
        replies.append(one.token_ids[start:])
    expected = Ragged.from_list([row.cpu().long() for row in kept])
    difference = first_difference(Ragged.from_list(replies), expected)
    if difference is not None:
        row, at = difference
        raise ValueError(
            f"sequence {row}: after the context the template renders other tokens of the assistant, {at} tokens after its "
            "first: store the sampled tokens."
        )
    return prompts


def _called(context: Callable[..., object], td: TensorDictBase, key: NestedKey) -> list[list[Message]]:
    """The conversations that ``context`` returns, as message dicts; the assistant's part is unchanged."""
    histories = row_histories(td, key)
    data = td.reshape(-1).unbind(0) if _takes_row(context) else None
    out = []
    for i, history in enumerate(histories):
        before = history_to_messages(history)
        given = history.clone()
        returned = context(given) if data is None else context(given, data[i])
        after = _messages(returned, i)
        old, new = before[_replies_from(before) :], after[_replies_from(after) :]
        if old != new:
            raise ValueError(f"sequence {i}: the context function changed the answer {old!r:.160} to {new!r:.160}.")
        if _replies_from(after) == 0:
            raise ValueError(f"sequence {i}: the context function returned no message before the assistant's.")
        out.append(after)
    return out


def _messages(returned: object, row: int) -> list[Message]:
    if isinstance(returned, list) and all(isinstance(message, dict) and "role" in message for message in returned):
        return returned
    from torchrl.data.llm import History

    if not isinstance(returned, History) or returned.batch_dims != 1:
        shape = f" of batch size {tuple(returned.batch_size)}" if isinstance(returned, History) else ""
        raise TypeError(
            f"sequence {row}: the context function must return a History [messages], got {type(returned).__name__}{shape}."
        )
    return history_to_messages(returned)


def _takes_row(function: Callable[..., object]) -> bool:
    """Whether a function requires a second positional argument."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in positional and one.default is one.empty for one in parameters) > 1
