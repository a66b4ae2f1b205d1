"""Batches of rollouts and of experts' answers from two replay buffers."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, ListStorage, ReplayBuffer

from torchrl_llm_kl.algorithms import make_algorithm, mix_buffers
from toy_tasks import chain

TASK = chain()


def prepared(rows: int = 32) -> TensorDict:
    data = TASK.sample(TASK.policy(), rows, torch.Generator().manual_seed(0), 4)
    data["expert_mask"] = torch.zeros(rows, dtype=torch.bool)
    parts = make_algorithm("mix", TASK.policy(), reference=TASK.policy(), group_key="query")
    return parts.prepare(data)


def shown(rows: int = 20) -> list[TensorDict]:
    """Of their own lengths, tokens alone."""
    prompts = torch.arange(rows) % 2
    data = TASK.batch(prompts, torch.arange(rows) % 13)
    return [
        TensorDict(tokens=TensorDict(full=row["tokens", "full"][row["masks", "all_attention_mask"]], prompt=prompt))
        for row, prompt in zip(data.unbind(0), data["tokens", "prompt"], strict=True)
    ]


def buffers(storage: type = ListStorage) -> tuple[ReplayBuffer, ReplayBuffer]:
    collate = {"collate_fn": lazy_stack} if storage is ListStorage else {}  # rows of several lengths
    rollouts, experts = (ReplayBuffer(storage=storage(64), **collate) for _ in range(2))
    rollouts.extend(prepared())
    experts.extend(lazy_stack(shown()))
    return rollouts, experts


SHARES = {(0.5, 8): (2, 4), (0.25, 16): (4, 4), (0.75, 8): (4, 2), (0.1, 20): (10, 2), (3 / 7, 14): (7, 2)}


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
def test_every_batch_has_the_share_and_stored_rows_are_not_changed(storage: type) -> None:
    rollouts, experts = buffers(storage)
    for (ratio, batch_size), shape in SHARES.items():
        mixture = mix_buffers(rollouts, experts, batch_size=batch_size, expert_data_ratio=ratio)
        for _ in range(2):
            batch = mixture.sample()
            assert batch.batch_size == shape
            flags = torch.stack([row["expert_mask"] for row in batch.reshape(-1).unbind(0)])
            assert int(flags.sum()) == round(ratio * batch_size)
            assert torch.equal(flags.int(), flags.int().sort().values)  # rollouts first
    assert all(set(row.keys()) == {"tokens"} for row in experts[:].unbind(0))


def test_rows_of_experts_are_completed_with_zeros() -> None:
    rows = mix_buffers(*buffers(), batch_size=8, expert_data_ratio=0.5).sample().reshape(-1).unbind(0)
    for usual, expert in zip(rows[:4], rows[4:], strict=True):
        length = len(expert["tokens", "full"])
        for key in (("next", "log_probs", "full"), ("next", "ref_log_probs", "full")):
            assert torch.equal(expert[key], torch.zeros(length))
            assert usual[key].any()
        assert not expert["advantage"].any()
        assert not expert["next", "reward"].any()
        assert expert["advantage"].shape == usual["advantage"].shape
        assert "masks" not in expert  # what tells the response is the experts' own
        known = {key for key in usual.keys(True, True) if key[0] != "masks"}
        assert "denominators" not in known  # of another batch
        assert set(expert.keys(True, True)) == known


@pytest.mark.parametrize(("of_experts", "per_token"), [(False, True), (True, False)])
def test_a_loss_mask_that_some_rows_have_is_true_for_the_others(of_experts: bool, per_token: bool) -> None:
    rollouts, experts = (ReplayBuffer(storage=ListStorage(64), collate_fn=lazy_stack) for _ in range(2))
    usual, shots = list(prepared().unbind(0)), shown()
    for row in shots if of_experts else usual:
        row["loss_mask"] = torch.ones(len(row["tokens", "full"]) if per_token else 1, dtype=torch.bool)
    rollouts.extend(usual)
    experts.extend(shots)
    batch = mix_buffers(rollouts, experts, batch_size=8).sample()
    for row in batch.reshape(-1).unbind(0):
        assert row["loss_mask"].shape == ((len(row["tokens", "full"]),) if per_token else (1,))
        assert row["loss_mask"].all()
    loss = make_algorithm("mix", TASK.policy(), reference=TASK.policy(), group_key="query").loss
    assert loss(batch)["num_sequences"] == 8


def test_impossible_proportions() -> None:
    both = buffers()
    for ratio, batch_size in ((0.5, 7), (0.3, 8), (0.001, 8), (0.0, 8), (1.0, 8)):
        message = f"a batch of {batch_size} cannot hold exactly {ratio} of experts: use a ratio n / {batch_size}"
        if ratio in (0, 1):
            message = f"expert_data_ratio must lie between 0 and 1, got {ratio}"
        with pytest.raises(ValueError, match=message):
            mix_buffers(*both, batch_size=batch_size, expert_data_ratio=ratio)
