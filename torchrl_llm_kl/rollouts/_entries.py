"""Read entries of a rollout: one lookup with one fallback, and values per token or per sequence.

**The fallback.** TorchRL writes the results of a step under ``"next"``; data that was flattened, stored or built by hand
often holds them at the root. A lookup tries the key as given, then the key on the other side of ``"next"``:
``("next", "reward")`` falls back to ``"reward"``, and ``"query"`` to ``("next", "query")``.

Shapes: ``S`` sequences, ``N`` tokens of all sequences together. In the readers of a column, ``rows`` is ``S`` and ``what``
names the entry in errors.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_non_tensor, unravel_key
from torch import Tensor

from torchrl_llm_kl._numerics import send, widen
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
from torchrl_llm_kl.rollouts._keys import ATTENTION_MASK, TOKENS_FULL

# ------------------------------------------------------------------ lookup


class MissingEntryError(KeyError):
    """A required entry is missing from the data."""

    def __str__(self) -> str:
        # KeyError shows its message in quotes, with every quote inside escaped.
        return str(self.args[0])


class MisalignedEntryError(ValueError):
    """The rows of an entry have other lengths than the tokens, or the response, of their sequences."""


def find_key(td: TensorDictBase, key: NestedKey) -> NestedKey | None:
    """``key`` if ``td`` holds it, else the key on the other side of ``"next"`` if ``td`` holds that, else None.

    Example:
        >>> from tensordict import TensorDict
        >>> td = TensorDict(reward=torch.ones(2, 1), batch_size=[2])
        >>> find_key(td, ("next", "reward")), find_key(td, "advantage")
        ('reward', None)
    """
    path = _path(key)
    other = path[1:] if path[0] == "next" else ("next", *path)
    for candidate in filter(None, (path, other)):
        if read_column(td, candidate) is not None:
            return candidate if len(candidate) > 1 else candidate[0]
    return None


def find_result(td: TensorDictBase, key: NestedKey) -> NestedKey | None:
    """:func:`find_key` for an entry that a transform writes for a step: below ``"next"`` before the root.

    An env declares the entries of its transforms, so the root holds them too: empty after a reset, and of the step before in
    later turns.

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
    """:func:`find_key`; where ``(..., "full")`` is missing, the ``"response"`` beside it.

    That is all that a TorchRL wrapper stores if its engine returns log-probs only of generated tokens.

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


def require_key(td: TensorDictBase, key: NestedKey, what: str, advice: str) -> NestedKey:
    """:func:`find_key`, or a :class:`MissingEntryError` that begins with ``what`` and ends with ``advice``.

    Example:
        >>> from tensordict import TensorDict
        >>> require_key(TensorDict(next=TensorDict(reward=torch.ones(1))), "reward", "no reward", "Add one.")
        ('next', 'reward')
    """
    entry = find_key(td, key)
    if entry is None:
        raise MissingEntryError(f"{what}: expected {key!r} in the TensorDict, found: {describe_entries(td)}. {advice}")
    return entry


def read_result(td: TensorDictBase, next_td: TensorDictBase, key: NestedKey) -> Ragged | None:
    """A variable-length entry of a step's result ``next_td``, else of the step ``td`` itself, ``[N]``."""
    value = read_ragged(next_td, key)
    return read_ragged(td, key) if value is None and next_td is not td else value


def read_of(td: TensorDictBase, key: NestedKey, tokens: Ragged) -> Ragged:
    """A variable-length entry that is there, of as many sequences as the tokens, ``[N]``."""
    data = read_ragged(td, key)
    assert data is not None
    if data.num_sequences != tokens.num_sequences:
        raise ValueError(f"{key!r} has {data.num_sequences} sequences, the tokens have {tokens.num_sequences}.")
    return data


def describe_entries(td: TensorDictBase, next_td: TensorDictBase | None = None) -> str:
    """List the entries of a step and of its result: ``tokens.full, tokens.prompt, ...; in 'next': reward``."""
    next_td = read_node(td, "next") if next_td is None else next_td
    return _names(td) + ("" if next_td is None or next_td is td else f"; in 'next': {_names(next_td)}")


