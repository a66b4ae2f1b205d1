from rollout_fixtures import _lists_become_stacks  # noqa: F401
