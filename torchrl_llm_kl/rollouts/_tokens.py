"""Locate the tokens of a rollout to score: the sampled tokens, and the mask of those that the assistant produced.

Sampled tokens take precedence. The policy produced them, and the end of the prompt separates the assistant's part without a
template. Text and conversations are rendered only if the data holds no tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, get_args
from zlib import crc32

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_llm_kl._numerics import check_choice, masked_mean, send, widen
from torchrl_llm_kl._typing import ImageRows, asked
from torchrl_llm_kl.ragged import EntryTypeError, Ragged, has_entry, on_host, read_column, read_ragged, same_rows
from torchrl_llm_kl.rollouts._entries import (
    TOKENS_FULL,
    MissingEntryError,
    ModelInterface,
    describe_entries,
    leading_unscored,
    outcomes,
    per_token,
    require_key,
    sequence_ids_of,
    sub_key,
)
from torchrl_llm_kl.rollouts._records import read_images
from torchrl_llm_kl.rollouts._rendered import Scope, TokenisingOptions, render_history, render_text
from torchrl_llm_kl.rollouts._response import ResponseTokens

#: torchrl's names: the response of each step (``sft``), all assistant turns (``rlhf``), all tokens with a prefix (``generic``).
MaskingStrategy = Literal["sft", "rlhf", "generic"]


@dataclass(frozen=True, eq=False)
class Located:
    """Token ids in the layout of the data, and the mask of those to score.

    Args:
        tokens: token ids, ``[N]``.
        mask: True at tokens to score, ``[N]``. Never the first token of a sequence.
        source: the entry that holds the tokens.
        sampled: False if the tokens were rendered from text.
        on_host: the mask on the CPU, if it was read there.
        images: the processor's output for the images of each row, if conversations were rendered.
    """

    tokens: Ragged
    mask: Tensor
    source: NestedKey
    sampled: bool
    on_host: Tensor | None = field(default=None, kw_only=True)
    images: ImageRows | None = field(default=None, kw_only=True)

    @property
    def host_mask(self) -> Tensor:
        """The mask on the CPU."""
        return self.mask.cpu() if self.on_host is None else self.on_host

    @cached_property
    def first_of_runs(self) -> Tensor:
        """True at the first token of each run of scored tokens, bool ``[N]``."""
        return send(_first_of_runs(self.host_mask, self.tokens.host), self.mask.device)

    @property
    def response(self) -> ResponseTokens:
        """The scored tokens."""
        return ResponseTokens(self.tokens, self.mask, self.on_host)

    def within(self, mask: Tensor) -> Located:
        """Restrict the mask to tokens that are also in ``mask``, which is on the CPU."""
        mask = self.host_mask & mask
        return replace(self, mask=send(mask, self.mask.device), on_host=mask)


def locate(
    td: TensorDictBase,
    interface: ModelInterface | None = None,
    *,
    assistant_only: bool = True,
    scope: Scope = "turn",
    options: TokenisingOptions | None = None,
) -> Located:
    """Find the tokens of a step or a conversation, and the mask of those to score.

    Args:
        td: the step, of any batch size.
        interface: keys and tokenisation of the model. Default: TorchRL's.

    Keyword Args:
        assistant_only: select the assistant's tokens. Otherwise every token that has a prefix.
        scope: ``"turn"`` selects the response of this step, and ``"full"`` also the assistant's earlier turns.
        options: how text and conversations are tokenised.

    Raises:
        KeyError: if the data holds neither tokens nor text.
        ValueError: if the assistant's tokens cannot be separated from the prompt.

    Example:
        >>> from tensordict import TensorDict
        >>> tokens = TensorDict(prompt=torch.tensor([[3, 4]]), full=torch.tensor([[3, 4, 5, 6]]), batch_size=[1])
        >>> locate(TensorDict(tokens=tokens, batch_size=[1])).mask.tolist()
        [False, False, True, True]
    """
    interface = ModelInterface() if interface is None else interface
    options = TokenisingOptions() if options is None else options
    key = interface.tokens_full
    attention = sub_key(interface.masks_key, "all_attention_mask")
    attention = attention if has_entry(td, attention) else interface.attention_mask_key
    # On an accelerator, copy ids and masks to the host in one synchronisation, locate there, and send only the mask
    # back.
    (host,) = on_host(td, interface.token_keys)
    if host is not td:
        located = locate(host, interface, assistant_only=assistant_only, scope=scope, options=options)
        data = read_ragged(td, located.source) if located.sampled else None
        if data is None or data.values.device.type == "cpu":
            return located
        tokens = Ragged.on_device_of(located.tokens, data.slots(), data.container)
        return replace(located, tokens=tokens, mask=send(located.mask, data.values.device), on_host=located.mask)
    sampled = read_ragged(td, key, attention)
    if sampled is not None:
        if sampled.values.is_floating_point():
            raise EntryTypeError(f"expected integer token ids under {key!r}, found {sampled.values.dtype}.")
        # A first token has no prefix and therefore no log-prob.
        mask = sampled.positions > 0
        _check_beginnings(sampled, read_ragged(td, interface.prompt_tokens), interface.bos)
        if assistant_only:
            mask = mask & _mask_of_sampled(td, sampled, interface, scope, options)
        return Located(sampled, mask, key, sampled=True)
    # First the model's own input if that is text or a history, then, with a tokenizer, any such entry of the data.
    sources = [(interface.input_mode, interface.input_key)]
    if options.can_tokenise(interface):
        sources += [("history", sub_key(interface.history_key, "full")), ("text", sub_key(interface.text_key, "full"))]
    for kind, key in sources:
        if kind != "tokens" and has_entry(td, key):
            render = render_history if kind == "history" else render_text
            tokens, mask, images = render(td, interface, options, key=key, scope=scope, assistant_only=assistant_only)
            return Located(tokens, mask & (tokens.positions > 0), key, sampled=False, images=images)
    expected = sorted({str(interface.tokens_full), str(interface.input_key)})
    places = " or ".join(expected)
    raise MissingEntryError(f"nothing to score: found {describe_entries(td)}. Run the policy first, or store {places}.")


_BOS_AS_PADDING = (
    "torchrl's wrapper pads with the first id of tokenizer(tokenizer.pad_token), which is BOS if the tokenizer adds one, and "
    "stores this padding as tokens. Set policy.padding_value = tokenizer.pad_token_id before sampling."
)


def _check_beginnings(tokens: Ragged, prompts: Ragged | None, bos: int | None) -> None:
    """Raise a ValueError if BOS was used as padding: three times, or more often before some prompts than before others.

    A single BOS before only some prompts is a warning, since prompts that were cut on the left have none. The answer is not
    checked, because BOS also ends answers in some models and may then be its first token.
    """
    if bos is None or prompts is None or not tokens.values.numel() or len(prompts.lengths) != len(tokens.lengths):
        return
    ends = torch.minimum(prompts.lengths, tokens.lengths)
    here = (tokens.values == bos) & (tokens.positions < ends[tokens.sequence_ids])
    others = torch.where(here, ends[tokens.sequence_ids], tokens.positions)
    runs = ends.scatter_reduce(0, tokens.sequence_ids, others, "amin")
    most, least = int(runs.max()), int(runs[ends > 0].min()) if bool((ends > 0).any()) else 0
    # A template and a tokenizer may each add one BOS.
    if most <= 2 and least == most:
        return
    text = (
        f"sequence {int(runs.argmax())} begins with {most} beginning-of-text tokens (id {bos}), and the fewest of any sequence "
        f"are {least}; expected the same number, at most 2, in each. {_BOS_AS_PADDING}"
    )
    if most > 1:
        raise ValueError(text)
    warnings.warn(text, stacklevel=3)


# ------------------------------------------------------------------ the assistant's tokens


def _mask_of_sampled(
    td: TensorDictBase, tokens: Ragged, interface: ModelInterface, scope: Scope, options: TokenisingOptions
) -> Tensor:
    """The assistant's tokens from the data's mask, the prompt's length, or a rendering of the conversation, ``[N]``."""
    given = _given_mask(td, tokens, interface)
    response = response_mask(td, tokens, interface)
    if given is not None:
        mask = given if response is None or scope == "full" else given & response
        _check_given(mask, response, tokens, interface)
        return mask
    if response is not None:
        return response if scope == "turn" else _with_earlier_turns(td, tokens, response, interface, options)
    key = sub_key(interface.history_key, "full")
    if options.can_tokenise(interface) and has_entry(td, key):
        rendered, mask, _ = render_history(td, interface, options, scope="full", key=key)
        if first_difference(rendered, tokens) is None:
            return mask
    raise ValueError(
        f"cannot tell which tokens the assistant produced: add {interface.prompt_tokens!r} or {interface.assistant_mask!r}."
    )


