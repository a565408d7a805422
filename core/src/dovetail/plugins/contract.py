"""Checks of a plugin class when it is loaded, with messages for the plugin's author."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection
from typing import Any, ClassVar, Literal, cast, get_args, get_origin

import attrs

from dovetail.errors import PluginBrokenError, PluginIncompatibleError
from dovetail.interfaces.plugin import Plugin
from dovetail.plugins.kinds import Kind
from dovetail.sections import PluginSection


def import_object(target: str) -> Any:
    """Import the module of `module:Name`, and return the named object."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def public_module(cls: type) -> str:
    """Return the name of the module to import a class from: the package if it exports the class, else the defining module."""
    package = ".".join(cls.__module__.split(".")[:2])
    exported = getattr(importlib.import_module(package), cls.__name__, None)
    return package if exported is cls else cls.__module__


def check_class(obj: object, kind: Kind, title: str) -> type[Plugin]:
    """Check that an object is a class that completely implements a kind's interface, and return the class.

    Raises:
        PluginBrokenError: the object is not a class, does not extend the interface, or lacks its methods or attributes.
    """
    interface = import_object(kind.interface)
    wanted = f"{public_module(interface)}.{interface.__name__}"
    if not isinstance(obj, type):
        raise PluginBrokenError(
            f"{title} is {type(obj).__name__} {obj!r}, not a class",
            hint=f"{with_article(kind.name)} plugin is a class that extends {wanted}",
        )
    if not issubclass(obj, interface):
        bases = ", ".join(base.__name__ for base in obj.__bases__)
        raise PluginBrokenError(
            f"{title} is a class that extends {bases}, but not {interface.__name__}",
            hint=f"{with_article(kind.name)} plugin extends {wanted}",
        )
    missing = sorted(getattr(obj, "__abstractmethods__", ()))
    if missing:
        raise PluginBrokenError(
            f"{title} does not implement {', '.join(missing)}",
            hint=f"define them as described in {wanted}: "
            + "; ".join(f"{name}{_signature(interface, name)}" for name in missing),
        )
    for name, allowed in _choices(interface).items():
        _check_choice(obj, name, allowed, title)
    for name in ("aliases", "capabilities", "before", "after"):
        _check_collection(obj, name, str, title)
    _check_collection(obj, "columns", import_object("dovetail.batch.columns:Column"), title)
    return obj


def check_api(api: str, kind: Kind, title: str) -> None:
    """Check that a range of interface versions contains this core's version of a kind's interface.

    Raises:
        PluginIncompatibleError: `api` does not contain the version, or is not a version range.
    """
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        fits = SpecifierSet(api).contains(kind.api, prereleases=True)
    except InvalidSpecifier as error:
        raise PluginIncompatibleError(
            f"{title} has api {api!r}, which is not a version range",
            hint=f'write a range such as api = ">={kind.api},<2"',
        ) from error
    if not fits:
        raise PluginIncompatibleError(
            f"{title} is made for the {kind.name} interface {api}; this dovetail-core has {kind.api}",
            hint="upgrade the plugin or dovetail-core, so that the versions match",
        )


def config_of(cls: type[Plugin], kind: Kind) -> type[PluginSection]:
    """Return the Config class of a plugin class; by default the section class of its kind.

    Raises:
        PluginBrokenError: the Config is not an attrs class that extends the kind's section class.
    """
    section = import_object(kind.section)
    if cls.Config is PluginSection:
        return cast("type[PluginSection]", section)
    return check_config(cls.Config, kind, f"Config of {cls.__module__}.{cls.__qualname__}")


def check_config(config: object, kind: Kind, title: str) -> type[PluginSection]:
    """Check that an object is a Config class for a kind, and return the class.

    Raises:
        PluginBrokenError: the object is not an attrs class that extends the kind's section class.
    """
    section = import_object(kind.section)
    if config is PluginSection:
        return cast("type[PluginSection]", section)
    if not (isinstance(config, type) and issubclass(config, section) and attrs.has(config)):
        raise PluginBrokenError(
            f"{title} is {config!r}, which does not extend {section.__name__}",
            hint=f"write: @attrs.frozen(kw_only=True) class Config({section.__name__}) "
            f"(from {public_module(section)})",
        )
    return cast("type[PluginSection]", config)


def _choices(interface: type) -> dict[str, tuple[Any, ...]]:
    """Return the allowed values of each class attribute of an interface that is annotated `ClassVar[Literal[…]]`."""
    choices: dict[str, tuple[Any, ...]] = {}
    for name, declared in inspect.get_annotations(interface, eval_str=True).items():
        outer: Any = get_origin(declared)
        inner: Any = get_args(declared)
        if outer is ClassVar and get_origin(inner[0]) is Literal:
            choices[name] = get_args(inner[0])
    return choices


def _check_choice(cls: type, name: str, allowed: tuple[Any, ...], title: str) -> None:
    wanted = " or ".join(map(repr, allowed))
    hint = f"write in the class: {name} = {allowed[0]!r} (or {' or '.join(map(repr, allowed[1:]))})"
    if not hasattr(cls, name):
        raise PluginBrokenError(
            f"{title} does not set the class attribute {name}; expected {wanted}", hint=hint
        )
    # A property computes the value from the config, which only an instance has.
    value = inspect.getattr_static(cls, name)
    if not isinstance(value, property) and getattr(cls, name) not in allowed:
        raise PluginBrokenError(
            f"{title} has {name} = {getattr(cls, name)!r}; expected {wanted}", hint=hint
        )


def _check_collection(cls: type, name: str, item: type, title: str) -> None:
    value = inspect.getattr_static(cls, name, ())
    if isinstance(value, property):
        return
    if isinstance(value, str) or not isinstance(value, Collection):
        wrong, example = value, f"({value!r},)"
    else:
        wrong = next((one for one in value if not isinstance(one, item)), None)
        example = f"({item.__name__}(…),)" if item is not str else f"({str(wrong)!r},)"
    if wrong is not None:
        raise PluginBrokenError(
            f"{title} has {name} = {value!r}; expected a tuple, each entry a {item.__name__}",
            hint=f"write in the class: {name} = {example}",
        )


def with_article(word: str) -> str:
    """Return a word with the indefinite article that its first letter takes."""
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def _signature(interface: type, name: str) -> str:
    member = inspect.getattr_static(interface, name)
    if isinstance(member, property):
        return " (a property)"
    try:
        return str(inspect.signature(getattr(interface, name)))
    except (TypeError, ValueError):
        return "()"
