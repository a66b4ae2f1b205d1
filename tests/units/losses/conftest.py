import pytest
from torch import nn

from rollout_fixtures import _lists_become_stacks  # noqa: F401
from toy_models import tiny_model


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model(seed=0)


@pytest.fixture(scope="module")
def reference() -> nn.Module:
    return tiny_model(seed=1)
