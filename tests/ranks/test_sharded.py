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
DDP_OF_LOSS, LOSS_OF_DDP, FSDP2, GROUPS, FLAT = KINDS
ORIGINAL, CHECKPOINTED = "fsdp1, original parameters", (*KINDS[:3], FLAT)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


SINGLE, CLIPPED = {"dtype": torch.float32}, {"clip": 0.01}  # FSDP1 clips by a norm in float32 and takes no float64
#: What is added -> options of the case, the wraps that are quick, and all that are tried.
ADDED = {
    "nothing": ({}, WRAPS, WRAPS),
    "four ranks": ({"ranks": 4}, [FSDP2], WRAPS),
    # Its share of the gradient is 0, and the others do not wait for it.
    "a rank has no rows": ({"split": "no rows"}, CHECKPOINTED, WRAPS),
    "a rank has no response": ({"split": "no response"}, [FSDP2], WRAPS),
    "single precision": (SINGLE, [FSDP2], [LOSS_OF_DDP, FSDP2, FLAT]),
    # no_sync, or set_requires_gradient_sync, for all micro-batches but the last; some are empty.
    "accumulation": ({"ranks": 4, "micro_batches": 3}, [LOSS_OF_DDP, FSDP2], WRAPS),
    "tied embeddings": ({"tie_word_embeddings": True}, [DDP_OF_LOSS, GROUPS], KINDS),
    # The base is frozen: most parameters have no gradient.
    "lora": ({"lora": True}, [LOSS_OF_DDP, FSDP2, ORIGINAL], [*KINDS[:-1], ORIGINAL, "fsdp2, root alone"]),
    "checkpointed by transformers": ({"checkpoint": "transformers"}, [DDP_OF_LOSS, FSDP2], CHECKPOINTED),
    "checkpointed by torch": ({"checkpoint": "torch"}, [], CHECKPOINTED),
    "exact KL with a sharded reference": ({"exact": True}, [FSDP2], KINDS[:3]),
    "clipped gradient": (CLIPPED, [LOSS_OF_DDP, FSDP2], KINDS[:-1]),  # the norm is of the whole gradient
    "clipped gradient of FSDP1": (CLIPPED | SINGLE, [ORIGINAL], [ORIGINAL]),
}


@pytest.mark.parametrize(
    ("added", "wrap"),
    [
        (added, wrap) if wrap in quick else slow(added, wrap)
        for added, (_, quick, wraps) in ADDED.items()
        for wrap in wraps
    ],
)
def test_three_steps_equal_one_process(pool, added, wrap):
    """Ranks have uneven tokens and numbers of packs. Only the order of sums may differ (float32: to 2e-6)."""
    if added == "lora":
        pytest.importorskip("peft")
    options = ADDED[added][0]
    assert max(pool.run(TRAIN, wrap=wrap, **options)) < (2e-6 if "dtype" in options else 1e-12)


@pytest.mark.parametrize("checkpoint", ["transformers", "torch"])
def test_a_recurrent_model_with_checkpointed_layers(pool, checkpoint):
    """In float32, with a rank that has nothing to forward. No rank may hang, raise by itself or get other gradients."""
    assert max(pool.run("distributed.features:recurrent", checkpoint=checkpoint)) < 1e-3


@pytest.mark.parametrize(
    ("wrap", "first", "count"),
    [(FSDP2, 25, 8), slow(FSDP2, 25, 25), slow(LOSS_OF_DDP, 0, 25), slow(GROUPS, 50, 25), slow(FLAT, 75, 25)],
)
def test_random_splits_equal_one_process(pool, wrap, first, count):
    """Each row is on a random rank. There are a hundred splits, some with an empty rank."""
    splits = [str(seed) for seed in range(first, first + count)]
    assert max(pool.run(TRAIN, wrap=wrap, split=splits, rate=0.01)) < 1e-12


