"""Write the table of seeded faults of ``docs/doctor.md``: what the doctor names first, in five families of models.

Run ``make docs`` after a change to the doctor; it samples 80 batches with a fault and 200 without.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("doctor.md")
sys.path.insert(0, str(ROOT / "tests" / "lab"))

from seeded import FAMILIES, FAULTS, SETTINGS, clean_batches, make_tokenizer  # noqa: E402
from torchrl_llm_kl import diagnose  # noqa: E402


def fault_table() -> str:
    """What is named first, once in each family, and with what confidence."""
    lines = ["| fault | how it is seeded | named first | confidence |", "|---|---|---|---|"]
    for name, (seed_it, _) in FAULTS.items():
        first: Counter[str] = Counter()
        least = 1.0
        for seed, family in enumerate(FAMILIES):
            batch, given = seed_it(family, seed)
            worst = diagnose(batch, tokenizer=make_tokenizer(), **given).worst
            first["nothing" if worst is None else f"`{worst.cause}`"] += 1
            least = min(least, 0.0 if worst is None else worst.confidence)
        named = ", ".join(f"{cause} {count} of {len(FAMILIES)}" for cause, count in first.most_common())
        how = (seed_it.__doc__ or "").split("\n")[0].rstrip(".")
        lines.append(f"| {name} | {how} | {named} | {least:.2f} or more |")
    return "\n".join(lines) + "\n"


def clean_line(number: int = 40) -> str:
    """How many clean batches raise an alarm, and the largest standard score among them."""
    alarms, scores, batches = 0, [0.0], 0
    for family in FAMILIES:
        for batch, given in clean_batches(family, 1, number):
            diagnosis = diagnose(batch, tokenizer=make_tokenizer(), **given)
            alarms, batches = alarms + bool(diagnosis.faults), batches + 1
            scores.append(abs(diagnosis.measures["surprisal/z"]))
    settings = ", ".join(f"`{setting}`" for setting in SETTINGS)
    return (
        f"\nClean batches with an alarm: {alarms} of {batches}, {number} of each family, sampled and scored with {settings}. "
        f"The largest `surprisal/z` among them is {max(scores):.1f}.\n"
    )


def render() -> str:
    """The page with the table of today."""
    text = f"\nFamilies: {', '.join(FAMILIES)}.\n\n{fault_table()}{clean_line()}\n"
    page = PAGE.read_text(encoding="utf-8")
    return re.sub(r"(<!-- faults -->\n).*?(<!-- end -->)", lambda m: m[1] + text + m[2], page, flags=re.DOTALL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    PAGE.write_text(render(), encoding="utf-8")
