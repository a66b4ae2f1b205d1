"""Which tokens of a rollout are scored: the sampled ones, and which of them the assistant produced.

Sampled tokens come first: the policy produced them, and the end of the prompt separates the assistant's part without a
template. Text and conversations are rendered only when the data holds no tokens.
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
from torchrl_llm_kl._typing import ImageRows
from torchrl_llm_kl.ragged import EntryTypeError, Ragged, has_entry, on_host, read_column, read_ragged, same_rows
from torchrl_llm_kl.rollouts._entries import (
    MissingEntryError,
    describe_entries,
    leading_unscored,
    outcomes,
    per_token,
    require_key,
    sequence_ids_of,
)
from torchrl_llm_kl.rollouts._keys import TOKENS_FULL, ModelInterface, sub_key
from torchrl_llm_kl.rollouts._records import read_images
from torchrl_llm_kl.rollouts._rendered import Scope, TokenisingOptions, render_history, render_text
from torchrl_llm_kl.rollouts._response import ResponseTokens

#: torchrl's names. ``sft``: the response of each step; ``rlhf``: all assistant turns; ``generic``: all tokens with a prefix.
MaskingStrategy = Literal["sft", "rlhf", "generic"]


@dataclass(frozen=True, eq=False)
class Located:
    """Token ids in the layout of the data, and which of them are scored.

    Args:
        tokens: token ids, ``[N]``.
        mask: True at tokens to score, ``[N]``. Never the first token of a sequence.
        source: the entry that holds the tokens.
        sampled: False if the tokens were rendered from text.
        on_host: the mask on the CPU, if it was read there.
        images: the output of a processor for the images of each row, if conversations were rendered.
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
        """The first token of each run of scored ones, bool ``[N]``."""
        return send(_first_of_runs(self.host_mask, self.tokens.host), self.mask.device)

    @property
    def response(self) -> ResponseTokens:
        """The scored tokens."""
        return ResponseTokens(self.tokens, self.mask, self.on_host)

    def within(self, mask: Tensor) -> Located:
        """Only the scored tokens that are also in a mask of the CPU."""
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
        interface: keys and tokenisation of the model; TorchRL's defaults if None.

    Keyword Args:
        assistant_only: only the assistant's tokens; otherwise every token that has a prefix.
        scope: ``"turn"``: the response of this step; ``"full"``: the assistant's earlier turns too.
        options: for text and conversations.

    Raises:
        KeyError: if the data holds neither tokens nor text.
        ValueError: if the assistant's tokens cannot be told from the prompt.

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
        mask = sampled.positions > 0
        _check_beginnings(sampled, read_ragged(td, interface.prompt_tokens), interface.bos)
        if assistant_only:
            mask = mask & _mask_of_sampled(td, sampled, interface, scope, options)
        return Located(sampled, mask, key, sampled=True)
    # The model's own input if it is text or a history; with a tokenizer, any such entry of the data.
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
    "stores this padding as tokens: set policy.padding_value = tokenizer.pad_token_id before sampling."
)


def _check_beginnings(tokens: Ragged, prompts: Ragged | None, bos: int | None) -> None:
    """Raise where BOS was used as padding: before some prompts more often than before others, or three times.

    A single one before some prompts is a warning: prompts that were cut on the left have none. An answer may begin with it,
    where it also ends answers.
    """
    if bos is None or prompts is None or not tokens.values.numel() or len(prompts.lengths) != len(tokens.lengths):
        return
    ends = torch.minimum(prompts.lengths, tokens.lengths)
    here = (tokens.values == bos) & (tokens.positions < ends[tokens.sequence_ids])
    others = torch.where(here, ends[tokens.sequence_ids], tokens.positions)
    runs = ends.scatter_reduce(0, tokens.sequence_ids, others, "amin")
    most, least = int(runs.max()), int(runs[ends > 0].min()) if bool((ends > 0).any()) else 0
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
    """The assistant's tokens: by the data's mask, else the prompt's length, else by rendering the conversation, ``[N]``."""
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
    """The assistant's tokens of a step by its mask and its prompt's length, ``[N]``, or None if the data has neither."""
    given, response = _given_mask(td, tokens, interface), response_mask(td, tokens, interface)
    if given is None or response is None:
        return response if given is None else given
    return given & response


