"""Fetch the libraries that tests/peers compares with: ``python tests/lab/fetch_peers.py FOLDER``.

The wheels of Trinity-RFT, verl, TRL and genlm-bytes are unpacked, not installed, since only single modules of them are loaded
(``peers.py``). torchrl's own tests come from its repository, since no wheel holds them. Existing folders are kept.
"""

import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

from peers import FOLDERS

REPOSITORY = "https://github.com/pytorch/rl"


def fetch_wheel(requirement: str, folder: Path) -> None:
    """Download a wheel without its dependencies, and unpack it."""
    # Single modules are loaded, so an older Python than the package's is fine.
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--ignore-requires-python",
    ]
    subprocess.run([*pip, "--dest", str(folder.parent), requirement], check=True)
    name, _, release = requirement.replace("-", "_").partition("==")
    (wheel,) = folder.parent.glob(f"{name}-{release}-*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    wheel.unlink()


def main(top: Path) -> None:
    """Fetch everything that is missing. Print a message if torchrl's repository cannot be reached."""
    top.mkdir(parents=True, exist_ok=True)
    for name, requirements in FOLDERS.values():
        if not (top / name).is_dir():
            for requirement in requirements.split():
                fetch_wheel(requirement, top / name)
    folder = top / "torchrl"
    clone = ["git", "clone", "--quiet", "--depth", "1", "--branch", f"v{version('torchrl')}", REPOSITORY, str(folder)]
    if not folder.is_dir() and subprocess.run(clone, check=False).returncode:
        print(f"torchrl's own tests are not run: {REPOSITORY} cannot be cloned. Put a checkout at {folder}.")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
