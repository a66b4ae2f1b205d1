"""Write ``docs/estimators.md`` from the contract table and from numbers measured on the estimators.

Run ``python docs/build_estimator_table.py`` after a change to either; a test fails while the page is out of date.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from torchrl_llm_kl.estimators import estimator_table, get_estimator

PAGE = Path(__file__).with_name("estimators.md")

INTRO = """\
# KL estimators

*Written by `docs/build_estimator_table.py`; edit that, or the table in `torchrl_llm_kl.estimators`, and run it again.*

`p` is the policy, `q` the reference, `old` the policy that sampled when it is not `p`. An estimator has two uses with
two different gradients. In a **loss**, autograd differentiates the estimate. In a **reward**, the estimate is a
constant and the policy gradient multiplies it by the gradient of the log-prob. "Gradient" below is the mean over one
token given its prefix. Every entry is checked by summing over a whole vocabulary.

Per token is not per answer: a KL in the loss takes each prefix as given and misses that a token may lead to where the
KL is large later; in the reward it is credited to all tokens before it. Only the latter has the optimum `pi_ref exp(r
/ beta)` over whole answers ([algorithms](algorithms.md)).

In short: `k1` in the reward, or `k2` / `k3+` / `exact` in the loss; `k3` to log; `corrected_k3` in the loss when
another policy sampled.

"""

MEASURED = """
## Bias and spread

`p = N(0, 1)` against `q = N(m, 1)`, integrated numerically; both columns are divided by the true KL, `m**2 / 2`. The
setting is that of J. Schulman, "Approximating KL Divergence" (2020).

"""


def gaussian_bias_and_std(name: str, shift: float) -> tuple[float, float]:
    """Bias and standard deviation of an estimator over the true KL, for N(0, 1) against N(shift, 1).

    Args:
        name: of a per-token estimator.
        shift: mean of the reference.

    Returns:
        The two numbers, by the trapezoid rule in float64 on +-12 standard deviations.
    """
    x = torch.linspace(-12.0, 12.0, 20_001, dtype=torch.float64)
    log_p, log_q = (-0.5 * (x - mean) ** 2 - 0.5 * math.log(2 * math.pi) for mean in (0.0, shift))
    estimate, density = get_estimator(name)(log_p, log_q), log_p.exp()
    mean = torch.trapezoid(density * estimate, x).item()
    variance = torch.trapezoid(density * (estimate - mean) ** 2, x).item()
    true_kl = shift**2 / 2
    return mean / true_kl - 1, math.sqrt(variance) / true_kl


def render() -> str:
    """Build the page's text."""
    shifts = (0.1, 1.0)
    titles = [f"{what}, m = {m:g}" for m in shifts for what in ("bias", "std")]
    lines = [f"| name | {' | '.join(titles)} |", "| --- |" + " ---: |" * len(titles)]
    for name in ("k1", "k2", "k3", "low_var_kl", "abs"):
        # Adding 0.0 turns a rounded -0.0 into 0.0.
        cells = (f"{round(number, 4) + 0.0:.4f}" for m in shifts for number in gaussian_bias_and_std(name, m))
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return INTRO + estimator_table() + MEASURED + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
