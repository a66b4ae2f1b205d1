"""Minibatches have their own means, micro-batches add up to their batch, and batches mix two replay buffers."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from test_prepare import TASK, uniform
from torch import Tensor
from torchrl.data import LazyStackStorage, ListStorage, ReplayBuffer

from torchrl_llm_kl.algorithms import AlgorithmParts, make_algorithm, mix_buffers
from toy_tasks import TabularCritic


def uneven(rows: int = 16) -> TensorDict:
    """Every third answer has one token, the others two: a mean over tokens differs from one over rows."""
    answers = torch.tensor([TASK.answers.index(x) for x in ((3,), (1, 0), (2, 3))])
    data = TASK.batch(torch.arange(rows) // 4 % 2, answers[torch.arange(rows) % 3])
    data["query"] = torch.arange(rows) // 4
    data["next", "reward"] = torch.arange(rows).float().cos().unsqueeze(-1)
    data["number"] = torch.arange(rows)
    # For mix_chord: a micro-batch without experts, and one of experts only.
    data["expert_mask"] = torch.arange(rows) >= 12
    return data


def sft_gradient(parts: AlgorithmParts, data: TensorDictBase) -> Tensor:
    """The gradient of the mean negative log-likelihood over response tokens, by hand: ``p - onehot`` at each token."""
    table = parts.loss.actor_network.table.detach()
    full, real = data["tokens", "full"], data["masks", "all_attention_mask"]
    gradient, tokens = torch.zeros_like(table), 0
    for row, keep in zip(full.tolist(), real.tolist(), strict=True):
        at = -1
        for before, token, is_real in zip(row[:-1], row[1:], keep[1:], strict=True):
            at = (at + 1) * TASK.vocab + before
            if is_real:
                gradient[at] += table[at].softmax(-1)
                gradient[at, token] -= 1
                tokens += 1
    return gradient / tokens


def gradient(parts: AlgorithmParts, *batches: TensorDictBase) -> Tensor:
    """The sum of the gradients of the losses of some batches, policy and critic together."""
    parameters = [p for loss in parts.losses for p in loss.parameters()]
    total = sum(loss(batch).total_loss for batch in batches for loss in parts.losses)
    found = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([each.flatten() for each in found])


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Compares gradients that were summed in different orders."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def algorithm(name: str) -> AlgorithmParts:
    given: dict[str, Any] = {"ppo": {"critic": TabularCritic(TASK)}, "grpo": {"group_key": "query"}}.get(name, {})
    given |= {"objective_args": {"mu": 0.35}} if name == "mix_chord" else {}
    return make_algorithm(name, TASK.policy(), reference=None if name == "sft" else TASK.policy(), **given)


def test_shares_of_ranks_have_about_equally_many_tokens() -> None:
    """Sixteen rows with 42 tokens in all. Rows keep their order, and a share may be empty."""
    parts = algorithm("sft")
    batch = parts.prepare(uneven())
    for number in (1, 2, 3, 20):
        shares = parts.shares(batch, number)
        rows = [share["number"].tolist() for share in shares]
        assert sorted(row for each in rows for row in each) == list(range(16))
        assert all(each == sorted(each) for each in rows)
        tokens = [int(share["masks", "all_attention_mask"].sum()) for share in shares]
        assert number == 20 or max(tokens) - min(tokens) <= 3, "the tokens of one row"
    assert [len(share) for share in parts.shares(batch[:1], 2)] == [1, 0]
    pairs = make_algorithm("dpo", TASK.policy(), reference=TASK.policy())
    for share in pairs.shares(uneven(), 3):
        assert (share["number"][::2] + 1 == share["number"][1::2]).all()


def test_a_minibatch_has_the_gradient_of_its_own_mean() -> None:
    parts = algorithm("sft")
    batch = parts.prepare(uneven())
    for rows in (slice(4), slice(5, 12), slice(None)):
        torch.testing.assert_close(gradient(parts, batch[rows]), sft_gradient(parts, uneven()[rows]).flatten())
    counted = parts.prepare(uneven(), count=True)
    share = batch["masks", "all_attention_mask"][:4, 1:].sum() / batch["masks", "all_attention_mask"][:, 1:].sum()
    assert 0.2 < float(share) < 0.3
    torch.testing.assert_close(gradient(parts, counted[:4]), share * gradient(parts, batch[:4]))


def test_counts_are_optional_and_draw_no_random_numbers() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    for name, keys in (("sft", {"denominators"}), ("ppo", {"denominators", "value_denominators"})):
        parts = algorithm(name)
        assert not keys & set(parts.prepare(uneven()).keys())
        counted = parts.prepare(uneven(), count=True)
        assert keys <= set(counted.keys())
        assert not keys & set(parts.prepare(counted).keys())  # those of an earlier batch are gone
    assert torch.equal(torch.rand(3), expected)


def test_counts_of_replayed_rows_are_not_reused() -> None:
    parts = algorithm("sft")
    buffer = ReplayBuffer(storage=LazyStackStorage(32), collate_fn=lambda x: x)
    buffer.extend(parts.prepare(uneven(), count=True))
    buffer.extend(parts.prepare(uneven(), count=True))  # another batch with equal counts
    mixed = buffer[torch.tensor([0, 20, 9])]
    with pytest.raises(ValueError, match="rows of 2 batches that were counted apart"):
        parts.loss(mixed)
    own = sft_gradient(parts, uneven()[torch.tensor([0, 4, 9])]).flatten()
    torch.testing.assert_close(gradient(parts, *parts.minibatches(mixed, 1)), own)
    torch.testing.assert_close(gradient(parts, *parts.micro_batches(mixed, 2)), own)
    fresh = parts.prepare(lazy_stack([*mixed.unbind(0), *uneven()[:1].unbind(0)]))  # not every row was counted
    torch.testing.assert_close(gradient(parts, fresh[:3]), own)
    assert "denominators" in buffer[0]  # the storage is left alone
    locked = buffer[torch.tensor([1, 2])].contiguous().lock_()
    torch.testing.assert_close(gradient(parts, parts.prepare(locked)), sft_gradient(parts, uneven()[1:3]).flatten())


@pytest.mark.parametrize("name", ["sft", "grpo", "ppo", "mix_chord"])
def test_micro_batches_add_up(name: str) -> None:
    """To a batch, and to a minibatch of a batch that was counted."""
    parts = algorithm(name)
    batch = parts.prepare(uneven())
    assert gradient(parts, batch).norm() > 0.05
    for settings in ({"number": 3}, {"size": 5}, {"number": 1}, {"size": 1}):
        pieces = list(parts.micro_batches(batch, **settings))
        assert torch.equal(torch.cat([piece["number"] for piece in pieces]), torch.arange(16))
        assert_same(gradient(parts, *pieces), gradient(parts, batch))
    assert not {"denominators", "value_denominators"} & set(batch.keys())
    batch = parts.prepare(uneven(), count=True)
    for minibatch in parts.minibatches(batch, 2):
        pieces = list(parts.micro_batches(minibatch, size=3))
        assert [len(piece) for piece in pieces] == [3, 3, 2]
        assert_same(gradient(parts, *pieces), gradient(parts, minibatch))


def test_minibatches_are_every_row_once_in_random_order() -> None:
    parts = algorithm("sft")
    batch = parts.prepare(uneven(), count=True)
    orders = []
    for _ in range(2):
        pieces = list(parts.minibatches(batch, 3))
        assert [len(piece) for piece in pieces] == [6, 5, 5]
        for piece in pieces:
            expected = sft_gradient(parts, uneven()[piece["number"]]).flatten()
            torch.testing.assert_close(gradient(parts, piece), expected)
        orders.append(torch.cat([piece["number"] for piece in pieces]))
        assert torch.equal(orders[-1].sort().values, torch.arange(16))
    assert not torch.equal(*orders)
    seeded = [torch.Generator().manual_seed(3) for _ in range(2)]
    a, b = (torch.cat([x["number"] for x in parts.minibatches(batch, size=4, generator=g)]) for g in seeded)
    assert torch.equal(a, b)
    assert torch.equal(a, torch.randperm(16, generator=torch.Generator().manual_seed(3)))
    assert "denominators" in batch.keys()  # noqa: SIM118


def test_the_answers_of_a_pair_stay_together() -> None:
    parts, pairs, rows = algorithm("dpo"), uneven(), torch.arange(16)
    pairs["pair_id"], pairs["chosen"] = torch.minimum(rows, 15 - rows), rows < 8
    for data, of in ((uneven(), rows // 2), (pairs, pairs["pair_id"])):
        batch = parts.prepare(data)
        with torch.no_grad():
            parts.loss.actor_network.table.mul_(1.5)
        for split in (parts.minibatches, parts.micro_batches):
            pieces = list(split(batch, size=5))
            assert [len(piece) for piece in pieces] == [4, 4, 4, 4]
            for piece in pieces:
                assert (of[piece["number"]].bincount() % 2 == 0).all()
                assert piece["number"].reshape(2, 2).diff().abs().min() > 0
        assert_same(gradient(parts, *pieces), gradient(parts, batch))
        assert gradient(parts, batch).norm() > 0.01
        drawn = {tuple(piece["number"].tolist()) for _ in range(3) for piece in parts.minibatches(batch, 4)}
        assert len(drawn) > 4  # shuffled
    shuffled = torch.cat([piece["number"] for piece in parts.minibatches(parts.prepare(uneven()), 8)])
    assert torch.equal(shuffled[1::2], shuffled[::2] + 1)  # chosen before rejected


def test_the_answers_of_a_triple_stay_together() -> None:
    parts = make_algorithm("tpo", TASK.policy(), objective_args={"beta": 0.5})
    data = TASK.sample(TASK.policy(), 24, torch.Generator().manual_seed(0))
    data["number"] = torch.arange(24)
    batch = parts.prepare(data)
    for split in (parts.minibatches, parts.micro_batches):
        pieces = list(split(batch, size=7))
        assert [len(piece) for piece in pieces] == [6, 6, 6, 6]
        for piece in pieces:
            assert (piece["number"].view(-1, 3) // 3).diff().abs().max() == 0
    assert_same(gradient(parts, *parts.micro_batches(batch, 3)), gradient(parts, batch))
    with pytest.raises(ValueError, match="8 groups of rows cannot be split into 9 parts"):
        list(parts.minibatches(batch, 9))


@pytest.mark.parametrize("layout", ["lazy", "nested", "stacks inside", "two dimensions", "lazy, two dimensions"])
def test_layouts(layout: str) -> None:
    parts = algorithm("sft")
    plain = uneven()
    data: Any = uneven()
    lengths = data["masks", "all_attention_mask"].sum(-1).tolist()
    if layout == "nested":
        rows = [row[:n] for row, n in zip(data["tokens", "full"], lengths, strict=True)]
        tokens = {"full": torch.nested.as_nested_tensor(rows), "prompt": plain["tokens", "prompt"]}
        data = TensorDict({"number": data["number"], "tokens": tokens}, batch_size=[16])
    if layout == "stacks inside":  # a policy's output before an env stacks it
        each = zip(data["tokens"].unbind(0), lengths, strict=True)
        data["tokens"] = lazy_stack([TensorDict(full=row["full"][:n], prompt=row["prompt"]) for row, n in each])
        data = data.exclude("masks", "expert_mask", "next")
    if "lazy" in layout:
        data = lazy_stack(list(data.unbind(0)))
    if "two" in layout:
        data = data.reshape(4, 4)
    batch = parts.prepare(data)
    torch.testing.assert_close(gradient(parts, *parts.micro_batches(batch, 3)), sft_gradient(parts, plain).flatten())
    for piece in parts.minibatches(batch, 5):
        numbers = torch.stack([row["number"] for row in piece.unbind(0)])
        torch.testing.assert_close(gradient(parts, piece), sft_gradient(parts, plain[numbers]).flatten())


def test_impossible_splits() -> None:
    parts, dpo = algorithm("sft"), algorithm("dpo")
    batch = parts.prepare(uneven())
    for settings, error, message in (
        ({}, TypeError, "number of parts or their size, got number=None and size=None"),
        ({"number": 2, "size": 2}, TypeError, "got number=2 and size=2"),
        ({"number": 0}, ValueError, "number must be at least 1, got 0"),
        ({"size": 0}, ValueError, "size must be at least 1, got 0"),
        ({"number": 17}, ValueError, "16 rows cannot be split into 17 parts"),
    ):
        for split in (parts.minibatches, parts.micro_batches):
            with pytest.raises(error, match=message):  # at the call, not at the first part
                split(batch, **settings)
    with pytest.raises(ValueError, match="size=1 cannot hold a pair of 2 rows"):
        dpo.minibatches(dpo.prepare(uneven()), size=1)
    with pytest.raises(ValueError, match="8 pairs cannot be split into 9 parts"):
        dpo.micro_batches(dpo.prepare(uneven()), 9)


def test_answers_of_equal_rank_stay_together() -> None:
    parts = make_algorithm("kto", TASK.policy(), reference=uniform(), objective="aot_unpaired")
    batch = TASK.sample(TASK.policy(), 12, torch.Generator().manual_seed(0), 2)
    batch["chosen"] = torch.arange(12) < 6
    batch = parts.prepare(batch)
    pieces = list(parts.micro_batches(batch, 3))
    assert all((piece["match_id"].unique(return_counts=True)[1] == 2).all() for piece in pieces)
    assert_same(gradient(parts, *pieces), gradient(parts, batch))


def test_answers_of_one_group_stay_together() -> None:
    parts = make_algorithm("grpo", TASK.policy(), kl_loss="none", objective="real", advantage=None)
    batch, rng = TASK.sample(TASK.policy(), 12, torch.Generator().manual_seed(0), 3), torch.Generator().manual_seed(1)
    batch["chosen"], batch["match_id"] = torch.arange(12) % 3 == 1, 50 - torch.arange(12) % 4
    batch = parts.prepare(batch)
    with torch.no_grad():
        parts.loss.actor_network.table.add_(torch.randn(TASK.policy().table.shape, generator=rng))
    pieces = list(parts.micro_batches(batch, 3))
    assert all((piece["match_id"].unique(return_counts=True)[1] == 3).all() for piece in pieces)
    assert_same(gradient(parts, *pieces), gradient(parts, batch))


def prepared(rows: int = 32) -> TensorDict:
    data = TASK.sample(TASK.policy(), rows, torch.Generator().manual_seed(0), 4)
    data["expert_mask"] = torch.zeros(rows, dtype=torch.bool)
    parts = make_algorithm("mix", TASK.policy(), reference=TASK.policy(), group_key="query")
    return parts.prepare(data)


def shown(rows: int = 20) -> list[TensorDict]:
    """Rows of several lengths that hold only tokens."""
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
def test_every_batch_has_the_share_and_stored_rows_stay(storage: type) -> None:
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
        assert "masks" not in expert  # the experts' own entries mark the response
        known = {key for key in usual.keys(True, True) if key[0] != "masks"}
        assert "denominators" not in known  # those counted another batch
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
        message = f"{batch_size} rows cannot hold exactly {ratio:g} of experts: use a ratio n / {batch_size}"
        with pytest.raises(ValueError, match=message):
            mix_buffers(*both, batch_size=batch_size, expert_data_ratio=ratio)
