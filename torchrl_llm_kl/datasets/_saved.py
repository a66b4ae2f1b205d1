"""Batches on disk. A write is atomic, reading runs no code from the file, and a round trip preserves the batch."""

from __future__ import annotations

import importlib
import json
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
    is_tensorclass,
)
from torch import Tensor

from torchrl_llm_kl._files import replacing
from torchrl_llm_kl._registry import first_sentence
from torchrl_llm_kl._typing import Json
from torchrl_llm_kl.datasets._rollouts import from_rollouts
from torchrl_llm_kl.datasets._values import DataError
from torchrl_llm_kl.masks import Tokenizer
from torchrl_llm_kl.ragged import fields_of, node_of

_FORMAT, _VERSION = "torchrl_llm_kl.batch", 1
#: Types of values that a file may hold besides tensors. Loading them runs no code.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
#: Packages whose tensorclasses may be in a batch. Loading a tensorclass imports its module, so the list is short.
_PACKAGES = ("tensordict", "torchrl.data", "torchrl.envs.llm", "torchrl.modules.llm")
#: First bytes of JSON, Parquet and gzip.
_OF_ROWS = (b"{", b"[", b"PAR1", b"\x1f\x8b")
#: Errors that torch, tensordict or this module raise for a damaged file.
_DAMAGED = (
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)

# ------------------------------------------------------------------ writing


def save_batch(batch: TensorDictBase, path: str | Path) -> None:
    """Write a batch to a file that :func:`load_batch`, ``check`` and ``inspect`` read.

    The file contains no pickled objects. It can hold tensors (padded, jagged or nested), text, numbers, lists, dicts,
    conversations (``History``) and other tensorclasses of torchrl. It preserves the structure of the batch, including lazy
    stacks with rows of different lengths, as torchrl's collectors return them. An earlier file is replaced only when the new
    one is complete.

    Args:
        batch: a TensorDict or tensorclass of any batch size. Tensors are detached, and a view is saved without the rest of its
            storage.
        path: the file, in an existing folder.

    Raises:
        TypeError: if the batch holds another Python object. The error names the entry.
        OSError: if the file cannot be written. An earlier file is then unchanged.

    Example:
        >>> import tempfile
        >>> from tensordict import lazy_stack
        >>> rows = [TensorDict(tokens=TensorDict(full=torch.arange(n)), query="why?") for n in (2, 3)]
        >>> path = Path(tempfile.mkdtemp()) / "batch.pt"
        >>> save_batch(lazy_stack(rows), path)
        >>> [row["tokens", "full"].tolist() for row in load_batch(path).unbind(0)]
        [[0, 1], [0, 1, 2]]
    """
    record = {"format": _FORMAT, "version": _VERSION, "batch": _encode(batch, ())}
    with replacing(Path(path)) as part:
        torch.save(record, part)


def _encode(value: TensorDictBase | Tensor, where: tuple[str, ...]) -> Tensor | dict[str, object]:
    """Convert an entry to a tensor, or to a dict from which :func:`_decode` rebuilds a collection. ``where`` is its key."""
    if isinstance(value, Tensor):
        return _encode_tensor(value)
    names = None if is_non_tensor(value) else value.names
    names = list(names) if names and any(names) else None
    about = {"batch_size": list(value.batch_size), "device": value.device is not None, "names": names}
    if isinstance(value, LazyStackedTensorDict):  # includes NonTensorStack
        rows = [_encode(row, where) for row in value.tensordicts]
        return {"class": _name(type(value), where), "dim": value.stack_dim, "rows": rows, **about}
    if is_non_tensor(value):
        return {"class": _name(type(value), where), "value": _plain_value(value.data, where), **about}
    if is_tensorclass(value):
        fields = {name: _plain_value(item, (*where, name)) for name, item in fields_of(value).items()}
        return {"class": _name(type(value), where), "of": _encode(node_of(value), where), "fields": fields}
    plain = value if type(value) is TensorDict else value.to_tensordict(retain_none=True)
    entries = {key: _encode(plain.get(key), (*where, key)) for key in plain.keys()}  # noqa: SIM118
    return {"class": _name(TensorDict, where), "entries": entries, **about}


