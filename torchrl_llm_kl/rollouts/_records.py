"""Records beside the tokens: kept tokens, routing, a teacher's top k, and the images of a row.

- **Kept tokens** are two entries below one key. ``(key, "counts")`` holds the number of kept tokens at each position,
  ``[*B, T]`` in the layout of the tokens or the response, 0 where nothing was recorded. ``(key, "ids")`` holds the ids of each
  sequence, concatenated, ``[*B, M]``: nested, leaves of a lazy stack, or padded on the right. In int32 a position with 8 kept
  tokens takes 36 bytes.
- **Routing** is an integer entry ``[*B, T, L, k]`` with the expert ids of each token by layer and slot, for all tokens or only
  the response. Engines record forwarded tokens, so the last token of a sequence may be missing: vLLM's ``routed_experts`` is
  ``[T - 1, L, k]``.
- **Images** are entries below one key with the processor's names. Each row holds the processor's output for that row, of any
  size. A row without images lacks the entries.
- **The version of the policy** is an integer of each row, or of each token. :func:`drop_stale` turns it into an age.
- **A teacher's top k**, written by transforms: ids, their log-probs, and the log of the total probability of all other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase, is_non_tensor
from torch import Tensor
from torch.nn.functional import pad

from torchrl_llm_kl._typing import ImageRows
from torchrl_llm_kl.head import Kept
from torchrl_llm_kl.ragged import (
    Dense,
    EntryTypeError,
    Node,
    Ragged,
    Rows,
    node_of,
    read_column,
    segment_sum,
    unbind_rows,
    write_ragged,
)
from torchrl_llm_kl.rollouts._entries import (
    both_sides,
    find_key,
    find_result,
    leaves,
    per_token,
    read_of,
    require_key,
    sub_key,
)

# ------------------------------------------------------------------ the version of the policy


def drop_stale(
    batch: TensorDictBase, version: int, *, max_age: int | None = None, key: NestedKey = "policy_version"
) -> TensorDictBase:
    """Write the age of each row, or of each token, and leave those out of the loss that are too old.

    Args:
        batch: rows with the version of the policy that sampled them, integers ``[*B]`` or ``[*B, 1]`` for rows, or ``[*B, T]``
            for tokens, dense. Negative versions stand for the present one.
        version: the present version, in optimizer steps like the others.

    Keyword Args:
        max_age: the largest age that is trained. None leaves nothing out.
        key: the entry of the versions.

    Returns:
        A shallow copy with the entry ``"age"``, which :class:`~torchrl_llm_kl.losses.StalenessMask` and the metrics of the loss
        read. If something is too old, it also has ``"loss_mask"``, combined with an earlier one, and ``"left_out"``, which is
        True for rows without a token that is trained. :func:`~torchrl_llm_kl.diagnose` compares these rows with the others.

    Raises:
        KeyError: if the versions are missing.
        TypeError: if they are no dense integers.
        ValueError: if a version is later than the present one.

    Example:
        >>> from tensordict import TensorDict
        >>> batch = TensorDict(policy_version=torch.tensor([[5], [3]]), batch_size=[2])
        >>> dropped = drop_stale(batch, 6, max_age=2)
        >>> dropped["age"].flatten().tolist(), dropped["loss_mask"].flatten().tolist()
        ([1, 3], [True, False])
    """
    place = find_key(batch, key)
    if place is None:
        require_key(batch, key, "drop_stale", "Collect with track_policy_version=True, or pass key=.")
    versions = read_column(batch, place)
    # The rows of a lazy stack have one shape here, unless each token has a version.
    if isinstance(versions, list) and len({getattr(row, "shape", None) for row in versions}) == 1:
        versions = torch.stack(versions) if isinstance(versions[0], Tensor) else versions
    if not isinstance(versions, Tensor) or versions.is_nested or versions.is_floating_point():
        kind = versions.dtype if isinstance(versions, Tensor) else type(versions).__name__
        raise EntryTypeError(f"{key!r} must hold dense integers, such as the number of optimizer steps, found {kind}.")
    age = torch.where(versions < 0, 0, version - versions.long())
    if bool((age < 0).any()):
        raise ValueError(f"{key!r} has version {version - int(age.min())}, later than the present one, {version}.")
    out = batch.copy().set("age", age)
    if max_age is None or not bool((age > max_age).any()):
        return out
    rows = batch.batch_size.numel()
    fresh, earlier = age <= max_age, batch.get("loss_mask", None)
    if earlier is not None:
        # A mask of rows and one of tokens are combined over the tokens.
        wider = max(fresh, earlier, key=torch.Tensor.numel)
        fresh = (fresh.reshape(rows, -1) & earlier.reshape(rows, -1)).reshape(wider.shape)
    # For the doctor, which compares whole rows.
    left_out = ~fresh.reshape(rows, -1).any(-1).reshape(batch.batch_size)
    if "left_out" in batch.keys():  # noqa: SIM118
        left_out |= batch["left_out"].reshape(left_out.shape)
    return out.set("loss_mask", fresh).set("left_out", left_out)


# ------------------------------------------------------------------ kept tokens


def read_kept(td: TensorDictBase, key: NestedKey, tokens: Ragged, responses: Tensor | None = None) -> Kept | None:
    """The kept ids of all ``N`` tokens, or None if they are missing.

    Args:
        td: the data.
        key: parent of both entries, read below ``"next"`` before the root.
        tokens: all tokens.
        responses: True at response tokens, bool ``[N]``. Needed if ``counts`` cover only the response.

    Raises:
        ValueError: if a sequence has fewer ids than its counts add up to.

    Example:
        >>> from tensordict import TensorDict
        >>> kept = TensorDict(counts=torch.tensor([[0, 2, 1]]), ids=torch.tensor([[5, 6, 7, -1]]), batch_size=[1])
        >>> tokens = Ragged.from_list([torch.tensor([3, 6, 7])])
        >>> read_kept(TensorDict(kept=kept, batch_size=[1]), "kept", tokens)[:2]
        (tensor([5, 6, 7]), tensor([0, 0, 2, 3]))
    """
    ids_key, counts_key = (find_result(td, sub_key(key, name)) for name in ("ids", "counts"))
    if ids_key is None or counts_key is None:
        return None
    ids = read_of(td, ids_key, tokens)
    counts = per_token(td, counts_key, tokens, responses, fill=0, repeats=False).long().cpu()
    needed, held = segment_sum(counts, tokens.lengths.cpu()), ids.lengths.cpu()
    short = (needed > held).nonzero()
    if len(short):
        row = int(short[0])
        raise ValueError(f"{ids_key!r} has {int(held[row])} ids for sequence {row}, {counts_key!r} {int(needed[row])}.")
    # The rows of ids may be padded on the right, so keep the first `needed` ids of each.
    flat = Ragged(ids.values.reshape(-1).cpu(), held, ids.container).first(needed)
    return Kept.of(ids.values.reshape(-1).cpu()[flat].long(), counts)


def write_kept(td: TensorDictBase, key: NestedKey, tokens: Ragged, ids: Tensor, counts: Tensor) -> TensorDictBase:
    """Store the kept ids of all tokens ``[M]`` and their counts ``[N]``. Returns the TensorDict that replaces ``td``.

    Example:
        >>> from tensordict import TensorDict
        >>> full = torch.tensor([[3, 6, 7]])
        >>> td = TensorDict(tokens=TensorDict(full=full, batch_size=[1]), batch_size=[1])
        >>> td = write_kept(td, "kept", Ragged.from_padded(full), torch.tensor([5, 6, 7]), torch.tensor([0, 2, 1]))
        >>> td["kept", "ids"], td["kept", "counts"]
        (tensor([[5, 6, 7]], dtype=torch.int32), tensor([[0, 2, 1]], dtype=torch.int32))
    """
    device = tokens.values.device
    td = write_ragged(td, sub_key(key, "counts"), tokens.like(counts.int().to(device)).slots(), tokens.container)
    sizes, shape = segment_sum(counts.cpu(), tokens.lengths.cpu()), tokens.container.batch_shape
    rows = Ragged(ids.int().to(device), sizes.to(device), Rows(sizes.tolist(), shape, device))
    if not isinstance(tokens.container, Dense):
        return write_ragged(td, sub_key(key, "ids"), rows.values, rows.container)
    # -1 cannot be a token id.
    padded = rows.to_padded(value=-1)
    return write_ragged(td, sub_key(key, "ids"), padded.flatten(), Dense(shape, padded.shape[1], device))


# ------------------------------------------------------------------ routing


def read_routing(td: TensorDictBase, key: NestedKey, tokens: Ragged, responses: Tensor | None = None) -> Tensor | None:
    """The recorded experts of each token, integers ``[N, L, k]``, -1 without a record. None if the entry is missing.

    Args:
        td: the data.
        key: the entry, read below ``"next"`` before the root.
        tokens: all tokens.
        responses: True at response tokens, bool ``[N]``. Needed if the entry covers only the response.

    Raises:
        ValueError: if the entry holds no integers ``[L, k]`` for each token, or its length is neither that of the tokens nor
            that of the response, with or without the last token.

    Example:
        >>> from tensordict import TensorDict
        >>> data = TensorDict(routed_experts=torch.tensor([[[[3, 1]], [[0, 2]]]]), batch_size=[1])
        >>> read_routing(data, "routed_experts", Ragged.from_list([torch.tensor([5, 6, 7])])).tolist()
        [[[3, 1]], [[0, 2]], [[-1, -1]]]
    """
    entry = find_result(td, key)
    if entry is None:
        return None
    data = read_of(td, entry, tokens)
    values = data.slots().cpu()
    if values.ndim != 3 or values.is_floating_point() or values.dtype == torch.bool:
        raise ValueError(
            f"{entry!r} must hold integers [layers, experts] for each token, found {list(values.shape[1:])} of {values.dtype}."
        )
    # Widen, since unsigned types have no -1 to mark missing tokens.
    values = values.to(torch.int16 if values.element_size() == 1 else torch.int32)
    widths, keep = data.container.row_lengths.cpu(), None if tokens.keep is None else tokens.keep.cpu()
    mask = torch.zeros(tokens.values.shape[0], dtype=torch.bool) if responses is None else responses.cpu()
    every = Ragged(tokens.values.cpu(), tokens.lengths.cpu(), tokens.container)
    slots, in_slots = every, mask
    if keep is not None:  # the record may also cover the padding
        slots = Ragged(keep, tokens.container.row_lengths.cpu(), tokens.container)
        in_slots = torch.zeros_like(keep).index_put((keep,), mask)
    # Try whole sequences first. With prompts of one token, a row without its last token is as long as the response.
    for places, scored in ((slots, None), (every, None), (slots, in_slots), (every, mask)):
        start = torch.zeros_like(places.lengths) if scored is None else places.first_true(scored)
        short, empty = places.lengths - start - widths, places.lengths == start
        if bool((short == 0).all() | (short == (~empty).long()).all()):
            where = places.first(start + widths) & ~places.first(start)
            out = values.new_full((where.shape[0], *values.shape[1:]), -1)
            out[where] = values
            return out[keep] if places is slots and keep is not None else out
    row = int((slots.lengths != widths).nonzero()[0])
    raise ValueError(
        f"{key!r} must have a row for each token but the last: sequence {row} has {int(widths[row])} rows and "
        f"{int(slots.lengths[row])} tokens."
    )


# ------------------------------------------------------------------ images


def read_images(td: TensorDictBase, key: NestedKey) -> ImageRows | None:
    """The processor's output for the images of each row, None for a row without images. None if no row has images.

    Args:
        td: the data, of any batch size.
        key: parent of the entries, also found on the other side of ``"next"``, or non-tensor data with a dict for each row.

    Example:
        >>> from tensordict import TensorDict, lazy_stack
        >>> row = TensorDict(images=TensorDict(pixel_values=torch.ones(2, 3)))
        >>> [found and list(found) for found in read_images(lazy_stack([row, TensorDict()]), "images")]
        [['pixel_values'], None]
    """
    for path in both_sides(key):
        rows = [row or None for row in _image_rows(td, path)]
        if any(row is not None for row in rows):
            return rows
    return None


def _image_rows(td: Node, path: tuple[str, ...]) -> ImageRows:
    """The images of each row of ``td``, in row-major order."""
    if isinstance(td, LazyStackedTensorDict) and not is_non_tensor(td):
        parts = [_image_rows(node_of(each), path) for each in td.tensordicts]
        outer = td.batch_size[: td.stack_dim].numel()
        size = [len(part) // outer for part in parts] if outer else []
        return [x for i in range(outer) for part, n in zip(parts, size, strict=True) for x in part[i * n : (i + 1) * n]]
    count = td.batch_size.numel()
    if path:
        value = node_of(td.get(path[0], None))
        if value is None:
            return [None] * count
        if isinstance(value, TensorDictBase) and not is_non_tensor(value):
            return _image_rows(value, path[1:])
        rows = [value] if isinstance(value, Mapping) else list(leaves(value))
        if len(path) > 1 or len(rows) != count or not all(row is None or isinstance(row, Mapping) for row in rows):
            raise EntryTypeError(
                f"expected a dict or None for each of {count} rows under {path[0]!r}, got {value!r:.60}."
            )
        return rows
    columns = {name: unbind_rows(value, td.batch_size) for name, value in td.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)] or [None] * count


# ------------------------------------------------------------------ a teacher's top k


class TeacherOutcomes(NamedTuple):
    """The top k of ``M`` teachers at each token, the result of :func:`read_top_k`."""

    ids: Tensor  #: int64 ``[N, M, k]``, -1 after the last id of a teacher with a smaller k
    log_probs: (
        Tensor  #: nats ``[N, M, k + 1]``: of the ids, ``-inf`` at ids of -1, and in the last column of all other tokens
    )


def top_k_entries(key: NestedKey) -> list[NestedKey]:
    """The keys of a teacher's top k: ids and log-probs ``[*B, T, k]``, and the log-prob of the rest ``[*B, T]``.

    Example:
        >>> top_k_entries("top_k")
        [('top_k', 'ids'), ('top_k', 'log_probs'), ('top_k', 'rest_log_prob')]
    """
    return [sub_key(key, name) for name in ("ids", "log_probs", "rest_log_prob")]


def read_top_k(
    td: TensorDictBase, keys: Sequence[NestedKey], tokens: Ragged, responses: Tensor | None
) -> TeacherOutcomes:
    """The top k of one or several teachers at each token, in any layout that :func:`per_token` reads.

    Args:
        td: the data.
        keys: the key of each teacher's :class:`~torchrl_llm_kl.TopK`, read below ``"next"`` before the root. Each teacher may
            have its own ``k``.
        tokens: all tokens.
        responses: True at response tokens, bool ``[N]``, or None if unknown.

    Raises:
        KeyError: if an entry is missing.
        ValueError: if the ids and the log-probs of a teacher have different shapes.

    Example:
        >>> from tensordict import TensorDict
        >>> tokens = Ragged.from_list([torch.tensor([7, 8])])
        >>> top = TensorDict(ids=torch.tensor([[[0], [8]]]), log_probs=torch.tensor([[[0.0], [-0.1]]]),
        ...     rest_log_prob=torch.tensor([[0.0, -2.4]]), batch_size=[1])
        >>> outcomes = read_top_k(TensorDict(top_k=top, batch_size=[1]), ["top_k"], tokens, None)
        >>> outcomes.ids[1].tolist(), outcomes.log_probs[1]
        ([[8]], tensor([[-0.1000, -2.4000]]))
    """
    advice = "RetrieveLogProb(teacher, extras=[TopK(64)]) or RayRetrieveLogProb writes it. Set its key by set_keys(top_k=...)."
    teachers = []
    for key in keys:
        entries = [
            find_result(td, name) or require_key(td, name, "a distillation needs a teacher's top k", advice)
            for name in top_k_entries(key)
        ]
        ids = per_token(td, entries[0], tokens, responses, fill=0, features=1)
        log_probs = per_token(td, entries[1], tokens, responses, features=1).detach()
        rest = per_token(td, entries[2], tokens, responses, repeats=False).detach().to(log_probs.dtype)
        if ids.shape != log_probs.shape:
            shapes = f"{tuple(ids.shape[1:])} and {tuple(log_probs.shape[1:])}"
            raise ValueError(f"{entries[0]!r} and {entries[1]!r} hold {shapes} numbers per token: expected the same k.")
        if ids.is_floating_point():
            raise ValueError(f"{entries[0]!r} holds {ids.dtype}: expected integers, the ids of tokens.")
        teachers.append((ids.long(), torch.cat([log_probs, rest.unsqueeze(-1)], -1)))
    most = max(ids.shape[-1] for ids, _ in teachers)
    ids = torch.stack([pad(ids, (0, most - ids.shape[-1]), value=-1) for ids, _ in teachers], 1)
    # Insert the padding before the last column, which is the rest.
    padded = [
        torch.cat([pad(x[:, :-1], (0, most + 1 - x.shape[-1]), value=-torch.inf), x[:, -1:]], -1) for _, x in teachers
    ]
    return TeacherOutcomes(ids, torch.stack(padded, 1))
