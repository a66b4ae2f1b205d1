"""What each estimator promises. The documentation is rendered from this table and the tests hold the code to it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

#: Keys for "the gradient of what", with their notation. ``p`` is the policy, ``q`` the reference, ``old`` the sampler.
QUANTITIES: dict[str, str] = {
    "zero": "0",
    "reverse": "KL(p‖q)",
    "forward": "KL(q‖p)",
    "total_variation": "Σ\u2009abs(p − q)",
    "reverse_minus_forward": "KL(p‖q) − KL(q‖p)",
    "minus_sampler": "−KL(old‖p)",
    "chosen": "the chosen one",
    "none": "no divergence",
}


@dataclass(frozen=True)
class EstimatorContract:
    """The promises of one estimator; means are over one token given its prefix.

    Attributes:
        name: as in :func:`get_estimator`.
        unbiased: the mean value over tokens from ``p`` is KL(p‖q).
        loss_gradient: key of :data:`QUANTITIES`; the mean gradient of the value over tokens from ``p``.
        reward_gradient: the same for the policy gradient of the detached value.
        unbiased_off_policy: the mean value over tokens from ``old`` is KL(p‖q).
        loss_gradient_off_policy: the mean gradient over tokens from ``old``.
        reward: advice for use in the reward.
        loss: advice for use in the loss.
        condition: when the promises hold, where not always.
    """

    name: str
    unbiased: bool
    loss_gradient: str
    reward_gradient: str
    unbiased_off_policy: bool
    loss_gradient_off_policy: str
    reward: str
    loss: str
    condition: str = ""


_UNCLAMPED = "while no clamp is active"

_BASES = (
    EstimatorContract("none", False, "zero", "zero", False, "zero", "switches it off", "switches it off"),
    EstimatorContract("k1", True, "zero", "reverse", False, "minus_sampler", "**yes**", "no: noise without pull"),
    EstimatorContract("k2", False, "reverse", "none", False, "none", "no", "**yes**"),
    EstimatorContract("k3", True, "forward", "reverse_minus_forward", False, "none", "no", "for the forward KL"),
    EstimatorContract(
        "low_var_kl",
        True,
        "forward",
        "reverse_minus_forward",
        False,
        "none",
        "no",
        "as k3; no pull when far",
        _UNCLAMPED,
    ),
    EstimatorContract("abs", False, "total_variation", "none", False, "none", "no", "for the total variation"),
    EstimatorContract(
        "corrected_k3",
        True,
        "reverse",
        "reverse_minus_forward",
        True,
        "reverse",
        "no",
        "**yes**, off-policy",
        _UNCLAMPED,
    ),
)
_K2 = _BASES[2]


def _straight_through(base: EstimatorContract) -> EstimatorContract:
    """Keep what follows from the value, take from k2 what follows from the gradient."""
    return dataclasses.replace(
        base,
        name=f"{base.name}+",
        loss_gradient=_K2.loss_gradient,
        loss_gradient_off_policy=_K2.loss_gradient_off_policy,
        loss=_K2.loss,
        condition=base.condition and f"value: {base.condition}",
    )


CONTRACTS: tuple[EstimatorContract, ...] = (
    *_BASES,
    *(_straight_through(base) for base in _BASES if base.name != "none"),
    EstimatorContract(
        "exact", True, "chosen", "zero", True, "chosen", "only beside the loss", "**yes**", "unbiased: `reverse`"
    ),
)

_HEADER = (
    "name",
    "value unbiased",
    "gradient in a loss",
    "gradient in a reward",
    "off-policy: value unbiased",
    "off-policy: gradient in a loss",
    "use in a reward",
    "use in a loss",
    "holds",
)


def estimator_table() -> str:
    """Render the contracts as a Markdown table, one row per estimator.

    Example:
        >>> print(estimator_table().splitlines()[3])
        | `k1` | yes | 0 | KL(p‖q) | no | −KL(old‖p) | **yes** | no: noise without pull | always |
    """
    lines = [_HEADER, ("---",) * len(_HEADER), *(_cells(contract) for contract in CONTRACTS)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cells(contract: EstimatorContract) -> tuple[str, ...]:
    return (
        f"`{contract.name}`",
        "yes" if contract.unbiased else "no",
        QUANTITIES[contract.loss_gradient],
        QUANTITIES[contract.reward_gradient],
        "yes" if contract.unbiased_off_policy else "no",
        QUANTITIES[contract.loss_gradient_off_policy],
        contract.reward,
        contract.loss,
        contract.condition or "always",
    )
