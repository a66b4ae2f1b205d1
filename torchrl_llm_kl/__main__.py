"""``python -m torchrl_llm_kl``: the command line."""

from __future__ import annotations

import sys

from torchrl_llm_kl.cli import main

if __name__ == "__main__":
    sys.exit(main())