def assistant_mask(td: TensorDictBase, tokens: Ragged, interface: ModelInterface) -> Tensor | None:
    """The assistant's tokens from the mask and the prompt's length, ``[N]``, or None if the data has neither."""
    given, response = _given_mask(td, tokens, interface), response_mask(td, tokens, interface)
    if given is None or response is None:
        return response if given is None else given
    return given & response


def response_mask(td: TensorDictBase, tokens: Ragged, interface: ModelInterface) -> Tensor | None:
    """True after the prompt, ``[N]``, or None if the data has no prompt tokens.

    The prompt may be unpadded, or padded like the whole sequence. Its slots are then the first ones of the sequence.

    Args:
        td: the step.
        tokens: the sequences, without padding.
        interface: the key of the prompt.

    Raises:
        ValueError: if a sampled sequence does not start with its prompt.
    """
    key = interface.prompt_tokens
    prompt = read_ragged(td, key)
    if prompt is None or prompt.num_sequences != tokens.num_sequences:
        return None
    widths = prompt.container.row_lengths
    # `tokens` lack the padding that a padded prompt contains, so compare with all slots.
    every = tokens if tokens.keep is None else read_ragged(td, interface.tokens_full)
    assert every is not None
    too_long = widths > every.lengths
    if bool(too_long.any()):
        row = int(too_long.nonzero()[0])
        raise ValueError(f"sequence {row}: {key!r} has {int(widths[row])} tokens, the whole {int(every.lengths[row])}.")
    in_prompt = every.first(widths)
    if torch.equal(prompt.slots(), every.values[in_prompt]):
        return ~in_prompt if tokens.keep is None else ~in_prompt[tokens.keep]
    # An unpadded prompt beside padded tokens is compared with the real tokens.
    if tokens.keep is not None and bool((widths <= tokens.lengths).all()):
        first = tokens.first(widths)
        if torch.equal(prompt.slots(), tokens.values[first]):
            return ~first
    at = int(in_prompt.nonzero()[prompt.slots() != every.values[in_prompt]][0])
    row, position = int(every.sequence_ids[at]), int(every.positions[at])
    ids, own = every.to_list()[row], prompt.to_list()[row]
    cause = (
        "Pad both the same way, or neither. If pad_token == eos_token, give the tokenizer another pad token, since torchrl "
        "drops end tokens from unpadded sequences."
    )
    if _follows_padding(ids, own):
        cause = _BOS_AS_PADDING
    raise ValueError(
        f"sequence {row}, position {position}: the sampled sequence does not start with {key!r}, but with token {int(ids[0])}. "
        f"{cause}"
    )