@pytest.mark.parametrize("by_layer", [True, slow(False)])
def test_mixed_precision_has_the_error_of_one_process(pool, by_layer):
    """Weights are float32, and the computation is in bfloat16, here as in the one process."""
    for found, one in pool.run("distributed.features:mixed_precision", by_layer=by_layer):
        assert 0 < one < 0.2
        assert found < 1.25 * one


@pytest.mark.parametrize(
    ("wrap", "options"),
    [
        *((LOSS_OF_DDP, {}), slow(ORIGINAL, {}), slow(DDP_OF_LOSS, {}), (FSDP2, {"split": "no rows"})),
        *((FSDP2, {"checkpoint": "transformers"}), slow(FLAT, {"checkpoint": "transformers"})),
    ],
)
def test_recorded_routing_is_replayed(pool, wrap, options):
    """A mixture of experts replays its record on each rank. Only norms in float32 add rounding."""
    for found, unforced in pool.run("distributed.features:replayed_routing", wrap=wrap, **options):
        assert found < 1e-5
        assert unforced > 1e-2


@pytest.mark.smoke
def test_a_model_scored_before_it_is_sharded(pool):
    assert max(pool.run("distributed.features:scored_before")) < 1e-12


@pytest.mark.parametrize(
    ("wrap", "estimator", "split"),
    [(LOSS_OF_DDP, "k1", "no rows"), (FSDP2, "exact", "no rows"), (FSDP2, "k1", "uneven")],
)
def test_kl_in_the_reward(pool, wrap, estimator, split):
    """``RetrieveKL`` before and after three steps of a wrapped policy with a sharded reference, also without rows."""
    assert max(pool.run("distributed.features:retrieve", wrap=wrap, estimator=estimator, split=split)) < 1e-12


@pytest.mark.parametrize(("what", "steps"), [("loss", 1), ("model", 2)])
def test_accelerate_equals_one_process(pool, what, steps):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    assert max(pool.run("distributed.features:accelerate", what=what, steps=steps)) < 1e-12


@pytest.mark.parametrize("wrap", [LOSS_OF_DDP, FSDP2, ORIGINAL, slow(GROUPS)])
def test_a_state_dict_equals_that_of_one_process(pool, wrap):
    assert max(pool.run("distributed.features:state", wrap=wrap)) == 0


@pytest.mark.parametrize(
    ("wrap", "kind"),  # FSDP1 holds the whole weights after a forward: the case cannot mend its NaN
    [
        *((DDP_OF_LOSS, "token"), (FSDP2, "token"), (FSDP2, "weight"), (FLAT, "token"), slow(DDP_OF_LOSS, "weight")),
        *(slow(wrap, kind) for wrap in (LOSS_OF_DDP, GROUPS) for kind in ("token", "weight")),
    ],
)
def test_an_error_on_one_rank_is_one_on_all(pool, wrap, kind):
    """No rank waits for a time-out, and the next steps are right."""
    found = pool.run("distributed.features:refuse", wrap=wrap, kind=kind)
    assert max(seconds for seconds, _, _ in found) < 30 * slowdown()
    named = {"token": "token id 10000", "weight": "log-prob is nan"}[kind]
    texts = [text for _, text, _ in found]
    assert named in texts[1]
    assert named in texts[0] or texts[0].startswith("RankError: another rank refused")
    assert max(difference for _, _, difference in found) < 1e-12


@pytest.mark.parametrize("where", ["layer", *map(slow, ("embedding", "norm", "head"))])
@pytest.mark.parametrize("wrap", [DDP_OF_LOSS, FSDP2, FLAT, slow(LOSS_OF_DDP), slow(GROUPS)])
def test_out_of_memory_on_one_rank(pool, wrap, where):
    """All ranks halve their packs, except under DDP of a loss, whose forwards are not in step."""
    found = pool.run("distributed.features:out_of_memory", wrap=wrap, where=where, room=16)
    assert [budget for budget, _ in found] == ([32, 16] if wrap == DDP_OF_LOSS else [16, 16])
    assert max(difference for _, difference in found) < 1e-12
