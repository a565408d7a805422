"""Proxies in the tests' process for objects of the response's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from .answer_client import AnswerClient

FIX = "set tests=in_process"


class NotPlainError(TypeError):
    """A value from the response's code can't be used by the tests, which run in another process.

    Only plain data (numbers, text, lists, mappings and the like) is copied to the tests' process. Tests can't compare or hash an object of
    another kind, or use its type, and can't get plain data that has a cycle, is nested too deeply or is too long.
    """


class AnswerObject:
    """Proxy of an object in the response's process that is not plain data, such as a function, an instance or an iterator.

    Calls, attributes and items are evaluated in the response's process, and return plain data or another proxy. Comparisons and hashing are
    refused.
    """

    __slots__ = ("_client", "_key")

    def __init__(self, client: AnswerClient, number: int, kind: str) -> None:
        object.__setattr__(self, "_client", client)
        object.__setattr__(self, "_key", (number, kind))

    def __call__(self, /, *args: object, **named: object) -> Any:
        return _ask(self, "call", *args, **named)

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__" or name in _REFUSED:
            return object.__getattribute__(self, name)
        return _ask(self, "getattr", name)  # all attributes are the response's, even __doc__

    def __setattr__(self, name: str, value: object) -> None:
        _ask(self, "setattr", name, value)

    def __delattr__(self, name: str) -> None:
        _ask(self, "delattr", name)

    def __getitem__(self, key: object) -> Any:
        return _ask(self, "getitem", key)

    def __setitem__(self, key: object, value: object) -> None:
        _ask(self, "setitem", key, value)

    def __delitem__(self, key: object) -> None:
        _ask(self, "delitem", key)

    def __contains__(self, item: object) -> bool:
        return bool(_ask(self, "contains", item))

    def __instancecheck__(self, value: object) -> bool:
        if type(value) is not AnswerObject:
            _refuse(self, "isinstance of a copied value and this class")
        return bool(_ask(self, "isinstance", value))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return _refuse(self, "the type")

    def __iter__(self) -> Any:
        return _ask(self, "iter")

    def __reversed__(self) -> Any:
        return _ask(self, "reversed")

    def __next__(self) -> Any:
        return _ask(self, "next")

    def __len__(self) -> int:
        return int(_ask(self, "len"))

    def __bool__(self) -> bool:
        return bool(_ask(self, "bool"))

    def __str__(self) -> str:
        return str(_ask(self, "str"))

    def __format__(self, form: str) -> str:
        return str(_ask(self, "format", form))

    def __repr__(self) -> str:
        return str(_ask(self, "repr"))


def _ask(one: AnswerObject, what: str, /, *args: object, **named: object) -> Any:
    return object.__getattribute__(one, "_client").ask(what, one, *args, **named)


def _refuse(one: AnswerObject, what: str) -> NoReturn:
    kind = object.__getattribute__(one, "_key")[1]
    client: AnswerClient = object.__getattribute__(one, "_client")
    client.refuse(
        f"the response returned a value of type {kind}, which is not plain data, so the tests' process can't evaluate "
        f"{what} of it; {FIX} if the response may influence the result"
    )


def _refused(name: str) -> Callable[..., Any]:
    return lambda self, *_: _refuse(self, name)


class TypeOfCopy(type):
    """Replacement of `type` for the tests. It refuses proxies, since a proxied object's type exists only in the response's process."""

    def __new__(cls, *args: Any, **named: Any) -> Any:
        """Return the type of the one argument, or a new class."""
        if len(args) != 1:
            return super().__new__(cls, *args, **named)
        if type(args[0]) is AnswerObject:
            _refuse(args[0], "the type")
        return type(args[0])


_REFUSED = frozenset(
    f"__{name}__"
    for name in (
        *("eq", "ne", "lt", "le", "gt", "ge", "hash"),
        *(
            f"{side}{one}"
            for side in ("", "r", "i")
            for one in (
                *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow"),
                *("and", "or", "xor", "lshift", "rshift"),
            )
        ),
        *("enter", "exit", "await", "aiter", "anext", "aenter", "aexit", "reduce_ex"),
        *("subclasscheck", "mro_entries"),
        *("neg", "pos", "abs", "invert", "round", "int", "float", "index", "complex"),
    )
)
for _name in _REFUSED:
    setattr(AnswerObject, _name, _refused(_name))
