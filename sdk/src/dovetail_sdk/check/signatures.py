"""Whether a class's methods can be called as its interface says: parameters, async or not, property or method."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import attrs

_AWAITABLE = ("Awaitable", "Coroutine", "Future")
_MAY_BE_ASYNC = {"compute_score"}
"""Plain methods of an interface that may also be coroutines, as their docstrings say."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@attrs.frozen
class SignatureDifference:
    """One way in which a method can't be called as its interface says."""

    method: str
    text: str
    hint: str


def differences(cls: type, interface: type) -> list[SignatureDifference]:
    """Every public method of the interface that the class has in another form.

    A keyword-only parameter with a default may be missing: interfaces grow by them, and a plugin made for an earlier
    minor version does not know them.
    """
    found = []
    for name, declared in members(interface).items():
        own = inspect.getattr_static(cls, name)
        if own is declared:
            continue
        try:
            problem = _form(own, declared, name) or _parameters(own, declared)
        except (TypeError, ValueError):  # what has no signature can't be compared
            continue
        if problem:
            text = f"{cls.__qualname__}.{name} {problem}"
            wanted = signature_text(declared, name)
            found.append(SignatureDifference(name, text, f"{interface.__name__} says: {wanted}"))
    return found


def members(interface: type) -> Mapping[str, Any]:
    """The public methods and properties of an interface, its bases' included, as they are declared."""
    found: dict[str, Any] = {}
    for base in reversed(interface.__mro__):
        if not base.__module__.startswith("dovetail."):
            continue
        own = vars(base).items()
        found |= {n: member for n, member in own if not n.startswith("_") and _is_method(member)}
    return dict(sorted(found.items()))


def form(member: object) -> str:
    """`property`, `classmethod`, `staticmethod`, `async method`, `async generator` or `method`."""
    if isinstance(member, property | cached_property):
        return "property"
    if isinstance(member, classmethod | staticmethod):
        return type(member).__name__
    if inspect.iscoroutinefunction(member):
        return "async method"
    return "async generator" if inspect.isasyncgenfunction(member) else "method"


def signature_of(member: object) -> inspect.Signature:
    """Its signature without `self` or `cls`; annotations are as they stand in the source."""
    bare: Any = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    if isinstance(bare, property):
        bare = bare.fget
    elif isinstance(bare, cached_property):
        bare = bare.func
    signature = inspect.signature(bare)
    if isinstance(member, staticmethod):
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def signature_text(member: object, name: str) -> str:
    """A declaration in one line, such as `async abort(request_ids: Sequence[str]) -> None`."""
    kind = form(member)
    text = str(signature_of(member)).replace("'", "")
    if kind == "property":
        return f"{name}{text[text.rfind(')') + 1 :].replace(' -> ', ': ')} (a property)"
    prefix = {
        "async method": "async ",
        "classmethod": "classmethod ",
        "staticmethod": "staticmethod ",
    }
    return f"{prefix.get(kind, '')}{name}{text}"


def _is_method(member: object) -> bool:
    return inspect.isfunction(member) or isinstance(
        member, property | cached_property | classmethod | staticmethod
    )


def _form(own: object, declared: object, name: str) -> str | None:
    wanted = form(declared)
    if wanted == "property":
        return "is a method, where a property is wanted" if inspect.isfunction(own) else None
    if not _is_method(own):
        return None if callable(own) else f"is {own!r}, where a method is wanted"
    found = form(own)
    if found == "property":
        return "is a property, where a method is wanted"
    if (wanted == "classmethod") != (found == "classmethod"):
        return f"is a {found}, where a {wanted} is wanted"
    if wanted == "async method" and found != wanted:
        returns = str(signature_of(own).return_annotation)
        if found == "async generator" or not any(word in returns for word in _AWAITABLE):
            return "is not async, and its callers await it"
    if wanted == "method" and found == "async method" and name not in _MAY_BE_ASYNC:
        return "is async, and its callers do not await it"
    return None


def _parameters(own: object, declared: object) -> str | None:
    if form(declared) == "property" or not _is_method(own):
        return None
    mine, wanted = signature_of(own).parameters, signature_of(declared).parameters
    found = (*_positional(mine, wanted), *_by_name(mine, wanted), *_extra(mine, wanted))
    return found[0] if found else None


Parameters = Mapping[str, inspect.Parameter]


def _takes_any(parameters: Parameters, kind: object) -> bool:
    return any(parameter.kind is kind for parameter in parameters.values())


def _positional(mine: Parameters, wanted: Parameters) -> Iterator[str]:
    """What callers give by position, and may give by name as well."""
    places = [name for name, parameter in mine.items() if parameter.kind in _POSITIONAL]
    given = [(name, p) for name, p in wanted.items() if p.kind in _POSITIONAL]
    for place, (name, parameter) in enumerate(given):
        if place >= len(places):
            if not _takes_any(mine, inspect.Parameter.VAR_POSITIONAL):
                yield f"has no parameter {name!r}"
        elif places[place] != name:
            yield (
                f"calls its parameter number {place + 1} {places[place]!r}; callers may give it by its name {name!r}"
            )
        elif parameter.default is not parameter.empty and mine[name].default is parameter.empty:
            yield f"has no default for {name!r}, which callers may leave out"


def _by_name(mine: Parameters, wanted: Parameters) -> Iterator[str]:
    """What callers give by name alone; one with a default may be of a later minor version."""
    if _takes_any(mine, inspect.Parameter.VAR_KEYWORD):
        return
    for name, parameter in wanted.items():
        demanded = parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        if demanded and name not in mine:
            yield f"has no parameter {name!r}"


def _extra(mine: Parameters, wanted: Parameters) -> Iterator[str]:
    """What no caller gives."""
    for name, parameter in mine.items():
        variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if not variable and name not in wanted and parameter.default is parameter.empty:
            yield f"demands a parameter {name!r}, which no caller gives"
