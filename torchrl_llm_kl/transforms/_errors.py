"""Errors of the transforms, and how they describe what was found."""

from __future__ import annotations

from tensordict import TensorDictBase

__all__ = ["MissingEntryError", "entries"]


class MissingEntryError(KeyError):
    """An entry that the transform reads is not in the data."""

    def __str__(self) -> str:
        # A KeyError shows its message quoted, with every quote in it escaped.
        return str(self.args[0])


def entries(td: TensorDictBase) -> str:
    """The entries of ``td``, for a message: ``tokens.full, tokens.prompt, ...``; those of ``next`` are left out."""
    names = {".".join(key[:2]) if isinstance(key, tuple) else key for key in td.keys(True) if key[0] != "next"}
    parents = {name.split(".")[0] for name in names if "." in name}
    return ", ".join(sorted(names - parents - {"next"})) or "nothing"
