"""A run that is saved on some ranks and continued on others ends like one process that never stopped."""

import shutil
import sys

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("typer")

from distributed import saving

STEPS = 3
# float64 sums in another order on another number of ranks; each of 12 updates adds to it.
TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """A short run from a model that is warmed up once for all tests."""
    import tensordict

    before = tensordict.list_to_stack()
    sys.path.insert(0, saving.TUTORIALS)
    from countdown.model import build_model, build_tokenizer, warm_up
    from countdown.task import all_problems, split_problems

    problems = all_problems()
    tokenizer = build_tokenizer(problems)
    torch.manual_seed(3)
    model = build_model(tokenizer)
    for _ in warm_up(model, tokenizer, split_problems(problems)[0], steps=70, seed=0, batch_size=24):
        pass
    folder = str(tmp_path_factory.mktemp("warm"))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sizes = {"num_prompts": 5, "group_size": 4, "steps": STEPS}  # 5 problems: uneven shares
    yield {"model": folder, "lr": 1e-3, "kl_target": 0.05, "seed": 7, **sizes}
    tensordict.set_list_to_stack(before).set()


@pytest.fixture(scope="module")
def alone(settings, tmp_path_factory):
    """A run of one process without torch.distributed, from the first step to the last."""
    return saving.recipe(settings, str(tmp_path_factory.mktemp("alone")))


def check(result, alone):
    assert len(result["rows"]) == len(alone["rows"])
    for row, want in zip(result["rows"], alone["rows"], strict=True):
        assert row.keys() == want.keys()
        for key, value in want.items():
            whole = key in ("step", "success", "answer_tokens", "tokens")  # others are float32 numbers
            assert row[key] == (value if whole else pytest.approx(value, abs=1e-7)), (row["step"], key)
    assert result["weights"].keys() == alone["weights"].keys()
    for key, value in alone["weights"].items():
        assert_close(result["weights"][key], value, atol=TOLERANCE, rtol=0, msg=lambda m, key=key: f"{key}: {m}")
    for key, value in alone["parts"].items():
        assert_close(result["parts"][key], value, atol=1e-6, rtol=0)
    assert result["accuracy"] == alone["accuracy"]


def test_the_run_of_one_process_changes_its_weights_and_samples(alone):
    """Equal figures are only meaningful if the run changes them."""
    rows = alone["rows"]
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert rows[0]["kl"] == 0
    assert all(abs(row["kl"]) > 1e-3 for row in rows[1:])
    assert len({row["answer_tokens"] for row in rows}) > 1
    assert 0 < rows[0]["reward"] < 1
    # The first step is held at the start; then the KL is far above its target, and the coefficient grows by half.
    assert [row["coefficient"] for row in rows] == pytest.approx([0.2, 0.2, 0.3], rel=1e-5)
    moved = alone["weights"]["policy.lm_head.weight"] - alone["weights"]["reference.lm_head.weight"]
    assert moved.abs().max() > 1e-3


def test_saved_on_two_ranks_and_continued_on_one_and_on_three(pool, settings, alone, tmp_path):
    out = tmp_path / "two"
    for result in pool.run("distributed.saving:recipe", settings=settings, out=str(out), until=2):
        assert len(result["rows"]) == 2
        assert 0.4 < result["share"] < 0.6, "sharded"
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-2"]
    shutil.copytree(out, tmp_path / "three")
    check(saving.recipe(settings, str(out), resume=True), alone)
    three = {"settings": settings, "out": str(tmp_path / "three"), "resume": True}
    for result in pool.run("distributed.saving:recipe", ranks=3, **three):
        check(result, alone)
        assert 0.3 < result["share"] < 0.37


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_steps_on_any_number_of_ranks(pool, settings, alone, tmp_path, ranks):
    for result in pool.run("distributed.saving:recipe", ranks=ranks, settings=settings, out=str(tmp_path)):
        check(result, alone)


# GiGPO is the one that must tell trajectories apart.
@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(name, marks=() if name == "gigpo" else pytest.mark.slow) for name in saving.other_algorithms()],
)
def test_other_algorithms(pool, settings, tmp_path, algorithm):
    """With a sharded critic, with moments, and without a reference."""
    from torchrl_llm_kl.algorithms import get_algorithm

    own = {**settings, "algorithm": algorithm, "steps": 2}
    if not get_algorithm(algorithm).use_reference:
        own["kl_target"] = None
    alone = saving.recipe(own, str(tmp_path / "alone"))
    out = str(tmp_path / "two")
    pool.run("distributed.saving:recipe", settings=own, out=out, until=1)
    for result in pool.run("distributed.saving:recipe", settings=own, out=out, resume=True):
        check(result, alone)
    assert ("critic.head.weight" in alone["weights"]) == (algorithm == "ppo")


def test_a_reference_that_follows_is_continued_on_other_ranks(pool, tmp_path):
    """It continues bit for bit. The rounding remainder of the average is saved, sharded like the weights."""
    whole = saving.follow(str(tmp_path / "whole"), first=0, last=6)
    pool.run("distributed.saving:follow", folder=str(tmp_path), first=0, last=3)
    rest = {"folder": str(tmp_path), "first": 3, "last": 6}
    others = [each for ranks in (3, 2) for each in pool.run("distributed.saving:follow", ranks=ranks, **rest)]
    for found in (*others, saving.follow(**rest)):
        assert all(torch.equal(found[name], value) for name, value in whole.items())