def _follows_padding(ids: Tensor, prompt: Tensor) -> bool:
    """Whether the prompt comes after copies of a single token."""
    copies = int((ids == ids[0]).long().cumprod(0).sum())
    return any(torch.equal(ids[start : start + len(prompt)], prompt) for start in range(1, copies + 1))


def prompt_ids(td: TensorDictBase) -> Tensor | None:
    """A number per sequence, the same for equal prompts, int64 ``[S]``, or None if the data does not hold the prompts.

    Prompts are compared with their images and without padding. Data without tokens is compared as text.

    Example:
        >>> from tensordict import TensorDict
        >>> full = torch.tensor([[3, 5], [4, 5], [3, 6]])
        >>> tokens = TensorDict(prompt=full[:, :1], full=full, batch_size=[3])
        >>> prompt_ids(TensorDict(tokens=tokens, batch_size=[3])).tolist()
        [0, 1, 0]
    """
    interface = ModelInterface()
    tokens = read_ragged(td, TOKENS_FULL, sub_key(interface.masks_key, "all_attention_mask"))
    if tokens is None:
        text = read_column(td, sub_key(interface.text_key, "prompt"))
        return None if text is None else sequence_ids_of(text, td.batch_size.numel(), "the prompt")
    try:
        response = response_mask(td, tokens, interface)
    except ValueError:  # scoring the data raises the same error with its reason
        return None
    if response is None:
        return None
    prompts = _rows_at(tokens, ~response)
    if len(response) == int(response.sum()):
        return None
    # Compare checksums of images, since pixels of all pairs would be too many.
    of_tokens, images = sequence_ids_of(prompts, len(prompts), "the prompt"), read_images(td, "images")
    if images is None:
        return of_tokens
    of_images = sequence_ids_of([_checksum(row) for row in images], len(prompts), "the images")
    return torch.stack([of_tokens, of_images]).unique(dim=1, return_inverse=True)[1]


