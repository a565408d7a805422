"""Machine-readable descriptions of the interfaces: their declarations, and the version that a change requires.

The description of every interface is committed (`dovetail/plugins/interfaces.json`). A change of a method, of a class
attribute or of a data class needs a new version: a minor version if existing plugins and callers keep working, else a
major version.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, get_origin

import attrs

import dovetail.plugins
from dovetail.errors import PluginError
from dovetail.hooks import HOOKS, HOOKS_API
from dovetail.interfaces import Plugin
from dovetail.plugins.contract import import_object
from dovetail.plugins.kinds import KINDS
from dovetail_sdk.check.signatures import members, signature_text

PLACE = Path(dovetail.plugins.__file__).parent / "interfaces.json"
SCHEMA = 2
COMMAND = "python -m dovetail_sdk interfaces"
"""Command that writes the description."""
Bump = Literal["none", "minor", "major"]
_ORDER: tuple[Bump, ...] = ("none", "minor", "major")


@attrs.frozen
class Change:
    """One difference between two descriptions of an interface, and the version bump that the difference requires."""

    text: str
    needs: Bump


def describe_all() -> dict[str, Any]:
    """Return `{"schema", "interfaces": {kind: {"interface", "api", "methods", "attributes", "types"}}, "hooks"}` of the imported core.

    Each method, attribute and field is `{"declared", "required"}`: its declaration in the source, and whether a plugin or a caller
    must provide it.
    """
    interfaces = {
        name: _describe(import_object(kind.interface), kind.api)
        for name, kind in sorted(KINDS.items())
    }
    hooks = {"api": HOOKS_API, "hooks": {name: list(HOOKS[name]) for name in sorted(HOOKS)}}
    return {"schema": SCHEMA, "interfaces": interfaces, "hooks": hooks}


def read() -> dict[str, Any]:
    """Return the committed description of the interfaces.

    Raises:
        PluginError: the file is missing or can't be read.
    """
    try:
        described: dict[str, Any] = json.loads(PLACE.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PluginError(
            f"{PLACE} can't be read: {error}", hint=f"write it again: {COMMAND}"
        ) from error
    return described


def write() -> Path:
    """Write the description of every plugin interface, derived from the imported classes, and return the file's path.

    Raises:
        PluginError: an interface changed without the required version bump; the message lists every such change.
    """
    described = describe_all()
    if PLACE.exists() and (complaints := missing_bumps(read(), described)):
        raise PluginError(
            "\n".join(complaints), hint="increase each version in the class of its interface"
        )
    PLACE.write_text(to_text(described), encoding="utf-8")
    return PLACE


def to_text(described: Mapping[str, Any]) -> str:
    """Return a description of the interfaces as JSON text, as `write` stores it."""
    return json.dumps(described, indent=1, ensure_ascii=False) + "\n"


def missing_bumps(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return a line for each interface that changed without the required version bump."""
    complaints = []
    old, new = before["interfaces"], after["interfaces"]
    for kind in sorted(old.keys() & new.keys()):
        found = changes(old[kind], new[kind])
        needed = max((change.needs for change in found), key=_ORDER.index, default="none")
        if _ORDER.index(bump(old[kind]["api"], new[kind]["api"])) < _ORDER.index(needed):
            which = "; ".join(change.text for change in found)
            complaints.append(
                f"the interface {kind} has version {new[kind]['api']} (before: {old[kind]['api']}), but its changes need a new {needed} version: {which}"
            )
    hooks = [
        Change(f"the hook {name} takes other arguments", "major")
        for name, arguments in before["hooks"]["hooks"].items()
        if not set(arguments) <= set(after["hooks"]["hooks"].get(name, ()))
    ]
    if hooks and bump(before["hooks"]["api"], after["hooks"]["api"]) != "major":
        complaints.append(
            f"the changes of the hooks need a new major version: {'; '.join(h.text for h in hooks)}"
        )
    return complaints


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Return the differences between two descriptions of one interface."""
    found = []
    for part in ("methods", "attributes"):
        found += list(_members(part.removesuffix("s"), before[part], after[part]))
    for name, fields in before["types"].items():
        now = after["types"].get(name)
        if now is None:
            found.append(Change(f"{name} is gone", "major"))
        else:
            found += list(_members(f"{name}'s", fields, now))
    found += [
        Change(f"{name} is new", "minor") for name in after["types"] if name not in before["types"]
    ]
    return found


def bump(before: str, after: str) -> Bump:
    """Return how a version number changed: `major` if its first number differs, `minor` if only its second differs, or `none`."""
    old, new = ([int(part) for part in version.split(".")] for version in (before, after))
    if new[0] != old[0]:
        return "major"
    return "none" if new == old else "minor"


def _members(what: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    for name, was in before.items():
        now = after.get(name)
        if now is None:
            yield Change(f"{what} {name} is gone", "major")
        elif now != was:
            text = f"{what} {name} was `{was['declared']}` and is `{now['declared']}`"
            yield Change(text, "minor" if _grew_only(was, now) else "major")
    for name, now in after.items():
        if name not in before:
            yield Change(f"{what} {name} is new", "major" if now["required"] else "minor")


def _grew_only(was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether a method only gained keyword-only parameters with defaults, or is no longer required."""
    if now["required"] and not was["required"]:
        return False
    if was["declared"] == now["declared"]:
        return True
    try:
        (fixed, before), (fixed_now, after) = map(_parsed, (was["declared"], now["declared"]))
    except (SyntaxError, AttributeError):  # not a method
        return False
    new = after.keys() - before.keys()
    kept = {name: after.get(name) for name in before}
    return fixed == fixed_now and kept == before and all(after[name][1] for name in new)


