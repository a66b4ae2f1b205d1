"""What is scored: the sampled tokens, and which of them the assistant produced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_llm_kl.ragged import Ragged, has_entry, read_ragged, same_rows
from torchrl_llm_kl.transforms._errors import MissingEntryError, entries
from torchrl_llm_kl.transforms._interface import ModelInterface, sub_key
from torchrl_llm_kl.transforms._rendered import TokenisingOptions, render_history, render_text

__all__ = ["Located", "Scope", "counted_mask", "locate", "response_mask"]

Scope = Literal["turn", "full"]


@dataclass(frozen=True, eq=False)
class Located:
    """Token ids in the form that the data has them, and which of them count.

    Args:
        tokens: token ids; ``[N]``.
        mask: True where a token is scored; ``[N]``. Never the first token of a sequence.
        source: the entry that the tokens came from.
        sampled: False if the tokens were made from text, not sampled.
    """

    tokens: Ragged
    mask: Tensor
    source: NestedKey
    sampled: bool


def locate(
    td: TensorDictBase,
    interface: ModelInterface,
    *,
    assistant_only: bool,
    scope: Scope,
    options: TokenisingOptions,
) -> Located:
    """Find the tokens of a step or a conversation, and the mask of those that count.

    Sampled tokens come first: they are what the policy produced, and their bookkeeping (where the prompt ended) tells
    what the assistant said without a template. Text and history are rendered and tokenised only when the data holds no
    tokens.

    Raises:
        KeyError: if there is nothing to score.
        ValueError: if the assistant's tokens cannot be told from the prompt.
    """
    tokens_full = interface.tokens_full
    tokens = _read_tokens(td, tokens_full, interface)
    if tokens is not None:
        return _locate_sampled(td, tokens, tokens_full, interface, assistant_only, scope, options)
    source = _text_source(td, interface, options)
    if source is None:
        expected = sorted({str(tokens_full), str(interface.input_key)})
        raise MissingEntryError(
            f"nothing to score: expected {' or '.join(expected)} in the TensorDict, found: "
            f"{entries(td)}. Run the policy first, or give the model the `input_key` that holds the data."
        )
    kind, key = source
    render = render_history if kind == "history" else render_text
    tokens, mask = render(td, interface, key=key, scope=scope, assistant_only=assistant_only, options=options)
    return Located(tokens, mask & (tokens.positions > 0), key, sampled=False)


def _text_source(
    td: TensorDictBase, interface: ModelInterface, options: TokenisingOptions
) -> tuple[str, NestedKey] | None:
    """The model's own input if it is text or a history; else any that the data has, for a model with a tokenizer."""
    candidates = [(interface.input_mode, interface.input_key)]
    if (options.tokenizer or interface.tokenizer) is not None:
        candidates += [
            ("history", sub_key(interface.history_key, "full")),
            ("text", sub_key(interface.text_key, "full")),
        ]
    return next(((kind, key) for kind, key in candidates if kind != "tokens" and has_entry(td, key)), None)


def _read_tokens(td: TensorDictBase, key: NestedKey, interface: ModelInterface) -> Ragged | None:
    attention = sub_key(interface.masks_key, "all_attention_mask")
    mask_key = attention if has_entry(td, attention) else interface.attention_mask_key
    tokens = read_ragged(td, key, mask_key)
    if tokens is not None and tokens.values.is_floating_point():
        raise TypeError(f"expected integer token ids under {key!r}, found {tokens.values.dtype}")
    return tokens


