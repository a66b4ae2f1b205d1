"""Keys and entries of a rollout: one lookup with one fallback, and values per token or per sequence.

**The fallback.** TorchRL writes the results of a step under ``"next"``. Data that was flattened, stored or built by hand
often holds them at the root. A lookup tries the key as given, then the key on the other side of ``"next"``:
``("next", "reward")`` falls back to ``"reward"``, and ``"query"`` to ``("next", "query")``.

Shapes: ``S`` sequences, ``N`` tokens of all sequences together. Functions that read a column take the number of sequences as
``rows``, and the name of the entry in errors as ``name``.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_non_tensor, unravel_key
from torch import Tensor

from torchrl_llm_kl._numerics import send, widen
from torchrl_llm_kl._typing import asked
from torchrl_llm_kl.masks import TemplateArgs, Tokenizer
from torchrl_llm_kl.ragged import (
    Dense,
    EntryTypeError,
    Node,
    Ragged,
    read_column,
    read_node,
    read_ragged,
    same_rows,
    segment_sum,
)

# ------------------------------------------------------------------ keys

TOKENS_FULL: NestedKey = ("tokens", "full")
ATTENTION_MASK: NestedKey = ("masks", "all_attention_mask")


def sub_key(key: NestedKey, name: str) -> NestedKey:
    """Append ``name`` to a key."""
    return (key, name) if isinstance(key, str) else (*key, name)


@dataclass(frozen=True)
class ModelInterface:
    """Keys and tokenisation of a model. The defaults fit a TorchRL wrapper with ``input_mode="tokens"``.

    Args:
        input_mode: the kind of input: ``"tokens"``, ``"text"`` or ``"history"``.
        input_key: the key of the input.
        tokens_key: parent of the token entries ``full``, ``prompt`` and ``response``.
        text_key: parent of the text entries.
        masks_key: parent of ``all_attention_mask`` and ``all_assistant_mask``.
        history_key: parent of the conversation entries.
        attention_mask_key: a mask of padding outside ``masks_key``.
        log_probs_key: parent of the log-prob entries.
        in_keys: all entries that the model reads.
        pad_output: whether the model's output is padded. None for a bare model: its output has the layout of the data.
        layout: the layout of unpadded nested output.
        tokenizer: the tokenizer for text and conversations, if the model has one.
        template_kwargs: the chat template's arguments.
        bos: the id of the beginning-of-text token, if known.
        adds_special: whether the tokenizer adds its special tokens to a text.

    Example:
        >>> ModelInterface().tokens_full
        ('tokens', 'full')
    """

    input_mode: str = "tokens"
    input_key: NestedKey = TOKENS_FULL
    tokens_key: NestedKey = "tokens"
    text_key: NestedKey = "text"
    masks_key: NestedKey = "masks"
    history_key: NestedKey = "history"
    attention_mask_key: NestedKey = "attention_mask"
    log_probs_key: NestedKey = "log_probs"
    in_keys: tuple[NestedKey, ...] = (TOKENS_FULL,)
    pad_output: bool | None = None
    layout: torch.layout = torch.strided
    tokenizer: Tokenizer | None = None
    template_kwargs: TemplateArgs = field(default_factory=dict)
    bos: int | None = None
    adds_special: bool = True

    @classmethod
    def of(cls, model: object) -> ModelInterface:
        """Read the interface from a TorchRL wrapper. A bare transformers model has the defaults."""
        known = asked(model, "interface", cls)  # a model in another process carries its interface
        if known is not None:
            return known
        input_mode = asked(model, "input_mode", str)
        if input_mode is None:
            return cls(bos=asked(asked(model, "config", object), "bos_token_id", int))
        in_keys = tuple(asked(model, "in_keys", (list, tuple)))
        # A generating policy reads the entry "prompt". To score the policy, read "full" from the same parent.
        generates = asked(model, "generate", bool) is True
        input_key = asked(model, "input_key", (str, tuple)) or in_keys[0]
        if generates and isinstance(input_key, tuple) and input_key[-1] == "prompt":
            input_key = (*input_key[:-1], "full")

        def given(*names: str) -> TemplateArgs:
            values = {name: asked(model, name, object) for name in names}
            return {name: value for name, value in values.items() if value is not None}

        return cls(
            input_mode=input_mode,
            input_key=input_key,
            in_keys=(input_key,) if generates else in_keys,
            template_kwargs=given("chat_template", "chat_template_name"),
            bos=asked(asked(model, "tokenizer", object), "bos_token_id", int),
            adds_special=(asked(model, "tokenizer_kwargs", dict) or {}).get("add_special_tokens") is not False,
            **given("tokens_key", "text_key", "masks_key", "history_key", "attention_mask_key", "log_probs_key"),
            **given("pad_output", "layout", "tokenizer"),
        )

    @property
    def tokens_full(self) -> NestedKey:
        """The key of the sampled tokens: the model's own input if it reads tokens."""
        return self.input_key if self.input_mode == "tokens" else sub_key(self.tokens_key, "full")

    @property
    def prompt_tokens(self) -> NestedKey:
        """The key of the prompt's tokens."""
        return sub_key(self.tokens_key, "prompt")

    @property
    def assistant_mask(self) -> NestedKey:
        """The key of the mask of tokens that the assistant produced."""
        return sub_key(self.masks_key, "all_assistant_mask")

    @property
    def token_keys(self) -> list[NestedKey]:
        """The keys of tokens, prompt and masks, which decide which tokens are scored."""
        masks = [sub_key(self.masks_key, "all_attention_mask"), self.attention_mask_key, self.assistant_mask]
        return [self.tokens_full, self.prompt_tokens, *masks]

    def with_history_key(self, key: NestedKey) -> ModelInterface:
        """This interface with conversations under ``(key, "full")``. If the model has set its own input key, that key stays."""
        if key == self.history_key:
            return self
        own = self.input_mode == "history" and self.input_key == sub_key(self.history_key, "full")
        return replace(self, history_key=key, input_key=sub_key(key, "full") if own else self.input_key)


