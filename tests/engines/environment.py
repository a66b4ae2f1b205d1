"""Creates the separate environment of the engines: ``python tests/engines/environment.py FOLDER``.

It holds vLLM for processors (``vllm.txt``: pinned, with hashes for CPython 3.11 on x86-64) in ``FOLDER/vllm``. What is there
already is kept.
"""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

LIST = Path(__file__).with_name("vllm.txt")
NEEDED = 8 * 2**30  # bytes: 3.5 GB, and the wheels while they are unpacked
HASHED = sys.version_info[:2] == (3, 11)


def requirements(folder: Path) -> Path:
    """The pinned list. Other Pythons have wheels with other hashes, so theirs is without hashes."""
    if HASHED:
        return LIST
    plain = folder / "vllm.txt"
    plain.write_text("".join(f"{line.partition(' --hash')[0]}\n" for line in LIST.read_text().splitlines()))
    return plain


def main(top: Path) -> None:
    """Create the environment, or say why it is not supported."""
    folder, ready = top / "vllm", top / "vllm" / ".ready"
    if ready.is_file() and ready.read_bytes() == LIST.read_bytes():
        return
    top.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(top).free) < NEEDED:
        free = f"{free / 2**30:.1f} GiB"
        raise SystemExit(f"The engines are not tested: {top} has {free} free, vLLM needs {NEEDED / 2**30:.0f}.")
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
    if subprocess.run([*pip, "--requirement", str(requirements(top))], check=False).returncode:
        raise SystemExit(
            "The engines are not tested: pip cannot install vLLM (its reason is above). It needs a package index, and one with "
            "torch for processors: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make engines."
        )
    shutil.copy(LIST, ready)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
