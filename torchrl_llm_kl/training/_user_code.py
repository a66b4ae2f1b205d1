"""The user's code in a run: files that register names, and functions named as ``mine.py:function``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from hashlib import sha256
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from torchrl_llm_kl._registry import no_such
from torchrl_llm_kl.training._config import ConfigError, TrainConfig

#: Settings of ``algorithm.args`` that may name a function.
FUNCTIONS_OF_ALGORITHM = ("objective", "advantage")

#: Files that :func:`import_code` ran. Each file runs once in a process, since a name can be registered only once.
_IMPORTED: dict[Path, ModuleType] = {}


def import_code(place: str) -> ModuleType:
    """Import a file (``mine.py``) or a module (``package.mine``), once in a process.

    Raises:
        ConfigError: if the file or module does not exist, or raises an error.

    Example:
        >>> import_code("math").sqrt(9.0)
        3.0
    """
    return _user_module(place, _IMPORTED)


def load_function(place: str, files: dict[Path, ModuleType] | None = None) -> Callable[..., Any]:
    """Load the function that a place such as ``rewards.py:correct`` or ``package.rewards:correct`` names.

    Args:
        place: a file or a module, and a name in it.
        files: the files that ran already, to which the function's file is added. Without them the file runs again, unless
            :func:`import_code` ran it.

    Raises:
        ConfigError: if the file, the module or the function does not exist, or the file raises an error.

    Example:
        >>> load_function("math:sqrt")(9.0)
        3.0
    """
    where, _, name = place.rpartition(":")
    if not where or not name:
        raise ConfigError(f"{place!r} names no function: write it as module.py:function or package.module:function.")
    values = vars(_user_module(where, {} if files is None else files))
    if not callable(values.get(name)):
        known = [key for key, value in values.items() if callable(value) and not key.startswith("_")]
        raise ConfigError(no_such(f"{where} has no function", name, known))
    return values[name]


def imported_function(place: str) -> Callable[..., Any]:
    """Load the function that a place such as ``mine.py:capped`` names. The file runs once, since it may register names.

    Example:
        >>> imported_function("math:sqrt")(9.0)
        3.0
    """
    return load_function(place, _IMPORTED)


def is_place(value: object) -> bool:
    """Whether a value is the place of a function in the user's code."""
    return isinstance(value, str) and ":" in value


def user_files(config: TrainConfig) -> list[tuple[str, str]]:
    """Key and path of the user's files in the configuration. Modules are left out."""
    places = [("reward.function", part.function) for part in config.reward.parts.values()]
    places += [(f"algorithm.args.{name}", str(config.algorithm.args.get(name))) for name in FUNCTIONS_OF_ALGORITHM]
    places += [("kl.estimator", str(config.kl.estimator)), ("kl.controller", config.kl.controller)]
    places += [("imports", f"{path}:") for path in config.imports]
    if config.turns is not None:
        places += [("turns.tools", place) for place in config.turns.tools]
        places += [("turns.reply", str(config.turns.reply)), ("turns.stop", str(config.turns.stop))]
    files = [(key, place.rpartition(":")[0]) for key, place in places]
    return [(key, path) for key, path in files if path.endswith(".py")]


def file_digests(config: TrainConfig) -> dict[str, str]:
    """SHA-256 of the prompt files, the chat template and the user's code by path, to notice changes when a run resumes.

    Modules (``package.module:function``) and the imports of a file are left out.

    Example:
        >>> file_digests(config)  # doctest: +SKIP
        {'prompts.jsonl': 'e3b0c442...', 'rewards.py': '9f86d081...'}
    """
    data = (config.data.prompts, config.data.held_out, config.data.experts, config.model.template)
    names = (*data, *(path for _, path in user_files(config)))
    paths = {name: Path(name).expanduser() for name in names if name}
    return {name: sha256(path.read_bytes()).hexdigest() for name, path in paths.items() if path.is_file()}


def _user_module(where: str, files: dict[Path, ModuleType]) -> ModuleType:
    if not where.endswith(".py"):
        sys.path.insert(0, "")  # finds modules of the current folder, as `python -m` does
        try:
            return importlib.import_module(where)
        except ImportError as error:
            raise ConfigError(f"the module {where} cannot be imported: {error}.") from error
        finally:
            sys.path.remove("")
    path = Path(where).expanduser().resolve()
    if path in _IMPORTED:
        return _IMPORTED[path]
    if path not in files:
        if not path.is_file():
            raise ConfigError(f"the file {where} does not exist, relative to the folder where the command runs.")
        files[path] = _run_file(path)
    return files[path]


def _run_file(path: Path) -> ModuleType:
    loader = SourceFileLoader(f"torchrl_llm_kl_user_{path.stem}", str(path))
    module = ModuleType(loader.name)
    module.__file__ = str(path)
    sys.modules[loader.name] = module  # dataclasses and pickle look their module up there
    beside = str(path.parent)  # the file may import its neighbours, now or later in a call
    sys.path.insert(0, beside)
    try:
        loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{path} cannot be loaded: {type(error).__name__}: {error}.") from error
    finally:
        sys.path.remove(beside)
        if beside not in sys.path:
            sys.path.append(beside)
    return module