# ------------------------------------------------------------------ lookup


class MissingEntryError(KeyError):
    """A required entry is missing from the data."""

    def __str__(self) -> str:
        # KeyError would show its message in quotes and escape every quote in it.
        return str(self.args[0])


class MisalignedEntryError(ValueError):
    """The rows of an entry have neither the lengths of the sequences nor those of the responses."""


def find_key(td: TensorDictBase, key: NestedKey) -> NestedKey | None:
    """``key`` if ``td`` holds it, else the key on the other side of ``"next"`` if ``td`` holds that, else None.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict(reward=torch.ones(2, 1), batch_size=[2])
        >>> find_key(td, ("next", "reward")), find_key(td, "advantage")
        ('reward', None)
    """
    for candidate in both_sides(key):
        if read_column(td, candidate) is not None:
            return candidate if len(candidate) > 1 else candidate[0]
    return None


def both_sides(key: NestedKey) -> list[tuple[str, ...]]:
    """The path of a key, and its path on the other side of ``"next"`` if there is one."""
    path = _path(key)
    other = path[1:] if path[0] == "next" else ("next", *path)
    return [path, other] if other else [path]


def find_result(td: TensorDictBase, key: NestedKey) -> NestedKey | None:
    """Like :func:`find_key`, for an entry that a transform writes for a step. It searches ``"next"`` before the root.

    An env declares the entries of its transforms, so the root holds them too. Entries at the root are empty after a reset. In
    later turns they belong to the previous step.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict(entropy=torch.ones(2, 0), next=TensorDict(entropy=torch.ones(2, 3)), batch_size=[2])
        >>> find_result(td, "entropy")
        ('next', 'entropy')
    """
    path = _path(key)
    return find_key(td, path if path[0] == "next" else ("next", *path))


def _path(key: NestedKey) -> tuple[str, ...]:
    path = unravel_key(key)
    return (path,) if isinstance(path, str) else path


