"""Writing files atomically."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which is renamed to ``path`` when the body ends.

    If the body raises an error, the temporary file is removed, and an existing file stays unchanged. A link stays a link.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with replacing(folder / "note.txt") as part:
        ...     _ = part.write_text("whole")
        >>> [file.name for file in folder.iterdir()]
        ['note.txt']
    """
    path = path.resolve()
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("rb") as written:
            os.fsync(written.fileno())  # a crash after the rename must not leave an empty file
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
