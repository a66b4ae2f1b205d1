"""Batches from disk, or one sentence that says why not."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrl_llm_kl._registry import first_sentence
from torchrl_llm_kl.cli._console import CommandError


def load_batch(path: Path, *, trust: bool = False) -> Any:
    """A TensorDict from a file of ``torch.save``, or a folder of ``td.save``, without running code from it.

    Args:
        path: the file or folder.

    Keyword Args:
        trust: allow pickled objects, which can run any code.
    """
    if not path.exists():
        raise CommandError(f"there is no {path}: pass a file of torch.save, or a folder that td.save (memmap) wrote.")
    if path.is_dir() or path.suffix == ".tdz":
        return _of_memmap(path, trust)
    if path.suffix in (".json", ".jsonl", ".parquet", ".safetensors", ".npz"):
        raise CommandError(
            f"{path} is a {path.suffix} file: expected a TensorDict or its dict from torch.save, or a folder of td.save. "
            "Files of text or token ids are for `score`."
        )
    return _of_torch(path, trust)


def _of_torch(path: Path, trust: bool) -> Any:
    import pickle

    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=not trust)
    except pickle.UnpicklingError as error:
        if trust or "weights_only" not in str(error).lower().replace(" ", "_"):
            raise CommandError(f"{path} is no file of torch.save: {first_sentence(error)}") from error
        raise CommandError(
            f"{path} holds pickled objects besides tensors, which can run any code when they are loaded: save "
            "td.to_dict() with torch.save, or use td.save(folder); or pass --trust if you made the file yourself."
        ) from error
    except (EOFError, RuntimeError, ValueError, AttributeError, ImportError, IndexError, KeyError) as error:
        raise CommandError(f"{path} cannot be read by torch.load: {first_sentence(error) or 'it is empty'}") from error
    return _as_tensordict(found, path)


def _as_tensordict(found: Any, path: Path) -> Any:
    from tensordict import TensorDictBase, is_tensor_collection

    if isinstance(found, TensorDictBase):
        return found
    if is_tensor_collection(found):
        return found.to_tensordict()
    if isinstance(found, Mapping) and found and all(isinstance(key, str) for key in found):
        return _of_dict({key: value for key, value in found.items() if not key.startswith("__")}, path)
    raise CommandError(
        f"{path} holds a {type(found).__name__}: expected a TensorDict, its dict (td.to_dict()) or its state_dict."
    )


def _of_dict(found: dict[str, Any], path: Path) -> Any:
    """A TensorDict from nested dicts, or from a flat one with dotted names. They do not say what its batch dimensions are."""
    from tensordict import TensorDict

    tokens = found["tokens"].get("full") if isinstance(found.get("tokens"), Mapping) else found.get("tokens.full")
    dense = tokens is not None and not getattr(tokens, "is_nested", False)
    dims = max(1, getattr(tokens, "ndim", 2) - 1) if dense else 1
    try:
        td = TensorDict.from_dict(found, auto_batch_size=True, batch_dims=dims)
        td = td.unflatten_keys(".") if any("." in key for key in found) else td
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise CommandError(f"the dict in {path} is no batch: {first_sentence(error)}") from error
    if td.batch_dims < dims:
        raise CommandError(
            f"the entries of the dict in {path} have no first dimension in common, so it is no batch: save td.to_dict() of a "
            "TensorDict."
        )
    return td


def _of_memmap(path: Path, trust: bool) -> Any:
    from tensordict import TensorDict

    if path.is_dir():
        names = [str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()]
        if "meta.json" not in names:
            raise CommandError(f"the folder {path} holds no meta.json: expected one that td.save or td.memmap wrote.")
    else:
        try:
            names = zipfile.ZipFile(path).namelist()
        except zipfile.BadZipFile:
            raise CommandError(f"{path} is no archive of td.save.") from None
    pickled = [name for name in names if name.endswith((".pickle", ".pkl"))]
    if pickled and not trust:
        raise CommandError(
            f"{path} holds pickled objects ({pickled[0]}), which can run any code when they are loaded: leave entries that are "
            "no tensors out (td.select), or pass --trust if you made it yourself."
        )
    try:
        return TensorDict.load_memmap(path)
    except (OSError, ValueError, KeyError, RuntimeError, json.JSONDecodeError) as error:
        raise CommandError(f"{path} is damaged: {first_sentence(error)}") from error