def find_log_probs(td: TensorDictBase, key: NestedKey) -> NestedKey | None:
    """Like :func:`find_key`, but if ``(..., "full")`` is missing, ``(..., "response")`` replaces it.

    A TorchRL wrapper stores only ``"response"`` if its engine returns log-probs only for generated tokens.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict(log_probs=TensorDict(response=torch.zeros(2, 3), batch_size=[2]), batch_size=[2])
        >>> find_log_probs(td, ("next", "log_probs", "full"))
        ('log_probs', 'response')
    """
    full, path = find_key(td, key), _path(key)
    if full is not None or len(path) < 2 or path[-1] != "full":
        return full
    return find_key(td, (*path[:-1], "response"))


def require_key(td: TensorDictBase, key: NestedKey, text: str, advice: str) -> NestedKey:
    """Like :func:`find_key`, but raises a :class:`MissingEntryError` if the entry is missing.

    The message begins with ``text`` and ends with ``advice``.

    Example:
        >>> from tensordict import TensorDict
        >>> require_key(TensorDict(next=TensorDict(reward=torch.ones(1))), "reward", "no reward", "Add one.")
        ('next', 'reward')
    """
    entry = find_key(td, key)
    if entry is None:
        raise MissingEntryError(f"{text}: expected {key!r} in the TensorDict, found: {describe_entries(td)}. {advice}")
    return entry


def read_result(td: TensorDictBase, next_td: TensorDictBase, key: NestedKey) -> Ragged | None:
    """Read a variable-length entry, ``[N]``, from a step's result ``next_td``. If it is missing there, read it from ``td``."""
    value = read_ragged(next_td, key)
    return read_ragged(td, key) if value is None and next_td is not td else value


def read_of(td: TensorDictBase, key: NestedKey, tokens: Ragged) -> Ragged:
    """Read an existing variable-length entry, ``[N]``. It must have as many sequences as the tokens."""
    data = read_ragged(td, key)
    assert data is not None
    if data.num_sequences != tokens.num_sequences:
        raise ValueError(f"{key!r} has {data.num_sequences} sequences, the tokens have {tokens.num_sequences}.")
    return data


def describe_entries(td: TensorDictBase, next_td: TensorDictBase | None = None) -> str:
    """List the entries of a step and its result for a message: ``tokens.full, tokens.prompt, ...; in 'next': reward``."""
    next_td = read_node(td, "next") if next_td is None else next_td
    return _names(td) + ("" if next_td is None or next_td is td else f"; in 'next': {_names(next_td)}")


def _names(td: TensorDictBase) -> str:
    # Two levels identify an entry and keep the message short.
    names = {".".join(key[:2]) if isinstance(key, tuple) else key for key in td.keys(True) if key[0] != "next"}
    parents = {name.split(".")[0] for name in names if "." in name}
    return ", ".join(sorted(names - parents - {"next"})) or "nothing"


# ------------------------------------------------------------------ one value per token


