"""Random batches for objectives, and the hyper-parameters of each."""

from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

import refused
from by_hand import called
from torchrl_llm_kl.losses import LossInputs, TermPart, get_objective, spec_of

_CASES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
CASES = {case: (case.partition("-")[0], hyper) for case, hyper in _CASES.items()}
#: Objectives of pairs, which need a reference log-prob each.
PAIRS = ["dpo", "robust", "hinge", "ipo", "exo_pair", "discopop", "apo_zero", "apo_down", "sppo_hard", "nca_pair"]
PAIRS += ["bco_pair", "aot"]


def random_batch(seed: int, rows: int = 6, width: int = 5, *, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Every input of an objective, ``[rows, width]``. Rows are pairs: chosen, rejected, chosen, ...

    Ratios lie on both sides of all usual clip bounds, advantages are never 0, some rows have few masked-in tokens, and
    the mask leaves holes. ``expert_mask`` is True for every row of every other pair.
    """
    rng = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return torch.randn(rows, width, generator=rng, dtype=torch.float64) * scale

    log_prob = -normal(1.0).abs() - 0.05
    old = (log_prob + normal(0.4)).clamp(max=-1e-3)
    mask = torch.rand(rows, width, generator=rng) < 0.7
    mask[torch.arange(rows), torch.randint(width, (rows,), generator=rng)] = True
    advantage = normal(1.0)
    advantage = torch.where(advantage.abs() < 0.1, 0.5, advantage)
    return {
        "log_prob": log_prob.to(dtype),
        "mask": mask,
        "old_log_prob": old.to(dtype),
        "ref_log_prob": (log_prob + normal(0.3)).clamp(max=-1e-3).to(dtype),
        "advantage": advantage.to(dtype),
        "expert_mask": (torch.arange(rows) // 2 % 2 == 1).unsqueeze(-1).expand(rows, width).clone(),
    }


def inputs_of(name: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with the further inputs of this objective."""
    spec, rows = spec_of(get_objective(name)), torch.arange(len(batch["mask"]))
    more = {
        "chosen": rows % 2 == 0,
        "reference_point": torch.where(batch["expert_mask"][:, 0], 0.5, -0.25).to(batch["log_prob"].dtype),
        "match_id": rows // 2,
        "age": (torch.arange(batch["mask"].shape[-1]) % 4).expand(batch["mask"].shape),
        "sharp_log_prob": 0.5 * batch["log_prob"].detach(),
        # Multiples by powers of two are exact in half precision.
        "teacher_divergence": -batch["log_prob"],
        "outcomes": torch.stack([batch["log_prob"] * factor for factor in (1.0, 0.5, 2.0)], -1),
        "teacher_outcomes": torch.stack([batch["ref_log_prob"] * factor for factor in (2.0, 1.0, 0.5)], -1),
    }
    settings = [hyper for each, hyper in CASES.values() if each == name]
    parts = [TermPart(get_objective(name), **hyper) for hyper in [*settings, {}]]
    taken = {need for part in parts for need in part.needs} | (set() if spec.once is None else {spec.once.name})
    return {**batch, **{key: value for key, value in more.items() if key in taken}}


def rows_of(batch: dict[str, Tensor], index: Any) -> dict[str, Tensor]:
    """Some rows of a batch."""
    return {key: value[index] for key, value in batch.items()}


def raises_without(part: Any, given: dict[str, Tensor]) -> set[str]:
    """The inputs without which a part of a loss raises. Each one is left out by itself."""
    part.run(LossInputs(**given))
    names = given.keys() - {"log_prob", "mask"}
    without = {name: LossInputs(**{key: x for key, x in given.items() if key != name}) for name in names}
    return {name for name in names if refused.refusal(part.run, without[name])}


def refusal(name: str, **changes: Any) -> str:
    """The error of an objective for changed inputs or hyper-parameters, with all other inputs given. Empty if it has none."""
    return refused.refusal(called, get_objective(name), **{**inputs_of(name, random_batch(0)), **changes})