def _checksum(images: Mapping[str, object] | None) -> str:
    numbers = {name: torch.as_tensor(x).cpu().float().contiguous() for name, x in sorted((images or {}).items())}
    return str([(name, tuple(x.shape), crc32(x.numpy().data)) for name, x in numbers.items()])


def _rows_at(tokens: Ragged, mask: Tensor) -> list[Tensor]:
    """The masked-in tokens of each sequence."""
    return list(tokens.values[mask].split(tokens.like(mask.long()).sum().tolist()))


def _given_mask(td: TensorDictBase, tokens: Ragged, interface: ModelInterface) -> Tensor | None:
    """The data's assistant mask without padding, ``[N]``."""
    key = interface.assistant_mask
    given = read_ragged(td, key)
    if given is None:
        return None
    if not same_rows(tokens.container, given.container):
        raise ValueError(f"{key!r} must have rows of {tokens.container.row_sizes}, found {given.container.row_sizes}.")
    slots = given.slots().bool()
    return slots if tokens.keep is None else slots[tokens.keep]


def _check_given(mask: Tensor, response: Tensor | None, tokens: Ragged, interface: ModelInterface) -> None:
    """Raise a ValueError if the mask is empty in a sequence with a response, which would silently score nothing."""
    spoken = tokens.lengths > 0 if response is None else tokens.like(response.long()).sum() > 0
    empty = spoken & (tokens.like(mask.long()).sum() == 0)
    if bool(empty.any()):
        name = interface.template_kwargs.get("chat_template_name")
        template = name or asked(interface.tokenizer, "chat_template", object)
        raise ValueError(
            f"sequence {int(empty.nonzero()[0])}: {interface.assistant_mask!r} is False everywhere in its response: the "
            f"template {template!r:.60} marked no turn. Remove the mask, or set assistant_only=False."
        )


def _with_earlier_turns(
    td: TensorDictBase, tokens: Ragged, response: Tensor, interface: ModelInterface, options: TokenisingOptions
) -> Tensor:
    """The response and the assistant turns inside the prompt, located by rendering the prompt's history."""
    key = sub_key(interface.history_key, "prompt")
    if not options.can_tokenise(interface) or not has_entry(td, key):
        raise ValueError(f"scope='full' needs {interface.assistant_mask!r}, or {key!r} and a tokenizer.")
    rendered, mask, _ = render_history(td, interface, options, scope="full", key=key, add_generation_prompt=True)
    in_prompt = ~response
    # The mask of the rendering fits the sampled prompt only if the tokens are the same.
    difference = first_difference(rendered, Ragged.from_list(_rows_at(tokens, in_prompt)))
    if difference is not None:
        raise ValueError(f"scope='full': {key!r} renders to other tokens than the prompt of sequence {difference[0]}.")
    out = response.clone()
    out[in_prompt] = mask
    return out


def first_difference(a: Ragged, b: Ragged) -> tuple[int, int] | None:
    """Sequence and position of the first token that differs between two sets of sequences, or None if they are equal."""
    if torch.equal(a.lengths, b.lengths) and torch.equal(a.values, b.values):
        return None
    for row, (x, y) in enumerate(zip(a.to_list(), b.to_list(), strict=True)):
        n = min(len(x), len(y))
        different = (x[:n] != y[:n]).nonzero()
        if len(different) or len(x) != len(y):
            return row, int(different[0]) if len(different) else n
    return None


