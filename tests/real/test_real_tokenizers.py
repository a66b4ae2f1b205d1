"""Real tokenizers of six model families on GSM8K: the bytes of their tokens, alignments, and teachers of other vocabularies.

The bytes of a token are compared with the offsets that the tokenizers themselves return.
"""

import unicodedata
from collections.abc import Iterator
from functools import cache, partial
from itertools import permutations
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from closeness import assert_near
from real_model import RealModel
from torchrl_llm_kl.masks import TextMismatchError, TokenBytes, Tokenizer, chunks
from torchrl_llm_kl.scoring import ByteTeacher
from toy_models import FORWARD

ROWS = 1000
NAMES = ("gemma3", "claude2", "deepseek", "tekken", "mistral3", "mon")
PAIRS = list(permutations(NAMES, 2))
#: These put a space before each text.
DUMMY_SPACE = {"mistral3", "mon"}
#: Characters that are not ASCII, digits, white space, and a space or a newline at either end.
TEXTS = ["½ of 5\u00a0km – that’s 2.5 km…", "  two  spaces\n\n\tand a tab \n", "Über 12345 🦆s, 自由 é e\u0301", "ﬁ ①"]


class Real:
    """A tokenizer, the bytes of its tokens, and a random model of its vocabulary."""

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        self.name, self.tokenizer = name, tokenizer
        self.bytes = TokenBytes(tokenizer)
        self.ids = cache(self._ids)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    @cache  # noqa: B019 the tokenizers live as long as the tests
    def answer(self, text: str) -> tuple[int, ...]:
        """The tokens of a text in the middle of another one."""
        return tuple(self.bytes.encode(latin(text)))

    @cache  # noqa: B019
    def model(self) -> Any:
        torch.manual_seed(len(self.name))
        config = Qwen2Config(
            vocab_size=len(self.bytes.texts),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=True,
            initializer_range=0.5,  # far from uniform
        )
        return Qwen2ForCausalLM(config).double().eval().requires_grad_(False)


def latin(text: str) -> str:
    return text.encode().decode("latin-1")


@pytest.fixture(scope="module")
def tokenizers(real: RealModel) -> dict[str, Real]:
    folder = real.folder.parent / "tokenizers"
    own = {name: Real(name, AutoTokenizer.from_pretrained(folder / name)) for name in NAMES[1:]}
    return {"gemma3": Real("gemma3", real.tokenizer), **own}


@pytest.fixture(scope="module")
def texts(real: RealModel) -> list[str]:
    return [f"{row['question']}\n{row['answer']}" for row in real.questions[:ROWS]] + TEXTS


def keeps(name: str, text: str) -> bool:
    """Whether a tokenizer keeps this text. Two of them replace characters before they tokenise."""
    if name == "mon":  # each kind of space becomes the usual one
        spaces = all(sign == " " or unicodedata.category(sign) != "Zs" for sign in text)
        return spaces and "\u200b" not in text and unicodedata.is_normalized("NFC", text)
    return name != "claude2" or unicodedata.is_normalized("NFKC", text)


def offsets(each: Real, text: str) -> list[tuple[int, int]]:
    """The tokenizer's own offsets in bytes. They are those of whole characters."""
    at = [len(text[:i].encode()) for i in range(len(text) + 1)]
    found = each.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping
    return [(at[a], at[b]) for a, b in found]


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize("name", NAMES)
def test_every_byte_belongs_to_one_token(tokenizers: dict[str, Real], texts: list[str], name: str) -> None:
    each = tokenizers[name]
    for text in filter(partial(keeps, name), texts):
        # Unigram's pre-tokenizer adds no second space.
        added = " " if name in DUMMY_SPACE and not (name == "mon" and text.startswith(" ")) else ""
        ids, data = each.ids(text), added + latin(text)
        spans = each.bytes.spans(ids)
        assert each.bytes.text(ids) == data
        assert [start for start, _ in spans] == [0, *(end for _, end in spans)][: len(ids)]
        assert [data[a:b] for a, b in spans] == [each.bytes.texts[i] for i in ids]
        for (a, b), (start, end) in zip(spans, offsets(each, text), strict=True):
            a, b = max(a - len(added), 0), b - len(added)
            if not b:  # only the added space: its offsets are those of the character after it
                continue
            # Inside a character, its offsets are those of the whole character.
            inside = data[len(added) :][a:b].encode("latin-1").decode("utf-8", "replace").count("\ufffd")
            assert (start, end) == (a, b) or (inside and start <= a and b <= end), (text, a, b, start, end)