def per_token(
    td: TensorDictBase,
    key: NestedKey,
    tokens: Ragged,
    responses: Tensor | None,
    *,
    fill: float = math.nan,
    features: int = 0,
    repeats: bool = True,
) -> Tensor:
    """Read an entry as one value per token, ``[N]``.

    With ``repeats``, one number per sequence is repeated for all tokens of the sequence. A row that is shorter than its
    sequence holds values of the response only, starting at its first token.

    Args:
        td: the data, which holds ``key``.
        key: the entry.
        tokens: all tokens.
        responses: True at response tokens, bool ``[N]``, or None if unknown.

    Keyword Args:
        fill: the value for tokens that a shorter row does not cover.
        features: the number of dimensions after the tokens. It is 1 for a top k, ``[N, k]``.
        repeats: False for entries that never describe a whole sequence, such as log-probs. A single number then belongs to a
            response of one token.

    Raises:
        ValueError: if a row is longer than its tokens, has another number of dimensions per token, or matches neither the
            sequence nor the response.
        TypeError: if the entry is not a tensor.

    Example:
        >>> from tensordict import TensorDict
        >>> tokens = Ragged.from_list([torch.tensor([7, 8]), torch.tensor([9])])
        >>> per_token(TensorDict(x=torch.tensor([1.0, 2.0]), batch_size=[2]), "x", tokens, None).tolist()
        [1.0, 1.0, 2.0]
    """
    whole = per_sequence(td, key) if repeats and not features else None
    if whole is not None:
        return whole.to(tokens.values.device)[tokens.sequence_ids]
    data = read_of(td, key, tokens)
    values = data.slots()
    if features and values.ndim != 1 + features:
        shape = ", ".join(["tokens", *map(str, values.shape[1:])])
        raise ValueError(f"{key!r} must have shape [tokens, k], found [{shape}].")
    if values.ndim > 1 and not features:
        if values[0].numel() != 1:
            raise ValueError(f"{key!r} must hold one number per token, found rows of {tuple(values.shape[1:])} each.")
        values = values.reshape(values.shape[0])
    if same_rows(data.container, tokens.container):
        return tokens.at_slots(values)
    widths = data.container.row_sizes
    # The rows are unpadded, although the tokens may be padded.
    if widths == tokens.sizes:
        return values
    if not values.is_floating_point() and values.dtype != torch.bool and not features:
        # An integer entry cannot be filled with NaN.
        values = values.float()
    both_dense = isinstance(data.container, Dense) and isinstance(tokens.container, Dense)
    return _at_responses(values, torch.tensor(widths), key, tokens, responses, fill, slots_first=both_dense)


def _at_responses(
    values: Tensor,
    widths: Tensor,
    key: NestedKey,
    tokens: Ragged,
    responses: Tensor | None,
    fill: float,
    *,
    slots_first: bool,
) -> Tensor:
    """Align each row with the end of its sequence. The end is the last token, or the last slot of a padded block."""
    host, *marked = tokens.to_host(*([] if responses is None else [responses]))
    responses = marked[0] if marked else None
    row_lengths = torch.tensor(tokens.container.row_sizes)
    slots = Ragged(host.slots(), row_lengths, tokens.container)
    ends = [(host, None), (slots, host.keep)]
    # If tokens and entry are padded, rows probably end at the last slot. Unpadded rows probably end at the last token.
    for every, keep in ends[::-1] if slots_first else ends:
        start = every.lengths - widths
        if bool((start < 0).any()):
            continue
        if responses is not None:
            where = responses if keep is None else torch.zeros_like(keep).index_put((keep,), responses)
            first = every.first_true(where)
            all_but_the_first = bool((start == 1).all())  # engines return no log-prob for a first token
            fits = (first == every.lengths) | (start == first)
            if keep is not None:  # a pad token that was sampled first is masked as padding, so its value has no token
                place, begin, end = every.positions, start[every.sequence_ids], first[every.sequence_ids]
                between = keep & (place >= begin) & (place < end)
                fits |= (start < first) & (every.like(between.long()).sum() == 0)
            if not all_but_the_first and not bool(fits.all()):
                continue
        after = ~every.first(start)
        out = values.new_full((*after.shape, *values.shape[1:]), fill)
        out = out.index_copy_(0, send(after.nonzero().squeeze(-1), values.device), values)
        return out if keep is None else tokens.at_slots(out)
    too_long = widths > row_lengths
    row = int(too_long.nonzero()[0]) if bool(too_long.any()) else 0
    raise MisalignedEntryError(
        f"{key!r} must have the length of the tokens: sequence {row} has {int(widths[row])} values and "
        f"{int(row_lengths[row])} tokens. Pass one value per token, or one per token of the response. Rows at the "
        "root are empty after the reset of an env: the values of a step are below 'next'."
    )


