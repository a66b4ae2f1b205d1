from elsewhere_batches import batch, model  # noqa: F401
from rollout_fixtures import _tables_have_no_head  # noqa: F401
