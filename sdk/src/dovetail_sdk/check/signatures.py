"""Whether a class's methods can be called as its interface says: parameters, async or not, property or method."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import attrs

_AWAITABLE = ("Awaitable", "Coroutine", "Future")
_MAY_BE_ASYNC = {"compute_score"}
"""Plain methods of an interface that may also be coroutines according to their docstrings."""


@attrs.frozen
class SignatureDifference:
    """A difference between a class's method and the same method of its interface."""

    text: str
    hint: str


def differences(cls: type, interface: type) -> list[SignatureDifference]:
    """Return a difference for each public method whose signature in the class does not match the interface.

    A class may lack a keyword-only parameter with a default: a later minor version of the interface may have added the parameter.
    """
    found = []
    for name, declared in members(interface).items():
        own = inspect.getattr_static(cls, name)
        if own is declared:
            continue
        try:
            problem = _form(own, declared, name) or _call(own, declared)
        except (TypeError, ValueError):  # without a signature there is no comparison
            continue
        if problem:
            text = f"{cls.__qualname__}.{name} {problem}"
            wanted = signature_text(declared, name)
            found.append(SignatureDifference(text, f"{interface.__name__} says: {wanted}"))
    return found


def members(interface: type) -> Mapping[str, Any]:
    """Return the public methods and properties of an interface, by name: those that core or the interface's own package declares."""
    found: dict[str, Any] = {}
    declaring = {"dovetail", interface.__module__.partition(".")[0]}
    for base in reversed(interface.__mro__):
        if base.__module__.partition(".")[0] not in declaring:
            continue
        own = vars(base).items()
        found |= {n: member for n, member in own if not n.startswith("_") and _is_method(member)}
    return dict(sorted(found.items()))


def form(member: object) -> str:
    """Return what a member is: `property`, `classmethod`, `staticmethod`, `async method`, `async generator` or `method`."""
    if isinstance(member, property | cached_property):
        return "property"
    if isinstance(member, classmethod | staticmethod):
        return type(member).__name__
    if inspect.iscoroutinefunction(member):
        return "async method"
    return "async generator" if inspect.isasyncgenfunction(member) else "method"


def signature_of(member: object) -> inspect.Signature:
    """Return a method's signature without `self` or `cls`, with annotations as in the source."""
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
    """Return a declaration in one line, such as `async abort(request_ids: Sequence[str]) -> None`."""
    kind = form(member)
    text = str(signature_of(member)).replace("'", "")
    # Show members of enumerations as the source has them.
    text = re.sub(r"<(\w+\.\w+): [^>]*>", r"\1", text)
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
        return "is a method; expected a property" if inspect.isfunction(own) else None
    if not _is_method(own):
        return None if callable(own) else f"is {own!r}; expected a method"
    found = form(own)
    if found == "property":
        return "is a property; expected a method"
    if (wanted == "classmethod") != (found == "classmethod"):
        return f"is a {found}; expected a {wanted}"
    if wanted == "async method" and found != wanted:
        returns = str(signature_of(own).return_annotation)
        if found == "async generator" or not any(word in returns for word in _AWAITABLE):
            return "is not async; expected an async method, since callers await its result"
    if wanted == "method" and found == "async method" and name not in _MAY_BE_ASYNC:
        return "is async; expected a plain method, since callers do not await its result"
    return None


def _call(own: Any, declared: Any) -> str | None:
    """Return the first call that the interface allows and the method does not; None if there is none."""
    if form(declared) == "property" or not _is_method(own):
        return None
    mine = signature_of(own)
    for positional, named in _calls(signature_of(declared).parameters.values()):
        try:
            mine.bind(*positional, **dict.fromkeys(named))
        except TypeError as error:
            call = ", ".join([*positional, *(f"{name}=…" for name in named)])
            return f"can't be called with ({call}): {error}"
    return None


def _calls(parameters: Iterable[inspect.Parameter]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield calls as positional and named arguments: all by position, all by name, and only required arguments.

    Keyword-only parameters with a default are left out, since a later minor version may have added them.
    """
    fixed = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    places = [p.name for p in fixed if p.kind is not p.KEYWORD_ONLY]
    nameless = [p.name for p in fixed if p.kind is p.POSITIONAL_ONLY]
    required = [p.name for p in fixed if p.default is p.empty]
    keywords = [p.name for p in fixed if p.kind is p.KEYWORD_ONLY and p.name in required]
    yield places, keywords
    yield nameless, [name for name in places if name not in nameless] + keywords
    yield [name for name in places if name in required], keywords
