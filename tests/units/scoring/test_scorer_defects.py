"""One test for each defect of the scoring path that this package replaces, named by its number."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from closeness import assert_near
from scoring_reference import plain_log_probs, random_mask, random_sequences
from torchrl_llm_kl.ragged import Ragged
from torchrl_llm_kl.scoring import LogProbScorer
from toy_models import FORWARD, tiny_model


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_defect_01_no_token_sees_the_future(family):
    """Change the last token of a sequence: no earlier log-prob of any sequence moves."""
    scorer = LogProbScorer(tiny_model(family))
    sequences = random_sequences(12, 9)
    changed = sequences.values.clone()
    changed[11] = (changed[11] + 1) % 97
    a, b = scorer.score(sequences).values, scorer.score(sequences.like(changed)).values
    moved = (a - b).abs() > 1e-3
    assert moved.nonzero().flatten().tolist() == [11]


def test_defect_02_first_tokens_are_never_scored_from_the_sequence_before():
    scorer = LogProbScorer(tiny_model())
    sequences = random_sequences(5, 4, 6)
    got = scorer.score(sequences)
    assert [row[0].item() for row in got.to_list()] == [0.0, 0.0, 0.0]
    alone = [scorer.score(Ragged.from_list([row])).values for row in sequences.to_list()]
    assert_near(got.values, torch.cat(alone), **FORWARD)


class Spy(nn.Module):
    """A model whose logits depend on the position alone: that of token ``p`` is high at position ``p``."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(97, 1)
        self.seen: list[dict] = []

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, *, attention_mask=None, position_ids=None):
        self.seen.append({"attention_mask": attention_mask, "position_ids": position_ids})
        if position_ids is None:  # the default for one sequence
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        return (8.0 * nn.functional.one_hot(position_ids, 97).float(),)


def test_defect_03_position_ids_are_integers():
    model = Spy()
    with pytest.warns(UserWarning, match="full forward"):
        LogProbScorer(model).score(random_sequences(5, 3))
    assert model.seen[-1]["position_ids"].dtype == torch.long


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_defect_03_models_with_learned_positions(family):
    model, sequences = tiny_model(family), random_sequences(12, 3, 7)
    with torch.no_grad():
        assert_near(LogProbScorer(model).score(sequences).values, plain_log_probs(model, sequences), **FORWARD)


def test_defect_04_mask_and_positions_go_by_keyword_and_count_from_the_first_real_token():
    """The spy takes keywords only."""
    model = Spy()
    with pytest.warns(UserWarning, match="full forward"):
        scorer = LogProbScorer(model)
    scorer.score(random_sequences(5, 3))
    seen = model.seen[-1]
    assert seen["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert seen["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]


@pytest.mark.parametrize("family", ["gpt2", "opt", "qwen2"])
def test_defect_04_left_padded_data_is_scored_from_position_zero(family):
    model, sequences = tiny_model(family), random_sequences(12, 3, 7)
    mask = sequences.padding_mask(side="left")
    padded = Ragged.from_padded(sequences.to_padded(side="left", value=96), mask=mask)
    got = LogProbScorer(model).score(padded).restore()
    with torch.no_grad():
        want = sequences.like(plain_log_probs(model, sequences)).to_padded(side="left")
    assert_near(got, want, **FORWARD)


def test_defect_32_the_first_generated_token_has_a_log_prob():
    """A prompt of three tokens, then the response: its first token is scored from the prompt."""
    model, sequences = tiny_model(), random_sequences(8)
    mask = torch.arange(8) >= 3
    got = LogProbScorer(model).score(sequences, mask).values
    assert got[3] < 0
    with torch.no_grad():
        assert_near(got, plain_log_probs(model, sequences, mask), **FORWARD)


def test_defect_33_temperature_divides_the_logits():
    """As in the sampler; after soft-capping, if the model has one."""
    sequences = random_sequences(8)
    for family in ("qwen2", "gemma2"):
        model = tiny_model(family)
        got = LogProbScorer(model, temperature=2.5).score(sequences).values
        with torch.no_grad():
            logits = model(input_ids=sequences.values[None]).logits[0, :-1] / 2.5
        want = torch.distributions.Categorical(logits=logits).log_prob(sequences.values[1:])
        assert_near(got[1:], want, **FORWARD)


def test_defect_34_pad_equal_to_eos_does_not_strip_the_sampled_end_token():
    eos = 5
    model = tiny_model(eos_token_id=eos, pad_token_id=eos)
    sequences = Ragged.from_list([torch.tensor([eos, 7, 8, eos, 9, eos]), torch.tensor([3, eos])])
    got = LogProbScorer(model).score(sequences)
    free = tiny_model()
    free.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert_near(got.values, plain_log_probs(free, sequences), **FORWARD)
    assert all((row[1:] < 0).all() for row in got.to_list())


def test_defect_35_exactly_zero_outside_the_mask():
    sequences = random_sequences(10, 4, 7)
    mask = random_mask(sequences)
    keep = sequences.padding_mask(side="left")
    padded = Ragged.from_padded(sequences.to_padded(side="left"), mask=keep)
    got = LogProbScorer(tiny_model()).score(padded, mask).restore()
    scored = torch.zeros_like(keep)
    scored[keep] = mask
    assert (got[~scored] == 0).all()
    assert (got[scored] < 0).all()


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "opt"])
def test_defect_36_log_sum_exp_is_float32_in_a_bfloat16_model(family):
    """No more error than the model's own logits, upcast; far less than a bfloat16 log-softmax."""
    model = tiny_model(family).to(torch.bfloat16)
    sequences = random_sequences(*[30] * 12)
    truth_model = copy.deepcopy(model).double()
    truth, upcast, narrow = [], [], []
    with torch.no_grad():
        for ids in sequences.to_list():
            logits, exact = (m(input_ids=ids[None]).logits[0, :-1] for m in (model, truth_model))
            for rows, each in ((truth, exact), (upcast, logits.float()), (narrow, logits)):
                rows.append(each.log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1).double())
    got = torch.cat([row[1:] for row in LogProbScorer(model).score(sequences).to_list()]).double()

    def rms(rows):
        return (rows - torch.cat(truth)).square().mean().sqrt().item()

    assert rms(got) <= 1.05 * rms(torch.cat(upcast))

    # The log-sum-exp alone: against the same bfloat16 logits, summed exactly.
    rounding = (got - torch.cat(upcast)).abs().mean().item()
    assert rounding < 0.5 * (torch.cat(narrow) - torch.cat(upcast)).abs().mean().item()


def test_defect_37_minus_infinity_is_masked_or_raises():
    """-inf minus -inf would be NaN: a scored -inf raises, a masked one is 0."""
    model = tiny_model()
    model.lm_head = nn.Linear(32, 97)
    model.lm_head.bias.data.zero_()[50] = float("-inf")
    scorer, sequences = LogProbScorer(model), Ragged.from_list([torch.tensor([1, 2]), torch.tensor([1, 50, 2])])
    with pytest.raises(ValueError, match="sequence 1, position 1"):
        scorer.score(sequences)
    got = scorer.score(sequences, torch.tensor([0, 1, 0, 0, 1]).bool(), grad=True).values
    assert (got - got.detach()).eq(0).all()
    got.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
