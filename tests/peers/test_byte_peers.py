"""``genlm.bytes``: a beam over the teacher's tokens that sums the probability of all texts with the same beginning.

Its log-prob of a beginning ``s`` is over every tokenisation. Ours is conditional on the teacher's own tokens up to the last
shared boundary, so both are equal inside the first chunk of an answer, and everywhere if each text has one tokenisation.
"""

import asyncio
import sys
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from closeness import assert_near
from peers import load
from torchrl_llm_kl.scoring import ByteTeacher
from toy_models import tiny_model

LINES = [
    "the student answers in its own tokens",
    "the teacher then has other and longer tokens",
    "an été then an ant",
] * 4
STUBS = ("IPython", "IPython.display", "arsenal", "arsenal.maths", "pandas", "scipy", "scipy.special")
#: The beam adds float32 probabilities of the vocabulary. Log-probs of a beginning are at most 64 nats.
BEAM: dict[str, Any] = {"terms": 512, "size": 64.0, "dtype": torch.float32}
ROUNDED = 1e-4


def byte_level(size: int) -> Any:
    """A byte-level BPE that was trained on the lines. 256 tokens are the bytes."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.fixture
def genlm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the beam, of its states, and of the bytes of a vocabulary."""
    vocab = load(monkeypatch, "genlm", "genlm.backend.tokenization.vocab")
    sys.modules["genlm.backend.tokenization"].Token = vocab.Token  # type: ignore[attr-defined]
    beam = load(monkeypatch, "genlm", "genlm.bytes.byte_lm.beam", stubs=STUBS)
    return SimpleNamespace(beam=beam, states=sys.modules["genlm.bytes.byte_lm.trie_state"], decode=vocab.decode_vocab)


def beginnings(genlm: Any, model: Any, tokenizer: Any, prompt: list[int], text: str, width: int) -> list[float]:
    """The beam's log-prob of each beginning of a text after the prompt's tokens."""

    async def next_token_logprobs(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)

    async def run() -> list[float]:
        llm = SimpleNamespace(next_token_logprobs=next_token_logprobs)
        trie = genlm.beam.AsyncTokenByteTrie.from_vocab(genlm.decode(tokenizer)[0])
        mode = genlm.states.TrieMode.WITHOUT_EOS
        context = genlm.states.StatefulTokenizedLM(llm, prompt)
        first = genlm.states.LazyTrieState(context, trie, trie.trie.root, 0.0, mode=mode)
        params = genlm.beam.BeamParams(K=width, heal=False)
        beam, out = genlm.beam.ByteBeamState([await first.materialize()], params), []
        for byte in text.encode():
            beam = await (beam.prune() << byte)
            out.append(float(beam.logZ))
        await beam.cleanup()
        return out

    return asyncio.run(run())


def ours(byte_teacher: ByteTeacher, prompt: list[int], row: list[int]) -> tuple[list[list[float]], list[int], int]:
    """The log-prob of each token with its bounds, the tokens' ends in bytes, and the number of tokens in the first chunk."""
    scores = byte_teacher.make_scorer().bounds([prompt + row], [[False] * len(prompt) + [True] * len(row)])
    values = [each.values[len(prompt) :].tolist() for each in (scores.log_prob, scores.lower, scores.upper)]
    ends = [end for _, end in byte_teacher.student.spans(row)]
    return values, ends, int((scores.chunk.values[len(prompt) :] == 0).sum())


@pytest.mark.parametrize("size", [256, 262])
@pytest.mark.parametrize("text", [" students", " answers in", " tokens", " longer", " then", " été"])
def test_boundaries_inside_the_first_chunk(genlm: Any, text: str, size: int) -> None:
    """With a narrow beam or a high tolerance, both find only a part of the sum."""
    teacher, student = byte_level(340), byte_level(size)
    model = tiny_model(vocab_size=len(teacher), initializer_range=0.3).double()
    prompt, row = student("the").input_ids, student(text).input_ids
    exact, narrow = (beginnings(genlm, model, teacher, teacher("the").input_ids, text, k) for k in (10_000, 1))
    (values, _, _), ends, count = ours(ByteTeacher(model, teacher, student, tolerance=0, covers=10_000), prompt, row)
    assert count > 2
    sums, want = list(accumulate(values))[:count], [exact[end - 1] for end in ends[:count]]
    assert_near(sums[:-1], want[:-1], **BEAM)
    # At the end of the chunk, ours is the probability of the teacher's own tokens.
    assert sums[-1] < want[-1]
    assert all(some <= every + ROUNDED for some, every in zip(narrow, exact, strict=True))
    (values, lower, upper), _, _ = ours(ByteTeacher(model, teacher, student, tolerance=0.5, covers=1), prompt, row)
    assert all(some <= every + ROUNDED for some, every in zip(accumulate(values[: count - 1]), want, strict=False))
    steps = [after - before for before, after in pairwise([0.0, *want[:-1]])]
    assert all(a - ROUNDED <= step <= b + ROUNDED for a, step, b in zip(lower, steps, upper, strict=False))


def test_every_boundary_of_a_teacher_of_bytes(genlm: Any) -> None:
    """Each text has one tokenisation, so the condition on the teacher's own tokens changes nothing."""
    teacher, student = byte_level(256), byte_level(330)
    model = tiny_model(vocab_size=256, initializer_range=0.3).double()
    text = " student answers then an aunt é longer"
    row = student(text).input_ids
    exact = beginnings(genlm, model, teacher, teacher("the").input_ids, text, 100)
    (values, _, _), ends, _ = ours(ByteTeacher(model, teacher, student), student("the").input_ids, row)
    assert len(row) < len(text)
    assert_near(list(accumulate(values)), [exact[end - 1] for end in ends], **BEAM)
