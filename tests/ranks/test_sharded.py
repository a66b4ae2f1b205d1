"""Training on several ranks gives the parameters of one process, whatever wraps the model and whatever scripts add.

Cases that are slow repeat one of the others with another wrap.
"""

import pytest
import torch

from distributed.cases import WRAPS
from waits import slowdown

TRAIN = "distributed.cases:train"
#: One of each kind.
KINDS = ("DDP(loss)", "loss(DDP)", "fsdp2", "fsdp2, own groups", "fsdp1, flat parameters")


def wraps(*quick, of=KINDS):
    """Parameters: these wraps, and the others as slow tests."""
    others = [wrap for wrap in of if wrap not in quick]
    return pytest.mark.parametrize("wrap", [*quick, *(pytest.param(wrap, marks=pytest.mark.slow) for wrap in others)])


@wraps(*WRAPS)
def test_three_steps_equal_one_process(pool, wrap):
    """Uneven tokens and numbers of packs; float64, so that nothing but the order of sums may differ."""
    assert max(pool.run(TRAIN, wrap=wrap)) < 1e-12


@wraps("fsdp2", of=tuple(WRAPS))
def test_four_ranks(pool, wrap):
    assert max(pool.run(TRAIN, ranks=4, wrap=wrap)) < 1e-12


@pytest.mark.parametrize(
    ("split", "wrap"),
    [
        pytest.param(split, wrap, marks=() if (split, wrap) in quick else pytest.mark.slow)
        for quick in [{("no rows", wrap) for wrap in (*KINDS[:3], KINDS[-1])} | {("no response", "fsdp2")}]
        for split in ("no rows", "no response")
        for wrap in WRAPS
    ],
)
def test_a_rank_without_data_takes_part(pool, wrap, split):
    """Its share of the gradient is 0, and the others do not wait for it."""
    assert max(pool.run(TRAIN, wrap=wrap, split=split)) < 1e-12


@pytest.mark.parametrize("checkpoint", ["transformers", "torch"])
def test_a_recurrent_model_with_checkpointed_layers(pool, checkpoint):
    """In float32; a rank has nothing to forward. Gradients were wrong, a rank hung, or raised an error that others did not."""
    assert max(pool.run("distributed.features:recurrent", checkpoint=checkpoint)) < 1e-3


@wraps("fsdp2", of=("loss(DDP)", "fsdp2", "fsdp1, flat parameters"))
def test_single_precision(pool, wrap):
    assert max(pool.run(TRAIN, wrap=wrap, dtype=torch.float32)) < 2e-6


@pytest.mark.parametrize(
    ("wrap", "first", "count"),
    [
        ("fsdp2", 25, 8),
        *(
            pytest.param(wrap, first, 25, marks=pytest.mark.slow)
            for wrap, first in (("fsdp2", 25), ("loss(DDP)", 0), ("fsdp2, own groups", 50), (KINDS[-1], 75))
        ),
    ],
)
def test_random_splits(pool, wrap, first, count):
    """Each row on a random rank: a hundred splits in all, some with an empty rank."""
    splits = [str(seed) for seed in range(first, first + count)]
    assert max(pool.run(TRAIN, wrap=wrap, split=splits, rate=0.01)) < 1e-12


@wraps("loss(DDP)", "fsdp2", of=tuple(WRAPS))
def test_accumulation(pool, wrap):
    """``no_sync``, or ``set_requires_gradient_sync``, for all micro-batches but the last; some are empty."""
    assert max(pool.run(TRAIN, ranks=4, wrap=wrap, micro_batches=3)) < 1e-12


@wraps("DDP(loss)", "fsdp2, own groups")
def test_tied_embeddings(pool, wrap):
    assert max(pool.run(TRAIN, wrap=wrap, tie_word_embeddings=True)) < 1e-12


@wraps("loss(DDP)", "fsdp2", "fsdp1, original parameters", of=(*KINDS[:-1], "fsdp2, root alone"))
def test_lora(pool, wrap):
    """The base is frozen: most parameters have no gradient."""
    pytest.importorskip("peft")
    assert max(pool.run(TRAIN, wrap=wrap, lora=True)) < 1e-12


