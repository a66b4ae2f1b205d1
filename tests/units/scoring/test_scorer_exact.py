"""Scores and gradients equal those of one sequence at a time through the plain model."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch.testing import assert_close

from closeness import assert_near
from scoring_reference import plain_log_probs, random_mask, random_sequences
from torchrl_llm_kl.head import _tiles
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring import LogProbScorer
from toy_models import BACKWARD, FAMILIES, FORWARD, VOCAB_SIZE, tiny_model

LENGTHS = (20, 1, 0, 7, 33, 2, 12, 12)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return tiny_model(request.param)


@pytest.mark.parametrize(
    ("tokens_per_batch", "keep", "temperature"), [(1, 0.5, 0.7), (40, 0.1, 1.3), (8192, 0.5, 0.7), (8192, None, 1.0)]
)
def test_equals_one_sequence_at_a_time(model, tokens_per_batch, keep, temperature):
    sequences = random_sequences(*LENGTHS)
    mask = None if keep is None else random_mask(sequences, keep=keep)
    scorer = LogProbScorer(model, temperature=temperature, tokens_per_batch=tokens_per_batch, head_chunk=5)
    assert scorer.path == "head"

    got = scorer.score(sequences, mask)

    with torch.no_grad():
        want = plain_log_probs(model, sequences, mask, temperature=temperature)
    assert_near(got.values, want, **FORWARD)
    assert got.values.dtype == torch.float32
    assert not got.values.requires_grad
    assert_close(got.lengths, sequences.lengths)


def test_gradient_equals_the_plain_models(model):
    model = copy.deepcopy(model)
    sequences = random_sequences(9, 1, 0, 14, 4)
    mask = random_mask(sequences, keep=0.6)
    weight = torch.randn(sequences.values.shape, generator=torch.Generator().manual_seed(1))

    (plain_log_probs(model, sequences, mask, temperature=0.8) * weight).sum().backward()
    want = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    got = LogProbScorer(model, temperature=0.8, tokens_per_batch=16, head_chunk=3).score(sequences, mask, grad=True)
    (got.values * weight).sum().backward()

    assert want
    for name, parameter in model.named_parameters():
        if want[name] is None:
            assert parameter.grad is None, name
            continue
        assert_near(parameter.grad, want[name], **BACKWARD, msg=name)


def test_sliding_window_shorter_than_the_sequence_matters():
    """Otherwise the case above does not test the window."""
    sequences = random_sequences(30)
    windowed, unlimited = tiny_model("mistral"), tiny_model("mistral", sliding_window=None)
    a, b = (LogProbScorer(model).score(sequences).values for model in (windowed, unlimited))
    assert (a - b).abs().max() > 0.1


def test_soft_cap_matters():
    """Logits far beyond the cap: without it the log-probs are off by nats."""
    sequences = random_sequences(30)
    capped, free = tiny_model("gemma2"), tiny_model("gemma2", final_logit_softcapping=None)
    a, b = (LogProbScorer(model).score(sequences).values for model in (capped, free))
    assert (a - b).abs().max() > 0.5


def test_sequences_without_tokens_to_score_are_not_forwarded_and_others_are_trimmed():
    model = tiny_model()
    seen = []
    handle = model.get_decoder().register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    sequences = random_sequences(10, 20, 8)
    mask = torch.zeros(38, dtype=torch.bool)
    mask[[3, 4]] = True  # sequence 0, up to position 4
    mask[30 + 6] = True  # sequence 2, position 6
    scorer = LogProbScorer(model, probe=False)
    scorer.score(sequences, mask)
    handle.remove()

    (call,) = seen
    first, third = sequences.to_list()[0], sequences.to_list()[2]
    assert call["input_ids"].tolist() == [third[:6].tolist(), [*first[:4].tolist(), 0, 0]]
    assert call["attention_mask"].tolist() == [[1] * 6, [1] * 4 + [0] * 2]


@pytest.mark.parametrize("grad", [False, True])
def test_nothing_to_score_is_all_zeros(grad):
    scorer = LogProbScorer(tiny_model())
    for sequences in (random_sequences(0), random_sequences(1, 0, 1), Ragged.from_list([torch.zeros(0).long()] * 2)):
        got = scorer.score(sequences, grad=grad)
        assert got.values.tolist() == [0.0] * len(sequences.values)
    assert scorer.score(random_sequences(5), torch.zeros(5, dtype=torch.bool)).values.tolist() == [0.0] * 5


def test_layout_in_is_layout_out():
    sequences = random_sequences(6, 4)
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]]).bool()
    padded = torch.where(mask, torch.stack([sequences.values[:6], sequences.values[4:]]), 0)
    scorer = LogProbScorer(tiny_model())
    got = scorer.score(Ragged.from_padded(padded, mask=mask)).restore()
    want = scorer.score(sequences).to_padded(side="left")
    assert_close(got, want)


def test_inputs_are_not_mutated_and_int32_ids_are_fine():
    sequences = random_sequences(9, 5)
    mask = random_mask(sequences)
    before = sequences.values.clone(), mask.clone(), sequences.lengths.clone()
    scorer = LogProbScorer(tiny_model())
    want = scorer.score(sequences, mask)
    for now, then in zip((sequences.values, mask, sequences.lengths), before, strict=True):
        assert_close(now, then, rtol=0, atol=0)
    assert_close(scorer.score(sequences.like(sequences.values.int()), mask).values, want.values)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda scorer: pickle.loads(pickle.dumps(scorer))])
def test_a_copy_scores_the_same(clone):
    scorer = LogProbScorer(tiny_model("gemma2"), temperature=0.6)
    sequences = random_sequences(9, 5)
    twin = clone(scorer)
    assert twin.model is not scorer.model
    assert twin.path == "head"
    assert_close(twin.score(sequences).values, scorer.score(sequences).values)


def test_new_weights_take_effect_at_once():
    model = tiny_model()
    scorer = LogProbScorer(model)
    model.load_state_dict(tiny_model(seed=1).state_dict())
    sequences = random_sequences(9)
    with torch.no_grad():
        assert_near(scorer.score(sequences).values, plain_log_probs(model, sequences), **FORWARD)


def test_without_grad_no_graph_is_kept_even_where_grad_is_on():
    with torch.enable_grad():
        assert LogProbScorer(tiny_model()).score(random_sequences(9)).values.grad_fn is None


def test_with_grad_the_logits_are_not_held(monkeypatch):
    """No tensor saved by the graph has the size of the vocabulary, beyond the few that the head keeps within a budget."""
    monkeypatch.setattr(_tiles, "_KEPT_BYTES", 0)
    model = tiny_model()
    sequences = random_sequences(30, 30)
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        LogProbScorer(model, probe=False, head_chunk=16).score(sequences, grad=True)
    assert shapes
    activations = [shape for shape in shapes if shape[-1:] == (VOCAB_SIZE,) and shape != (VOCAB_SIZE, 32)]
    assert not activations


def test_the_gradient_of_an_exact_kl_on_the_full_path() -> None:
    """Recomputed logits: each saved tensor may be unpacked only once."""

    class Table(torch.nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            values = torch.randn(5, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            self.table = torch.nn.Parameter(values)

        def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor]:
            return (self.table[input_ids],)

    ids = torch.tensor([0, 3, 1, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no separate body and head
        model, other = LogProbScorer(Table(0)), LogProbScorer(Table(1))
    kl = model.evaluate(Ragged.from_list([ids]), grad=True, reference=other).kl.values.sum()
    p, q = (scorer.model.table[ids[:-1]].log_softmax(-1) for scorer in (model, other))
    expected = (p.exp() * (p - q.detach())).sum()
    torch.testing.assert_close(kl.double(), expected, rtol=1e-5, atol=1e-6)
    found, want = (torch.autograd.grad(x, model.model.table)[0] for x in (kl, expected))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-6)
