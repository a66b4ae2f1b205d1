"""Token sequences of realistic shape: groups of answers to one prompt, and independent lengths."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

# openai/grade-school-math (MIT), when the file is at hand; made-up lengths of the same distribution otherwise.
REAL_ANSWERS = Path(os.environ.get("KL_BENCH_DATA", "../shared/data")) / "gsm8k_model_solutions.jsonl"


@dataclass(frozen=True)
class Batch:
    """``S`` sequences, each a prompt and a response."""

    prompts: list[Tensor]
    responses: list[Tensor]
    source: str

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(len(p) + len(r) for p, r in zip(self.prompts, self.responses, strict=True))

    def padded(self) -> TensorDictBase:
        """As a rollout of a policy with ``pad_output=True``: prompts padded on the left, responses on the right."""
        prompt = _pad(self.prompts, left=True)
        response = _pad(self.responses, left=False)
        mask = torch.cat(
            [
                _pad([torch.ones_like(p) for p in self.prompts], left=True),
                _pad([torch.ones_like(r) for r in self.responses], left=False),
            ],
            -1,
        )
        return TensorDict(
            {
                ("tokens", "prompt"): prompt,
                ("tokens", "full"): torch.cat([prompt, response], -1),
                ("masks", "all_attention_mask"): mask.bool(),
                "next": TensorDict({"reward": torch.zeros(len(prompt), 1)}, [len(prompt)]),
            },
            [len(prompt)],
        )


def _pad(rows: list[Tensor], *, left: bool) -> Tensor:
    side = "left" if left else "right"
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)


def grouped(groups: int, size: int, vocab: int, *, seed: int = 0) -> Batch:
    """``groups`` prompts with ``size`` answers each; real questions and answers where they are at hand."""
    generator = torch.Generator().manual_seed(seed)
    if REAL_ANSWERS.exists():
        lines = REAL_ANSWERS.read_text(encoding="utf-8").splitlines()[:groups]
        prompts, responses = [], []
        for line in lines:
            row = json.loads(line)
            question = _ids(row["question"], vocab)
            answers = [_ids(v["solution"], vocab) for v in row.values() if isinstance(v, dict)]
            for i in range(size):
                answer = answers[i % len(answers)]
                if i >= len(answers):  # more than the four real ones: other words, the same lengths
                    answer = torch.randint(vocab, answer.shape, generator=generator)
                prompts.append(question)
                responses.append(answer)
        return Batch(prompts, responses, "gsm8k answers")
    prompts, responses = [], []
    for _ in range(groups):
        prompt = torch.randint(vocab, (int(torch.randint(40, 120, (), generator=generator)),), generator=generator)
        for _ in range(size):
            length = int(torch.randint(50, 180, (), generator=generator))
            prompts.append(prompt)
            responses.append(torch.randint(vocab, (length,), generator=generator))
    return Batch(prompts, responses, "generated")


def independent(count: int, vocab: int, *, shortest: int = 100, longest: int = 800, seed: int = 0) -> Batch:
    """Sequences of ``shortest`` to ``longest`` tokens without a shared prompt; a quarter of each is its prompt."""
    generator = torch.Generator().manual_seed(seed)
    prompts, responses = [], []
    for length in torch.linspace(shortest, longest, count).long().tolist():
        ids = torch.randint(vocab, (length,), generator=generator)
        prompts.append(ids[: length // 4])
        responses.append(ids[length // 4 :])
    return Batch(prompts, responses, "generated")


def _ids(text: str, vocab: int) -> Tensor:
    """A token for each word piece of up to four characters: about as many as a trained vocabulary of that size gives."""
    pieces = re.findall(r"\d|\s?[A-Za-z]{1,6}|[^\sA-Za-z\d]", text)
    return torch.tensor([hash_of(piece) % vocab for piece in pieces])


def hash_of(piece: str) -> int:
    """The same in every process."""
    value = 0
    for byte in piece.encode():
        value = (value * 257 + byte) % 2_147_483_647
    return value
