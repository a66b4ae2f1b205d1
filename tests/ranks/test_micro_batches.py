"""PolicyLoss and ValueLoss of the parts of a batch add up to those of the whole: micro-batches, layouts, ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import nn
from torch.testing import assert_close
from torchrl.data import LazyStackStorage, ReplayBuffer

from distributed.pool import RankPool
from policy_batches import batch, gradients, total
from torchrl_llm_kl.losses import EntropyBonus, KLToReference, PolicyLoss, ValueLoss
from torchrl_llm_kl.scoring import TokenCritic
from toy_models import tiny_model

CLOSE = {"rtol": 1e-3, "atol": 2e-5}
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
SPLITS = [[[0, 5], [1], [2, 3, 4]], [[4, 1, 0, 2, 3], [5]]]


def make_loss(mode: str, objective: str = "ppo", **hyper: Any) -> PolicyLoss:
    terms = [KLToReference(0.2), EntropyBonus(0.05)]
    return PolicyLoss(tiny_model(seed=0), objective, terms=terms, aggregation=mode, max_len=8, **hyper)


def sum_of_parts(loss: Any, data: TensorDictBase, split: list[list[int]]) -> dict[str, torch.Tensor]:
    parts = [gradients(total(loss(data[torch.tensor(rows)])), loss) for rows in split]
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert any(bool((x != 0).any()) for x in want.values())
    for name in want:
        assert_close(got[name], want[name], **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("layout", ["padded", "lazy"])
@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_of_a_counted_batch(mode: str, layout: str, split: list[list[int]]) -> None:
    loss, data = make_loss(mode), batch(layout=layout)
    whole = gradients(total(loss(data)), loss)
    loss.count(data)
    assert_same(gradients(total(loss(data)), loss), whole)
    assert_same(sum_of_parts(loss, data, split), whole)


@pytest.mark.parametrize("mode", MODES)
def test_without_counting_they_do_not_add_up(mode: str) -> None:
    loss, data = make_loss(mode), batch()
    whole = gradients(total(loss(data)), loss)
    parts = sum_of_parts(loss, data, SPLITS[0])
    assert not all(torch.allclose(parts[name] / 3, whole[name], rtol=1e-3) for name in whole)


def test_terms_have_denominators_of_their_own() -> None:
    """Two experts' sequences of 3 and 2 tokens; a micro-batch of experts alone is no special case."""
    data = batch()
    data["expert_mask"] = torch.tensor([False, True, False, False, True, False])
    loss = make_loss("token-mean", "mix", mu=0.25)
    whole = gradients(total(loss(data)), loss)
    loss.count(data)
    counts = {name.split("/")[0]: x.unique().item() for name, x in data["denominators"].exclude("batch").items()}
    assert counts == {"usual": 15, "expert": 5, "kl_to_ref": 20, "entropy": 20}
    assert_same(sum_of_parts(loss, data, [[1, 4], [0, 2], [3, 5]]), whole)


def test_rows_of_batches_counted_apart_are_refused() -> None:
    loss, data = make_loss("token-mean"), batch()
    first, second = loss.count(data[:2].clone()), loss.count(data[2:].clone())
    with pytest.raises(
        ValueError, match=r"rows of 2 batches that were counted apart: found denominators \[8.0, 12.0\]"
    ):
        loss(torch.cat([first, second]))
    twins = make_loss("seq-mean-token-sum")
    first, second = (twins.count(data[rows].exclude("denominators")) for rows in ([0, 1], [2, 3]))
    with pytest.raises(ValueError, match=r"rows of 2 batches .* denominators \[2.0\] of objective"):
        twins(torch.cat([first, second]))  # the counts are equal
    first, second = loss.count(data[:2].exclude("denominators")), loss.count(data[2:].exclude("denominators"))
    other = PolicyLoss(tiny_model(seed=0), terms=[EntropyBonus(0.1)])
    del first["denominators", "entropy/token-mean"]
    with pytest.raises(ValueError, match=r"was counted for kl_to_ref/token-mean, .* but not for entropy/token-mean"):
        other(first)


def test_counts_of_another_way_to_sum_are_refused() -> None:
    data = make_loss("token-mean").count(batch())
    with pytest.raises(ValueError, match="but not for objective/seq-mean-token-sum: count it with this loss"):
        make_loss("seq-mean-token-sum")(data)
    make_loss("seq-mean-token-sum").count(data)
    assert total(make_loss("seq-mean-token-sum")(data)).isfinite()


def test_counting_a_sample_does_not_write_into_the_buffer() -> None:
    buffer = ReplayBuffer(storage=LazyStackStorage(6), collate_fn=lambda x: x)
    buffer.extend(batch(layout="lazy"))
    sample = make_loss("token-mean").count(buffer[torch.arange(4)])
    assert "denominators" in sample
    assert "denominators" not in buffer[torch.arange(4)]


def test_a_critic_of_nothing_has_gradient_0() -> None:
    loss, data = ValueLoss(TokenCritic(tiny_model(seed=2).model)), batch()
    data["value_target"], data["loss_mask"] = torch.ones(6, 9), torch.zeros(6, dtype=torch.bool)
    with pytest.warns(UserWarning, match="the mask is empty"):
        out = loss(data)
    assert all((g == 0).all() for g in gradients(out["loss_critic"], loss).values())


@pytest.mark.parametrize("mode", MODES)
def test_the_critic_too(mode: str) -> None:
    critic = TokenCritic(tiny_model(seed=2).model)
    nn.init.normal_(critic.head.weight, std=0.1)
    loss = ValueLoss(critic, aggregation=mode, max_len=8)
    data = batch()
    data["value_target"] = torch.linspace(-1, 1, 54).reshape(6, 9)
    whole = gradients(total(loss(data)), loss)
    loss.count(data)
    assert_same(sum_of_parts(loss, data, SPLITS[0]), whole)


def share_of_rank(mode: str, average: bool) -> dict[str, torch.Tensor]:
    """On each of two ranks: the sum of both gradients, each rank's from two micro-batches."""
    loss, rank = make_loss(mode), torch.distributed.get_rank()
    share = batch()[torch.tensor([[0, 1, 2, 4], [3, 5]][rank])]
    loss.count(share, ranks_average=average)
    mine = sum_of_parts(loss, share, [[0], list(range(1, len(share)))])
    for name in sorted(mine):
        torch.distributed.all_reduce(mine[name])
    return {name: (x / (2 if average else 1)).numpy() for name, x in mine.items()}


@pytest.mark.parametrize(("mode", "average"), [("token-mean", True), ("seq-mean-token-mean", False)])
def test_two_ranks_have_the_gradient_of_the_whole(pool: RankPool, mode: str, average: bool) -> None:
    loss, data = make_loss(mode), batch()
    want = gradients(total(loss(data)), loss)
    for found in pool.run("test_micro_batches:share_of_rank", mode=mode, average=average):
        assert_same({name: torch.from_numpy(x) for name, x in found.items()}, want)


def test_all_ranks_without_a_group_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialised"):
        make_loss("token-mean").count(batch(), all_ranks=True)
