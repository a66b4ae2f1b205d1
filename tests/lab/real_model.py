"""Gemma 3 270M, its answers to questions of GSM8K, and float64 log-probs of them from plain forwards."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from project import PROJECT
from torchrl_llm_kl import Ragged, Sampling

#: The environment variable with the model's folder.
FOLDER = "TORCHRL_LLM_KL_REAL"
QUESTIONS = PROJECT.parent / "shared" / "data" / "gsm8k_test.jsonl"
#: The template of Gemma's instruction-tuned models, for text turns: https://ai.google.dev/gemma/docs/core/prompt-structure
GEMMA_TURNS = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Answers:
    """Sampled answers, a row of token ids for each, prompt included."""

    rows: list[Tensor]
    prompts: list[int]  # the lengths of the prompts
    recorded: list[Tensor] = field(default_factory=list)  # the sampler's log-probs of the answers' tokens

    @property
    def sequences(self) -> Ragged:
        return Ragged.from_list(self.rows)

    @property
    def mask(self) -> Tensor:
        """True at the answers' tokens, ``[N]``."""
        return torch.cat([torch.arange(len(row)) >= start for row, start in zip(self.rows, self.prompts, strict=True)])

    def padded(self, side: str = "right") -> tuple[Tensor, Tensor]:
        """Ids and attention mask, ``[B, T]``."""
        width = max(map(len, self.rows))
        ids, real = torch.zeros(2, len(self.rows), width, dtype=torch.long)
        for each, mask, row in zip(ids, real, self.rows, strict=True):
            at = slice(len(row)) if side == "right" else slice(width - len(row), width)
            each[at], mask[at] = row, 1
        return ids, real.bool()

    def batch(self) -> TensorDict:
        """Token ids and masks, padded on the right."""
        ids, real = self.padded()
        answer = torch.zeros_like(real)
        answer[real] = self.mask
        size = [len(ids)]
        masks = TensorDict(all_attention_mask=real, all_assistant_mask=answer, batch_size=size)
        return TensorDict(tokens=TensorDict(full=ids, batch_size=size), masks=masks, batch_size=size)


class RealModel:
    """The model in float32, frozen, with its tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.tokenizer.padding_side = "left"
        self._samples: dict[Any, Answers] = {}

    def load(self, dtype: torch.dtype = torch.float32) -> Any:
        """A model of its own."""
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype).eval().requires_grad_(False)

    @cached_property
    def model(self) -> Any:
        return self.load()

    @cached_property
    def wide(self) -> Any:
        """The model in float64."""
        return self.load(torch.float64)

    @cached_property
    def questions(self) -> list[dict[str, str]]:
        """The questions of GSM8K with worked answers, the shortest first."""
        rows = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
        return sorted(rows, key=lambda row: len(row["question"]))

    @property
    def prompts(self) -> list[str]:
        return [f"Question: {row['question']}\nAnswer:" for row in self.questions]

    def sampled(
        self,
        sampling: Sampling | None = None,
        *,
        prompts: int = 4,
        answers: int = 3,
        tokens: int = 20,
        seed: int = 0,
        model: nn.Module | None = None,
    ) -> Answers:
        """Answers of ``generate``, of equal lengths, from this model or another one."""
        sampling = Sampling() if sampling is None else sampling
        key = sampling, prompts, answers, tokens, seed
        if model is None and key in self._samples:
            return self._samples[key]
        torch.manual_seed(seed)
        given = self.tokenizer(self.prompts[:prompts], return_tensors="pt", padding=True)
        drawn = sampling.generate_kwargs(num_return_sequences=answers, max_new_tokens=tokens, eos_token_id=None)
        drawn |= {"return_dict_in_generate": True, "output_scores": True}
        out = (self.model if model is None else model).generate(**given, **drawn)
        ids = out.sequences
        chosen = ids[:, given["input_ids"].shape[1] :]
        scores = torch.stack(out.scores, 1).log_softmax(-1)  # after temperature and truncation
        real = given["attention_mask"].repeat_interleave(answers, 0)
        lengths = real.sum(-1)
        rows = [row[real.shape[1] - int(length) :] for row, length in zip(ids, lengths, strict=True)]
        found = Answers(rows, lengths.tolist(), list(scores.gather(-1, chosen[..., None]).squeeze(-1)))
        if model is None:
            self._samples[key] = found
        return found

    def truth(self, answers: Answers, sampling: Sampling | None = None) -> Tensor:
        """Float64 log-probs of the answers' tokens from a forward of each row, ``[N]``, 0 elsewhere."""
        temperature = 1.0 if sampling is None else sampling.temperature
        return torch.cat([taken(logits / temperature, row) for logits, row in self.logits(self.wide, answers)])

    def logits(self, model: Any, answers: Answers) -> Any:
        """For each row its answer's logits ``[answer, V]`` in float64 from a plain forward, and its ids."""
        for row, start in zip(answers.rows, answers.prompts, strict=True):
            with torch.no_grad():
                keep = torch.arange(start - 1, len(row) - 1)
                yield model(input_ids=row[None], logits_to_keep=keep).logits[0].double(), row


def taken(logits: Tensor, row: Tensor) -> Tensor:
    """Log-probs of the last tokens of a row, after zeros for the others."""
    answer = row[len(row) - len(logits) :]
    chosen = logits.log_softmax(-1).gather(-1, answer[:, None]).squeeze(-1)
    return torch.cat([chosen.new_zeros(len(row) - len(logits)), chosen])
