"""DeepSpeed's ZeRO gives the parameters of one process. It computes in float32, whatever the model's dtype."""

import pytest

pytest.importorskip("deepspeed", reason="deepspeed is not installed")
CASES = "distributed.zero"


@pytest.mark.parametrize(
    ("what", "stage", "ranks", "micro_batches"),
    [("model", 1, 2, 1), ("model", 2, 4, 3), ("loss", 2, 2, 1), ("model", 3, 2, 1), ("model", 3, 4, 3)],
)
def test_three_steps_equal_one_process(pool, what, stage, ranks, micro_batches):
    """Uneven tokens and numbers of packs; with accumulation some micro-batches are empty."""
    found = pool.run(f"{CASES}:train", ranks=ranks, what=what, stage=stage, micro_batches=micro_batches)
    assert max(found) < 2e-6


@pytest.mark.parametrize(
    ("what", "stage", "split"), [("model", 2, "no rows"), ("loss", 2, "no response"), ("model", 3, "no rows")]
)
def test_a_rank_without_data_takes_part(pool, what, stage, split):
    assert max(pool.run(f"{CASES}:train", ranks=4, what=what, stage=stage, split=split)) < 2e-6


@pytest.mark.parametrize("stage", [2, 3])
def test_kl_in_the_reward(pool, stage):
    """Before and after three steps; with ZeRO-3 of policy and reference, and the cache of an env."""
    assert max(map(max, pool.run(f"{CASES}:retrieve", stage=stage))) < 1e-4  # sums over a response of float32 rounding


@pytest.mark.parametrize("case", ["token, ZeRO-2", "token, ZeRO-3"])
def test_bad_data_on_one_rank_is_an_error_on_all(pool, case):
    """And the next steps are right."""
    first, second = pool.run(f"{CASES}:refuse", case=case)
    assert "token id 10000" in second
    assert first.startswith("RankError: another rank refused")


@pytest.mark.parametrize(
    ("case", "advice"), [("loss", "PolicyLoss(deepspeed.initialize(model=model, ...)[0])"), ("updater", "FSDP2")]
)
def test_what_zero3_cannot_do_is_refused_on_all_ranks(pool, case, advice):
    for message in pool.run(f"{CASES}:refuse", case=case):
        assert message.startswith("ValueError")
        assert advice in message
