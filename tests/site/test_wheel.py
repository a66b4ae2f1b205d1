"""The wheel that a user installs holds only the package, and the loop of docs/torchrl.md runs from it in another folder."""

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
from code_blocks import example, save_checkpoint
from project import PROJECT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    # Built in a copy, because setuptools writes `build/` and `*.egg-info` beside the sources.
    (source := folder / "source").mkdir()
    files = "pyproject.toml setup.py MANIFEST.in README.md LICENSE torchrl_llm_kl tests tutorials benchmarks docs"
    for name in files.split():
        os.symlink(PROJECT / name, source / name)
    subprocess.run([*build, str(source)], check=True, capture_output=True, text=True)
    (path,) = folder.glob("*.whl")
    return path


def metadata_of(wheel: Path, file: str) -> str:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(f".dist-info/{file}")]
    return archive.read(name).decode()


def test_contents_of_the_wheel(wheel: Path) -> None:
    kinds = {".py", ".pyi", ".typed", ".css", ".csv", ".ini", ".jinja", ".js"}
    files = [path for path in PROJECT.glob("torchrl_llm_kl/**/*") if path.suffix in kinds or path.name == "py.typed"]
    expected = {str(path.relative_to(PROJECT)) for path in files}
    assert {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name} == expected
    assert "torchrl-llm-kl = torchrl_llm_kl.cli:main" in metadata_of(wheel, "entry_points.txt").splitlines()
    metadata = metadata_of(wheel, "METADATA")
    assert f"\nVersion: {torchrl_llm_kl.__version__}\n" in metadata
    assert "\nDescription-Content-Type: text/markdown\n" in metadata
    _, _, readme = metadata.partition("\n\n")
    links = re.findall(r"\]\(([^)]*)\)", readme)
    assert "https://github.com/pytorch/rl" in links
    assert [link for link in links if not link.startswith("https://")] == []
    assert "known defect" in readme  # the text of a link stays
    assert "Reward, KL and coefficient of the demo" not in readme  # a picture is not there


def test_relative_links_become_absolute() -> None:
    absolute = runpy.run_path(str(PROJECT / "setup.py"))["absolute"]
    text = "See [`a` [b]](docs/a.md#top), ![a picture](docs/a.png), [there](https://example.org) and [here](#here)."
    assert absolute(text, "https://example.org/x/", "v1.2") == (
        "See [`a` [b]](https://example.org/x/blob/v1.2/docs/a.md#top), "
        "![a picture](https://example.org/x/raw/v1.2/docs/a.png), [there](https://example.org) and [here](#here)."
    )
    assert absolute(text, None, "v1.2") == "See `a` [b], , [there](https://example.org) and [here](#here)."


def test_the_readme_example_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    elsewhere, checkpoint, dependencies = (tmp_path / name for name in ("elsewhere", "checkpoint", "dependencies"))
    for folder in (elsewhere, dependencies):
        folder.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(code: str) -> list[str]:
        command = [str(tmp_path / "env" / "bin" / "python"), "-c", code]
        done = subprocess.run(command, cwd=elsewhere, env=variables, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.splitlines()

    (site,) = run("import sysconfig; print(sysconfig.get_path('purelib'))")
    zipfile.ZipFile(wheel).extractall(site)
    # Use this environment's dependencies, but not its editable install of the project.
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "torchrl_llm_kl" not in path.name:
            os.symlink(path, dependencies / path.name)
    Path(site, "dependencies.pth").write_text(f"{dependencies}\n")
    save_checkpoint(checkpoint)
    first, *lines = run("import torchrl_llm_kl; print(torchrl_llm_kl.__file__)\n" + example(checkpoint))
    assert first.startswith(site)
    assert [line for line in lines if line.startswith("reward ")], lines