def _encode_tensor(value: Tensor) -> Tensor:
    value = value.detach()
    if value.layout is torch.jagged:  # a clone would lose the identity of offsets that several tensors share
        return value
    if type(value) is not Tensor:  # memory-mapped
        value = value.as_subclass(Tensor)
    # torch.save writes the whole storage, so a view is copied first.
    whole = not value.is_nested and value.untyped_storage().nbytes() == value.numel() * value.element_size()
    return value if whole else value.clone()


def _plain_value(value: Any, where: tuple[str, ...]) -> object:
    """Convert a Python value, which may be nested. Raises a TypeError if it could only be pickled."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return _encode_tensor(value)
    if type(value) in (list, tuple, set):
        return type(value)(_plain_value(item, where) for item in value)
    if type(value) is dict:
        return {_plain_value(key, where): _plain_value(item, where) for key, item in value.items()}
    raise TypeError(
        f"the entry {where} holds a {type(value).__module__}.{type(value).__name__}, which only pickle can store: expected "
        "tensors, text, numbers, lists or dicts. Convert it, or leave it out with batch.exclude(...)."
    )


def _name(cls: type, where: tuple[str, ...]) -> str:
    name = f"{cls.__module__}:{cls.__qualname__}"
    try:
        _class(name)
    except (ValueError, ImportError, AttributeError) as error:
        raise TypeError(f"the entry {where} cannot be saved: {error}. Convert it with .to_tensordict().") from None
    return name


def _class(name: str) -> type[TensorDict]:
    """Import the tensor collection with this name. Raises a ValueError for a class outside the trusted packages."""
    module, _, cls = name.partition(":")
    if not any(f"{module}.".startswith(f"{package}.") for package in _PACKAGES):
        raise ValueError(f"{name!r} is not a class of {', '.join(_PACKAGES)}")
    loaded = getattr(importlib.import_module(module), cls)
    if not is_tensor_collection(loaded):
        raise ValueError(f"{name!r} is not a tensor collection")
    return loaded


# ------------------------------------------------------------------ reading


def load_batch(
    path: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    columns: Mapping[str, str] | None = None,
    trust: bool = False,
) -> TensorDictBase:
    """Read a batch from disk onto the CPU without running code from it.

    Args:
        path: one of these:

            - a file of :func:`save_batch`, or of ``torch.save`` applied to a TensorDict's ``to_dict()`` or ``state_dict()``.
              A dict does not store the batch size, so the batch size of ``("tokens", "full")`` is used.
            - a folder or ``.tdz`` archive of ``td.save``
            - rollouts of another framework, in a JSONL, JSON or Parquet file. See :func:`from_rollouts`.
        tokenizer: encodes rollouts that hold text.

    Keyword Args:
        columns: the columns of rollouts by role. See :func:`from_rollouts`.
        trust: also read pickled objects, which can run any code.

    Returns:
        The TensorDict or tensorclass that was saved. Tensors from a folder or an archive are memory-mapped.

    Raises:
        FileNotFoundError: if ``path`` does not exist.
        DataError: a ``ValueError``, if ``path`` holds no batch, is damaged or incomplete, contains links, or contains pickled
            objects and ``trust`` is False.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "batch.pt"
        >>> save_batch(TensorDict(advantage=torch.tensor([1.0, -1.0]), query="why?", batch_size=[2]), path)
        >>> found = load_batch(path)
        >>> found.batch_size, found["advantage"], found["query"]
        (torch.Size([2]), tensor([ 1., -1.]), 'why?')
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: pass a file of save_batch, or a folder of td.save.")
    if path.is_dir() or path.suffix.lower() == ".tdz":
        return _of_memmap(path, trust)
    if not path.is_file():  # opening a pipe would wait for its writer
        raise DataError(f"{path} is not a regular file: pass a file of save_batch.")
    with path.open("rb") as file:
        start = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(_OF_ROWS) or path.suffix.lower() in (".jsonl", ".json", ".parquet", ".gz"):
        return from_rollouts(path, tokenizer, columns=columns)
    return _of_torch(path, trust, tokenizer, columns)


