"""Write the tables of ``docs/losses.md`` from the code: the inputs of a loss, and a row for each registered objective.

A row is the first paragraph of the docstring and the defaults of the signature. Run ``make docs`` after a change; a test fails
while the page is out of date.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

from torchrl_llm_kl.losses import LossInputs, available_objectives, get_objective, spec_of

PAGE = Path(__file__).with_name("losses.md")
#: Families whose objectives compare answers; all others have a value for each token.
OF_ANSWERS = ("_preference", "_relative", "_without_reference")


def cell(text: str) -> str:
    """Text of a docstring for a cell: code in single backticks, roles as code, no bars."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", " ".join(text.split()).replace("``", "`"))
    return text.replace("|", "\\|")


def input_table() -> str:
    """The fields of ``LossInputs``, with shapes and meanings."""
    doc = inspect.getdoc(LossInputs) or ""
    args = re.findall(
        r"^    (\w+): (.*(?:\n      .*)*)$", doc.partition("Args:")[2].partition("Example:")[0], re.MULTILINE
    )
    rows = []
    for field, (name, text) in zip(fields(LossInputs), args, strict=True):
        assert field.name == name
        text = re.sub(
            r"; (?:(bool|integers) )?(?:``\[[^`]*``|same shape)\.?",
            lambda kind: f" ({kind[1]})" if kind[1] else "",
            text,
        )
        rows.append(f"| `{name}` | `{field.metadata['shape']}` | {cell(text).rstrip('.')} |")
    return "\n".join(["| input | shape | meaning |", "|---|---|---|", *rows])


def objective_table(*, of_answers: bool) -> str:
    """Name, first sentence and defaults of each objective of some families."""
    rows = ["| name | | defaults |", "|---|---|---|"]
    for name in available_objectives():
        function, spec = get_objective(name), spec_of(name)  # type: ignore[arg-type, call-overload]
        if (function.__module__.rpartition(".")[2] in OF_ANSWERS) == of_answers:
            first = (inspect.getdoc(function) or "").partition("\n\n")[0]
            shown = ", ".join(f"`{key}={value}`" for key, value in spec.defaults.items())
            rows.append(f"| `{name}` | {cell(first)} | {shown} |")
    return "\n".join(rows)


def render() -> str:
    """The page with its tables."""
    text = PAGE.read_text(encoding="utf-8")
    tables = {"inputs": input_table()}
    tables |= {"objectives": objective_table(of_answers=False), "preferences": objective_table(of_answers=True)}
    for name, table in tables.items():
        text = re.sub(
            rf"(<!-- {name} -->\n).*?(\n<!-- end -->)",
            lambda found, t=table: found[1] + t + found[2],
            text,
            flags=re.DOTALL,
        )
    return text


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
