"""A small model with a supervised warm-up, and its accuracy."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchrl.modules.llm import TransformersWrapper
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from countdown.task import OPERATIONS, Problem, ShortCountdownEnv
from torchrl_llm_kl import Sampling

MAX_NEW_TOKENS = 14  # the longest right answer has 8
WARMUP_STEPS = 300  # few enough to leave room for RL

#: The token ids of each demonstration, and whether the model learns each token.
Rows = Sequence[tuple[list[int], list[bool]]]

# ChatML. `{% generation %}` marks the assistant's text, for tools that request that mask from the template.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tokenizer(problems: Sequence[Problem]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: it encodes any text; each fixed phrase of the task and each digit is one token."""
    texts = [text for p in problems for text in (f"user\n{p.query}", "assistant\n", p.answer(p.operation))]
    return train_tokenizer([*texts, *[f"system\n{ShortCountdownEnv.SYSTEM_PROMPT}"] * 2], CHAT_TEMPLATE)


def train_tokenizer(texts: Sequence[str], template: str, *, tags: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which each phrase between the digits of ``texts`` is one token, and so is each tag."""
    bpe = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens(list(tags))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",  # not eos: the end of an answer is learned, padding is not
        additional_special_tokens=["<|im_start|>"],
        padding_side="left",
    )
    tokenizer.chat_template = template
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A Qwen2 of 0.4 million parameters, untrained."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Qwen2ForCausalLM(config).eval()


def make_policy(problems: Sequence[Problem]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Build the small model, untrained, and its tokenizer."""
    torch.set_num_threads(1)  # more threads only wait for each other on a model this small, and change the numbers
    tokenizer = build_tokenizer(problems)
    return build_model(tokenizer), tokenizer


def as_policy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> TransformersWrapper:
    """Wrap a model as a torchrl policy that generates answers.

    With another ``temperature`` the algorithm must score at the same one. With ``top_k`` the scores differ from the sampler's.
    """
    generate_kwargs: dict[str, Any] = {"max_new_tokens": max_new_tokens, "pad_token_id": tokenizer.pad_token_id}
    # Sample from the distribution that is scored. By default transformers keeps only the 50 most probable tokens.
    generate_kwargs |= Sampling(temperature, top_k=top_k or 0).generate_kwargs()
    return TransformersWrapper(
        model,
        tokenizer=tokenizer,
        input_mode="text",
        generate=True,
        generate_kwargs=generate_kwargs,
        pad_output=True,  # plain tensors: prompts padded on the left, answers on the right
        device=model.device if model.device.type == "cuda" else None,
    )


def render_prompt(problem: Problem, tokenizer: PreTrainedTokenizerBase) -> str:
    """The conversation up to the assistant's answer, as the env presents it to the policy."""
    messages = [
        {"role": "system", "content": ShortCountdownEnv.SYSTEM_PROMPT},
        {"role": "user", "content": problem.query},
    ]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    *,
    steps: int,
    seed: int,
    random_share: float = 0.5,
    batch_size: int = 32,
    lr: float = 2e-3,
) -> Iterator[float]:
    """Supervised training on demonstrations, of which a share of ``random_share`` uses a random operation.

    Such demonstrations teach the form of an answer and the use of the given numbers, but only in part the operation that
    reaches the target, which is left to RL. Each step yields its loss.
    """
    rng = random.Random(seed)

    def demonstrations() -> Iterator[Rows]:
        while True:
            batch = []
            for problem in rng.choices(problems, k=batch_size):
                operation = rng.choice(OPERATIONS) if rng.random() < random_share else problem.operation
                prompt, answer = render_prompt(problem, tokenizer), problem.answer(operation) + tokenizer.eos_token
                # Apart, since the sampled tokens of an answer never merge with those of its prompt.
                before, own = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
                batch.append((before + own, [False] * len(before) + [True] * len(own)))
            yield batch

    yield from imitate(model, tokenizer, demonstrations(), steps=steps, lr=lr)


def imitate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batches: Iterable[Rows], *, steps: int, lr: float
) -> Iterator[float]:
    """Supervised training on the first ``steps`` batches. Each step yields its loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    # Its rise takes a tenth of the steps, and at least two.
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=max(steps, 20), pct_start=0.1)
    model.train()
    for batch in islice(batches, steps):
        loss = _answer_loss(model, tokenizer, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        yield loss.item()
    model.eval()  # and it stays in evaluation mode: with dropout, sampling and scoring would disagree in RL


def _answer_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: Rows) -> Tensor:
    """Mean cross-entropy of the answer tokens."""
    rows = [torch.tensor(tokens) for tokens, _ in batch]
    targets = [torch.where(torch.tensor(mask), row, -100) for row, (_, mask) in zip(rows, batch, strict=True)]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    target = torch.nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=-100)
    # Padding is on the right, out of reach of causal attention: no attention mask is needed.
    logits = model(input_ids=tokens.to(model.device)).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten().to(logits.device), ignore_index=-100)


@torch.no_grad()
def accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    *,
    max_new_tokens: int,
    batch_size: int = 50,
) -> float:
    """Share of the problems that greedy decoding solves."""
    solved = 0
    for start in range(0, len(problems), batch_size):
        batch = problems[start : start + batch_size]
        prompts = [render_prompt(problem, tokenizer) for problem in batch]
        inputs = tokenizer(
            prompts, return_tensors="pt", padding=True, add_special_tokens=False, return_token_type_ids=False
        ).to(model.device)
        output = model.generate(  # type: ignore[operator]
            **inputs, do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=tokenizer.pad_token_id
        )
        replies = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        solved += sum(problem.is_solved_by(reply) for problem, reply in zip(batch, replies, strict=True))
    return solved / len(problems)