def _parsed(declared: str) -> tuple[tuple[str, str], dict[str, tuple[str, str]]]:
    """Divide a method's declaration into what callers rely on and the keyword-only parameters, which may be added later.

    Returns:
        A pair of the prefix, such as `async `, and the signature without keyword-only parameters, as source text; and, for each
        keyword-only parameter by name, its declaration and its default, as source text ("" without a default).

    Raises:
        SyntaxError, AttributeError: the declaration is not of a method.
    """
    kind, signature = re.fullmatch(r"((?:\w+ )?)\w+(\(.*)", declared).groups()  # type: ignore[union-attr]
    [function] = ast.parse(f"def f{signature}: ...").body
    assert isinstance(function, ast.FunctionDef)
    own = function.args
    keywords = {
        argument.arg: (ast.unparse(argument), ast.unparse(default) if default else "")
        for argument, default in zip(own.kwonlyargs, own.kw_defaults, strict=True)
    }
    own.kwonlyargs, own.kw_defaults = [], []
    return (kind, ast.unparse(function)), keywords


def _describe(interface: type, api: str) -> dict[str, Any]:
    module = importlib.import_module(interface.__module__)
    return {
        "interface": f"{interface.__module__}:{interface.__qualname__}",
        "api": api,
        "methods": {name: _method(member, name) for name, member in members(interface).items()},
        "attributes": dict(sorted(_attributes(interface))),
        "types": {
            name: _type(found)
            for name, found in sorted(vars(module).items())
            if isinstance(found, type)
            and found.__module__ == module.__name__
            and not name.startswith("_")
            and not issubclass(found, Plugin)
        },
    }


def _method(member: Any, name: str) -> dict[str, Any]:
    required = bool(getattr(member, "__isabstractmethod__", False))
    return {"declared": signature_text(member, name), "required": required}


def _attributes(interface: type) -> Iterator[tuple[str, dict[str, Any]]]:
    for base in reversed(interface.__mro__):
        if not base.__module__.startswith("dovetail."):
            continue
        for name, declared in vars(base).get("__annotations__", {}).items():
            text = _plain(declared)
            if name.startswith("_") or not (
                text.startswith("ClassVar") or get_origin(declared) is ClassVar
            ):
                continue
            required = not hasattr(interface, name)
            yield name, {"declared": f"{name}: {text}", "required": required}


def _type(cls: type) -> dict[str, dict[str, Any]]:
    """Describe the values of an enumeration, the fields of a data class, or the methods of any other class."""
    if issubclass(cls, enum.Enum):
        return {
            one.name: {"declared": f"{one.name} = {one.value!r}", "required": False} for one in cls
        }
    if not attrs.has(cls):
        return {name: _method(member, name) for name, member in members(cls).items()}
    return {
        field.name: {
            "declared": f"{field.name}: {_plain(field.type)}",
            "required": field.default is attrs.NOTHING,
        }
        for field in attrs.fields(cls)
    }


def _plain(annotation: object) -> str:
    """Return an annotation as source text, in a form that is the same in all Python versions."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    try:
        return ast.unparse(ast.parse(text, mode="eval"))
    except SyntaxError:
        return text