def zeros_of_first_tokens(log_prob: Tensor, mask: Tensor, tokens: Ragged) -> Tensor:
    """True at the first token of a masked-in run if its log-prob is exactly 0, ``[N]``.

    torchrl's wrappers store 0 there because they never compute it. A token with probability 1 is also marked, without a loss,
    since its gradient is 0. The result for a row does not depend on other rows, so parts of a batch agree with the whole.

    Example:
        >>> tokens = Ragged.from_list([torch.tensor([7, 8, 9]), torch.tensor([7, 8])])
        >>> mask = torch.tensor([False, True, True, False, True])
        >>> zeros_of_first_tokens(torch.tensor([0.0, 0.0, -1.0, 0.0, 0.0]), mask, tokens).tolist()
        [False, True, False, False, True]
    """
    return _first_of_runs(mask, tokens) & (log_prob == 0)


def _first_of_runs(mask: Tensor, tokens: Ragged) -> Tensor:
    """True at the first token of each masked-in run, ``[N]``."""
    before = torch.nn.functional.pad(mask[:-1], (1, 0)) if mask.numel() else mask
    return mask & (~before | (tokens.positions == 0))


# ------------------------------------------------------------------ the trained tokens of a loss


@dataclass(frozen=True)
class TokenReader:
    """Reads the tokens and the mask of a masking strategy from rollouts, with the keys of ``interface``."""

    interface: ModelInterface
    strategy: MaskingStrategy

    @classmethod
    def of(cls, model: object, tokens_key: NestedKey, strategy: MaskingStrategy) -> TokenReader:
        """A reader for a model and the key of the tokens."""
        check_choice(get_args(MaskingStrategy), masking_strategy=strategy)
        interface = ModelInterface.of(model)
        if tokens_key == TOKENS_FULL:
            return cls(interface, strategy)
        if interface.input_mode == "tokens":
            return cls(replace(interface, input_key=tokens_key), strategy)
        if not isinstance(tokens_key, tuple) or tokens_key[-1] != "full":
            raise ValueError(f"the actor needs sequences under (..., 'full'), got the key {tokens_key!r}.")
        parent = tokens_key[0] if len(tokens_key) == 2 else tokens_key[:-1]
        return cls(replace(interface, tokens_key=parent), strategy)

    @property
    def in_keys(self) -> list[NestedKey]:
        """The key that the strategy needs beside the tokens."""
        keys = {"sft": self.interface.prompt_tokens, "rlhf": self.interface.assistant_mask}
        return [keys[self.strategy]] if self.strategy in keys else []

    def with_batch_dims(self, td: TensorDictBase) -> TensorDictBase:
        """Exclude the token dimension from the batch size of ``td``.

        ``dispatch`` builds a TensorDict with the largest batch size that the keyword arguments share. That includes the token
        dimension if every argument has it.
        """
        tokens = read_column(td, self.interface.tokens_full)
        if isinstance(tokens, Tensor) and not tokens.is_nested and tokens.ndim == td.batch_dims > 0:
            td = td.copy()
            td.batch_size = td.batch_size[:-1]
        return td

    def locate(self, td: TensorDictBase) -> Located:
        """The tokens and the mask of the strategy."""
        scope: Scope = "full" if self.strategy == "rlhf" else "turn"
        return locate(td, self.interface, assistant_only=self.strategy != "generic", scope=scope)

    def unscored(self, log_prob: Tensor, tokens: Ragged, responses: Located | None, key: NestedKey) -> Tensor:
        """True at tokens whose log-prob under ``key`` the sampler never computed, ``[N]``. Rows do not affect each other.

        These are NaN at the first token of a response. torchrl's wrappers also store exactly 0 there, which counts unless a
        transform wrote the entry, see :func:`zeros_of_first_tokens`. ``"rlhf"`` and ``"generic"`` also train on prompts, for
        which wrappers may fill in 0 or NaN, see :func:`leading_unscored`.
        """
        every = tokens.positions > 0 if responses is None else responses.mask
        first = _first_of_runs(every, tokens) if responses is None else responses.first_of_runs
        unscored = first & log_prob.isnan()
        if _of_transform(key):
            return unscored
        if self.strategy != "sft":
            prompts = leading_unscored(log_prob, tokens)
            unscored, every = unscored | prompts, every & ~prompts
        return unscored | zeros_of_first_tokens(log_prob, every, tokens)

    @staticmethod
    def marks_zeros(key: NestedKey) -> bool:
        """Whether :meth:`unscored` may also mark zeros, because no transform wrote the entry."""
        return not _of_transform(key)

    def warn_of_unscored(self, log_prob: Tensor, unscored: Tensor, tokens: Ragged, key: NestedKey) -> None:
        """Warn about trained tokens that the loss leaves out because they are :meth:`unscored`.

        A transform's entry on an accelerator is not searched for NaN, since that would need a host synchronisation.
        """
        if (_of_transform(key) and unscored.device.type != "cpu") or not bool(unscored.any()):
            return
        has_prompts = self.strategy != "sft" and not _of_transform(key)
        prompts = unscored & leading_unscored(log_prob, tokens) if has_prompts else torch.zeros_like(unscored)
        first, of_responses = unscored & ~prompts, "for the first generated token of {} responses"
        reasons = {
            "0 or NaN for the first {} tokens of prompts: the sampler returned no scores of prompts": prompts,
            f"exactly 0 {of_responses}: torchrl's wrappers never compute it": first & (log_prob == 0),
            f"NaN {of_responses}: it was not scored": first & log_prob.isnan(),
        }
        for text, left_out in reasons.items():
            number = int(left_out.sum())
            if number:
                warnings.warn(
                    f"{key!r} holds {text.format(number)}. The loss leaves those tokens out. RetrieveKL and RetrieveLogProb "
                    "score every token, with scope='full' also the tokens of earlier turns.",
                    stacklevel=4,
                )


