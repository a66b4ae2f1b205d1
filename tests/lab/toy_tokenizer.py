"""Tokenizers for tests, without a model hub: a byte-level one, and one that adds BOS. Any text round-trips."""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tokenizer(
    chat_template: str | dict[str, str] | None = CHATML,
    extra_special_tokens: Sequence[str] = ("<|im_start|>",),
    *,
    eos_token: str = "<|im_end|>",
    bos_token: str | None = None,
    pad_token: str | None = None,
    merges: Sequence[tuple[str, str]] = (),
    name_or_path: str = "toy",
) -> PreTrainedTokenizerFast:
    """A tokenizer of 256 byte tokens (ids 0-255), the results of ``merges``, and the special tokens, in this order.

    ``merges`` are pairs of known tokens in the byte alphabet (``"Ġ"`` is a space, ``"Ċ"`` a newline).
    """
    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": eos_token, "bos_token": bos_token, "pad_token": pad_token or eos_token}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        name_or_path=name_or_path,
        **{name: token for name, token in special.items() if token is not None},
    )
    fast.add_special_tokens({"additional_special_tokens": list(extra_special_tokens)})
    fast.chat_template = chat_template
    return fast


def build_bos_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A tokenizer as SentencePiece builds them: it adds BOS to text, has pad != eos, and bytes for unknown characters.

    Ids: ``<pad>`` 0, ``<eos>`` 1, ``<bos>`` 2, ``<unk>`` 3, the bytes from 4 on, then letters, then ChatML's tokens.
    """
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    pieces = [*special.values(), *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bos = ("<bos>", vocab["<bos>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[bos])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    fast.chat_template = chat_template
    return fast


class Words:
    """A tokenizer whose ids are indices of a list."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.words[i] for i in ids]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.words[i] for i in ids)
