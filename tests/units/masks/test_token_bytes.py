"""The bytes of tokens of four kinds of tokenizers, trained on a few lines, and the alignment of two tokenisations."""

from typing import Any

import pytest
from hypothesis import given, strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from byte_texts import merges_of
from torchrl_llm_kl.masks import TextMismatchError, TokenBytes, chunks, pair_specials
from toy_tokenizer import build_bos_tokenizer, build_tokenizer

LINES = [
    "Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day.",
    "She makes 9 * 2 = $<<9*2=18>>18 every day at the farmer's market.",
    "It takes 2/2=<<2/2=1>>1 bolt of white fiber\n\nSo the total amount is 2+1=<<2+1=3>>3 bolts of fabric",
    "The cost of the house and repairs came out to 80,000+50,000=$<<80000+50000=130000>>130,000",
    "Über den Wolken muss die Freiheit wohl grenzenlos sein. 自由 é\t  indented",
] * 4


def trained(model: Any, trainer: Any, before: Any, decoder: Any, **special: Any) -> Any:
    backend = Tokenizer(model)
    backend.pre_tokenizer, backend.decoder = before, decoder
    backend.train_from_iterator(LINES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def byte_level() -> Any:
    """As GPT-2, Qwen and Llama 3."""
    split = pre_tokenizers.Split(Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), "isolated")
    before = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    return trained(models.BPE(), trainer, before, decoders.ByteLevel(), eos_token="<|end|>")