def _of_transform(key: NestedKey) -> bool:
    """Whether a transform wrote an entry, according to its key. Transforms score every token."""
    return isinstance(key, tuple) and key[0] == "next" and key[-1] != "response"


# ------------------------------------------------------------------ means


def batch_mean(td: TensorDictBase, key: NestedKey, *, per: Literal["sequence", "token"] = "sequence") -> Tensor:
    """The mean of an entry over a batch, in any layout, for a log or a coefficient. Answers may differ in length.

    Args:
        td: the batch, with its tokens and the prompt or the mask that marks the responses.
        key: the entry, with one number per token or per sequence. Also found on the other side of ``"next"``.

    Keyword Args:
        per: ``"sequence"`` sums over the tokens of each sequence and takes the mean over sequences, such as the KL in nats per
            answer. ``"token"`` takes the mean over all response tokens.

    Returns:
        0-dim, float32 or wider, without graph. Without rows the mean per sequence is NaN. Without response tokens the mean per
        token is 0.

    Raises:
        KeyError: if the entry is missing.
        ValueError: if it has another length than the tokens.

    Example:
        >>> from tensordict import TensorDict, lazy_stack
        >>> def row(prompt, full, kl):
        ...     tokens = TensorDict(prompt=torch.tensor(prompt), full=torch.tensor(full))
        ...     return TensorDict(tokens=tokens, next=TensorDict(kl_penalty=torch.tensor(kl)))
        >>> rows = [row([3], [3, 4, 5], [0.0, 0.2, 0.4]), row([3], [3, 6], [0.0, 0.3])]
        >>> batch = lazy_stack(rows)
        >>> batch_mean(batch, ("next", "kl_penalty")), batch_mean(batch, ("next", "kl_penalty"), per="token")
        (tensor(0.4500), tensor(0.3000))
    """
    check_choice(("sequence", "token"), per=per)
    key = require_key(td, key, "the entry is missing", "Add the transform that writes it, or correct the key.")
    if 0 in td.batch_size:
        return torch.tensor(float("nan") if per == "sequence" else 0.0)
    if per == "sequence":
        return outcomes(td, read_column(td, key), f"{key!r}").mean()
    located = locate(td)
    values = per_token(td, key, located.tokens, located.mask)
    return masked_mean(widen(values.detach())[0], located.mask.to(values.device))
