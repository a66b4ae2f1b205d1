"""A head sharded over the vocabulary gives the values and gradients of the whole head."""

import pytest
import torch

CASES = "distributed.tensor_parallel"
OTHER_LOGITS = pytest.param("colwise_gather_output", marks=pytest.mark.slow)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("score", "settings"),
    [
        *(("one_head", {"vocab": vocab}) for vocab in (8, 23)),  # 23: slices of 12 and 11; 6, 6, 6 and 5
        *(
            ("two_heads", {"direction": d, "ref_whole": whole})
            for d in ("reverse", "forward")
            for whole in (False, True)
        ),
        ("tops", {"ks": [1, 3, 9, 22, 23]}),  # 9: more than a slice of four ranks; 23: no tail
        ("all_outcomes", {"ks": [1, 5, 23]}),
        ("impossible_slice", {"vocab": 24}),
    ],
)
def test_scores_of_a_head(pool, ranks, score, settings):
    """Log-prob and entropy, the exact KL, the top k, outcomes, and a slice without a possible token."""
    found = pool.run(f"{CASES}:{score}", ranks=ranks, **{"vocab": 23, **settings})
    assert torch.tensor(found).max() < 1e-12


def test_what_is_not_supported_is_refused_on_all_ranks(pool):
    """A plan with sequence parallel norms at construction, before a forward that would wait for other ranks."""
    expected = {
        "hidden size": ["Shard(0), the vocabulary"],
        "bias": [": expected the same"],
        "mixture": ["needs whole rows"],
        "policy whole": ["weight is sharded over no ranks but ref_weight over ranks [0, 1]"],
        "trained reference": ["weight is sharded over ranks [0, 1] but ref_weight over no ranks"],
        "target": ["from 1 to 10; expected 0 to 9"],
        "k": ["expected 1 to 10"],
        "ids": ["ids holds token ids from 0 to 10; expected at most 9"],
        "empty slice": ["too few for 2 ranks"],
        "sequence parallel of torch": ["norm of ", "is sequence parallel"],
        "sequence parallel of transformers": ["norm of ", "is sequence parallel"],
    }
    for messages in pool.run(f"{CASES}:refusals", cases=list(expected)):
        for case, texts in expected.items():
            assert all(text in messages[case] for text in texts), (case, messages[case])


@pytest.mark.parametrize("logits", [OTHER_LOGITS, "colwise"])
@pytest.mark.parametrize(
    ("tp", "ranks", "vocab"), [(2, 2, 96), pytest.param(4, 4, 95, marks=pytest.mark.slow), (2, 4, 96)]
)
def test_scores_of_a_model_in_packs(pool, logits, tp, ranks, vocab):
    """transformers' tensor parallel plan, also beside FSDP2; a vocabulary of 95 has uneven slices."""
    for worst in pool.run(f"{CASES}:score", ranks=ranks, logits=logits, tp=tp, vocab=vocab):
        assert worst.keys() > {"log_prob", "entropy", "ref_log_prob", "kl", "top_log_probs", "collision"}
        assert max(worst.values()) < 1e-12


@pytest.mark.parametrize("logits", [OTHER_LOGITS, "colwise"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_three_steps_equal_one_process(pool, logits, ranks):
    assert max(pool.run(f"{CASES}:train", ranks=ranks, logits=logits, tp=2)) < 1e-12