def leading_unscored(values: Tensor, tokens: Ragged) -> Tensor:
    """True at all tokens before the first one with a score, ``[N]``. A score is neither exactly 0 nor NaN.

    A wrapper fills in 0 (SGLang) or NaN (vLLM) for prompts that were not scored. The first token of a sequence never has a
    score. In a sequence without scores all values are False.

    Example:
        >>> tokens = Ragged.from_list([torch.tensor([7, 8, 9]), torch.tensor([5, 6])])
        >>> leading_unscored(torch.tensor([torch.nan, 0.0, -1.0, 0.0, 0.0]), tokens).tolist()
        [True, True, False, False, False]
    """
    none, scored = torch.zeros_like(tokens.lengths), (values != 0) & ~values.isnan() & (tokens.positions > 0)
    at = torch.where(scored, tokens.lengths[tokens.sequence_ids] - tokens.positions, 0)
    left = none.scatter_reduce(0, tokens.sequence_ids, at, "amax")  # how many tokens remain from the first score on
    return tokens.first(torch.where(left > 0, tokens.lengths - left, 0))


# ------------------------------------------------------------------ one value per sequence


def per_sequence(td: TensorDictBase, key: NestedKey) -> Tensor | None:
    """Read an entry with one number per sequence, ``[S]``. Returns None if the entry has another shape.

    Example:
        >>> from tensordict import TensorDict
        >>> per_sequence(TensorDict(x=torch.tensor([[3.0], [4.0]]), batch_size=[2]), "x")
        tensor([3., 4.])
    """
    column = read_column(td, key)
    if isinstance(column, list):
        if not all(isinstance(leaf, Tensor) and leaf.numel() == 1 for leaf in column):
            return None
        return torch.stack([leaf.reshape(()) for leaf in column])
    if not isinstance(column, Tensor):
        raise EntryTypeError(f"expected a tensor under {key!r}, found {type(column).__name__}.")
    return None if column.is_nested or column.numel() != td.batch_size.numel() else column.reshape(-1)


def row_numbers(value: Node, rows: int, name: str) -> tuple[Tensor, list[int]]:
    """Flatten a column (dense, nested, or a list of rows). Returns all numbers, and how many each row has.

    Raises:
        ValueError: if the numbers of a dense column do not divide evenly among the rows.
    """
    if isinstance(value, list):
        return torch.cat([row.reshape(-1) for row in value]), [row.numel() for row in value]
    if value.is_nested:
        data = Ragged.from_nested(value)
        slots = data.slots()
        features = slots.shape[1:].numel()
        return slots.reshape(-1), [size * features for size in data.container.row_sizes]
    count = value.numel() // max(rows, 1)
    if value.numel() != count * rows:
        raise ValueError(f"{name} has shape {tuple(value.shape)}: expected as many numbers for each of {rows} rows.")
    return value.reshape(-1), [count] * rows


def sequence_sums(value: object, rows: int, name: str) -> Tensor:
    """The sum of each row, ``[S]``, detached from the autograd graph, in float32 or wider."""
    flat, counts = row_numbers(value, rows, name)
    if isinstance(value, Tensor) and not value.is_nested:
        return widen(flat.detach())[0].reshape(rows, -1).sum(-1)
    return _sums(flat, counts)


def _sums(flat: Tensor, counts: list[int]) -> Tensor:
    # Every layout is summed in the same order. Padded and nested rewards then give the same outcome to the last bit.
    (flat,) = widen(flat.detach())
    return segment_sum(flat, torch.tensor(counts, device=flat.device))


def outcomes(td: TensorDictBase, value: object, name: str) -> Tensor:
    """The outcome reward of each sequence, ``[S]``, detached from the autograd graph, in float32 or wider.

    ``value`` holds one number per sequence or per token. Numbers per token are summed over each sequence. The lengths and the
    padding come from the tokens in ``td``, or from their mask. Rewards at padding are ignored.

    Raises:
        ValueError: if a sequence has several numbers, but not one per token.
    """
    rows = td.batch_size.numel()
    flat, counts = row_numbers(value, rows, name)
    tokens = None if counts == [1] * rows else _padded_tokens(td)
    if tokens is None:
        return sequence_sums(value, rows, name)
    if tokens.keep is not None and counts == tokens.lengths.tolist():  # the rewards are unpadded, the tokens are padded
        return _sums(flat, counts)
    expected = tokens.container.row_sizes
    if counts != expected:
        row = next(i for i, (a, b) in enumerate(zip(counts, expected, strict=True)) if a != b)
        shape = tuple(value.shape) if isinstance(value, Tensor) and not value.is_nested else f"rows of {counts}"
        raise ValueError(
            f"{name} has shape {shape}: expected one number per sequence or token. Sequence {row} has {expected[row]} tokens."
        )
    # Padding may hold any number.
    return _sums(flat if tokens.keep is None else torch.where(tokens.keep.to(flat.device), flat, 0), counts)


