"""Token sequences of realistic shape: groups of answers to one prompt, conversations, and independent lengths."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_llm_kl import Ragged

# Uses openai/grade-school-math (MIT) if the file exists, else random tokens with similar lengths.
_SHARED = Path(__file__).parents[2] / "shared" / "data"
REAL_ANSWERS = Path(os.environ.get("KL_BENCH_DATA", _SHARED)) / "gsm8k_model_solutions.jsonl"


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

    def padded(self, device: torch.device | None = None) -> TensorDictBase:
        """The batch as a rollout with ``pad_output=True``: prompts padded on the left, responses on the right."""
        prompt = _pad(self.prompts, left=True)
        response = _pad(self.responses, left=False)
        in_prompt = _pad([torch.ones_like(p) for p in self.prompts], left=True)
        return TensorDict(
            {
                ("tokens", "prompt"): prompt,
                ("tokens", "full"): torch.cat([prompt, response], -1),
                ("masks", "all_attention_mask"): torch.cat([in_prompt, self._in_response()], -1).bool(),
                "next": TensorDict({"reward": torch.zeros(len(prompt), 1)}, [len(prompt)]),
            },
            [len(prompt)],
        ).to(device)

    def padded_response(self) -> Tensor:
        """Mask of the response tokens in :meth:`padded`, ``[S, T]`` bool."""
        return torch.cat([torch.zeros_like(_pad(self.prompts, left=True)), self._in_response()], -1).bool()

    def ragged(self, device: torch.device | None = None) -> tuple[Ragged, Tensor]:
        """Token ids without padding, and the mask of the response tokens, ``[N]`` each."""
        rows = [torch.cat(row) for row in zip(self.prompts, self.responses, strict=True)]
        sequences = Ragged.from_list([row.to(device) for row in rows])
        prompts = torch.tensor([len(prompt) for prompt in self.prompts], device=device)
        return sequences, sequences.positions >= prompts[sequences.sequence_ids]

    def _in_response(self) -> Tensor:
        return _pad([torch.ones_like(r) for r in self.responses], left=False)


def _pad(rows: list[Tensor], *, left: bool) -> Tensor:
    side = "left" if left else "right"
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)


def grouped(groups: int, size: int, vocab: int, *, seed: int = 0) -> Batch:
    """``groups`` prompts with ``size`` answers each: real questions and answers if available."""
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
                if i >= len(
                    answers
                ):  # there are four real answers, and the others are random tokens of the same length
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


def texts(count: int) -> list[tuple[str, str]]:
    """Questions and answers: real ones if available, else words of similar number."""
    if REAL_ANSWERS.exists():
        rows = map(json.loads, islice(cycle(REAL_ANSWERS.read_text(encoding="utf-8").splitlines()), count))
        return [(row["question"], row["175b_verification"]["solution"]) for row in rows]
    return [(f"How much is {i} and {i + 1}? " * 8, f"{i} and {i + 1} make {2 * i + 1}. " * 12) for i in range(count)]


def one_prompt(answers: int, prompt: int, response: int, vocab: int, *, seed: int = 0) -> Batch:
    """``answers`` of ``response`` tokens to one prompt of ``prompt`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    question = torch.randint(2, vocab, (prompt,), generator=generator)
    replies = torch.randint(2, vocab, (answers, response), generator=generator)
    return Batch([question] * answers, list(replies), "generated")


def conversation(turns: int, vocab: int, *, seed: int = 0) -> list[Batch]:
    """One conversation at each of its turns. Each row has all tokens so far, up to the assistant's answer of about 100 tokens.

    A turn adds a question and its answer, 150 to 200 tokens.
    """
    pairs, source = _question_answer_pairs(turns, vocab, seed)
    so_far = torch.zeros(0, dtype=torch.long)
    batches = []
    for question, answer in pairs:
        prompt = torch.cat([so_far, question])
        batches.append(Batch([prompt], [answer], source))
        so_far = torch.cat([prompt, answer])
    return batches


def _question_answer_pairs(count: int, vocab: int, seed: int) -> tuple[list[tuple[Tensor, Tensor]], str]:
    if REAL_ANSWERS.exists():
        rows = (json.loads(line) for line in REAL_ANSWERS.read_text(encoding="utf-8").splitlines())
        pairs = ((_ids(row["question"], vocab), _ids(row["175b_verification"]["solution"], vocab)) for row in rows)
        fitting = ((q, a) for q, a in pairs if 150 <= len(q) + len(a) <= 200)
        return list(islice(fitting, count)), "gsm8k answers"
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(60, 81, (count,), generator=generator).tolist()
    made = [torch.randint(vocab, (n + 110,), generator=generator) for n in lengths]
    return [(ids[:n], ids[n:]) for n, ids in zip(lengths, made, strict=True)], "generated"


def independent(count: int, vocab: int, *, shortest: int = 100, longest: int = 800, seed: int = 0) -> Batch:
    """Sequences of ``shortest`` to ``longest`` tokens without a shared prompt. The first quarter of each is its prompt."""
    generator = torch.Generator().manual_seed(seed)
    prompts, responses = [], []
    for length in torch.linspace(shortest, longest, count).long().tolist():
        ids = torch.randint(vocab, (length,), generator=generator)
        prompts.append(ids[: length // 4])
        responses.append(ids[length // 4 :])
    return Batch(prompts, responses, "generated")


def _ids(text: str, vocab: int) -> Tensor:
    """One token per word piece of up to six letters. A trained tokenizer of that vocabulary produces about as many."""
    pieces = re.findall(r"\d|\s?[A-Za-z]{1,6}|[^\sA-Za-z\d]", text)
    return torch.tensor([hash_of(piece) % vocab for piece in pieces])


def hash_of(piece: str) -> int:
    """A hash that is equal in all processes, unlike Python's own."""
    value = 0
    for byte in piece.encode():
        value = (value * 257 + byte) % 2_147_483_647
    return value
