"""A head sharded over the vocabulary gives the values and gradients of the whole head."""

from __future__ import annotations

import pytest

CASES = "distributed.tensor_parallel"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("vocab", [8, 23])  # 23: slices of 12 and 11; 6, 6, 6 and 5
def test_log_prob_and_entropy(pool, ranks, vocab):
    assert max(pool.run(f"{CASES}:one_head", ranks=ranks, vocab=vocab)) < 1e-12


@pytest.mark.parametrize("ref_whole", [False, True])
@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_exact_kl(pool, ranks, direction, ref_whole):
    worst = pool.run(f"{CASES}:two_heads", ranks=ranks, vocab=23, direction=direction, ref_whole=ref_whole)
    assert max(worst) < 1e-12


@pytest.mark.parametrize("k", [1, 3, 9, 22, 23])  # 9: more than a slice of four ranks; 23: no tail
@pytest.mark.parametrize("ranks", [2, 4])
def test_top_k(pool, ranks, k):
    assert max(pool.run(f"{CASES}:top", ranks=ranks, vocab=23, k=k)) < 1e-12


@pytest.mark.parametrize("k", [1, 5, 23])
@pytest.mark.parametrize("ranks", [2, 4])
def test_outcomes(pool, ranks, k):
    assert max(pool.run(f"{CASES}:outcomes", ranks=ranks, vocab=23, k=k)) < 1e-12


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_slice_without_a_possible_token(pool, ranks):
    assert max(map(max, pool.run(f"{CASES}:impossible_slice", ranks=ranks, vocab=24))) < 1e-12


@pytest.mark.parametrize(
    ("case", "match"),
    [
        ("hidden size", "Shard(0), the vocabulary"),
        ("bias", "expected the same for both"),
        ("mixture", "needs whole rows"),
        ("policy whole", "weight is whole but ref_weight is sharded over ranks [0, 1]"),
        ("trained reference", "weight is sharded over ranks [0, 1] but ref_weight is whole"),
        ("target", "from 1 to 10; expected 0 to 9"),
        ("k", "expected 1 to 10"),
        ("ids", "ids holds the token id 10; expected at most 9"),
        ("empty slice", "the last has none"),
    ],
)
def test_what_is_not_supported_is_refused_on_all_ranks(pool, case, match):
    for message in pool.run(f"{CASES}:refusal", case=case):
        assert match in message


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_sequence_parallel_is_refused_on_all_ranks(pool, library):
    """At construction, before a forward that would wait for other ranks."""
    for message in pool.run(f"{CASES}:refuse_plan", library=library):
        assert "norm of " in message
        assert "is sequence parallel" in message


@pytest.mark.parametrize("logits", [pytest.param("colwise_gather_output", marks=pytest.mark.slow), "colwise"])
@pytest.mark.parametrize(
    ("tp", "ranks", "vocab"), [(2, 2, 96), pytest.param(4, 4, 95, marks=pytest.mark.slow), (2, 4, 96)]
)
def test_scores_of_a_model_in_packs(pool, logits, tp, ranks, vocab):
    """transformers' tensor parallel plan, also beside FSDP2; a vocabulary of 95 has uneven slices."""
    for worst in pool.run(f"{CASES}:score", ranks=ranks, logits=logits, tp=tp, vocab=vocab):
        assert worst.keys() > {"log_prob", "entropy", "ref_log_prob", "kl", "top_log_probs", "collision"}
        assert max(worst.values()) < 1e-12


@pytest.mark.parametrize("logits", [pytest.param("colwise_gather_output", marks=pytest.mark.slow), "colwise"])
@pytest.mark.parametrize(("tp", "ranks"), [(2, 2), (2, 4)])
def test_three_steps_equal_one_process(pool, logits, tp, ranks):
    assert max(pool.run(f"{CASES}:train", ranks=ranks, logits=logits, tp=tp)) < 1e-12
