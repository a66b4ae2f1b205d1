"""torchrl's own tests pass on this package's transforms, except for the differences listed in docs/differences.md."""

import os
from pathlib import Path

import pytest

from project import PROJECT
from upstream_run import run

VARIABLE = "TORCHRL_LLM_KL_TORCHRL"
#: test -> the row of docs/differences.md that says why it cannot pass
DIFFERENT = {
    "TestKLTransforms.test_retrieve_log_prob_assistant_only_validation": "`assistant_only=True` with text or token input",
    "TestKLTransforms.test_retrieve_kl_assistant_only_validation": "`assistant_only=True` with text or token input",
}


def test_only_documented_differences_fail():
    """Some hundred tests of ``TestKLTransforms`` and ``test_llm_objectives``, unchanged from torchrl's repository."""
    checkout = Path(os.environ.get(VARIABLE) or "/nonexistent")
    if not checkout.is_dir():
        pytest.skip(f"{VARIABLE} names no checkout of torchrl: `make test-peers` fetches it")
    outcomes = run(checkout)
    failed = {name: message for name, (outcome, message) in outcomes.items() if outcome == "failed"}
    assert failed.keys() == DIFFERENT.keys(), failed
    assert sum(outcome == "passed" for outcome, _ in outcomes.values()) > 80


@pytest.mark.parametrize("row", sorted(set(DIFFERENT.values())))
def test_each_difference_is_documented(row):
    assert row in (PROJECT / "docs" / "differences.md").read_text()