def _untrusted(path: Path, name: str = "") -> DataError:
    return DataError(
        f"{path} holds more than tensors{name}, and loading it can run any code: pass a file of save_batch, or --trust "
        "(trust=True) if you made it yourself."
    )


def _of_torch(
    path: Path, trust: bool, tokenizer: Tokenizer | None, columns: Mapping[str, str] | None
) -> TensorDictBase:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=not trust)
    except (pickle.UnpicklingError, *_DAMAGED) as error:
        # torch has no error type for pickled objects that it refuses to load.
        if not trust and "weights_only" in str(error).lower().replace(" ", "_"):
            raise _untrusted(path) from error
        raise DataError(f"{path} cannot be read by torch.load: {first_sentence(error) or 'it is empty'}") from error
    if isinstance(loaded, dict) and isinstance(loaded.get("samples"), list):  # slime's dump of rollouts
        return from_rollouts(loaded["samples"], tokenizer, columns=columns)
    if columns:
        raise DataError(
            f"{path} holds a batch, whose entries have their names: columns= is for rows of another framework."
        )
    if isinstance(loaded, TensorDictBase):
        return loaded
    if is_tensor_collection(loaded):
        return loaded.to_tensordict()
    if isinstance(loaded, dict) and loaded.get("format") == _FORMAT:
        return _of_record(loaded, path)
    if isinstance(loaded, dict) and loaded and all(isinstance(key, str) for key in loaded):
        # `state_dict` stores the batch size and the device under keys with underscores.
        return _of_dict({key: value for key, value in loaded.items() if not key.startswith("__")}, path)
    raise DataError(f"{path} holds a {type(loaded).__name__}: expected a batch of save_batch, or a dict of entries.")


def _of_record(record: Json, path: Path) -> TensorDictBase:
    if record.get("version") != _VERSION:
        raise DataError(f"{path} has format version {record.get('version')!r}, expected {_VERSION}. Save it again.")
    try:
        return _decode(record["batch"])
    except (*_DAMAGED, RecursionError) as error:
        raise DataError(f"{path} is damaged: {first_sentence(error)}") from error


def _decode(node: Json | Tensor) -> TensorDictBase | Tensor:
    if isinstance(node, Tensor):
        return node
    cls = _class(node["class"])
    if "of" in node:
        return cls.from_tensordict(_decode(node["of"]), dict(node["fields"]))
    device = torch.device("cpu") if node["device"] else None
    if "rows" in node:
        out = cls(*map(_decode, node["rows"]), stack_dim=node["dim"])
    elif "value" in node:
        return cls(data=node["value"], batch_size=node["batch_size"], device=device)
    else:
        out = TensorDict({}, batch_size=node["batch_size"], device=device)
        for key, value in node["entries"].items():
            out.set(key, _decode(value))
    if node["names"] is not None:
        out.names = node["names"]
    return out


def _of_dict(entries: Json, path: Path) -> TensorDictBase:
    """Build a TensorDict from nested dicts, or from a flat dict with dotted names.

    The dicts do not store the batch size, so the dimensions of the tokens determine it.
    """
    tokens = entries["tokens"].get("full") if isinstance(entries.get("tokens"), Mapping) else entries.get("tokens.full")
    dims = max(1, tokens.ndim - 1) if isinstance(tokens, Tensor) and not tokens.is_nested else 1
    try:
        td = TensorDict.from_dict(entries, auto_batch_size=True, batch_dims=dims)
        td = td.unflatten_keys(".") if any("." in key for key in entries) else td
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"the dict in {path} is not a batch: {first_sentence(error)}") from error
    if td.batch_dims < dims:
        raise DataError(f"the entries of the dict in {path} have different first dimensions: save it with save_batch.")
    return td


