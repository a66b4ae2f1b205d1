"""TorchRL wrappers: unwrapped if the weights are in this process, otherwise scored through their own forward."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.modules.llm import TransformersWrapper

from closeness import assert_near
from scoring_reference import FakeBackend, engine, plain_log_probs, random_mask, random_sequences
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring import LogProbScorer, Sampling
from toy_models import FORWARD, tiny_model
from toy_tokenizer import build_tokenizer

SETTINGS = {"tokenizer_kwargs": {"padding": True, "padding_side": "left"}}


@pytest.fixture
def module():
    return tiny_model()


@pytest.fixture
def backend(module):
    return engine(module)


@pytest.fixture
def scorer(backend):
    return LogProbScorer(FakeBackend(backend, **SETTINGS))


@pytest.mark.parametrize(("generate", "input_mode"), [(True, "history"), (False, "tokens")])
def test_transformers_wrapper_is_scored_through_its_weights(module, generate, input_mode):
    wrapper = TransformersWrapper(module, tokenizer=build_tokenizer(), generate=generate, input_mode=input_mode)
    scorer, sequences = LogProbScorer(wrapper, temperature=0.7), random_sequences(9, 1, 4)
    assert (scorer.path, scorer.model) == ("head", module)
    want = plain_log_probs(module, sequences, temperature=0.7).detach()
    assert_near(scorer.score(sequences).values, want, **FORWARD)


@pytest.mark.parametrize(
    ("tokens_per_batch", "key"), [(1, "log_probs"), (20, ("nested", "log_probs")), (8192, "log_probs")]
)
def test_another_backend_is_scored_through_its_own_forward(module, backend, tokens_per_batch, key):
    wrapper = FakeBackend(backend, log_probs_key=key, **SETTINGS)
    scorer = LogProbScorer(wrapper, tokens_per_batch=tokens_per_batch)
    assert (scorer.path, scorer.model) == ("wrapper", wrapper)
    sequences = random_sequences(12, 1, 0, 7, 9)
    mask = random_mask(sequences, keep=0.3)
    mask[12 + 1 : 12 + 1 + 7] = False  # nothing of sequence 3: not forwarded
    got = scorer.score(sequences, mask).values
    assert (got.dtype, got.requires_grad) == (torch.float32, False)
    assert_near(got, plain_log_probs(module, sequences, mask).detach(), **FORWARD)
    assert sum(map(len, backend.requests)) == 2


def test_defect_09_the_wrapper_is_never_mutated(backend):
    wrapper = FakeBackend(backend, **copy.deepcopy(SETTINGS))
    before = {
        name: copy.deepcopy(value) if name in FakeBackend.DEFAULTS else value for name, value in vars(wrapper).items()
    }
    LogProbScorer(wrapper).score(random_sequences(6, 3))
    assert vars(wrapper) == before


def test_defect_34_tokens_equal_to_the_backends_padding_are_scored(module, scorer):
    sequences = Ragged.from_list([torch.tensor([3, 5, 7, 5]), torch.tensor([5, 5])])
    assert_near(scorer.score(sequences).values, plain_log_probs(module, sequences).detach(), **FORWARD)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.7),
        ("sampling", Sampling(top_p=0.9)),
        ("adapters", False),
        ("adapters", "other"),
        ("deterministic", True),
        ("dtype", torch.bfloat16),
    ],
)
def test_a_setting_that_a_backend_cannot_follow(module, backend, scorer, name, value):
    shown = re.escape(f"{value}" if name == "sampling" else f"{name}={value!r}")
    message, sequences = f"{shown} cannot be applied by FakeBackend.*backend", random_sequences(6)
    with pytest.raises(ValueError, match=message):
        LogProbScorer(FakeBackend(backend, **SETTINGS), **{name: value})
    with pytest.raises(ValueError, match=message):
        setattr(scorer, name, value)
    if name == "temperature":
        with pytest.raises(ValueError, match=f"{message[:-7]}in the backend"):
            scorer.score(sequences, temperature=value)
    assert_near(scorer.score(sequences).values, plain_log_probs(module, sequences).detach(), **FORWARD)


def test_gradients_flow_if_the_backend_keeps_a_graph(module, backend, scorer):
    scorer.score(random_sequences(6), grad=True).values.sum().backward()
    assert module.lm_head.weight.grad.abs().sum() > 0
    backend.score = lambda ids: -torch.ones(len(ids))
    with pytest.raises(ValueError, match="grad=True, but the backend of FakeBackend returns log-probs without a graph"):
        scorer.score(random_sequences(6), grad=True)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (lambda n: torch.zeros(n + 2 * (n == 4)), r"expected \[6, 4\].*first that differs is sequence 2"),
        (lambda n: torch.zeros(n - (n == 4)), r"expected \[6, 4\].*first that differs is sequence 2"),
        (lambda n: torch.full((n,), -torch.inf), "log-prob is -inf at sequence 2, position 3"),
    ],
)
def test_a_backend_that_returns_other_lengths_or_no_numbers(backend, scorer, score, message):
    backend.score = lambda ids: score(len(ids))
    mask = None if "expected" in message else torch.arange(11) == 10
    with pytest.raises(ValueError, match=message):
        scorer.score(random_sequences(6, 1, 4), mask)


def test_a_backend_that_returns_no_log_probs_of_the_given_tokens(backend):
    class Silent(FakeBackend):
        def forward(self, tensordict):
            return TensorDict({"tokens": tensordict.get("tokens")}, batch_size=tensordict.batch_size)

    with pytest.raises(ValueError, match=r"Silent returned no \('log_probs', 'full'\)"):
        LogProbScorer(Silent(backend, **SETTINGS)).score(random_sequences(6, 4))


def test_a_remote_wrapper_is_used_as_it_is(module, backend):
    """A new version of it would transfer the weights."""

    class Remote:
        def __init__(self, local):
            self._remote_wrapper = local

        def get_new_version(self, **kwargs):
            raise AssertionError("the weights would travel")

        def __call__(self, tensordict):
            return self._remote_wrapper(tensordict)

    own = {"generate": False, "input_mode": "tokens", "input_key": ("tokens", "full"), "pad_output": False}
    sequences, scorer = random_sequences(6, 3), LogProbScorer(Remote(FakeBackend(backend, **own, padding_value=-1)))
    assert scorer.path == "wrapper"
    assert_near(scorer.score(sequences).values, plain_log_probs(module, sequences).detach(), **FORWARD)


# ------------------------------------------------------------------ zeros that torchrl fills in


def filled(module: nn.Module, cached: int) -> SimpleNamespace:
    """An engine that returns no scores of tokens whose block of ``cached`` tokens it has seen; torchrl fills in 0.

    Like vLLM it always computes a sequence's last token, which predicts none of the sequence.
    """
    seen, backend = set(), engine(module)

    def score(ids):
        row = plain_log_probs(module, Ragged.from_list([ids])).detach()
        rows = ids.tolist()
        blocks = [tuple(rows[:end]) for end in range(cached, len(rows), cached)]
        hit = max((len(block) for block in blocks if block in seen), default=0)
        seen.update(blocks)
        return torch.where(torch.arange(len(row)) <= hit, 0.0, row) if hit else row

    backend.score = score
    return backend


@pytest.mark.parametrize("length", [9, 12, 13])
def test_scores_of_a_cached_prefix_are_no_zeros(length):
    """A second call finds the first blocks of 4 in the cache."""
    sequences, end = random_sequences(length, 2), (length - 1) // 4 * 4
    scorer = LogProbScorer(FakeBackend(filled(tiny_model(), 4), **SETTINGS))
    want = plain_log_probs(tiny_model(), sequences).detach()
    assert_near(scorer.score(sequences).values, want, **FORWARD)
    message = f"FakeBackend returned log-probs of exactly 0 up to sequence 0, position {end}, .*enable_prefix_caching=F"
    with pytest.raises(ValueError, match=message):
        scorer.score(sequences)
    mask = torch.arange(length + 2) == length - 1
    if end < length - 1:  # the zeros are those of tokens that are not scored
        assert_near(scorer.score(sequences, mask).values, torch.where(mask, want, 0), **FORWARD)


@pytest.mark.parametrize("prompt", [2, 5])
def test_an_engine_without_scores_of_prompts(module, backend, scorer, prompt):
    """As SGLang's wrapper: 0 for the whole prompt; a mask of the response alone reads none of them."""
    sequences, mask = random_sequences(9), torch.arange(9) >= prompt
    row = plain_log_probs(module, sequences, mask).detach()
    backend.score = lambda ids: row[: len(ids)]
    with pytest.raises(ValueError, match=rf"exactly 0 up to sequence 0, position {prompt - 1}, .* in its place 0:"):
        scorer.score(sequences)
    assert len(backend.requests) == 2
    assert_near(scorer.score(sequences, mask).values, row, **FORWARD)
    assert len(backend.requests) == 3


class Counting(nn.Module):
    """After ``n`` comes ``n + 1`` with a probability of exactly 1 in float32."""

    def forward(self, input_ids):
        return SimpleNamespace(logits=100.0 * nn.functional.one_hot((input_ids + 1) % 10, 10))


def test_tokens_that_are_certain_have_zeros():
    """No false alarm: whole sequences of certain tokens, certain starts, and certain tokens in between."""
    module = Counting()
    backend = engine(module)
    scorer = LogProbScorer(FakeBackend(backend, **SETTINGS))
    sequences = Ragged.from_list([torch.arange(8), torch.tensor([3, 4, 5, 9, 0, 1]), torch.tensor([6, 6, 7, 8])])
    got = scorer.score(sequences)
    assert got.values.tolist() == plain_log_probs(module, sequences).tolist()
    assert got.values.tolist() == [0.0] * 11 + [-100.0, 0.0, 0.0, 0.0, -100.0, 0.0, 0.0]
    assert sum(map(len, backend.requests)) == 3 + 4  # two sequences are certain from their start
    assert scorer.score(Ragged.from_list([torch.tensor([4, 5])])).values.tolist() == [0.0, 0.0]
