"""Conversion of text to SFT and preference data: TensorDicts that losses, transforms and replay buffers read.

The result is a lazy stack with one unpadded TensorDict per sequence.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from typing_extensions import Unpack

from torchrl_llm_kl.datasets._encoding import Answer, Encoder, EncodingArgs, Skip, Skipped
from torchrl_llm_kl.datasets._rows import DataSource, Row, read_rows
from torchrl_llm_kl.datasets._values import DataError, Layout
from torchrl_llm_kl.masks import Tokenizer

_Columns = dict[str, list[Tensor | NonTensorData]]
#: How skipped rows are reported: by a warning, by an error at the first one, or by a call with the :class:`Skipped`.
OnSkip = Literal["warn", "raise"] | Callable[[Skipped], None]


class SkippedRowsWarning(UserWarning):
    """Rows were left out or cut. ``skipped`` holds the counts and reasons, a :class:`Skipped`."""

    def __init__(self, name: str, skipped: Skipped) -> None:
        super().__init__(f"some rows of {name} were left out or cut:\n{skipped}")
        self.skipped = skipped


def from_conversations(
    data: DataSource,
    tokenizer: Tokenizer,
    *,
    messages_key: str = "messages",
    on_skip: OnSkip = "warn",
    **encoding: Unpack[EncodingArgs],
) -> LazyStackedTensorDict:
    r"""Convert conversations to SFT data with the tokenizer's chat template.

    Args:
        data: rows with a list of ``messages`` (dicts with ``role`` and ``content``), or bare conversations, in any form that
            :func:`read_rows` accepts: a JSONL or Parquet file, a dataset, a list, or a ``History`` of TorchRL. A ``tools``
            column is passed to the template.
        tokenizer: a transformers tokenizer. Conversations with images need the model's processor instead.

    Keyword Args:
        messages_key: the column that holds the messages.
        on_skip: how to report rows that cannot be used, and rows that ``too_long="cut"`` shortens. ``"warn"`` reports their
            number, reasons and first places. ``"raise"`` raises at the first unusable row. A function is called once with the
            :class:`Skipped`, even if no row was skipped.
        encoding: options of :class:`Encoder`, such as ``turns="last"`` (train only the assistant's last turn) or ``"each"``
            (one row for each turn), ``strict``, ``max_length``, ``too_long``, ``system_prompt`` and ``tools``.

    Returns:
        A lazy stack ``[N]``. Each row has these entries, unpadded:

        - ``("tokens", "full")``: int64 ``[T]``.
        - ``("tokens", "prompt")``: the tokens before the first trained token.
        - ``("masks", "all_assistant_mask")``: bool ``[T]``, True in all turns of the assistant.
        - ``("masks", "all_attention_mask")``: bool ``[T]``, True everywhere.
        - ``"images"``: for a conversation with images, the processor's tensors. See ``docs/images.md``.
        - ``"metadata"``: all other columns. Numbers and booleans are tensors. A row without a value has None.

        ``make_algorithm("sft")``, :class:`~torchrl_llm_kl.PolicyLoss`, :class:`~torchrl_llm_kl.RetrieveLogProb` and a
        ``ReplayBuffer`` with a ``LazyStackStorage`` read the result directly. A loss trains the assistant's tokens after the
        prompt. With ``masking_strategy="rlhf"`` it also trains the assistant's tokens in the prompt.

    Raises:
        DataError: a ``ValueError``, if no row can be used. With ``on_skip="raise"``, for the first row that cannot be used.
        MissingChatTemplateError: if the tokenizer has no chat template.

    Warns:
        SkippedRowsWarning: if rows are left out or cut.

    Example:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = Tokenizer(models.WordLevel({"yes": 0, "no": 1, "or": 2, "<user>": 3, "<bot>": 4, "<end>": 5}))
        >>> words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
        >>> tokenizer.chat_template = (
        ...     "{% for m in messages %}{{ '<bot> ' if m.role == 'assistant' else '<user> ' }}{{ m.content }} <end>\n"
        ...     "{% endfor %}{% if add_generation_prompt %}<bot> {% endif %}")
        >>> chat = [{"role": "user", "content": "yes or no"}, {"role": "assistant", "content": "yes"}]
        >>> data = from_conversations([{"messages": chat, "level": 3}], tokenizer)
        >>> tokenizer.decode(data[0]["tokens", "prompt"])
        '<user> yes or no <end> <bot>'
        >>> data[0]["masks", "all_assistant_mask"].int().tolist()
        [0, 0, 0, 0, 0, 0, 1, 1]
        >>> data["metadata", "level"]
        tensor([3])
    """
    encoder = Encoder("messages", tokenizer, **encoding)
    stack, metadata = _encode_rows(data, encoder, on_skip, messages=messages_key)
    return _stack_rows(stack, metadata)


def from_completions(
    data: DataSource,
    tokenizer: Tokenizer,
    *,
    prompt_key: str = "prompt",
    completion_key: str = "completion",
    label_key: str = "label",
    on_skip: OnSkip = "warn",
    **encoding: Unpack[EncodingArgs],
) -> LazyStackedTensorDict:
    """Convert prompts and completions to SFT data. Both are text, or both are messages.

    Text is encoded unchanged, prompt and completion together, and ends with the tokenizer's end-of-sequence token unless
    ``add_eos=False``. With ``as_chat=True`` the texts become a user message and an assistant message on the chat template.

    Args:
        data: rows with ``prompt`` and ``completion``, in any form that :func:`read_rows` accepts.
        tokenizer: a transformers tokenizer.

    Keyword Args:
        prompt_key: the column that holds the prompt.
        completion_key: the column that holds the completion.
        label_key: a column of booleans that says whether the completion is a good one, as KTO's data has it. It becomes the
            entry ``"chosen"``.
        on_skip: how to report rows that cannot be used. See :func:`from_conversations`.
        encoding: options of :class:`Encoder`, such as ``as_chat``, ``max_length`` and ``system_prompt``.

    Returns:
        The entries of :func:`from_conversations`, ``[N]``. ``("tokens", "prompt")`` is the prompt.

    Raises, warns:
        The same as :func:`from_conversations`.

    Example:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = Tokenizer(models.WordLevel({"two": 0, "plus": 1, "is": 2, "four": 3, "<end>": 4}))
        >>> words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
        >>> rows = {"question": ["two plus two is "], "answer": ["four"]}
        >>> data = from_completions(rows, tokenizer, prompt_key="question", completion_key="answer")
        >>> data[0]["tokens", "full"].tolist(), data[0]["tokens", "prompt"].tolist()
        ([0, 1, 0, 2, 3, 4], [0, 1, 0, 2])
    """
    encoding.setdefault("add_eos", True)  # training must show where an answer ends
    encoder = Encoder("completion", tokenizer, **encoding)
    stack, columns = _encode_rows(data, encoder, on_skip, prompt=prompt_key, completion=completion_key)
    rows = _stack_rows(stack, columns)
    labels = columns.get(label_key, [])
    if labels and all(isinstance(label, Tensor) and label.dtype == torch.bool for label in labels):
        per_row = [label for label, answers in zip(labels, stack, strict=True) for _ in answers]
        for row, label in zip(rows.tensordicts, per_row, strict=True):
            row.set("chosen", label)
    return rows


def from_pairs(
    data: DataSource,
    tokenizer: Tokenizer,
    *,
    prompt_key: str = "prompt",
    chosen_key: str = "chosen",
    rejected_key: str = "rejected",
    on_skip: OnSkip = "warn",
    **encoding: Unpack[EncodingArgs],
) -> LazyStackedTensorDict:
    """Convert pairs of a chosen and a rejected answer to preference data. All are text, or all are messages.

    Text is encoded as in :func:`from_completions`. Without a prompt, the answers are whole conversations, and the prompt is
    their common beginning. A pair is left out if one of its answers cannot be used, or if both have the same tokens.

    Args:
        data: rows with ``chosen``, ``rejected`` and usually ``prompt``, in any form that :func:`read_rows` accepts, such as
            ``{"chosen": history, "rejected": history}``.
        tokenizer: a transformers tokenizer.

    Keyword Args:
        prompt_key: the column that holds the prompt.
        chosen_key: the column that holds the better answer.
        rejected_key: the column that holds the worse answer.
        on_skip: how to report rows that cannot be used. See :func:`from_conversations`.
        encoding: options of :class:`Encoder`, such as ``as_chat``, ``max_length`` and ``system_prompt``.

    Returns:
        The entries of :func:`from_conversations`, ``[N, 2]``, the chosen answer first. A replay buffer therefore stores and
        samples whole pairs. The entries ``"pair_id"`` and ``"chosen"`` identify the rows of ``reshape(-1)`` in any order.
        Objectives of single answers (``kto``, ``bco``) read ``"chosen"``.

    Raises, warns:
        The same as :func:`from_conversations`.

    Example:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = Tokenizer(models.WordLevel({"two": 0, "plus": 1, "is": 2, "four": 3, "five": 4, "<end>": 5}))
        >>> words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
        >>> rows = [{"prompt": "two plus two is ", "chosen": "four", "rejected": "five"}]
        >>> data = from_pairs(rows, tokenizer)
        >>> data.batch_size, [row["tokens", "full"].tolist() for row in data[0]]
        (torch.Size([1, 2]), [[0, 1, 0, 2, 3, 5], [0, 1, 0, 2, 4, 5]])
        >>> data["chosen"].tolist()
        [[True, False]]
    """
    encoding.setdefault("add_eos", True)  # training must show where an answer ends
    encoder = Encoder("preference", tokenizer, **encoding)
    keys = {"prompt": prompt_key, "chosen": chosen_key, "rejected": rejected_key}
    stack, columns = _encode_rows(data, encoder, on_skip, **keys)
    pairs = []
    for i, answers in enumerate(stack):
        # Both answers have the metadata of their row.
        pair = _stack(answers, {name: column[i : i + 1] * 2 for name, column in columns.items()})
        for row, chosen in zip(pair.tensordicts, (True, False), strict=True):
            row.set("pair_id", torch.tensor(i)).set("chosen", torch.tensor(chosen))
        pairs.append(pair)
    return lazy_stack(pairs)


# ------------------------------------------------------------------ rows


#: The columns that become tokens in each layout; all others are metadata.
_COLUMNS: dict[Layout, set[str]] = {
    "messages": {"messages", "tools"},
    "completion": {"prompt", "completion", "tools"},
    "preference": {"prompt", "chosen", "rejected", "tools"},
}


def _renamed(row: Row, keys: Mapping[str, str]) -> Row:
    """Rename the columns of a row. ``keys`` maps the names of a layout to the names in the data."""
    if not isinstance(row.value, Mapping):
        return row
    others = {name: item for name, item in row.value.items() if name not in keys.values()}
    return replace(row, value=others | {name: row.value[own] for name, own in keys.items() if own in row.value})


def _encode_rows(
    data: DataSource, encoder: Encoder, on_skip: OnSkip, **keys: str
) -> tuple[list[list[Answer]], _Columns]:
    """Encode the rows. Returns the answers of each usable row, and the metadata columns of these rows."""
    rows = read_rows(data)
    keys = {name: own for name, own in keys.items() if name != own}
    first = next((row for row in rows if isinstance(row.value, Mapping)), None) if keys else None
    for name, own in keys.items():  # answers as messages need no prompt, so a misspelt key would drop it silently
        if first is not None and own not in first.value:
            raise rows.error(first, f"has no column {own!r}, which {name}_key= names: it has {', '.join(first.value)}")
    skipped = Skipped()
    usable: list[list[Answer]] = []
    values: list[Mapping[str, object]] = []
    for row in (_renamed(row, keys) for row in rows):
        encoded = encoder.encode(row)
        answers = [item for item in encoded if isinstance(item, Answer)]
        skips = [item for item in encoded if isinstance(item, Skip)]
        if encoder.layout == "preference" and len(answers) == 2 and torch.equal(answers[0].tokens, answers[1].tokens):
            skips = [Skip(row.index, "", row.place, "equal answers", "both answers have the same tokens")]
        for skip in skips[:1]:
            if on_skip == "raise":
                raise DataError(f"{skip.where} of {rows.name}, {skip.reason}: {skip.detail.rstrip('.')}.")
            skipped.add(skip)
        if answers and (not skips or encoder.turns == "each"):
            skipped.cut += sum(answer.cut for answer in answers)
            skipped.notes.update(note for answer in answers for note in answer.notes)
            usable.append(answers)
            values.append(row.value if isinstance(row.value, Mapping) else {})
    if not usable:
        raise DataError(f"no row of {rows.name} can be used:\n{skipped}")
    if callable(on_skip):
        on_skip(skipped)
    elif skipped.total or skipped.cut or skipped.notes:
        warnings.warn(SkippedRowsWarning(rows.name, skipped), stacklevel=3)  # names the caller's line
    names = dict.fromkeys(name for value in values for name in value if name not in _COLUMNS[encoder.layout])
    return usable, {str(name): as_column([value.get(name) for value in values]) for name in names}


# ------------------------------------------------------------------ TensorDicts


def _stack_rows(stack: Sequence[Sequence[Answer]], columns: _Columns) -> LazyStackedTensorDict:
    """Stack all answers of all rows, each with the metadata of its row."""
    repeated = {
        name: [item for item, answers in zip(column, stack, strict=True) for _ in answers]
        for name, column in columns.items()
    }
    return _stack([answer for answers in stack for answer in answers], repeated)


def _stack(answers: Sequence[Answer], columns: _Columns) -> LazyStackedTensorDict:
    rows = [_row_of(answer, {name: column[i] for name, column in columns.items()}) for i, answer in enumerate(answers)]
    return lazy_stack(rows)


def _row_of(answer: Answer, metadata: Mapping[str, object]) -> TensorDictBase:
    prompt = int(answer.mask.int().argmax())  # the first trained token
    tokens = {"full": answer.tokens, "prompt": answer.tokens[:prompt]}
    masks = {"all_attention_mask": torch.ones_like(answer.mask), "all_assistant_mask": answer.assistant}
    entries = {"tokens": tokens, "masks": masks, "images": answer.images, "metadata": metadata}
    return TensorDict({name: TensorDict(dict(held)) for name, held in entries.items() if held})


def as_column(values: Sequence[Any]) -> list[Tensor | NonTensorData]:
    """One entry per row. The entries are tensors if all values are numbers, or all are booleans."""
    kinds = {type(value) for value in values}
    # Larger integers do not fit in int64 and stay Python values.
    if kinds == {bool} or (kinds <= {int, float} and not any(abs(value) >= 2**63 for value in values)):
        return list(torch.tensor(values))
    return [NonTensorData(data=value) for value in values]
