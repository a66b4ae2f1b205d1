"""TorchRL wrappers: unwrapped if the weights are in this process, otherwise scored through their own forward."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import nn
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import LLMWrapperBase, LogProbs

from closeness import assert_near
from scoring_reference import plain_log_probs, random_mask, random_sequences
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring import LogProbScorer, Sampling
from toy_models import FORWARD, tiny_model


class FakeBackend(LLMWrapperBase):
    """A wrapper whose engine is not a module: its output has vLLM's form, and it drops padding like vLLM's wrapper."""

    def __init__(
        self,
        model,
        *,
        generate=True,
        return_log_probs=None,
        input_mode="history",
        input_key=None,
        pad_output=True,
        tokenizer_kwargs=None,
        log_probs_key="log_probs",
        padding_value=5,
    ):
        nn.Module.__init__(self)
        self.model = model
        self.generate, self.return_log_probs, self.input_mode = generate, return_log_probs, input_mode
        self.input_key, self.pad_output, self.tokenizer_kwargs = input_key, pad_output, tokenizer_kwargs
        if tokenizer_kwargs is not None:
            tokenizer_kwargs["padding"] = pad_output
        self.log_probs_key, self.padding_value = log_probs_key, padding_value
        self._batch_queue, self._futures, self._min_batch_size, self._max_batch_size = [], [], None, None

    def get_new_version(self, **kwargs):
        settings = ("generate", "return_log_probs", "input_mode", "pad_output", "tokenizer_kwargs", "log_probs_key")
        current = {name: getattr(self, name) for name in settings}
        return type(self)(self.model, **{**current, "padding_value": self.padding_value, **kwargs})

    def forward(self, tensordict):
        assert (self.generate, self.input_mode, self.pad_output) == (False, "tokens", False)
        rows = [ids[ids != self.padding_value] for ids in tensordict.get(self.input_key, as_list=True)]
        self.model.requests.append([len(row) for row in rows])
        found = [self.model.score(row) for row in rows]
        out = lazy_stack([TensorDict() for _ in rows])
        log_probs = LogProbs._from_tensordict(out.empty())
        log_probs.full = found
        return out.set(self.log_probs_key, log_probs)


def engine(module: nn.Module) -> SimpleNamespace:
    """Scores token ids, and is not a module."""

    def score(ids):
        return plain_log_probs(module, Ragged.from_list([ids])).double()

    return SimpleNamespace(score=score, requests=[])


SETTINGS = {"tokenizer_kwargs": {"padding": True, "padding_side": "left"}}


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("input_mode", ["history", "tokens"])
def test_transformers_wrapper_is_scored_through_its_weights(generate, input_mode):
    from toy_tokenizer import build_tokenizer

    model = tiny_model()
    wrapper = TransformersWrapper(model, tokenizer=build_tokenizer(), generate=generate, input_mode=input_mode)
    scorer = LogProbScorer(wrapper, temperature=0.7)
    assert scorer.model is model
    assert scorer.path == "head"
    sequences = random_sequences(9, 1, 4)
    with torch.no_grad():
        want = plain_log_probs(model, sequences, temperature=0.7)
    assert_near(scorer.score(sequences).values, want, **FORWARD)


@pytest.mark.parametrize("tokens_per_batch", [1, 20, 8192])
@pytest.mark.parametrize("key", ["log_probs", ("nested", "log_probs")])
def test_another_backend_is_scored_through_its_own_forward(tokens_per_batch, key):
    module = tiny_model()
    backend = engine(module)
    wrapper = FakeBackend(backend, log_probs_key=key, **SETTINGS)
    scorer = LogProbScorer(wrapper, tokens_per_batch=tokens_per_batch)
    assert scorer.path == "wrapper"
    assert scorer.model is wrapper

    sequences = random_sequences(12, 1, 0, 7, 9)
    mask = random_mask(sequences, keep=0.3)
    mask[12 + 1 : 12 + 1 + 7] = False  # nothing of sequence 3: not forwarded
    got = scorer.score(sequences, mask)
    assert got.values.dtype == torch.float32
    assert not got.values.requires_grad
    assert_near(got.values, plain_log_probs(module, sequences, mask).detach(), **FORWARD)
    assert sum(map(len, backend.requests)) == 2


def test_defect_09_the_wrapper_is_never_mutated():
    wrapper = FakeBackend(engine(tiny_model()), **copy.deepcopy(SETTINGS))
    before = {
        name: copy.deepcopy(value) for name, value in vars(wrapper).items() if name != "_modules" and name != "model"
    }
    LogProbScorer(wrapper).score(random_sequences(6, 3))
    for name, value in before.items():
        assert getattr(wrapper, name) == value, name


def test_defect_34_tokens_equal_to_the_backends_padding_are_scored():
    module = tiny_model()
    sequences = Ragged.from_list([torch.tensor([3, 5, 7, 5]), torch.tensor([5, 5])])
    got = LogProbScorer(FakeBackend(engine(module), padding_value=5, **SETTINGS)).score(sequences)
    assert_near(got.values, plain_log_probs(module, sequences).detach(), **FORWARD)


def test_a_temperature_must_be_set_in_the_backend():
    with pytest.raises(ValueError, match=r"temperature=0.7 cannot be applied by FakeBackend.*in the backend"):
        LogProbScorer(FakeBackend(engine(tiny_model()), **SETTINGS), temperature=0.7)
    scorer = LogProbScorer(FakeBackend(engine(tiny_model()), **SETTINGS))
    with pytest.raises(ValueError, match=r"temperature=0.7 cannot be applied by FakeBackend.*in the backend"):
        scorer.score([[1, 2, 3]], temperature=0.7)


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
def test_a_setting_that_a_backend_cannot_follow(name, value):
    module = tiny_model()
    shown = re.escape(f"{value}" if name == "sampling" else f"{name}={value!r}")
    with pytest.raises(ValueError, match=f"{shown} cannot be applied by FakeBackend.*backend"):
        LogProbScorer(FakeBackend(engine(module), **SETTINGS), **{name: value})
    scorer = LogProbScorer(FakeBackend(engine(module), **SETTINGS))
    with pytest.raises(ValueError, match=f"{shown} cannot be applied by FakeBackend.*backend"):
        setattr(scorer, name, value)
    sequences = random_sequences(6)
    assert_near(scorer.score(sequences).values, plain_log_probs(module, sequences).detach(), **FORWARD)


def test_gradients_flow_if_the_backend_keeps_a_graph():
    module = tiny_model()
    scorer = LogProbScorer(FakeBackend(engine(module), **SETTINGS))
    scorer.score(random_sequences(6), grad=True).values.sum().backward()
    assert module.lm_head.weight.grad.abs().sum() > 0


def test_gradients_from_a_backend_without_a_graph():
    backend = engine(tiny_model())
    backend.score = lambda ids: -torch.ones(len(ids))
    with pytest.raises(ValueError, match="grad=True, but the backend of FakeBackend returns log-probs without a graph"):
        LogProbScorer(FakeBackend(backend, **SETTINGS)).score(random_sequences(6), grad=True)


@pytest.mark.parametrize("wrong", [lambda ids: torch.zeros(len(ids) + 2), lambda ids: torch.zeros(len(ids) - 1)])
def test_a_backend_that_returns_other_lengths(wrong):
    backend = engine(tiny_model())
    backend.score = lambda ids: wrong(ids) if len(ids) == 4 else torch.zeros(len(ids))
    with pytest.raises(ValueError, match=r"expected \[6, 4\].*first that differs is sequence 2"):
        LogProbScorer(FakeBackend(backend, **SETTINGS)).score(random_sequences(6, 1, 4))


def test_a_backend_that_returns_no_log_probs_of_the_given_tokens():
    class Silent(FakeBackend):
        def forward(self, tensordict):
            return TensorDict({"tokens": tensordict.get("tokens")}, batch_size=tensordict.batch_size)

    with pytest.raises(ValueError, match=r"Silent returned no \('log_probs', 'full'\)"):
        LogProbScorer(Silent(engine(tiny_model()), **SETTINGS)).score(random_sequences(6, 4))


def test_non_finite_log_probs_of_a_backend_name_the_sequence():
    backend = engine(tiny_model())
    backend.score = lambda ids: torch.full((len(ids),), float("-inf"))
    scorer = LogProbScorer(FakeBackend(backend, **SETTINGS))
    with pytest.raises(ValueError, match="log-prob is -inf at sequence 1, position 3"):
        scorer.score(random_sequences(6, 4), torch.arange(10) == 9)


def test_a_remote_wrapper_is_used_as_it_is():
    """A new version of it would transfer the weights."""

    class Remote:
        def __init__(self, local):
            self._remote_wrapper = local

        def get_new_version(self, **kwargs):
            raise AssertionError("the weights would travel")

        def __call__(self, tensordict):
            return self._remote_wrapper(tensordict)

    module = tiny_model()
    local = FakeBackend(
        engine(module),
        generate=False,
        input_mode="tokens",
        input_key=("tokens", "full"),
        pad_output=False,
        padding_value=-1,
    )
    sequences = random_sequences(6, 3)
    scorer = LogProbScorer(Remote(local))
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
    sequences = random_sequences(length, 2)
    scorer = LogProbScorer(FakeBackend(filled(tiny_model(), 4), **SETTINGS))
    with torch.no_grad():
        want = plain_log_probs(tiny_model(), sequences)
    assert_near(scorer.score(sequences).values, want, **FORWARD)
    end = (length - 1) // 4 * 4
    message = (
        rf"FakeBackend returned log-probs of exactly 0 up to sequence 0, position {end}, .*enable_prefix_caching=False"
    )
    with pytest.raises(ValueError, match=message):
        scorer.score(sequences)
    mask = torch.arange(length + 2) == length - 1
    if end < length - 1:  # the zeros are those of tokens that are not scored
        assert_near(scorer.score(sequences, mask).values, torch.where(mask, want, 0), **FORWARD)


@pytest.mark.parametrize("prompt", [2, 5])
def test_an_engine_without_scores_of_prompts(prompt):
    """As SGLang's wrapper: 0 for the whole prompt; a mask of the response alone reads none of them."""
    backend, module = engine(tiny_model()), tiny_model()

    def score(ids):
        row = plain_log_probs(module, Ragged.from_list([ids])).detach()
        row[:prompt] = 0
        return row

    backend.score = score
    scorer, sequences = LogProbScorer(FakeBackend(backend, **SETTINGS)), random_sequences(9)
    with pytest.raises(ValueError, match=rf"exactly 0 up to sequence 0, position {prompt - 1}, .* in its place 0:"):
        scorer.score(sequences)
    assert len(backend.requests) == 2
    mask = torch.arange(9) >= prompt
    with torch.no_grad():
        want = plain_log_probs(module, sequences, mask)
    assert_near(scorer.score(sequences, mask).values, want, **FORWARD)
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
