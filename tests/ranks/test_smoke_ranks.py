"""The pool of ranks starts, and a step of a sharded policy on two ranks equals one process's."""


def test_three_steps_of_a_sharded_policy_equal_one_process(pool):
    """The ranks have 475 and 35 tokens; float64, so that nothing but the order of sums may differ."""
    assert max(pool.run("distributed.cases:train", wrap="fsdp2")) < 1e-12
