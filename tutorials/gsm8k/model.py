"""A byte-level BPE tokenizer and a small Qwen2, both made here, and the two kinds of training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from tensordict import TensorDictBase
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from countdown.model import CHAT_TEMPLATE
from gsm8k.task import Question
from torchrl_llm_kl.algorithms import AlgorithmParts


def build_tokenizer(questions: Sequence[Question], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE, trained on the questions and their worked solutions: it encodes any text; each digit is one token."""
    bpe = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(
        (text for q in questions for text in (f"user\n{q.text}", f"assistant\n{q.solution}")), trainer
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerBase, *, hidden: int, layers: int) -> PreTrainedModel:
    """A Qwen2, untrained."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config).eval()


def train(
    parts: AlgorithmParts, data: TensorDictBase, *, epochs: int, batch_size: int, lr: float, seed: int
) -> Iterator[dict[str, float]]:
    """Train on all rows in each epoch; yields loss and metrics of each step."""
    batch = parts.prepare(data)
    rng = torch.Generator().manual_seed(seed)
    weights = [p for p in parts.loss.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=lr, weight_decay=0.1)
    steps = epochs * -(-batch.batch_size.numel() // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=max(steps, 20), pct_start=0.1)
    for _ in range(epochs):
        for minibatch in parts.minibatches(batch, size=batch_size, generator=rng):
            optimizer.zero_grad()
            out = parts.loss(minibatch)
            out.total_loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            names = {"loss_objective": "loss", "reward_accuracy": "reward_accuracy", "reward_margin": "reward_margin"}
            yield {name: out[key].item() for key, name in names.items() if key in out.keys()}  # noqa: SIM118
