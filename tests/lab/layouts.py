"""Sequences in the layouts of torchrl's policies and engines: padded, nested, jagged, or rows of a lazy stack."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Ids = Sequence[Sequence[int]]
LAYOUTS = ["padded", "nested", "jagged", "lazy"]
KINDS = {"nested": torch.strided, "jagged": torch.jagged}
#: Three sequences whose prompts and responses all differ in length.
PROMPTS = [[7, 8, 9], [5], [4, 4]]
RESPONSES = [[11, 12], [13, 14, 15, 16], [17]]


def joined(prompts: Ids, responses: Ids) -> list[list[int]]:
    return [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]


def pad_both_sides(rows: list[Tensor], prompts: Ids, responses: Ids, fill: float = 0) -> Tensor:
    """Pad as torchrl does, on the left of prompts and the right of responses. Rows of other lengths are padded right."""
    lengths, starts = [len(row) for row in rows], [len(prompt) for prompt in prompts]
    if lengths != starts and lengths != [len(row) for row in joined(prompts, responses)]:
        starts = [0] * len(rows)
    before = [row[:start] for row, start in zip(rows, starts, strict=True)]
    after = [row[start:] for row, start in zip(rows, starts, strict=True)]
    return torch.cat([pad_sequence(before, True, fill, "left"), pad_sequence(after, True, fill)], 1)


def lay_out(
    layout: str, entries: Mapping[Any, Any], prompts: Ids = PROMPTS, responses: Ids = RESPONSES, *, fill: float = 0
) -> TensorDictBase:
    """A TensorDict of sequences.

    ``entries``: under each key a list with a row for each sequence, or a tensor whose first dimension is the batch. Rows
    as long as the sequences, their prompts or their responses are padded as those are; ``fill`` is what padding holds.
    """
    columns: dict[Any, Any] = dict(entries)
    for key, rows in entries.items():
        if isinstance(rows, list):
            columns[key] = rows = [torch.as_tensor(row) for row in rows]
            if layout == "padded":
                columns[key] = pad_both_sides(rows, prompts, responses, fill if rows[0].is_floating_point() else 0)
            elif layout != "lazy":
                columns[key] = torch.nested.as_nested_tensor(rows, layout=KINDS[layout])
    if layout == "lazy":
        return lazy_stack([TensorDict({k: rows[i] for k, rows in columns.items()}) for i in range(len(prompts))])
    return TensorDict(columns, batch_size=[len(prompts)])


def tokens(
    layout: str, prompts: Ids = PROMPTS, responses: Ids = RESPONSES, *, fill: float = 0, **entries: Any
) -> TensorDictBase:
    """:func:`lay_out` with the tokens and their prompts, and the attention mask if they are padded.

    Keyword arguments with two underscores are nested keys: ``log_probs__full``.
    """
    full = joined(prompts, responses)
    columns: dict[Any, Any] = {("tokens", "full"): full, ("tokens", "prompt"): [list(p) for p in prompts]}
    if layout == "padded":
        columns["masks", "all_attention_mask"] = [[True] * len(row) for row in full]
    columns |= {tuple(name.split("__")) if "__" in name else name: value for name, value in entries.items()}
    return lay_out(layout, columns, prompts, responses, fill=fill)


def at_responses(data: TensorDictBase, key: Any, prompts: Ids = PROMPTS, responses: Ids = RESPONSES) -> list[Tensor]:
    """Rows of an entry at the response tokens, in any layout. Asserts that the entry is 0 at all other tokens."""
    value, out = data.get(key, as_list=True), []
    padded = isinstance(value, Tensor) and not value.is_nested
    for prompt, response, row in zip(prompts, responses, value, strict=True):
        start = max(map(len, prompts)) if padded else len(prompt)
        end = start + len(response)
        assert len(row) == (start + max(map(len, responses)) if padded else end)
        assert not row[:start].any()
        assert not row[end:].any()
        out.append(row[start:end])
    return out
