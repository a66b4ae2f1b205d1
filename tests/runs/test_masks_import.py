"""What an import of the masks loads."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_masks_loads_neither_transformers_nor_torchrl() -> None:
    code = "import sys, torchrl_llm_kl.masks; print({'transformers', 'torchrl', 'ray'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
