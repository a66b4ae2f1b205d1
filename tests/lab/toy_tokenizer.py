"""A byte-level tokenizer for tests: every byte is a token, so any text round-trips, without a model hub."""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
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


class Words:
    """A tokenizer whose ids are places in a list."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.words[i] for i in ids]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.words[i] for i in ids)
