import pytest

from toy_models import tiny_model


@pytest.fixture(scope="session", autouse=True)
def _transformers_is_imported() -> None:
    """Outside the time of the first test."""
    tiny_model()
