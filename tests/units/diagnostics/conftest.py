from rollout_fixtures import _imported_before_the_first_test  # noqa: F401
