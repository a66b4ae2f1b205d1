from rollout_fixtures import (  # noqa: F401
    _imported_before_the_first_test,
    _lists_become_stacks,
    padded,
    policy_model,
    ref_model,
    tokenizer,
)
