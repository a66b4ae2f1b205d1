"""Conversion of rows to token ids and masks, and the counts of skipped rows.

``T`` is the number of tokens of an answer, prompt and response together. An unusable row becomes a :class:`Skip` with its
reason, so that one bad line does not end a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypedDict, get_args

import torch
from torch import Tensor

from torchrl_llm_kl._numerics import check_choice, check_range
from torchrl_llm_kl.datasets._rows import Row
from torchrl_llm_kl.datasets._values import (
    TRAINED,
    Fields,
    Layout,
    Reason,
    RowColumns,
    RowError,
    check_unicode,
    is_trained,
    layout_of,
    read_messages,
    row_variables,
    split_choices,
    standard_row,
)
from torchrl_llm_kl.masks import (
    ASSISTANT,
    LostText,
    Message,
    MissingChatTemplateError,
    TemplateArgs,
    encode_images,
    encode_with_mask,
    is_processor,
    render_conversation,
    split_images,
    template_variables,
)


class _Encoded(NamedTuple):
    """Tokens, masks and images of an :class:`Answer` before it is cut to ``max_length``."""

    tokens: Tensor
    mask: Tensor
    assistant: Tensor
    images: Mapping[str, Tensor] = {}
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Answer:
    """One sequence to score or to train on.

    Args:
        index: the number of its row.
        part: ``"chosen"``, ``"rejected"``, or empty.
        tokens: prompt and response, int64 ``[T]``.
        mask: True at the tokens to score, bool ``[T]``, False at the first token.
        assistant: True at all tokens of the assistant, including those in the prompt, bool ``[T]``, False at the first token.
        cut: whether tokens at its end were cut off.
        images: the processor's tensors for its images, by name.
        notes: what the encoding lost or changed, such as reasoning that the template does not write.
    """

    index: int
    part: str
    tokens: Tensor
    mask: Tensor
    assistant: Tensor
    cut: bool = False
    images: Mapping[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Skip:
    """A sequence that is left out.

    Args:
        index: the number of its row.
        part: ``"chosen"``, ``"rejected"``, or empty.
        place: the place of its row in words, such as ``"line 3"``.
        reason: the kind of problem.
        detail: the problem in words.
    """

    index: int
    part: str
    place: str
    reason: Reason
    detail: str

    @property
    def where(self) -> str:
        """The place of the row and the part, such as ``"line 3 (rejected)"``."""
        return f"{self.place} ({self.part})" if self.part else self.place


#: Which assistant turns are trained.
Turns = Literal["all", "last", "each"]


class EncodingArgs(TypedDict, total=False):
    """Encoding options: the arguments of :class:`Encoder` other than layout and tokenizer."""

    max_length: int | None
    too_long: Literal["skip", "cut"]
    vocab_size: int | None
    as_chat: bool
    add_eos: bool
    turns: Turns
    strict: bool
    system_prompt: str | None
    tools: Sequence[object] | None
    chat_template: str | None
    template_kwargs: Mapping[str, object] | None


@dataclass
class Encoder:
    """Converts rows to token ids, with the mask of the tokens to score or to train on.

    Conversations are rendered with the tokenizer's chat template. The mask covers the assistant's turns, including their
    end-of-turn tokens. Plain text is encoded unchanged, prompt and answer together, after the begin-of-sequence token if the
    tokenizer adds one.

    Args:
        layout: the layout that every row must have.
        tokenizer: a transformers tokenizer, or a processor for conversations with images. None for rows of token ids.
        vocab_size: the vocabulary size of the model. Larger token ids are malformed. None disables the check.
        max_length: the longest sequence, in tokens. None for no limit.
        too_long: ``"skip"`` longer sequences, or ``"cut"`` them at their end. A sequence is still skipped if it has no
            response token before the cut, or if it has images.
        as_chat: whether prompt and answer texts become a user message and an assistant message.
        add_eos: whether an answer text ends with the tokenizer's end-of-sequence token.
        turns: score ``"all"`` assistant turns after the prompt, or only the ``"last"`` one. ``"each"`` gives one sequence for
            each assistant turn, which ends with this turn and is scored there. Templates that drop the reasoning of earlier
            turns then write all reasoning once. A turn is left out if its message has a false ``weight``, ``loss``,
            ``trainable``, ``loss_mask``, ``train`` or ``train_on_turn``.
        strict: skip rows with a text that the template does not write. By default they are used, and counted as notes.
        system_prompt: a system message for conversations that do not begin with one. A row's ``system`` column replaces it.
        tools: tools for the template, for rows without a ``tools`` column.
        chat_template: replaces the tokenizer's template.
        template_kwargs: further variables of the template, such as ``{"enable_thinking": False}``. A row's
            ``chat_template_kwargs``, and its columns with the name of a variable of the template, replace them.

    Example:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = Tokenizer(models.WordLevel({"two": 0, "plus": 1, "is": 2, "four": 3}))
        >>> words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        >>> encoder = Encoder("completion", PreTrainedTokenizerFast(tokenizer_object=words))
        >>> (answer,) = encoder.encode(Row(0, "row 1", {"prompt": "two plus two is ", "completion": "four"}))
        >>> answer.tokens.tolist(), answer.mask.tolist()
        ([0, 1, 0, 2, 3], [False, False, False, False, True])
        >>> (skip,) = encoder.encode(Row(1, "row 2", {"prompt": "two", "completion": ""}))
        >>> skip.reason, skip.detail
        ('empty', 'no text to score')
    """

    layout: Layout
    tokenizer: Any
    vocab_size: int | None = None
    max_length: int | None = None
    too_long: Literal["skip", "cut"] = "skip"
    as_chat: bool = False
    add_eos: bool = False
    turns: Turns = "all"
    strict: bool = False
    system_prompt: str | None = None
    tools: Sequence[object] | None = None
    chat_template: str | None = None
    template_kwargs: Mapping[str, object] | None = None
    _processor: Any = field(default=None, init=False)  # holds the tokenizer, if a processor was passed

    def __post_init__(self) -> None:
        if is_processor(self.tokenizer):
            self._processor, self.tokenizer = self.tokenizer, self.tokenizer.tokenizer
            self.chat_template = self.chat_template or self._processor.chat_template
        check_choice(("skip", "cut"), too_long=self.too_long)
        check_choice(get_args(Turns), turns=self.turns)
        if self.turns == "each" and self.layout == "preference":
            raise ValueError('turns="each" has no meaning for pairs: pass turns="all" or turns="last".')
        check_range(2, max_length=2 if self.max_length is None else self.max_length)
        if self.add_eos and self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no eos_token to end an answer with: set it, or pass add_eos=False.")

    def encode(self, row: Row) -> list[Answer | Skip]:
        """Encode a row: two answers for a preference, one for each assistant turn with ``turns="each"``, else one.

        A response object of the OpenAI API gives one for each of its choices.
        """
        values = split_choices(row.value)
        if len(values) > 1:
            return [item for value in values for item in self.encode(replace(row, value=value))]
        row = replace(row, value=values[0])
        if self.layout == "preference":
            return [self._part(row, "chosen"), self._part(row, "rejected")]
        if self.turns != "each":
            return [self._part(row, "")]
        try:
            value = standard_row(row.value)
            answer = self._messages(value, "")[1]
            places = [i for i, message in enumerate(answer) if message["role"] == ASSISTANT and is_trained(message)]
        except RowError:  # the row has no messages, or cannot be used
            places = []
        return [self._part(row, "", until=place + 1) for place in places] or [self._part(row, "")]

    def _part(self, row: Row, part: str, until: int | None = None) -> Answer | Skip:
        """Encode one answer of a row. With ``until``, only the first messages of the answer, scored at the last one."""

        def skip(reason: Reason, detail: str) -> Skip:
            return Skip(row.index, part, row.place, reason, detail)

        if row.value is None:
            return skip("malformed", row.problem)
        try:
            layout = layout_of(row.value)
            if layout != self.layout:
                raise RowError(f"holds {layout}, expected {self.layout}")
            tokens, mask, assistant, images, notes = self._tokens(standard_row(row.value), part, until)
            if notes and self.strict:
                raise RowError("; ".join(notes), "not written")
        except RowError as error:
            return skip(error.reason, str(error))
        if self.vocab_size is not None and len(tokens) and int(tokens.max()) >= self.vocab_size:
            return skip("malformed", f"token id {int(tokens.max())} is outside the vocabulary of {self.vocab_size}")
        most = self.max_length
        cut = most is not None and len(tokens) > most
        if cut:
            # A cut would separate images from their tokens.
            if self.too_long == "skip" or images or not mask[:most].any():
                return skip("too long", f"{len(tokens)} tokens, at most {most}")
            tokens, mask, assistant = tokens[:most], mask[:most], assistant[:most]
        if not mask.any():
            return skip("empty", "no token to score")
        return Answer(row.index, part, tokens, mask, assistant, cut, images, notes)

    def _tokens(self, value: Fields, part: str, until: int | None) -> _Encoded:
        """Tokenise one answer of a row, with its prompt."""
        own = RowColumns(value)
        if self.layout == "tokens":
            ids, places = own.ids()
            mask = places.mask[places.keep]
            return _Encoded(ids, mask, mask)
        prompt, answer = (
            value.get("prompt", own.values.get("prompt")),
            value.get(part) if part else own.values.get("response"),
        )
        if self.layout != "messages" and isinstance(answer, str) and isinstance(prompt, str) and not self.as_chat:
            if not answer:
                raise RowError("no text to score", "empty")
            return self._of_text(prompt, answer)
        before, messages = self._messages(value, part)
        return self._of_messages(before, messages[:until], value, last=until is not None)

    def _messages(self, value: Fields, part: str) -> tuple[list[Message], list[Message]]:
        """The messages of the prompt and of the answer."""
        if self.layout == "messages":
            return [], read_messages(value["messages"], "messages")
        own = RowColumns(value)
        name = part or own.names["response"]
        prompt, answer = value.get("prompt", own.values.get("prompt")), value[name]
        if isinstance(answer, str) and isinstance(prompt, str):
            if not answer:
                raise RowError("no text to score", "empty")
            asked: list[Message] = [{"role": "user", "content": prompt}] if prompt else []
            return asked, [{"role": ASSISTANT, "content": answer}]
        answer = read_messages(answer, name)
        if prompt is None:  # the prompt is the common beginning of both conversations
            other = read_messages(value["rejected" if part == "chosen" else "chosen"], "chosen and rejected")
            differing = (i for i, (a, b) in enumerate(zip(answer, other, strict=False)) if a != b)
            shared = next(differing, min(len(answer), len(other)))
            return answer[:shared], answer[shared:]
        return read_messages(prompt, "prompt"), answer

    def _of_messages(self, prompt: list[Message], answer: list[Message], value: Fields, *, last: bool) -> _Encoded:
        """Render a conversation with the chat template and mask the trained turns of the assistant in ``answer``."""
        if not answer:
            raise RowError("no message", "empty")
        spoken = [i for i, message in enumerate(answer) if message["role"] == ASSISTANT]
        if not spoken:
            raise RowError("no message of the assistant", "no assistant turn")
        if last or self.turns == "last":
            prompt, answer = [*prompt, *answer[: spoken[-1]]], answer[spoken[-1] :]
        system = value.get("system") if isinstance(value.get("system"), str) else self.system_prompt
        if system is not None and [*prompt, *answer][0]["role"] != "system":
            prompt = [{"role": "system", "content": system}, *prompt]
        whole = [*prompt, *answer]
        learned = {i for i, message in enumerate(whole) if message["role"] == ASSISTANT and is_trained(message)}
        trained = {i for i in learned if i >= len(prompt)}
        if not trained:
            raise RowError("no turn of the assistant that is trained", "no assistant turn")
        whole = [{key: item for key, item in message.items() if key not in TRAINED} for message in whole]
        try:
            whole, images = split_images(whole)
            if images and self._processor is None:
                raise RowError(f"has {len(images)} images: pass the model's processor instead of its tokenizer")
            rendered = render_conversation(self.tokenizer, whole, **self._options(value))
            owned = list(zip(rendered.assistant_spans, rendered.messages, strict=True))
            spans, every = ([span for span, i in owned if i in chosen] for chosen in (trained, learned))
            notes = _notes(rendered.lost, trained)
            if images:
                encoded, pixels = encode_images(self._processor, rendered.text, images, spans, every)
                (tokens, mask), (_, assistant) = encoded
                return _Encoded(tokens, mask, assistant, pixels, notes)
            if len(spans) == len(owned):
                return _Encoded(rendered.token_ids, rendered.assistant_mask, rendered.assistant_mask, {}, notes)
            encoded = encode_with_mask(self.tokenizer, [rendered.text] * 2, [spans, every])
            (tokens, mask), (_, assistant) = encoded
            return _Encoded(tokens, mask, assistant, {}, notes)
        except (RowError, MissingChatTemplateError):
            raise
        except Exception as error:  # a template can raise any error
            raise RowError(f"{type(error).__name__}: {error}", "template") from error

    def _options(self, value: Fields) -> TemplateArgs:
        """The template and its variables for a row: the encoder's, replaced by the row's own."""
        options: TemplateArgs = {"chat_template": self.chat_template, **(self.template_kwargs or {})}
        options |= row_variables(value, template_variables(self.tokenizer, options["chat_template"]))
        options["tools"] = self.tools if value.get("tools") is None else value["tools"]
        return options

    def _of_text(self, prompt: str, answer: str) -> _Encoded:
        """Tokenise plain text without a template, after the begin-of-sequence token if the tokenizer adds one."""
        check_unicode(prompt + answer)
        text, span = prompt + answer, (len(prompt), len(prompt) + len(answer))
        (tokens, mask), (separate, _) = encode_with_mask(self.tokenizer, [text, prompt], [[span], []], add_bos=True)
        notes = () if torch.equal(tokens[: len(separate)], separate) else (_BORDER,)
        eos = self.tokenizer.eos_token_id
        if not len(tokens):
            raise RowError("no token to score", "empty")
        if self.add_eos and int(tokens[-1]) != eos:
            tokens, mask = torch.cat([tokens, torch.tensor([eos])]), torch.cat([mask, torch.tensor([True])])
        return _Encoded(tokens, mask, mask, {}, notes)


_BORDER = "a token crosses the border of prompt and completion"


def _notes(lost: Sequence[LostText], trained: set[int]) -> tuple[str, ...]:
    """The texts that the template does not write. Reasoning counts only in turns that are trained."""
    counted = (each for each in lost if each.field != "reasoning" or each.message in trained)
    return tuple(dict.fromkeys(f"the template {each.problem} of a message" for each in counted))


# ------------------------------------------------------------------ skipped sequences

_PLACES = 5  # places listed per reason


@dataclass
class Skipped:
    """Counts of the skipped sequences by reason, with the first places for each reason.

    Args:
        counts: the number of sequences, by reason.
        places: the first five places in words, by reason.
        cut: the number of sequences that were cut to the maximum length.
        notes: the number of sequences that are used in spite of a loss, by its description.

    Example:
        >>> skipped = Skipped()
        >>> skipped.add(Skip(3, "", "line 4", "empty", "no text to score"))
        >>> print(skipped)
        skipped 1, empty: line 4: no text to score
        >>> skipped.total, skipped.counts["empty"]
        (1, 1)
    """

    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)
    cut: int = 0
    notes: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """The number of skipped sequences."""
        return self.counts.total()

    def add(self, skip: Skip) -> None:
        """Count one sequence."""
        self.counts[skip.reason] += 1
        places = self.places.setdefault(skip.reason, [])
        if len(places) < _PLACES:
            places.append(f"{skip.where}: {skip.detail}")

    def to_dict(self) -> dict[str, object]:
        """Counts and first places by reason, as JSON values."""
        return {reason: {"count": n, "first": self.places[reason]} for reason, n in self.counts.items()}

    def __str__(self) -> str:
        lines = []
        for reason, places in self.places.items():
            more = "; ..." if self.counts[reason] > len(places) else ""
            lines.append(f"skipped {self.counts[reason]:,}, {reason}: {'; '.join(places)}{more}")
        if self.cut:
            lines.append(f"cut {self.cut:,} at the maximum length")
        lines += [f"used {count:,} in which {note}" for note, count in self.notes.items()]
        return "\n".join(lines)
