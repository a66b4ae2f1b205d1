"""What a user installs: the wheel holds the package alone, and the README's example runs from it, in another directory."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import torchrl_llm_kl
from project import PROJECT
from readme import example, save_checkpoint


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    # In a copy: setuptools writes `build/` and `*.egg-info` beside the sources.
    source = folder / "source"
    source.mkdir()
    tracked = ["pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"]
    tracked += ["torchrl_llm_kl", "tests", "tutorials", "benchmarks", "docs"]
    for name in tracked:
        os.symlink(PROJECT / name, source / name)
    subprocess.run([*build, str(source)], check=True, capture_output=True, text=True)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_the_package_alone_and_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    folders = {name.split("/")[0] for name in names}
    assert {name for name in folders if not name.endswith(".dist-info")} == {"torchrl_llm_kl"}
    package = PROJECT / "torchrl_llm_kl"
    expected = {str(path.relative_to(PROJECT)) for path in package.rglob("*.py")} | {"torchrl_llm_kl/py.typed"}
    page = ("_excerpt.html.jinja", "_inspector.css", "_inspector.html.jinja", "_inspector.js", "_parts.js")
    expected |= {f"torchrl_llm_kl/diagnostics/{name}" for name in page}
    assert {name for name in names if name.startswith("torchrl_llm_kl/")} == expected
    (name,) = [name for name in names if name.endswith("entry_points.txt")]
    assert "torchrl-llm-kl = torchrl_llm_kl.cli:main" in archive.read(name).decode().splitlines()


def test_the_wheel_has_the_version_and_a_readme_without_relative_links(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
    metadata = archive.read(name).decode()
    assert f"\nVersion: {torchrl_llm_kl.__version__}\n" in metadata
    assert "\nDescription-Content-Type: text/markdown\n" in metadata
    _, _, readme = metadata.partition("\n\n")
    links = re.findall(r"\]\(([^)]*)\)", readme)
    assert "https://github.com/pytorch/rl" in links
    assert [link for link in links if not link.startswith("https://")] == []
    assert "known defect" in readme  # the text of a link stays


def test_relative_links_become_absolute() -> None:
    functions = runpy.run_path(str(PROJECT / "setup.py"))
    text = "See [`a` [b]](docs/a.md#top), ![a picture](docs/a.png), [there](https://example.org) and [here](#here)."
    assert functions["absolute"](text, "https://example.org/x/", "v1.2") == (
        "See [`a` [b]](https://example.org/x/blob/v1.2/docs/a.md#top), "
        "![a picture](https://example.org/x/raw/v1.2/docs/a.png), [there](https://example.org) and [here](#here)."
    )
    assert functions["absolute"](text, None, "v1.2") == (
        "See `a` [b], a picture, [there](https://example.org) and [here](#here)."
    )


def test_the_readme_example_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    environment, elsewhere, checkpoint = tmp_path / "env", tmp_path / "elsewhere", tmp_path / "checkpoint"
    elsewhere.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip())
    zipfile.ZipFile(wheel).extractall(site)
    # The dependencies are those of this environment; its editable install of the project is left out.
    dependencies = tmp_path / "dependencies"
    dependencies.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "torchrl_llm_kl" not in path.name:
            os.symlink(path, dependencies / path.name)
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [str(python), *arguments], cwd=elsewhere, env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    save_checkpoint(checkpoint)
    first, *lines = run(
        "-c", "import torchrl_llm_kl; print(torchrl_llm_kl.__file__)\n" + example(checkpoint)
    ).splitlines()
    assert first.startswith(str(site))
    assert [line for line in lines if line.startswith("KL tensor(0.")], lines