def _locate_sampled(
    td: TensorDictBase,
    tokens: Ragged,
    key: NestedKey,
    interface: ModelInterface,
    assistant_only: bool,
    scope: Scope,
    options: TokenisingOptions,
) -> Located:
    after_first = tokens.positions > 0
    if not assistant_only:
        return Located(tokens, after_first, key, sampled=True)
    given = _given_mask(td, tokens, interface)
    response = response_mask(td, tokens, interface)
    if given is not None:
        mask = given if response is None or scope == "full" else given & response
        _check_given(mask, response, tokens, interface)
    elif response is not None:
        mask = response if scope == "turn" else _with_earlier_turns(td, tokens, response, interface, options)
    else:
        found = _mask_of_history(td, tokens, interface, options)
        if found is None:
            raise ValueError(
                f"cannot tell which tokens the assistant produced: found {key!r}, but neither "
                f"{sub_key(interface.tokens_key, 'prompt')!r} nor {sub_key(interface.masks_key, 'all_assistant_mask')!r} "
                f"nor a history that renders to these tokens. Add one of them, or set assistant_only=False."
            )
        mask = found
    return Located(tokens, mask & after_first, key, sampled=True)


def counted_mask(
    td: TensorDictBase, tokens: Ragged, interface: ModelInterface, *, every: Ragged | None = None
) -> Tensor | None:
    """What counts as the assistant's in a step, as far as mask and bookkeeping tell; ``[N]``, or None if neither does."""
    given, response = _given_mask(td, tokens, interface), response_mask(td, tokens, interface, every=every)
    if given is None or response is None:
        return response if given is None else given
    return given & response


def _given_mask(td: TensorDictBase, tokens: Ragged, interface: ModelInterface) -> Tensor | None:
    key = sub_key(interface.masks_key, "all_assistant_mask")
    given = read_ragged(td, key)
    if given is None:
        return None
    return _at_tokens(given.slots(), given, tokens, key)


def _at_tokens(slots: Tensor, found: Ragged, tokens: Ragged, key: NestedKey) -> Tensor:
    """Slot values at the kept positions of ``tokens``, checked to have the same form."""
    if not same_rows(tokens.container, found.container):
        raise ValueError(
            f"{key!r} must have the length of the tokens: found row lengths {found.container.row_sizes}, "
            f"expected {tokens.container.row_sizes}"
        )
    slots = slots.bool()
    return slots if tokens.keep is None else slots[tokens.keep]


def _check_given(mask: Tensor, response: Tensor | None, tokens: Ragged, interface: ModelInterface) -> None:
    """A given mask that is False all over a sequence in which the assistant spoke would silently score nothing."""
    spoken = tokens.lengths > 0 if response is None else tokens.like(response.long()).sum() > 0
    empty = spoken & (tokens.like(mask.long()).sum() == 0)
    if bool(empty.any()):
        row = int(empty.nonzero()[0])
        raise ValueError(
            f"sequence {row}: {sub_key(interface.masks_key, 'all_assistant_mask')!r} is False everywhere"
            f"{'' if response is None else ' in its response'}: the template {_template_name(interface)} marked no assistant "
            f"turn. Remove the mask entry to use the rollout's own bookkeeping, or mask with this package's "
            f"render_conversations; a conversation without assistant turns needs assistant_only=False."
        )


def _template_name(interface: ModelInterface) -> str:
    template = interface.template_kwargs.get("chat_template_name") or getattr(
        interface.tokenizer, "chat_template", None
    )
    return repr(str(template)[:60]) if template else "(unknown)"


