"""Columns of a batch: values by hand, in every layout; scores equal to a plain forward."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict

from torchrl_llm_kl.diagnostics import read_columns
from toy_models import tiny_model

NAN = math.nan
FULL = torch.tensor([[3, 4, 5, 6, 7], [3, 4, 8, 9, 0]])
REAL = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]).bool()
ASSISTANT = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 1, 1, 0]]).bool()


def batch() -> TensorDict:
    """Two answers to one prompt; the first has two turns."""
    return TensorDict(
        tokens=TensorDict(prompt=FULL[:, :1], full=FULL, batch_size=[2]),
        masks=TensorDict(all_attention_mask=REAL, all_assistant_mask=ASSISTANT, batch_size=[2]),
        next=TensorDict(reward=torch.tensor([[1.0], [0.5]]), batch_size=[2]),
        batch_size=[2],
    )


def test_turns_and_places() -> None:
    columns = read_columns(batch())
    assert columns.turns.tolist() == [-1, 0, -1, 1, 1, -1, -1, 0, 0]
    assert columns.places.tolist() == [-1, 0, -1, 1, 2, -1, -1, 0, 1]
    assert columns.rows["reward"].tolist() == [1.0, 0.5]
    assert columns.prompts is not None
    assert columns.prompts.tolist() == [0, 0]


def test_a_mask_that_begins_each_sequence_starts_a_turn_in_each() -> None:
    td = TensorDict(tokens=TensorDict(prompt=FULL[:, :1], full=FULL, batch_size=[2]), batch_size=[2])
    assert read_columns(td).turns.tolist() == [-1, 0, 0, 0, 0, -1, 0, 0, 0, 0]


@pytest.mark.parametrize("nested", [False, True])
def test_log_probs_of_engine_and_transform_are_kept_apart(nested: bool) -> None:
    td = batch()
    own = torch.tensor([[0.0, -1, -2, -3, -4], [0.0, -5, -6, -7, 0]])
    if nested:
        rows = [own[0], own[1, :4]]
        td = TensorDict(
            tokens=TensorDict(
                prompt=torch.nested.nested_tensor([FULL[0, :1], FULL[1, :1]]),
                full=torch.nested.nested_tensor([FULL[0], FULL[1, :4]]),
                batch_size=[2],
            ),
            batch_size=[2],
        )
        td["next", "log_probs", "full"] = torch.nested.nested_tensor(rows)
        td["log_probs", "full"] = torch.nested.nested_tensor([row * 2 for row in rows])
    else:
        td["next", "log_probs", "full"], td["log_probs", "full"] = own, own * 2
    columns = read_columns(td, scope="turn")
    expected = torch.tensor([0.0, -1, -2, -3, -4, 0, -5, -6, -7])
    old, sampler = columns.columns["old_log_prob"], columns.columns["sampler_log_prob"]
    assert torch.equal(old[columns.mask], expected[columns.mask])
    assert torch.equal(sampler[columns.mask], 2 * expected[columns.mask])


def test_the_first_zero_of_an_engine_is_no_number() -> None:
    td = batch()
    td["log_probs", "full"] = torch.tensor([[0.0, 0.0, -2, -3, -4], [0.0, 0.0, 0.0, -7, 0]])
    sampler = read_columns(td).columns["sampler_log_prob"]
    mask = read_columns(td).mask
    assert sampler[mask].isnan().tolist() == [True, False, False, True, False]


def test_an_answer_s_advantage_is_that_of_all_its_tokens() -> None:
    td = batch().set("advantage", torch.tensor([2.0, -1.0]))
    columns = read_columns(td)
    assert columns.columns["advantage"][columns.mask].tolist() == [2.0, 2.0, 2.0, -1.0, -1.0]


def test_models_give_log_prob_entropy_and_the_exact_kl() -> None:
    policy, reference = tiny_model(seed=0).double(), tiny_model(seed=1).double()
    columns = read_columns(batch(), policy=policy, reference=reference, temperature=0.7)
    expected: dict[str, list[torch.Tensor]] = {"log_prob": [], "entropy": [], "ref_log_prob": [], "kl": []}
    for row, length in ((FULL[0], 5), (FULL[1], 4)):
        ids = row[:length]
        p, q = (
            (model(input_ids=ids[None]).logits[0, :-1].detach() / 0.7).log_softmax(-1) for model in (policy, reference)
        )
        expected["log_prob"].append(p.gather(-1, ids[1:, None]).squeeze(-1))
        expected["ref_log_prob"].append(q.gather(-1, ids[1:, None]).squeeze(-1))
        expected["entropy"].append(-(p.exp() * p).sum(-1))
        expected["kl"].append((p.exp() * (p - q)).sum(-1))
    after_the_first = columns.tokens.positions > 0
    for name, values in expected.items():
        found = columns.columns[name]
        wanted = torch.cat(values).to(found.dtype)[columns.mask[after_the_first]]
        torch.testing.assert_close(found[columns.mask], wanted, rtol=1e-5, atol=1e-6)
        assert bool(found[~columns.mask].isnan().all())
    assert torch.equal(columns.known("kl", "entropy"), columns.mask)
    assert not bool(columns.known("advantage").any())


def test_an_unknown_column_is_refused() -> None:
    with pytest.raises(KeyError, match="no column"):
        read_columns(batch(), keys={"log_probs": "x"})
