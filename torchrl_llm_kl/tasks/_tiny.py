"""A chat model that needs no download, for examples and tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_chat_model(*, seed: int = 0) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    r"""Builds a random Qwen2 with 87,000 parameters and its tokenizer in a fraction of a second, without a network.

    Each ASCII character is one token, so sampled answers decode and encode again to the same ids. Other characters become
    ``<unk>``. The chat template is ChatML.

    Args:
        seed: of the weights. torch's global random state stays as it is.

    Returns:
        The model, in evaluation mode and float32, and the tokenizer, with a vocabulary of 100 tokens.

    Example:
        >>> model, tokenizer = tiny_chat_model()
        >>> tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "Hi!"}])["input_ids"])
        '<|im_start|>user\nHi!<|im_end|>\n'
    """
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokens = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "\n", *map(chr, range(ord(" "), ord("~") + 1))]
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        padding_side="left",
    )
    tokenizer.chat_template = _TEMPLATE
    config = Qwen2Config(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,  # logits far enough from uniform for entropy and KL to show something
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).eval()
        # The first dimension is 1 at every position and no layer writes to it, so the head can give <pad>, <unk> and
        # <|im_start|> low logits. A trained model does not sample them either, and torchrl's wrapper drops a sampled <pad>.
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:3, 0] = -10.0
    return model, tokenizer
