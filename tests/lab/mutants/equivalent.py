"""Changes that no test can notice, with the reason: ``equivalent.json``."""

from __future__ import annotations

import json
from pathlib import Path

#: (file below ``torchrl_llm_kl``, function, the line with the change) -> why it is the same.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (file, function, line): reason
    for file, function, line, reason in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
}
