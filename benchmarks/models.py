"""Random-weight Qwen2 models of benchmark size, and the two libraries' transforms on them."""

from __future__ import annotations

from typing import Any

import torch
from torchrl.modules.llm import TransformersWrapper
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


def qwen2(vocab: int, *, hidden: int = 512, layers: int = 6, seed: int = 0) -> Any:
    """A float32 Qwen2 in evaluation mode."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config).eval()


def tokenizer() -> Any:
    """What torchrl's wrapper asks of one; tokens are given as ids."""
    from tokenizers import Tokenizer, models

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )


def wrapper(model: Any, key: str, *, padded: bool = True) -> TransformersWrapper:
    """A scoring wrapper on token input."""
    return TransformersWrapper(
        model,
        tokenizer=tokenizer(),
        input_mode="tokens",
        generate=False,
        pad_output=padded,
        log_probs_key=key,
    )
