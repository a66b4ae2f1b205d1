"""Random-weight Qwen2 models of benchmark size, and torchrl's scoring wrapper on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchrl.modules.llm import TransformersWrapper
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


@dataclass(frozen=True)
class ModelSize:
    """Vocabulary, width and depth."""

    vocab: int
    hidden: int
    layers: int

    family: str = "Qwen2"

    def __str__(self) -> str:
        return f"{self.family} of {self.layers} layers, hidden {self.hidden}, vocabulary {self.vocab:,}"


QUICK = ModelSize(vocab=97, hidden=32, layers=2)


def qwen2(
    size: ModelSize, *, seed: int = 0, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Any:
    """A random-weight Qwen2 in evaluation mode, with untied embedding and head."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=4 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config).eval().to(device=device, dtype=dtype)


def qwen3_5(
    size: ModelSize, *, seed: int = 0, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Any:
    """A random-weight Qwen3.5 in evaluation mode: three layers of four are gated delta rules, which carry a state."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(seed)
    heads = {"linear_num_key_heads": 8, "linear_num_value_heads": 8}
    config = Qwen3_5TextConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=4 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=size.hidden // 8,
        linear_key_head_dim=size.hidden // 8,
        linear_value_head_dim=size.hidden // 8,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        **heads,
    )
    return Qwen3_5ForCausalLM(config).eval().to(device=device, dtype=dtype)


def checkpoint_layers(model: Any) -> None:
    """Recompute each layer in the backward. transformers 5.24 renamed the method."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def tokenizer() -> Any:
    """A minimal tokenizer for torchrl's wrapper. The benchmarks pass token ids."""
    from tokenizers import Tokenizer, models

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )


def wrapper(model: Any, key: str) -> TransformersWrapper:
    """A scoring wrapper that takes padded tokens and returns padded log-probs."""
    return TransformersWrapper(
        model, tokenizer=tokenizer(), input_mode="tokens", generate=False, pad_output=True, log_probs_key=key
    )