def _padded_tokens(td: TensorDictBase) -> Ragged | None:
    tokens = read_ragged(td, TOKENS_FULL, ATTENTION_MASK)
    if tokens is not None:
        return tokens
    mask = read_ragged(td, ATTENTION_MASK)
    return None if mask is None else Ragged.from_slots(mask.slots(), mask.container, mask.slots().bool())


def sequence_integers(value: object, rows: int, name: str) -> Tensor:
    """One integer per row, int64 ``[S]``.

    Raises:
        ValueError: if the column does not hold one integer per row.
    """
    flat, counts = row_numbers(value, rows, name)
    if flat.is_floating_point() or counts != [1] * rows:
        raise ValueError(f"{name} must hold an integer for each of {rows} rows, found {flat.numel()} of {flat.dtype}.")
    return flat.long()


def sequence_ids_of(value: object, rows: int, name: str) -> Tensor:
    """Number the rows, int64 ``[S]``. Rows with equal values get the same number.

    The column holds strings, or one or several integers per row, such as a prompt's tokens.

    Raises:
        TypeError: for floating-point numbers.
        ValueError: if the column does not hold one value per row.
    """
    if isinstance(value, Tensor) or (isinstance(value, list) and all(isinstance(row, Tensor) for row in value)):
        if isinstance(value, Tensor) and value.is_nested:
            value = Ragged.from_nested(value).to_list()  # removes the gaps of a jagged tensor
        flat, counts = row_numbers(value, rows, name)
        if flat.is_floating_point():
            raise TypeError(f"{name} must be integers or strings, found {flat.dtype}.")
        if not flat.numel():
            raise ValueError(f"{name} must have one value for each of {rows} rows, found none.")
        data = Ragged.from_list(list(flat.split(counts)))
        # Padding is 0, which is also a token id. The first column holds the length, so that the two are told apart.
        table = torch.cat([data.lengths.unsqueeze(1), data.to_padded()], 1)
        return torch.unique(table, dim=0, return_inverse=True)[1]
    entries = list(leaves(value))
    if len(entries) == 1:
        entries *= rows  # one value for the whole batch
    if len(entries) != rows:
        raise ValueError(f"{name} must have one value for each of {rows} rows, found {len(entries)}.")
    number: dict[Hashable, int] = {}
    for entry in entries:
        number.setdefault(entry, len(number))
    return torch.tensor([number[entry] for entry in entries])


def leaves(value: Node) -> Iterator[Node]:
    """Yield the leaves of non-tensor data. TensorDict may hold it plain, wrapped or stacked."""
    if is_non_tensor(value):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


# ------------------------------------------------------------------ a rank without rows


def is_distributed() -> bool:
    """Whether this process is one of several ranks."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def with_a_row(tensordict: TensorDictBase) -> TensorDictBase:
    """Return ``tensordict``. A rank without rows gets one row of zeros, so that it can join the computations of all ranks."""
    if tensordict.batch_dims != 1 or tensordict.shape[0] or not is_distributed():
        return tensordict
    rows = {
        key: torch.zeros(1, *value.shape[1:], dtype=value.dtype, device=value.device)
        for key, value in tensordict.items(True, True)
        if isinstance(value, Tensor) and not value.is_nested
    }
    return TensorDict(batch_size=[1], device=tensordict.device).update(rows) if rows else tensordict