@pytest.mark.parametrize("by_layer", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_mixed_precision(pool, by_layer):
    """Float32 weights that compute in bfloat16: as far from float32 as one process that computes in bfloat16."""
    for found, one in pool.run("distributed.features:mixed_precision", by_layer=by_layer):
        assert 0 < one < 0.2
        assert found < 1.25 * one


@pytest.mark.parametrize("checkpoint", ["transformers", pytest.param("torch", marks=pytest.mark.slow)])
@wraps("DDP(loss)", "fsdp2", of=(*KINDS[:3], KINDS[-1]))
def test_checkpointed_layers(pool, wrap, checkpoint):
    assert max(pool.run(TRAIN, wrap=wrap, checkpoint=checkpoint)) < 1e-12


@pytest.mark.parametrize(
    ("wrap", "options"),
    [
        ("loss(DDP)", {}),
        ("fsdp2", {"checkpoint": "transformers"}),
        ("fsdp2", {"split": "no rows"}),
        pytest.param("fsdp1, original parameters", {}, marks=pytest.mark.slow),
        pytest.param("DDP(loss)", {}, marks=pytest.mark.slow),
        pytest.param("fsdp1, flat parameters", {"checkpoint": "transformers"}, marks=pytest.mark.slow),
    ],
)
def test_recorded_routing(pool, wrap, options):
    """A mixture of experts replays its record on each rank; norms in float32 leave their rounding."""
    for found, unforced in pool.run("distributed.features:replayed_routing", wrap=wrap, **options):
        assert found < 1e-5
        assert unforced > 1e-2


@wraps("fsdp2", of=KINDS[:3])
def test_exact_kl_with_a_sharded_reference(pool, wrap):
    assert max(pool.run(TRAIN, wrap=wrap, exact=True)) < 1e-12


@wraps("loss(DDP)", "fsdp2", "fsdp1, original parameters", of=KINDS[:-1])
def test_clipped_gradient(pool, wrap):
    """The norm covers the whole gradient; FSDP1 computes it in float32 and takes no float64."""
    dtype, close = (torch.float32, 2e-6) if "fsdp1" in wrap else (torch.float64, 1e-12)
    assert max(pool.run(TRAIN, wrap=wrap, clip=0.01, dtype=dtype)) < close


@pytest.mark.smoke
def test_a_model_scored_before_it_is_sharded(pool):
    assert max(pool.run("distributed.features:scored_before")) < 1e-12


@pytest.mark.parametrize(
    ("wrap", "estimator", "split"),
    [("loss(DDP)", "k1", "no rows"), ("fsdp2", "exact", "no rows"), ("fsdp2", "k1", "uneven")],
)
def test_kl_in_the_reward(pool, wrap, estimator, split):
    """``RetrieveKL`` before and after three steps of a wrapped policy, with a sharded reference; also without a row."""
    assert max(pool.run("distributed.features:retrieve", wrap=wrap, estimator=estimator, split=split)) < 1e-12


@pytest.mark.parametrize(("what", "steps"), [("loss", 1), ("model", 2)])
def test_accelerate(pool, what, steps):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    assert max(pool.run("distributed.features:accelerate", what=what, steps=steps)) < 1e-12


@wraps("loss(DDP)", "fsdp2", "fsdp1, original parameters", of=KINDS[1:4])
def test_state_dict(pool, wrap):
    """The keys and values of the model in one process, which can load it."""
    assert max(pool.run("distributed.features:state", wrap=wrap)) == 0


@pytest.mark.parametrize(
    ("wrap", "kind"),  # FSDP1 holds the whole weights after a forward: the case cannot mend its NaN
    [
        ("DDP(loss)", "token"),
        ("fsdp2", "token"),
        ("fsdp2", "weight"),
        (KINDS[-1], "token"),
        *(pytest.param(wrap, kind, marks=pytest.mark.slow) for wrap in KINDS[1:4:2] for kind in ("token", "weight")),
        pytest.param("DDP(loss)", "weight", marks=pytest.mark.slow),
    ],
)
def test_an_error_on_one_rank_is_one_on_all(pool, wrap, kind):
    """Without waiting for the others' time-out; and the next steps are right."""
    found = pool.run("distributed.features:refuse", wrap=wrap, kind=kind)
    assert max(seconds for seconds, _, _ in found) < 30 * slowdown()
    named = {"token": "token id 10000", "weight": "log-prob is nan"}[kind]
    texts = [text for _, text, _ in found]
    assert named in texts[1]
    assert named in texts[0] or texts[0].startswith("RankError: another rank refused")
    assert max(difference for _, _, difference in found) < 1e-12


#: Where the memory ends.
PLACES = ["layer", *(pytest.param(place, marks=pytest.mark.slow) for place in ("embedding", "norm", "head"))]


@pytest.mark.parametrize("where", PLACES)
@wraps("DDP(loss)", "fsdp2", "fsdp1, flat parameters")
def test_out_of_memory_on_one_rank(pool, wrap, where):
    """All ranks halve their packs, except under DDP of a loss, whose forwards are not in step."""
    found = pool.run("distributed.features:out_of_memory", wrap=wrap, where=where, room=16)
    assert [budget for budget, _ in found] == ([32, 16] if wrap == "DDP(loss)" else [16, 16])
    assert max(difference for _, difference in found) < 1e-12