def response_mask(td: TensorDictBase, tokens: Ragged, interface: ModelInterface) -> Tensor | None:
    """True after the prompt, ``[N]``, or None if the data has no prompt tokens.

    The prompt may be padded like the whole sequence (its slots are then the first ones of the sequence), or unpadded.

    Args:
        td: the step.
        tokens: the sequences, without padding.
        interface: where the prompt is.

    Raises:
        ValueError: if a sampled sequence does not start with its prompt.
    """
    key = interface.prompt_tokens
    prompt = read_ragged(td, key)
    if prompt is None or prompt.num_sequences != tokens.num_sequences:
        return None
    widths = prompt.container.row_lengths
    # A padded prompt has the ids of its padding, which `tokens` lack.
    every = tokens if tokens.keep is None else read_ragged(td, interface.tokens_full)
    assert every is not None
    too_long = widths > every.lengths
    if bool(too_long.any()):
        row = int(too_long.nonzero()[0])
        raise ValueError(f"sequence {row}: {key!r} has {int(widths[row])} tokens, the whole {int(every.lengths[row])}.")
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
    whole, own = every.to_list()[row], prompt.to_list()[row]
    after = int((whole != whole[0]).long().argmax())  # where the first run of equal tokens ends
    moved = any(torch.equal(own, whole[n : n + len(own)]) for n in range(1, after + 1))
    raise ValueError(
        f"sequence {row}, position {position}: the sampled sequence does not start with {key!r}. "
        + (f"Token {int(whole[0])} precedes it. {_BOS_AS_PADDING}" if moved else _UNLIKE_PROMPT)
    )


_UNLIKE_PROMPT = (
    "Pad both the same way, or neither; if pad_token == eos_token, give the tokenizer another pad token: torchrl drops end "
    "tokens from unpadded sequences."
)


def prompt_ids(td: TensorDictBase) -> Tensor | None:
    """A number per sequence, equal for equal prompts, int64 ``[S]``, or None if the data does not show the prompts.

    Prompts are compared without their padding, and with their images; as text if the data holds no tokens.

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
    except ValueError:  # whoever scores the data says why
        return None
    if response is None:
        return None
    prompts = _rows_at(tokens, ~response)
    if len(response) == int(response.sum()):
        return None
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
    """The data's own assistant mask at the kept tokens, ``[N]``."""
    key = interface.assistant_mask
    given = read_ragged(td, key)
    if given is None:
        return None
    if not same_rows(tokens.container, given.container):
        raise ValueError(f"{key!r} must have rows of {tokens.container.row_sizes}, found {given.container.row_sizes}.")
    slots = given.slots().bool()
    return slots if tokens.keep is None else slots[tokens.keep]


def _check_given(mask: Tensor, response: Tensor | None, tokens: Ragged, interface: ModelInterface) -> None:
    """Raise if the mask is empty in a sequence that has a response: it would silently score nothing."""
    spoken = tokens.lengths > 0 if response is None else tokens.like(response.long()).sum() > 0
    empty = spoken & (tokens.like(mask.long()).sum() == 0)
    if bool(empty.any()):
        names = (
            interface.template_kwargs.get("chat_template_name"),
            getattr(interface.tokenizer, "chat_template", None),
        )
        shown = next((repr(str(name)[:60]) for name in names if name), "(unknown)")
        where = "" if response is None else " in its response"
        raise ValueError(
            f"sequence {int(empty.nonzero()[0])}: {interface.assistant_mask!r} is False everywhere{where}: the template "
            f"{shown} marked no assistant turn. Remove the mask to use the prompt's length, or set assistant_only=False."
        )


def _with_earlier_turns(
    td: TensorDictBase, tokens: Ragged, response: Tensor, interface: ModelInterface, options: TokenisingOptions
) -> Tensor:
    """The response and the assistant turns inside the prompt, found by rendering the prompt's history."""
    key = sub_key(interface.history_key, "prompt")
    if not options.can_tokenise(interface) or not has_entry(td, key):
        raise ValueError(
            f"scope='full' needs {interface.assistant_mask!r}, or {key!r} and a tokenizer; or use scope='turn'."
        )
    rendered, mask, _ = render_history(td, interface, options, scope="full", key=key, add_generation_prompt=True)
    in_prompt = ~response
    difference = first_difference(rendered, Ragged.from_list(_rows_at(tokens, in_prompt)))
    if difference is not None:
        raise ValueError(
            f"scope='full': {key!r} renders to other tokens than the prompt, first at sequence {difference[0]}, position "
            f"{difference[1]}."
        )
    out = response.clone()
    out[in_prompt] = mask
    return out


def first_difference(a: Ragged, b: Ragged) -> tuple[int, int] | None:
    """Sequence and position of the first token in which two sets of sequences differ, or None if they are equal."""
    if torch.equal(a.lengths, b.lengths) and torch.equal(a.values, b.values):
        return None
    for row, (x, y) in enumerate(zip(a.to_list(), b.to_list(), strict=True)):
        n = min(len(x), len(y))
        different = (x[:n] != y[:n]).nonzero()
        if len(different) or len(x) != len(y):
            return row, int(different[0]) if len(different) else n
    return None


