"""What training scripts add to plain training on ranks; each equal to one process, or refused on all ranks."""

from __future__ import annotations

import pytest
import torch

TRAIN = "distributed.cases:train"
#: One of each kind.
KINDS = ["DDP(loss)", "loss(DDP)", "fsdp2", "fsdp2, own groups", "fsdp1, flat parameters"]
FSDP1 = ["fsdp1, flat parameters", "fsdp1, original parameters"]
_SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "wrap",
    [*KINDS[1:4], *(pytest.param(wrap, marks=_SLOW) for wrap in ("DDP(loss)", "fsdp2(loss)", *FSDP1))],
)
def test_accumulation(pool, wrap):
    """``no_sync``, or ``set_requires_gradient_sync``, for all micro-batches but the last; some are empty."""
    assert max(pool.run(TRAIN, ranks=4, wrap=wrap, micro_batches=3)) < 1e-12


@pytest.mark.parametrize("wrap", KINDS)
def test_tied_embeddings(pool, wrap):
    assert max(pool.run(TRAIN, wrap=wrap, tie_word_embeddings=True)) < 1e-12


@pytest.mark.parametrize("wrap", [*KINDS[:-1], "fsdp2, root alone", "fsdp1, original parameters"])
def test_lora(pool, wrap):
    """The base is frozen: most parameters have no gradient."""
    pytest.importorskip("peft")
    assert max(pool.run(TRAIN, wrap=wrap, lora=True)) < 1e-12


@pytest.mark.parametrize("by_layer", [True, False])
def test_mixed_precision(pool, by_layer):
    """Float32 weights that compute in bfloat16: as far from float32 as one process that computes in bfloat16."""
    for found, one in pool.run("distributed.features:mixed_precision", by_layer=by_layer):
        assert 0 < one < 0.2
        assert found < 1.25 * one


@pytest.mark.parametrize("checkpoint", ["transformers", pytest.param("torch", marks=_SLOW)])
@pytest.mark.parametrize("wrap", [*KINDS[:3], "fsdp1, flat parameters"])
def test_checkpointed_layers(pool, wrap, checkpoint):
    assert max(pool.run(TRAIN, wrap=wrap, checkpoint=checkpoint)) < 1e-12


@pytest.mark.parametrize(
    ("wrap", "options"),
    [
        ("loss(DDP)", {}),
        ("fsdp2", {"checkpoint": "transformers"}),
        ("fsdp2", {"split": "no rows"}),
        ("fsdp1, original parameters", {}),
        pytest.param("DDP(loss)", {}, marks=_SLOW),
        pytest.param("fsdp1, flat parameters", {"checkpoint": "transformers"}, marks=_SLOW),
    ],
)
def test_recorded_routing(pool, wrap, options):
    """A mixture of experts replays its record on each rank; norms in float32 leave their rounding."""
    for found, unforced in pool.run("distributed.features:replayed_routing", wrap=wrap, **options):
        assert found < 1e-5
        assert unforced > 1e-2


@pytest.mark.parametrize("wrap", KINDS[:3])
def test_exact_kl_with_a_sharded_reference(pool, wrap):
    assert max(pool.run(TRAIN, wrap=wrap, exact=True)) < 1e-12


@pytest.mark.parametrize("wrap", [*KINDS[:-1], "fsdp1, original parameters"])
def test_clipped_gradient(pool, wrap):
    """The norm is that of the whole gradient; FSDP1 computes it in float32 and takes no float64."""
    dtype, close = (torch.float32, 2e-6) if "fsdp1" in wrap else (torch.float64, 1e-12)
    assert max(pool.run(TRAIN, wrap=wrap, clip=0.01, dtype=dtype)) < close


@pytest.mark.parametrize(
    ("wrap", "first"),
    [
        ("fsdp2", 25),
        *(pytest.param(*case, marks=_SLOW) for case in (("loss(DDP)", 0), ("fsdp2, own groups", 50), (KINDS[-1], 75))),
    ],
)
def test_random_splits(pool, wrap, first):
    """Each row on a random rank: a hundred splits in all, some with an empty rank."""
    splits = [str(seed) for seed in range(first, first + 25)]
    assert max(pool.run(TRAIN, wrap=wrap, split=splits, rate=0.01)) < 1e-12


def test_a_model_scored_before_it_is_sharded(pool):
    assert max(pool.run("distributed.features:scored_before")) < 1e-12


@pytest.mark.parametrize("split", ["uneven", "no rows"])
@pytest.mark.parametrize("estimator", ["k1", "exact"])
@pytest.mark.parametrize("wrap", ["loss(DDP)", "fsdp2"])
def test_kl_in_the_reward(pool, wrap, estimator, split):
    """``RetrieveKL`` before and after three steps of a wrapped policy, with a sharded reference; also without a row."""
    assert max(pool.run("distributed.features:retrieve", wrap=wrap, estimator=estimator, split=split)) < 1e-12


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("what", ["loss", "model"])
def test_accelerate(pool, what, steps):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    assert max(pool.run("distributed.features:accelerate", what=what, steps=steps)) < 1e-12


@pytest.mark.parametrize("wrap", ["loss(DDP)", "fsdp2", "fsdp2, own groups", "fsdp1, original parameters"])
def test_state_dict(pool, wrap):
    """The keys and values of the model in one process, which can load it."""
    assert max(pool.run("distributed.features:state", wrap=wrap)) == 0


@pytest.mark.parametrize(
    ("wrap", "kind"),  # FSDP1 holds the whole weights after a forward: the case cannot mend its NaN
    [(wrap, kind) for wrap in KINDS for kind in ("token", "weight") if (wrap, kind) != (KINDS[-1], "weight")],
)
def test_an_error_on_one_rank_is_one_on_all(pool, wrap, kind):
    """Within seconds; and the next steps are right."""
    found = pool.run("distributed.features:refuse", wrap=wrap, kind=kind)
    assert max(seconds for seconds, _, _ in found) < 30
    named = {"token": "token id 10000", "weight": "log-prob is nan"}[kind]
    texts = [text for _, text, _ in found]
    assert named in texts[1]
    assert named in texts[0] or texts[0].startswith("RankError: another rank refused")
    assert max(difference for _, _, difference in found) < 1e-12


#: Where the memory ends.
PLACES = ["layer", *(pytest.param(place, marks=_SLOW) for place in ("embedding", "norm", "head"))]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("wrap", KINDS)
def test_out_of_memory_on_one_rank(pool, wrap, where):
    """All ranks halve their packs, except under DDP of a loss, whose forwards are not in step."""
    found = pool.run("distributed.features:out_of_memory", wrap=wrap, where=where, room=16)
    assert [budget for budget, _ in found] == ([32, 16] if wrap == "DDP(loss)" else [16, 16])
    assert max(difference for _, difference in found) < 1e-12
