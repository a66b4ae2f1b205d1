"""The forms of token ids that a scorer takes: the same log-probs for each, in the form of the ids."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from closeness import assert_near
from scoring_reference import plain_log_probs
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring import LogProbScorer
from toy_models import BACKWARD, FORWARD, tiny_model

ROWS = [[3, 5, 7, 9], [], [5], [3, 5, 8]]
PAD = 5  # also a token
LEFT = torch.tensor([[3, 5, 7, 9], [PAD] * 4, [PAD, PAD, PAD, 5], [PAD, 3, 5, 8]])
LEFT_REAL = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1], [0, 1, 1, 1]])
RIGHT = torch.tensor([[3, 5, 7, 9], [PAD] * 4, [5, PAD, PAD, PAD], [3, 5, 8, PAD]])
RIGHT_REAL = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]])


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def scorer(model):
    return LogProbScorer(model)


@pytest.fixture(scope="module")
def want(model):
    with torch.no_grad():
        return plain_log_probs(model, Ragged.from_list([torch.tensor(row, dtype=torch.long) for row in ROWS]))


FORMS = {
    "lists": (ROWS, None),
    "tuples": (tuple(map(tuple, ROWS)), None),
    "tensors": ([torch.tensor(row, dtype=torch.int32) for row in ROWS], None),
    "left": (LEFT, LEFT_REAL),
    "right": (RIGHT, RIGHT_REAL.bool()),
    "batch dimensions": (LEFT.reshape(2, 2, 4), LEFT_REAL.reshape(2, 2, 4).float()),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form(scorer, want, form):
    ids, attention = FORMS[form]
    got = scorer.score(ids, attention_mask=attention)
    assert_near(got.values, want, **FORWARD)
    assert got.lengths.tolist() == [4, 0, 1, 3]
    if attention is None:
        assert [row.shape for row in got.restore()] == [torch.Size([len(row)]) for row in ROWS]
    else:
        restored, real = got.restore(), attention.bool()
        assert restored.shape == ids.shape
        assert bool((restored[~real] == 0).all())
        assert_near(restored[real], want, **FORWARD)


def test_a_nested_tensor(scorer, want):
    rows = [torch.tensor(row) for row in ROWS if len(row) > 1]
    got = scorer.score(torch.nested.as_nested_tensor(rows, layout=torch.jagged))
    assert_near(got.values, want[[0, 1, 2, 3, 5, 6, 7]], **FORWARD)
    assert got.restore().is_nested


# Tokens 2 and 3 of the first row, 1 of the last.
MASK_ROWS = [[False, False, True, True], [], [False], [False, True, False]]
FLAT = torch.tensor([0, 0, 1, 1, 0, 0, 1, 0], dtype=torch.bool)
LEFT_MASK = torch.zeros(4, 4, dtype=torch.bool).index_put(
    (torch.tensor([0, 0, 3]), torch.tensor([2, 3, 2])), torch.tensor(True)
)


@pytest.mark.parametrize(
    ("ids", "attention", "mask"),
    [
        (ROWS, None, MASK_ROWS),
        (ROWS, None, FLAT),
        (LEFT, LEFT_REAL, LEFT_MASK),
        (LEFT, LEFT_REAL, FLAT),
        (LEFT, LEFT_REAL, [torch.tensor(row, dtype=torch.bool) for row in MASK_ROWS]),
        (Ragged.from_list([torch.tensor(row, dtype=torch.long) for row in ROWS]), None, MASK_ROWS),
    ],
)
def test_every_form_of_the_mask(scorer, want, ids, attention, mask):
    got = scorer.evaluate(ids, mask, attention_mask=attention, entropy=True)
    assert_near(got.log_prob.values, torch.where(FLAT, want, 0), **FORWARD)
    assert ((got.entropy.values > 0) == FLAT).all()


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_mask(scorer, want, layout):
    """With ids of every form."""
    rows, marks = ([torch.tensor(row) for row in x if len(row) > 0] for x in (ROWS, MASK_ROWS))
    mask = torch.nested.as_nested_tensor(marks, layout=layout)
    for ids in (rows, Ragged.from_list(rows), torch.nested.as_nested_tensor(rows, layout=layout)):
        got = scorer.score(ids, mask)
        assert_near(got.values, torch.where(FLAT, want, 0), **FORWARD)
    some = [0, 2, 3]
    got = scorer.score(LEFT[some], mask, attention_mask=LEFT_REAL[some])
    assert_near(got.values, torch.where(FLAT, want, 0), **FORWARD)
    with pytest.raises(ValueError, match=r"one bool for each token, rows of \[4, 1, 3\], got rows of \[4, 1\]"):
        scorer.score(rows, torch.nested.as_nested_tensor(marks[:2], layout=layout))


def test_gradients_of_padded_ids(model, scorer):
    model.zero_grad()
    scorer.score(LEFT, attention_mask=LEFT_REAL, grad=True).values.sum().backward()
    got = model.lm_head.weight.grad.clone()
    model.zero_grad()
    plain_log_probs(model, Ragged.from_list([torch.tensor(row, dtype=torch.long) for row in ROWS])).sum().backward()
    assert_near(got, model.lm_head.weight.grad, **BACKWARD)


@pytest.mark.parametrize(
    ("ids", "mask", "attention", "error", "message"),
    [
        (LEFT, None, None, ValueError, r"token ids of shape \(4, 4\) may be padded: pass attention_mask="),
        (LEFT[0], None, LEFT_REAL[0], ValueError, r"a tensor \[\*B, T\], got shape \(4,\)"),
        (LEFT, None, LEFT_REAL[:, 1:], ValueError, r"shape \(4, 4\) of the token ids, got \(4, 3\)"),
        (LEFT, None, LEFT_REAL * 2, ValueError, "must hold 1 at tokens and 0 at padding"),
        (ROWS, None, LEFT_REAL, ValueError, "attention_mask= belongs to a padded tensor"),
        (LEFT, LEFT_MASK | (LEFT_REAL == 0), LEFT_REAL, ValueError, "the mask selects padding: sequence 1, slot 0"),
        (LEFT, LEFT_MASK.long(), LEFT_REAL, TypeError, "mask must be boolean, got torch.int64"),
        (LEFT, LEFT_MASK[:, 1:], LEFT_REAL, ValueError, r"one entry for each token, \(8,\), got \(4, 3\)"),
        (ROWS, MASK_ROWS[1:], None, ValueError, r"rows of \[4, 0, 1, 3\], got rows of \[0, 1, 3\]"),
        (ROWS, [[1, 0, 1, 1], [], [0], [0, 1, 0]], None, (TypeError, ValueError), "boolean|rows"),
        ([3, 5, 7], None, None, TypeError, "expected a list of rows of numbers, found 3 as row 0"),
        ([[3, 5], ["a"]], None, None, TypeError, r"found \['a'\] as row 1"),
        ([[3, 5], [0.5]], None, None, ValueError, r"torch.float32 at row 1"),
        ([[0.5, 2.0]], None, None, ValueError, "token ids must be a flat integer tensor .* torch.float32"),
        ([], None, None, ValueError, "at least one row"),
        ("text", None, None, TypeError, "sequences must be a Ragged, a list of token id lists, .* got str"),
        ({"input_ids": LEFT}, None, None, TypeError, "got dict"),
    ],
)
def test_bad_input(scorer, ids, mask, attention, error, message):
    with pytest.raises(error, match=message):
        scorer.score(ids, mask, attention_mask=attention)


def test_a_served_model_takes_every_form(monkeypatch):
    """Nothing is sent: the requests hold the flat tokens."""
    from torchrl_llm_kl.service.client import _remote

    sent = []
    monkeypatch.setattr(_remote, "Exchange", lambda replicas, router, whole, timeout: sent.append(whole))
    remote = SimpleNamespace(router=None, version=None, replicas=None, timeout=1.0)
    scorer = _remote.RemoteScorer(remote, _remote.Settings(temperature=1.0, adapters=True, dtype=None, remember=False))
    for ids, attention in FORMS.values():
        scorer.begin(ids, attention_mask=attention)
    scorer.begin(LEFT, LEFT_MASK, attention_mask=LEFT_REAL)
    masks = [part.mask.tolist() for part in sent]
    assert masks == [[False, True, True, True, False, False, True, True]] * len(FORMS) + [FLAT.tolist()]