def response_mask(
    td: TensorDictBase, tokens: Ragged, interface: ModelInterface, *, every: Ragged | None = None
) -> Tensor | None:
    """True behind the prompt, by the bookkeeping of the rollout; ``[N]``, or None if the data has no prompt tokens.

    The prompt may be padded as the whole sequence is (its slots are then the first ones of the sequence), or hold the
    prompt's own tokens alone.

    Args:
        td: the step.
        tokens: the sequences, without padding.
        interface: says where the prompt is.
        every: the same with the padding's own ids, which the prompt has too; read if it is not given.

    Raises:
        ValueError: if the sampled sequence does not start with its prompt.
    """
    key = sub_key(interface.tokens_key, "prompt")
    prompt = read_ragged(td, key)
    if prompt is None or prompt.num_sequences != tokens.num_sequences:
        return None
    widths = prompt.container.row_lengths
    every = read_ragged(td, interface.tokens_full) if every is None else every
    assert every is not None
    too_long = widths > every.lengths
    if bool(too_long.any()):
        row = int(too_long.nonzero()[0])
        raise ValueError(
            f"sequence {row}: {key!r} has {int(widths[row])} tokens, more than the {int(every.lengths[row])} of the "
            f"whole sequence. A rollout's full tokens are prompt + response: pass both from the same step."
        )
    in_prompt = every.first(widths)
    if torch.equal(prompt.slots(), every.values[in_prompt]):
        return ~in_prompt if tokens.keep is None else ~in_prompt[tokens.keep]
    if tokens.keep is not None and bool((widths <= tokens.lengths).all()):
        first = tokens.first(widths)
        if torch.equal(prompt.slots(), tokens.values[first]):
            return ~first
    differs = torch.zeros_like(in_prompt)
    differs[in_prompt] = prompt.slots() != every.values[in_prompt]
    at = int(differs.nonzero()[0])
    row, position = int(every.sequence_ids[at]), int(every.positions[at])
    raise ValueError(
        f"sequence {row}, position {position}: the sampled sequence does not start with {key!r}. Pad both the same way, "
        f"or neither; and if pad_token == eos_token, give the tokenizer a pad token of its own: torchrl drops end tokens "
        f"from unpadded sequences."
    )


def _mask_of_history(
    td: TensorDictBase, tokens: Ragged, interface: ModelInterface, options: TokenisingOptions
) -> Tensor | None:
    """The template's mask of ``history.full``, if that renders to exactly these tokens."""
    key = sub_key(interface.history_key, "full")
    if (options.tokenizer or interface.tokenizer) is None or not has_entry(td, key):
        return None
    rendered, mask = render_history(td, interface, scope="full", assistant_only=True, options=options, key=key)
    if torch.equal(rendered.lengths, tokens.lengths) and torch.equal(rendered.values, tokens.values):
        return mask
    return None


def _with_earlier_turns(
    td: TensorDictBase, tokens: Ragged, response: Tensor, interface: ModelInterface, options: TokenisingOptions
) -> Tensor:
    """The response and the assistant turns inside the prompt, found by rendering the prompt's history."""
    key = sub_key(interface.history_key, "prompt")
    if (options.tokenizer or interface.tokenizer) is None or not has_entry(td, key):
        raise ValueError(
            f"scope='full' counts the assistant turns inside the prompt too, and the data does not say where they are: "
            f"found neither {sub_key(interface.masks_key, 'all_assistant_mask')!r} nor {key!r} with a tokenizer. Add one "
            f"of them, or use scope='turn'."
        )
    rendered, mask = render_history(
        td, interface, scope="full", assistant_only=True, options=options, key=key, add_generation_prompt=True
    )
    in_prompt = ~response
    prompt_lengths = tokens.like(in_prompt.long()).sum()
    prompt_tokens = tokens.values[in_prompt]
    if not torch.equal(rendered.lengths, prompt_lengths) or not torch.equal(rendered.values, prompt_tokens):
        row, position = _first_difference(
            rendered, Ragged.from_list(list(prompt_tokens.split(prompt_lengths.tolist())))
        )
        raise ValueError(
            f"scope='full': rendering {key!r} again gives other tokens than the prompt that was sampled from, first at "
            f"sequence {row}, position {position}. Use scope='turn', "
            f"or store {sub_key(interface.masks_key, 'all_assistant_mask')!r}."
        )
    out = response.clone()
    out[in_prompt] = mask
    return out


def _first_difference(a: Ragged, b: Ragged) -> tuple[int, int]:
    for row, (x, y) in enumerate(zip(a.to_list(), b.to_list(), strict=True)):
        n = min(len(x), len(y))
        different = (x[:n] != y[:n]).nonzero()
        if len(different) or len(x) != len(y):
            return row, int(different[0]) if len(different) else n
    return 0, 0
