"""Docstrings for the site's API reference, read from the running program, with roles as links.

The docstrings are written for ``help()`` and Sphinx: roles such as ``:class:`Name``` name other objects, and ``:math:`` holds
LaTeX. Decorators complete some docstrings, and ``#:`` comments document constants. The reader of the reference, griffe, only
sees the source code. This extension inserts the complete texts and turns roles into links.
"""

from __future__ import annotations

import inspect
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
import build_api

PACKAGE = build_api.torchrl_llm_kl.__name__
_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: griffe.ParameterKind.positional_only,
    inspect.Parameter.POSITIONAL_OR_KEYWORD: griffe.ParameterKind.positional_or_keyword,
    inspect.Parameter.VAR_POSITIONAL: griffe.ParameterKind.var_positional,
    inspect.Parameter.KEYWORD_ONLY: griffe.ParameterKind.keyword_only,
    inspect.Parameter.VAR_KEYWORD: griffe.ParameterKind.var_keyword,
}
_TABLE = re.compile(r"^( *)(=+(?: +=+)+)\n(.*?)\n\1\2\n(.*?)\n\1\2$", re.DOTALL | re.MULTILINE)
_TABLE_WITHOUT_HEAD = re.compile(r"^( *)(=+(?: +=+)+)\n(.*?)\n\1\2$", re.DOTALL | re.MULTILINE)
_ROLE = re.compile(r":(?P<role>[a-z]+):`(?P<text>[^`]+)`")


class Docstrings(griffe.Extension):
    """Completes the docstrings of the public names, and converts the roles in all docstrings."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called after the whole package was read."""
        for layer in build_api.ORDER:
            for name, thing in build_api.public_names(layer).items():
                complete(pkg, layer, name, thing)
        convert_all(pkg, pkg, set())


def complete(pkg: griffe.Module, layer: str, name: str, thing: Any) -> None:
    """Give a public name the docstring that it has in the running program."""
    found = pkg[layer].members[name]
    target = found.final_target if found.is_alias else found
    if inspect.isfunction(thing) and target.is_attribute:  # the variants of an objective are assigned
        target = as_function(target, thing)
        target.parent.set_member(name, target)
        if found.is_alias:
            found.target = target
    documented = inspect.isfunction(thing) or (inspect.isclass(thing) and thing.__module__.startswith(PACKAGE))
    text = (inspect.getdoc(thing) if documented else build_api.comment(layer, name)) or ""
    if text and (target.docstring is None or target.docstring.value != text):
        target.docstring = griffe.Docstring(text, lineno=target.lineno, endlineno=target.endlineno, parent=target)


def as_function(attribute: Any, thing: Any) -> griffe.Function:
    """Replace an attribute by the function assigned to it, with the signature from the running program."""
    parameters = [
        griffe.Parameter(
            parameter.name,
            annotation=None if parameter.annotation is parameter.empty else str(parameter.annotation),
            kind=_KINDS[parameter.kind],
            default=None if parameter.default is parameter.empty else repr(parameter.default),
        )
        for parameter in inspect.signature(thing).parameters.values()
    ]
    place = {"lineno": attribute.lineno, "endlineno": attribute.endlineno, "parent": attribute.parent}
    return griffe.Function(attribute.name, parameters=griffe.Parameters(*parameters), **place)


def convert_all(pkg: griffe.Module, holder: Any, seen: set[str]) -> None:
    """Convert the docstrings of a module or a class and of its members."""
    for thing in (holder, *holder.members.values()):
        if thing.is_alias or (thing is not holder and thing.path in seen):
            continue
        seen.add(thing.path)
        if thing is not holder and (thing.is_module or thing.is_class):
            convert_all(pkg, thing, seen)
        elif thing.docstring is not None:
            thing.docstring.value = convert(pkg, thing, thing.docstring.value)


def convert(pkg: griffe.Module, owner: Any, text: str) -> str:
    """Convert a docstring to Markdown: roles to links or code, tables, and section names to those that griffe knows."""
    for here, there in (("Example", "Examples"), ("Hyper-parameters", "Keyword Args")):
        text = re.sub(rf"^( *){here}:$", rf"\1{there}:", text, flags=re.MULTILINE)
    text = _TABLE.sub(lambda match: as_table(match[1], match[2], match[3], match[4]), text)
    text = _TABLE_WITHOUT_HEAD.sub(lambda match: as_table(match[1], match[2], "", match[3]), text)
    text = re.sub(r"^(\s*)\.\. seealso:: ", r"\1See also: ", text, flags=re.MULTILINE)
    return _ROLE.sub(partial(_converted, pkg, owner), text)


def as_table(indent: str, ruler: str, head: str, body: str) -> str:
    """Convert a simple reStructuredText table to Markdown."""
    starts = [match.start() + len(indent) for match in re.finditer("=+", ruler)]

    def cells(line: str) -> list[str]:
        ends = [*starts[1:], max(len(line), starts[-1])]
        return [line[start:end].strip().replace("|", "\\|") for start, end in zip(starts, ends, strict=True)]

    rows = [cells(head), ["---"] * len(starts), *(cells(line) for line in body.splitlines())]
    return "\n".join(f"{indent}| {' | '.join(row)} |" for row in rows)


def _converted(pkg: griffe.Module, owner: Any, match: re.Match[str]) -> str:
    if match["role"] == "math":
        return f"`${' '.join(match['text'].split())}$`"  # site_hooks.py turns it into MathML
    target = " ".join(match["text"].split()).lstrip("~")
    shown = target.rpartition(".")[2] if match["text"].startswith("~") else target
    identifier = identify(pkg, owner, target)
    return f"[`{shown}`][{identifier}]" if identifier else f"`{shown}`"


def identify(pkg: griffe.Module, owner: Any, target: str) -> str | None:
    """The identifier in the reference of the object that a role names, ``torchrl_llm_kl.LAYER.NAME[.MEMBER]``, or None."""
    parts = target.split(".")
    layer = owner.path.split(".")[1] if "." in owner.path else ""
    if parts[0] == PACKAGE:
        parts = parts[1:]
    if parts and parts[0] in build_api.ORDER and target != parts[0]:
        layer, *parts = parts
        if not parts:
            return f"{PACKAGE}.{layer}"
    if not parts:
        return None
    home = _home(layer, parts[0])
    if home is None:  # a member of the class that the docstring belongs to
        holder = owner if owner.is_class else owner.parent
        if holder is None or not holder.is_class or _home(layer, holder.name) is None:
            return None
        home, parts = _home(layer, holder.name), [holder.name, *parts]
    found = pkg[home].members[parts[0]]
    for part in parts[1:]:
        found = found.final_target if found.is_alias else found
        if not found.is_class or part.startswith("_") or part not in found.all_members:
            return None
        found = found.all_members[part]
        if found.docstring is None:
            return None
    return ".".join([PACKAGE, str(home), *parts])


def _home(layer: str, name: str) -> str | None:
    """The layer whose page documents a public name: ``layer`` itself if it has the name, else the defining layer."""
    holders = [other for other in build_api.ORDER if name in build_api.public_names(other)]
    if layer in holders:
        return layer
    return build_api.home_of(holders[0], name, build_api.public_names(holders[0])[name]) if holders else None