# ------------------------------------------------------------------ folders and archives of td.save


def _of_memmap(path: Path, trust: bool) -> TensorDictBase:
    try:
        names, read = _folder(path) if path.is_dir() else _archive(path)
        if "meta.json" not in names:
            raise DataError(f"{path} holds no meta.json: expected a folder or an archive of td.save.")
        pickled = sorted(name for name in names if name.lower().endswith((".pickle", ".pkl")))
        if pickled and not trust:
            raise _untrusted(path, f" ({pickled[0]})")
        missing = _missing(names, read)
        if missing:
            raise DataError(f"{path} is incomplete: it lacks {', '.join(missing[:3])}. Save it again.")
        return TensorDict.load_memmap(path, allow_pickle=trust)
    except DataError:
        raise
    except (*_DAMAGED, RecursionError) as error:
        raise DataError(f"{path} is damaged: {first_sentence(error)}") from error


#: The names of all files, and a function that reads a file.
_Files = tuple[set[str], Callable[[str], bytes]]


def _folder(path: Path) -> _Files:
    names = set()
    for each in path.rglob("*"):
        if each.is_symlink() or not (each.is_dir() or each.is_file()):
            raise DataError(f"{each} is a link or a device, which is not read: replace it by a regular file.")
        if each.is_file():
            names.add(each.relative_to(path).as_posix())
    return names, lambda name: (path / name).read_bytes()


def _archive(path: Path) -> _Files:
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name for name in archive.namelist() if not name.endswith("/")}
            metadata = {name: archive.read(name) for name in names if name.rpartition("/")[2] == "meta.json"}
    except zipfile.BadZipFile:
        raise DataError(f"{path} is not an archive of td.save.") from None
    return names, metadata.__getitem__


def _missing(names: set[str], read: Callable[[str], bytes]) -> list[str]:
    """List the files that the metadata requires and that are missing. tensordict would skip them without an error."""
    children: dict[str, set[str]] = {}
    for name in names:
        parts = name.split("/")
        for i, part in enumerate(parts):
            children.setdefault("/".join(parts[:i]), set()).add(part)
    missing: list[str] = []
    for name in sorted(names):
        folder, _, last = name.rpartition("/")
        if last == "meta.json":
            needed = _needed(json.loads(read(name)), children[folder])
        else:  # tensordict does not read a name in another case
            needed = {last.lower()} & {"other.pickle", "pickle.pkl", "meta.json"}
        paths = {f"{folder}/{each}" if folder else each for each in needed}
        missing += sorted(paths - names - set(missing))
    return missing


def _needed(about: Json, here: set[str]) -> set[str]:
    """List the files that the metadata of a folder requires. ``here`` holds the names in the folder."""
    kind = str(about["_type"])
    if "torchrl." in kind:  # tensordict finds a class only after its module is imported
        _class(":".join(kind.removeprefix("<class '").removesuffix("'>").rsplit(".", 1)))
    if kind.endswith("NonTensorStack'>") and "data" in about:
        return {"pickle.pkl"} if isinstance(about["data"], str) else set()
    if "_is_non_tensor" in about:
        return set() if "data" in about else {"other.pickle"}
    if "stack_dim" in about:
        last = max((int(each) for each in here if each.isdecimal()), default=0)
        return {f"{i}/meta.json" for i in range(last + 1)}
    if not kind.endswith("tensordict._td.TensorDict'>"):
        return {"_tensordict/meta.json"}
    names = {unquote(each): each for each in here}
    out = set()
    for key, entry in about.items():
        if isinstance(entry, dict) and "type" in entry:
            out.add(f"{names.get(key, key)}/meta.json")
        # An empty tensor has no file.
        elif isinstance(entry, dict) and (entry.get("is_nested") or 0 not in entry["shape"]):
            files = [f"{key}.memmap"] + [f"{key}.shape.memmap"] * bool(entry.get("is_nested"))
            out |= {names.get(file, file) for file in files}
    return out
