"""For the server's processes: vLLM's second model runner needs Triton, whose interpreter runs its kernels on a processor.

vLLM asks for a backend "cpu" that the released Triton does not have. The interpreter needs none, so an empty one is enough. Its
loops count in Python's integers, where a kernel expects a tensor's ``to``.
"""

import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

from triton.backends import backends
from triton.runtime import interpreter

backends.setdefault("cpu", SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None))


class Index(int):
    def to(self, dtype):
        return self


def patch(language, scope, original=interpreter._patch_lang_core):
    original(language, scope)
    count = language.range
    scope.set_attr(language, "range", lambda *bounds, **options: map(Index, count(*bounds, **options)))


interpreter._patch_lang_core = patch