def sentencepiece(*, dummy: bool = True) -> Any:
    """As Llama 2 and Mistral: a space before each text, white space as ``▁``, and bytes of unknown characters."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    first = Tokenizer(models.BPE())
    change = normalizers.Replace(" ", "▁")
    first.normalizer = change
    first.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    learned = first.get_vocab()
    longer = [piece for piece, _ in sorted(learned.items(), key=lambda item: item[1])]
    vocab = {piece: i for i, piece in enumerate([*pieces, *longer])}
    backend = Tokenizer(models.BPE(vocab, merges_of(longer), unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), change]) if dummy else change
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def unigram() -> Any:
    """As T5: pieces with ``▁``, and no bytes."""
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    named = {"unk_token": "<unk>", "eos_token": "</s>"}
    return trained(models.Unigram(), trainer, pre_tokenizers.Metaspace(), decoders.Metaspace(), **named)


def word_piece() -> Any:
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[SEP]"])
    named = {"unk_token": "[UNK]", "eos_token": "[SEP]"}
    model, words = models.WordPiece(unk_token="[UNK]"), pre_tokenizers.WhitespaceSplit()
    return trained(model, trainer, words, decoders.WordPiece(), **named)


TOKENIZERS = {"byte_level": byte_level(), "sentencepiece": sentencepiece(), "plain": sentencepiece(dummy=False)}
BYTES = {name: TokenBytes(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def latin(text: str) -> str:
    return text.encode().decode("latin-1")


# ------------------------------------------------------------------ bytes


# SentencePiece has one sign for a space and for U+2581.
@given(
    text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=30) | st.sampled_from(LINES)
)
@pytest.mark.parametrize("name", BYTES)
def test_the_bytes_of_tokens_are_those_of_the_text(name: str, text: str) -> None:
    """SentencePiece puts one space before a text. The bytes of any text come back, and no byte belongs to two tokens."""
    tokens, added = BYTES[name], " " if name == "sentencepiece" and text else ""
    ids = TOKENIZERS[name](text, add_special_tokens=False).input_ids
    assert tokens.text(ids) == added + latin(text)
    spans = tokens.spans(ids)
    assert [start for start, _ in spans] == [0, *(end for _, end in spans)][: len(ids)]
    assert [tokens.text(ids)[a:b] for a, b in spans] == [tokens.texts[i] for i in ids]
    # An answer has no space before it, and may end anywhere, also within a character.
    data = latin(text)
    for cut in (data, data[:-1], data[1:]):
        assert tokens.text(tokens.encode(cut)) == cut


def test_pieces_by_hand() -> None:
    tokenizer = byte_level()
    tokens = TokenBytes(tokenizer)
    assert tokens.texts[tokenizer.convert_tokens_to_ids("Ġ")] == " "
    assert tokens.texts[tokenizer.convert_tokens_to_ids("Ã")] == "\xc3"
    assert tokens.texts[tokenizer.eos_token_id] == chr(0x100 + tokenizer.eos_token_id)
    other = BYTES["sentencepiece"]
    assert [other.texts[i] for i in (3, 3 + 0xE2)] == ["\x00", "\xe2"]
    assert {other.texts[i] for i in other.ids_of[" "]} == {" "}
    assert len(other.ids_of[" "]) == 2  # "▁" and "<0x20>"
    words = word_piece()
    pieces = TokenBytes(words)
    text = pieces.text(words("Janet sells duck eggs", add_special_tokens=False).input_ids)
    assert text == " Janet sells duck eggs"
    assert pieces.text(pieces.encode(text)) == text
    units = unigram()
    assert TokenBytes(units).text(units("duck eggs a day.", add_special_tokens=False).input_ids) == " duck eggs a day."


def test_a_tokenizer_without_a_decoder_has_plain_pieces() -> None:
    backend = Tokenizer(models.WordLevel({"<0x41>": 0, "Ġa": 1, "▁b": 2, "##c": 3}))
    assert TokenBytes(PreTrainedTokenizerFast(tokenizer_object=backend)).texts == [
        "<0x41>",
        *map(latin, ("Ġa", "▁b", "##c")),
    ]


def test_added_tokens_that_are_not_special_are_text() -> None:
    tokenizer = build_tokenizer(None, [])
    tokenizer.add_tokens(["<é>"])
    tokens = TokenBytes(tokenizer)
    ids = tokenizer("é<é>\n").input_ids
    assert len(ids) == 4
    assert tokens.text(ids) == "\xc3\xa9<\xc3\xa9>\n"
    assert tokens.text([10_000]) == ""  # a row of the head without a token


def test_ranges_and_prefixes_of_the_vocabulary() -> None:
    """Compared with a plain search through all tokens."""
    tokens = BYTES["byte_level"]
    for text in (" ", " 1", "the", "\xc3", "\xc3\xbc", "zzz", chr(0x100 + tokens.tokenizer.eos_token_id)):
        assert sorted(tokens.starting_with(text)) == [i for i, each in enumerate(tokens.texts) if each.startswith(text)]
        want = [
            (i, len(each)) for i, each in enumerate(tokens.texts) if each and each != text and text.startswith(each)
        ]
        assert sorted(tokens.inside(text)) == want


def test_text_that_looks_like_a_special_token_is_text() -> None:
    tokenizer = build_tokenizer()
    tokens = TokenBytes(tokenizer)
    ids = tokens.encode("a<|im_end|>" + chr(0x100 + tokenizer.eos_token_id))
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.eos_token_id not in ids[:-1]


# ------------------------------------------------------------------ special tokens


def test_special_tokens_correspond_by_name_then_by_role() -> None:
    chat, plain = build_tokenizer(None, ["<|im_start|>", "<tool>"], eos_token="<|end|>"), build_bos_tokenizer()
    ids = {name: chat.convert_tokens_to_ids(name) for name in ("<|im_start|>", "<tool>", "<|end|>")}
    pairs = pair_specials(chat, plain)
    assert pairs == {
        ids["<|im_start|>"]: plain.convert_tokens_to_ids("<|im_start|>"),
        ids["<|end|>"]: plain.eos_token_id,
    }
    given = pair_specials(chat, plain, {ids["<tool>"]: 3, ids["<|end|>"]: 0})
    assert (given[ids["<tool>"]], given[ids["<|end|>"]]) == (3, 0)
    tokens = TokenBytes(chat, pairs)
    assert tokens.text([ids["<|end|>"], ids["<tool>"]]) == chr(0x100 + plain.eos_token_id) + "<tool>"
    named = pair_specials(build_tokenizer(None, [], eos_token="<|im_end|>"), plain)
    assert [*named.values()] == [plain.convert_tokens_to_ids("<|im_end|>")]  # and not the plain tokenizer's EOS
    # A BOS without counterpart has no bytes.
    assert TokenBytes(plain, pair_specials(plain, chat)).text([plain.bos_token_id]) == ""


# ------------------------------------------------------------------ differences


def test_a_normalizer_is_named_with_the_first_byte_that_differs() -> None:
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    with pytest.raises(TextMismatchError, match=r"byte 3 differs, 'is \\xc2\\xbd' becomes 'is 1"):
        TokenBytes(tokenizer).encode(latin("is ½"))
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(TextMismatchError, match="byte 2 differs, 'a B' becomes 'a b'"):
        TokenBytes(tokenizer).encode("a B")


def test_the_space_before_a_text_is_not_the_difference() -> None:
    """This tokenizer puts a space before each text and replaces no-break spaces, as SentencePiece with NMT's rules."""
    tokenizer = sentencepiece()
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Sequence([normalizers.Replace("\u00a0", " "), backend.normalizer])
    with pytest.raises(TextMismatchError, match=r"byte 4 differs, 'eggs\\xc2\\xa0a' becomes 'eggs a'"):
        TokenBytes(tokenizer).encode(latin("eggs\u00a0a"))


def test_unknown_characters_and_lost_spaces_are_errors() -> None:
    with pytest.raises(TextMismatchError, match="byte 5 differs"):
        TokenBytes(unigram()).encode(latin(" eggs☃"))
    with pytest.raises(TextMismatchError, match="byte 7 differs"):
        TokenBytes(word_piece()).encode(" Janet  sells")


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(TypeError, match="Slow does not show the bytes of its tokens: use the fast tokenizer"):
        TokenBytes(Slow())  # type: ignore[arg-type]


# ------------------------------------------------------------------ alignment


@given(cuts=st.tuples(*[st.lists(st.integers(0, 9), max_size=8)] * 2))
def test_chunks_are_cut_at_every_shared_boundary_and_nowhere_else(cuts: tuple[list[int], list[int]]) -> None:
    spans = [list(zip([0, *sorted(each)], [*sorted(each), 9], strict=True)) for each in cuts]
    found = chunks(*spans)
    borders = [spans[0][b - 1][1] for (_, b), _ in found]
    assert borders == [x for x in range(1, 10) if all(x in {end for _, end in each} for each in spans)]
    for side, rows in enumerate(spans):
        ranges = [chunk[side] for chunk in found]
        assert [a for a, _ in ranges] == [0, *(b for _, b in ranges)][: len(ranges)]
        assert ranges[-1][1] == len(rows)
