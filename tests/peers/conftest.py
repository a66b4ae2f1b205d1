from __future__ import annotations

import pytest
from torch import Tensor, nn

from elsewhere_batches import make_batch, make_model
from rollout_fixtures import _tables_have_no_head  # noqa: F401


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    """In double precision, for the losses of other libraries."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def batch(model: nn.Module) -> dict[str, Tensor]:
    return make_batch(model)
