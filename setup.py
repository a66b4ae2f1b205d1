"""The long description of wheel and sdist: the README, with links that work outside the repository.

Everything else is in pyproject.toml. A relative link becomes one to the ``Repository`` of ``[project.urls]``, at the tag of
this version; as long as that address is not set, there is no page: a link becomes its text, a picture is left out.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
# [text](target) and ![text](target), where the target is neither an address nor a place on the page itself
RELATIVE = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\((?![a-z][a-z0-9+.-]*:|#)([^)\s]+)\)")


def absolute(text: str, repository: str | None, tag: str) -> str:
    """``text`` with each relative link made absolute; without a ``repository`` replaced by its text, and pictures left out."""

    def link(found: re.Match[str]) -> str:
        mark, label, target = found.groups()
        if repository is None:
            return "" if mark else label
        kind = "raw" if mark else "blob"
        return f"{mark}[{label}]({repository.rstrip('/')}/{kind}/{tag}/{target})"

    return RELATIVE.sub(link, text)


def only(pattern: str, file: str) -> str | None:
    """The only match of ``pattern`` at the start of a line of ``file``; None if there is none."""
    found = re.findall(f"^{pattern}", (HERE / file).read_text(encoding="utf-8"), re.MULTILINE)
    return found[0] if len(found) == 1 else None


if __name__ == "__main__":
    version = only('__version__ = "(.*)"', "torchrl_llm_kl/__init__.py")
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    readme = absolute(readme, only('Repository = "(.*)"', "pyproject.toml"), f"v{version}")
    setup(long_description=readme, long_description_content_type="text/markdown")