def _names(td: TensorDictBase) -> str:
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
    """An entry at each token, ``[N]``.

    One number per sequence is repeated for all of its tokens, if the entry ``repeats``. Rows shorter than their sequence hold
    only the response, from its first token on.

    Args:
        td: the data, which holds ``key``.
        key: the entry.
        tokens: all tokens.
        responses: True at response tokens, bool ``[N]``, or None if unknown.

    Keyword Args:
        fill: for tokens that a shorter row does not cover.
        features: dimensions after the tokens: 1 for the ``k`` numbers of a top k, ``[N, k]``.
        repeats: False for an entry that is never of a whole sequence, such as a log-prob: one number is then that of a single
            token, the response.

    Raises:
        ValueError: if a row is longer than its tokens, holds another number of dimensions per token, or fits no place in its
            sequence.
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
        shape = tuple(values.shape[1:])
        raise ValueError(f"{key!r} must have {features} dimension after the tokens, found {shape or 'none'}.")
    if values.ndim > 1 and not features:
        if values[0].numel() != 1:
            raise ValueError(f"{key!r} must hold one number per token, found rows of {tuple(values.shape[1:])} each.")
        values = values.reshape(values.shape[0])
    if same_rows(data.container, tokens.container):
        return tokens.at_slots(values)
    widths = data.container.row_sizes
    if widths == tokens.sizes:
        return values
    if not values.is_floating_point() and values.dtype != torch.bool and not features:
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
    """Align rows with the end of their sequence: its last token, or the last slot of a padded block."""
    host, *marked = tokens.to_host(*([] if responses is None else [responses]))
    responses = marked[0] if marked else None
    row_lengths = torch.tensor(tokens.container.row_sizes)
    slots = Ragged(host.slots(), row_lengths, tokens.container)
    ends = [(host, None), (slots, host.keep)]
    for every, keep in ends[::-1] if slots_first else ends:
        start = every.lengths - widths
        if bool((start < 0).any()):
            continue
        if responses is not None:
            where = responses if keep is None else torch.zeros_like(keep).index_put((keep,), responses)
            first = every.first_true(where)
            all_but_the_first = bool((start == 1).all())  # log-probs of every token that has a prefix
            fits = (first == every.lengths) | (start == first)
            if keep is not None:  # a pad token that was sampled first is padding too
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
    advice = (
        "Rows of only the response must begin with its first token: pass nested rows of exactly its length, or one value "
        "per token of the sequence."
    )
    if widths[row] == 0 and _path(key)[0] != "next":
        advice = (
            f"The reset of an env leaves empty rows at the root: pass {('next', *_path(key))!r}, where a step's are."
        )
    raise MisalignedEntryError(
        f"{key!r} must have the length of the tokens: sequence {row} has {int(widths[row])} values and "
        f"{int(row_lengths[row])} tokens. {advice}"
    )


def leading_unscored(values: Tensor, tokens: Ragged) -> Tensor:
    """True before the first token, other than a sequence's very first, whose log-prob is neither exactly 0 nor NaN, ``[N]``.

    An engine's wrapper fills in 0 (SGLang's) or NaN (vLLM's) for prompts that were not scored. All False in a sequence
    that holds nothing else.

    Example:
        >>> tokens = Ragged.from_list([torch.tensor([7, 8, 9]), torch.tensor([5, 6])])
        >>> leading_unscored(torch.tensor([torch.nan, 0.0, -1.0, 0.0, 0.0]), tokens).tolist()
        [True, True, False, False, False]
    """
    none, scored = torch.zeros_like(tokens.lengths), (values != 0) & ~values.isnan() & (tokens.positions > 0)
    at = torch.where(scored, tokens.lengths[tokens.sequence_ids] - tokens.positions, 0)
    left = none.scatter_reduce(0, tokens.sequence_ids, at, "amax")  # tokens from the first score on
    return tokens.first(torch.where(left > 0, tokens.lengths - left, 0))


# ------------------------------------------------------------------ one value per sequence


def per_sequence(td: TensorDictBase, key: NestedKey) -> Tensor | None:
    """An entry with one number per sequence, ``[S]``, or None if it has another shape.

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


def row_numbers(value: Node, rows: int, what: str) -> tuple[Tensor, list[int]]:
    """All numbers of a column (dense, nested, or a list of rows) in one dimension, and how many each row has.

    Raises:
        TypeError: if the column holds no tensors.
        ValueError: if the numbers of a dense column do not divide evenly among the rows.
    """
    for kind in set(map(type, value)) if isinstance(value, list) else {type(value)}:
        if not issubclass(kind, Tensor):
            raise TypeError(f"{what} must be a tensor, found {kind.__name__}.")
    if isinstance(value, list):
        try:
            flat = torch.cat(value)
        except RuntimeError:  # scalars
            flat = torch.cat([row.reshape(-1) for row in value])
        return flat.reshape(-1), [row.numel() for row in value]
    if value.is_nested:
        data = Ragged.from_nested(value)
        slots = data.slots()
        features = slots.shape[1:].numel()
        return slots.reshape(-1), [size * features for size in data.container.row_sizes]
    count = value.numel() // max(rows, 1)
    if value.numel() != count * rows:
        raise ValueError(f"{what} has shape {tuple(value.shape)}: expected as many numbers for each of {rows} rows.")
    return value.reshape(-1), [count] * rows


def sequence_sums(value: object, rows: int, what: str) -> Tensor:
    """The sum of each row's numbers, in float32 or wider, without graph, ``[S]``."""
    flat, counts = row_numbers(value, rows, what)
    if isinstance(value, Tensor) and not value.is_nested:
        return widen(flat.detach())[0].reshape(rows, -1).sum(-1)
    return _sums(flat, counts)


def _sums(flat: Tensor, counts: list[int]) -> Tensor:
    # One order of summation for every layout: padded and nested rewards have the same outcome to the last bit.
    (flat,) = widen(flat.detach())
    return segment_sum(flat, torch.tensor(counts, device=flat.device))


def outcomes(td: TensorDictBase, value: object, what: str) -> Tensor:
    """The outcome reward of each sequence, in float32 or wider, without graph, ``[S]``.

    ``value`` holds one number per sequence, or one per token, which are summed. ``td`` holds the tokens or their mask: how
    many each sequence has, and which are padding, whose rewards are ignored.

    Raises:
        ValueError: if a sequence has several numbers, but not one per token.
    """
    rows = td.batch_size.numel()
    flat, counts = row_numbers(value, rows, what)
    tokens = None if counts == [1] * rows else _padded_tokens(td)
    if tokens is None:
        return sequence_sums(value, rows, what)
    if tokens.keep is not None and counts == tokens.lengths.tolist():  # rows without the padding of the tokens
        return _sums(flat, counts)
    expected = tokens.container.row_sizes
    if counts != expected:
        row = next(i for i, (a, b) in enumerate(zip(counts, expected, strict=True)) if a != b)
        shape = tuple(value.shape) if isinstance(value, Tensor) and not value.is_nested else f"rows of {counts}"
        raise ValueError(
            f"{what} has shape {shape}: expected one number per sequence or per token; sequence {row} has {expected[row]} "
            "tokens."
        )
    return _sums(flat if tokens.keep is None else torch.where(tokens.keep.to(flat.device), flat, 0), counts)


def _padded_tokens(td: TensorDictBase) -> Ragged | None:
    tokens = read_ragged(td, TOKENS_FULL, ATTENTION_MASK)
    if tokens is not None:
        return tokens
    mask = read_ragged(td, ATTENTION_MASK)
    return None if mask is None else Ragged.from_slots(mask.slots(), mask.container, mask.slots().bool())


def sequence_integers(value: object, rows: int, what: str) -> Tensor:
    """One integer per row, int64 ``[S]``.

    Raises:
        TypeError: if the column holds no integer tensors.
        ValueError: if it does not hold one integer per row.
    """
    flat, counts = row_numbers(value, rows, what)
    if flat.is_floating_point() or flat.dtype == torch.bool:
        raise TypeError(f"{what} must be of an integer dtype, found {flat.dtype}.")
    if counts != [1] * rows:
        raise ValueError(f"{what} must have one number for each of {rows} rows, found {flat.numel()} numbers.")
    return flat.long()


def sequence_ids_of(value: object, rows: int, what: str) -> Tensor:
    """A number per row, equal for rows with equal values, int64 ``[S]``.

    The column holds integers, one or several per row (a prompt's tokens, padded or nested), or strings.

    Raises:
        TypeError: if it holds neither integers nor strings.
        ValueError: if it does not hold one value per row.
    """
    if isinstance(value, Tensor) or (isinstance(value, list) and all(isinstance(row, Tensor) for row in value)):
        if isinstance(value, Tensor) and value.is_nested:
            value = Ragged.from_nested(value).to_list()  # without the gaps of a jagged tensor
        flat, counts = row_numbers(value, rows, what)
        if flat.is_floating_point() or flat.dtype == torch.bool:
            raise TypeError(f"{what} must be integers or strings, found {flat.dtype}.")
        if not flat.numel():
            raise ValueError(f"{what} must have one value for each of {rows} rows, found none.")
        data = Ragged.from_list(list(flat.split(counts)))
        table = torch.cat([data.lengths.unsqueeze(1), data.to_padded()], 1)  # the length separates padding from token 0
        return torch.unique(table, dim=0, return_inverse=True)[1]
    names = list(leaves(value))
    if len(names) == 1:
        names *= rows  # one for the whole batch
    if len(names) != rows:
        raise ValueError(f"{what} must have one value for each of {rows} rows, found {len(names)}.")
    number: dict[Hashable, int] = {}
    for name in names:
        if not isinstance(name, (str, int, bytes)):
            raise TypeError(f"{what} must be integers or strings, found {type(name).__name__}.")
        number.setdefault(name, len(number))
    return torch.tensor([number[name] for name in names])


def leaves(value: Node) -> Iterator[Node]:
    """The leaves of non-tensor data, however TensorDict holds it: plain, wrapped or stacked."""
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
    """``tensordict``; for a rank whose share has no row, one of zeros: it takes part in computations of all ranks."""
    if tensordict.batch_dims != 1 or tensordict.shape[0] or not is_distributed():
        return tensordict
    rows = {
        key: torch.zeros(1, *value.shape[1:], dtype=value.dtype, device=value.device)
        for key, value in tensordict.items(True, True)
        if isinstance(value, Tensor) and not value.is_nested
    }
    return TensorDict(batch_size=[1], device=tensordict.device).update(rows) if rows else tensordict