def zeros_of_first_tokens(log_prob: Tensor, mask: Tensor, tokens: Ragged) -> Tensor:
    """True at the first token of a masked-in run whose log-prob is exactly 0 because it was never computed, ``[N]``.

    torchrl's wrappers store 0 there. A token that really had probability 1 is taken for one of those too, and loses nothing:
    its gradient is 0. Nothing else of the batch is looked at, so that its parts agree with the whole.

    Example:
        >>> tokens = Ragged.from_list([torch.tensor([7, 8, 9]), torch.tensor([7, 8])])
        >>> mask = torch.tensor([False, True, True, False, True])
        >>> zeros_of_first_tokens(torch.tensor([0.0, 0.0, -1.0, 0.0, 0.0]), mask, tokens).tolist()
        [False, True, False, False, True]
    """
    return _first_of_runs(mask, tokens) & (log_prob == 0)


def _first_of_runs(mask: Tensor, tokens: Ragged) -> Tensor:
    """The first token of each masked-in run, ``[N]``."""
    before = torch.nn.functional.pad(mask[:-1], (1, 0)) if mask.numel() else mask
    return mask & (~before | (tokens.positions == 0))


# ------------------------------------------------------------------ the trained tokens of a loss


@dataclass(frozen=True)
class TokenReader:
    """Reads the tokens and the mask of a masking strategy from rollouts; ``interface`` has the keys of the model."""

    interface: ModelInterface
    strategy: MaskingStrategy

    @classmethod
    def of(cls, model: object, tokens_key: NestedKey, strategy: MaskingStrategy) -> TokenReader:
        """For a model, and the entry that holds the tokens."""
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
        """The entry that the strategy needs beside the tokens."""
        keys = {"sft": self.interface.prompt_tokens, "rlhf": self.interface.assistant_mask}
        return [keys[self.strategy]] if self.strategy in keys else []

    def with_batch_dims(self, td: TensorDictBase) -> TensorDictBase:
        """``td`` with the token dimension excluded from its batch size.

        ``dispatch`` builds a TensorDict whose batch size is all that the keyword arguments have in common, including the
        token dimension if each has it.
        """
        tokens = read_column(td, self.interface.tokens_full)
        if isinstance(tokens, Tensor) and not tokens.is_nested and tokens.ndim == td.batch_dims > 0:
            td = td.copy()
            td.batch_size = td.batch_size[:-1]
        return td

    def locate(self, td: TensorDictBase) -> Located:
        """The tokens, and the mask of the strategy."""
        scope: Scope = "full" if self.strategy == "rlhf" else "turn"
        return locate(td, self.interface, assistant_only=self.strategy != "generic", scope=scope)

    def unscored(self, log_prob: Tensor, tokens: Ragged, responses: Located | None, key: NestedKey) -> Tensor:
        """Tokens whose log-prob under ``key`` the sampler never computed, each row by itself, ``[N]``.

        NaN at the first token of a response; and, unless a transform wrote the entry, exactly 0 there
        (torchrl's wrappers. See :func:`zeros_of_first_tokens`). ``"rlhf"`` and ``"generic"`` train on prompts too, where
        wrappers fill in 0 or NaN for a whole prompt (see :func:`leading_unscored`).
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
        """Whether :meth:`unscored` also holds of numbers: of the zeros in an entry that no transform wrote."""
        return not _of_transform(key)

    def warn_of_unscored(self, log_prob: Tensor, unscored: Tensor, tokens: Ragged, key: NestedKey) -> None:
        """Say which trained tokens leave the loss because they are :meth:`unscored`.

        Not of NaN in a transform's entry on an accelerator, where looking for it would be a host sync.
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
                    f"{key!r} holds {text.format(number)}. Those tokens are left out of the loss; RetrieveKL and "
                    "RetrieveLogProb score every token, with scope='full' also the tokens of earlier turns.",
                    stacklevel=4,
                )


def _of_transform(key: NestedKey) -> bool:
    """Whether an entry was written by a transform, which scores every token, to judge by its key."""
    return isinstance(key, tuple) and key[0] == "next" and key[-1] != "response"


# ------------------------------------------------------------------ means


def batch_mean(td: TensorDictBase, key: NestedKey, *, per: Literal["sequence", "token"] = "sequence") -> Tensor:
    """The mean of an entry over a batch whose answers may differ in length, in any layout; for a log or a coefficient.

    Args:
        td: the batch, with its tokens and the prompt or the mask that marks the responses.
        key: the entry: one number per token or per sequence, also found on the other side of ``"next"``.

    Keyword Args:
        per: ``"sequence"``: the mean over sequences of the sum over their tokens, such as the KL in nats per answer;
            ``"token"``: the mean over all response tokens.

    Returns:
        0-dim, float32 or wider, without graph; NaN per sequence of no rows, 0 per token of no response tokens.

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
