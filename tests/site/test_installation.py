"""Every ``pip install`` line in the documentation and in error messages works from a checkout."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from code_blocks import PAGES
from project import PROJECT

_PIP = re.compile(r"(?<![\w-])pip install [^`\n\"]*[^`\n\".;)]")
_NOTEBOOKS = sorted(PROJECT.glob("docs/notebooks/*.py"))
_SOURCES = sorted([*PROJECT.glob("torchrl_llm_kl/**/*.py"), *PROJECT.glob("torchrl_llm_kl/**/*.csv")])
INDEX = "https://download.pytorch.org/whl/cpu"


def lines_of(path: Path) -> list[list[str]]:
    """The arguments of each ``pip install`` in a page, without comments, or in a message."""
    text = path.read_text(encoding="utf-8").replace("{kind}", "wandb")
    lines = [line.partition(" in the checkout")[0] for line in _PIP.findall(text) if "{extra}" not in line]
    found = [[word.rstrip(",:") for word in shlex.split(line, comments=True)[2:]] for line in lines]
    return found + [[f".[{extra}]"] for extra in re.findall(r"install_hint\(['\"](\w+)['\"]\)", text)]


def documented() -> dict[tuple[str, ...], str]:
    """Arguments of ``pip install`` -> a file with this line."""
    files = [path for path in [*PAGES, *_NOTEBOOKS, *_SOURCES] if path.name != "CHANGELOG.md"]
    return {tuple(words): path.relative_to(PROJECT).as_posix() for path in files for words in lines_of(path)}


LINES = documented()
#: ``.``, ``.[extras]`` or a folder of the checkout with extras.
FROM_CHECKOUT = sorted({word for words in LINES for word in words if re.fullmatch(r"(\.|/[\w/-]+)(\[[\w,]+\])?", word)})


def test_install_lines_name_existing_packages() -> None:
    """This package is on no index. All other names must be on PyPI, or on PyTorch's index for CPU builds."""
    assert {".", ".[train]", ".[cli]", ".[data]", ".[lora]", ".[ray]", ".[train,lora]"} <= set(FROM_CHECKOUT)
    known = {"torch", "torchvision", "wandb", "--index-url", INDEX, *FROM_CHECKOUT}
    assert {path: set(words) - known for words, path in LINES.items() if set(words) - known} == {}
    both = [words for words in LINES if "torch" in words]
    assert both
    assert all(INDEX in words for words in both)


def checkout(folder: Path) -> Path:
    """A copy of the checkout, because setuptools writes into it."""
    folder.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "torchrl_llm_kl"):
        os.symlink(PROJECT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that contains only pip."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder / "bin" / "python"


@pytest.mark.slow
@pytest.mark.parametrize("requirement", FROM_CHECKOUT)
def test_a_line_installs_from_a_checkout(requirement: str, environment: Path, tmp_path: Path) -> None:
    """A real installation, without dependencies: they are gigabytes, and `make setup` installs those of every extra.

    pip warns of an extra that does not exist, and installs the rest.
    """
    source = checkout(tmp_path / "checkout")
    if requirement.startswith("/"):  # the path on a cluster
        requirement = f"{source}[{requirement.partition('[')[2]}"
    pip = [str(environment), "-m", "pip"]
    command = [*pip, "install", "--no-deps", "--force-reinstall", requirement]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "does not provide the extra" not in done.stderr
    shown = subprocess.run([*pip, "show", "torchrl-llm-kl"], capture_output=True, text=True, check=True).stdout
    assert "\nRequires: " in shown
    assert "torchrl" in shown.partition("\nRequires: ")[2]
