"""The documentation page matches published numbers and is up to date."""

import importlib.util

import pytest

from project import PROJECT
from torchrl_llm_kl.estimators import available_estimators, estimator_table

SCRIPT = PROJECT / "docs" / "build_estimator_table.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("build_estimator_table", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("shift", "name", "bias", "std"),
    [
        # J. Schulman, "Approximating KL Divergence": bias and standard deviation over the true KL, 0.005 and 0.5.
        (0.1, "k1", 0.0, 20.0),
        (0.1, "k2", 0.002, 1.42),
        (0.1, "k3", 0.0, 1.42),
        (1.0, "k1", 0.0, 2.0),
        (1.0, "k2", 0.25, 1.73),
        (1.0, "k3", 0.0, 1.7),
    ],
)
def test_schulmans_table(script, shift, name, bias, std):
    # Half a unit of the last printed digit; the published bias of k2 is sampled (the integral is 0.0025).
    got_bias, got_std = script.gaussian_bias_and_std(name, shift)
    assert got_bias == pytest.approx(bias, abs=6e-4)
    assert got_std == pytest.approx(std, abs=5.1e-3)


def test_the_closed_form_bias_of_k2(script):
    """``E d**2 / 2 = (m**2 + m**4 / 4) / 2``, so the bias over the true KL is ``m**2 / 4``."""
    for shift in (0.1, 0.5, 1.0):
        assert script.gaussian_bias_and_std("k2", shift)[0] == pytest.approx(shift**2 / 4, abs=1e-9)


def test_the_page_is_up_to_date(script):
    assert script.PAGE.read_text(encoding="utf-8") == script.render(), "run: python docs/build_estimator_table.py"


def test_every_row_has_every_column():
    header, rule, *rows = estimator_table().splitlines()
    assert {line.count("|") for line in (header, rule, *rows)} == {10}
    assert [row.split("`")[1] for row in rows] == list(available_estimators())
