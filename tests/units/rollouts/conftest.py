from rollout_fixtures import _lists_become_stacks, padded, policy_model, ref_model, tokenizer  # noqa: F401