@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_of_tokens_become_these_tokens(tokenizers: dict[str, Real], texts: list[str], name: str) -> None:
    each = tokenizers[name]
    for text in filter(partial(keeps, name), texts):
        ids = each.ids(text)
        assert each.bytes.encode(each.bytes.text(ids)) == ids
        if name not in DUMMY_SPACE:
            assert list(each.answer(text)) == ids


# ------------------------------------------------------------------ two tokenizers


def ends(each: Real, text: str) -> set[int]:
    """The bytes where a token of an answer ends, from the tokenizer's offsets. Ends inside a character are left out."""
    # Before an answer stands a line: the tokenizers put no space after it.
    before = "x\n" if each.name in DUMMY_SPACE else ""
    return {end - len(before) for _, end in offsets(each, before + text) if end > len(before)}


@pytest.mark.parametrize(("one", "two"), PAIRS)
def test_chunks_are_the_finest_common_refinement(
    tokenizers: dict[str, Real], texts: list[str], one: str, two: str, measured: dict[str, Any]
) -> None:
    """Compared with the common ends of the tokens by the tokenizers' own offsets."""
    pair, mismatches, inner, total = (tokenizers[one], tokenizers[two]), 0, 0, 0
    for text in texts:
        try:
            rows = [each.answer(text) for each in pair]
        except TextMismatchError:
            mismatches += 1
            assert not (keeps(one, text) and keeps(two, text))
            continue
        assert keeps(one, text)
        assert keeps(two, text)
        spans = [each.bytes.spans(row) for each, row in zip(pair, rows, strict=True)]
        found = chunks(*spans)
        cuts = [spans[0][stop - 1][1] for (_, stop), _ in found]
        assert cuts == [spans[1][stop - 1][1] for _, (_, stop) in found]
        borders = {len(text[: i + 1].encode()) for i in range(len(text))}
        assert borders & set(cuts) == ends(pair[0], text) & ends(pair[1], text)
        for side, row in enumerate(rows):
            ranges = [chunk[side] for chunk in found]
            assert [a for a, _ in ranges] == [0, *(b for _, b in ranges)][: len(ranges)]
            assert ranges[-1][1] == len(row)
        inner += len(rows[0]) - len(found)
        total += len(rows[0])
    share = (
        f"{inner / total:.1%} of the student's boundaries inside a chunk, {mismatches} of {len(texts)} texts refused"
    )
    measured[f"{one}'s tokens by {two}"] = share


def answers(student: Real, teacher: Real, texts: list[str]) -> Iterator[list[int]]:
    """Rows of the student's ids, with the end of a turn if both have one."""
    end = student.tokenizer.eos_token_id, teacher.tokenizer.eos_token_id
    for text in texts:
        yield [*student.answer(text), *(end[:1] if None not in end else ())]


@pytest.mark.parametrize(("one", "two"), PAIRS)
def test_a_teacher_of_another_vocabulary(tokenizers: dict[str, Real], texts: list[str], one: str, two: str) -> None:
    """The log-probs add up to the teacher's own, over each chunk and over each answer, and none is positive."""
    student, teacher = tokenizers[one], tokenizers[two]
    chosen = [*texts[:2], texts[2].replace("a", "🦆", 1)]
    byte_teacher = ByteTeacher(teacher.model(), teacher.tokenizer, student.tokenizer, covers=2)
    prompt = list(student.answer("Question:"))
    rows = list(answers(student, teacher, chosen))
    mask = [[False] * len(prompt) + [True] * len(row) for row in rows]
    scores = byte_teacher.make_scorer().bounds([prompt + row for row in rows], mask)
    assert scores.spelled == 0
    assert bool((scores.log_prob.values <= 0).all())
    start = list(byte_teacher.start) + list(byte_teacher.prompt(prompt))
    for row, text, values, number in zip(rows, chosen, scores.log_prob.to_list(), scores.chunk.to_list(), strict=True):
        own = list(teacher.answer(text)) + [teacher.tokenizer.eos_token_id] * (len(row) > len(student.answer(text)))
        ids = torch.tensor([start + own])
        logits = teacher.model()(input_ids=ids).logits[0, len(start) - 1 : -1].log_softmax(-1)
        want = logits.gather(-1, ids[0, len(start) :, None]).squeeze(-1)
        assert_near(values.sum(), want.sum(), **FORWARD | {"size": 40.0 * len(own)})
        spans = [each.bytes.spans(tokens) for each, tokens in ((student, row), (teacher, own))]
        for i, (_, (a, b)) in enumerate(chunks(*spans)):
            assert_near(values[number == i].sum(), want[a:b].sum(), **FORWARD | {"size": 40.0 * (b - a)})
