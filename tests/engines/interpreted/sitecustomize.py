"""For the server's processes: vLLM's second model runner needs Triton, whose interpreter runs its kernels on a processor.

vLLM asks for a backend "cpu" that the released Triton does not have. The interpreter needs none, so an empty one is enough.
"""

import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

from triton.backends import backends

backends.setdefault("cpu", SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None))
