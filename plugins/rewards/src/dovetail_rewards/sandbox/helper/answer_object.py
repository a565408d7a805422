"""What stands in the tests' process for an object of the response's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from .answer_client import AnswerClient

FIX = "set tests=in_process"


class NotPlainError(TypeError):
    """The tests do with a value of the response what only its own process could do."""


class AnswerObject:
    """Stands for an object of the response's process that is no plain data: a function, an instance, an iterator.

    What is asked of it is done there, and gives plain data or another one. It compares with nothing, and has no type here.
    """

    __slots__ = ("_client", "_key")

    def __init__(self, client: AnswerClient, number: int, kind: str) -> None:
        object.__setattr__(self, "_client", client)
        object.__setattr__(self, "_key", (number, kind))

    def _ask(self, what: str, /, *args: object, **named: object) -> Any:
        return object.__getattribute__(self, "_client").ask(what, self, *args, **named)

    def __call__(self, /, *args: object, **named: object) -> Any:
        return self._ask("call", *args, **named)

    def __getattr__(self, name: str) -> Any:
        return self._ask("getattr", name)

    def __setattr__(self, name: str, value: object) -> None:
        self._ask("setattr", name, value)

    def __delattr__(self, name: str) -> None:
        self._ask("delattr", name)

    def __getitem__(self, key: object) -> Any:
        return self._ask("getitem", key)

    def __setitem__(self, key: object, value: object) -> None:
        self._ask("setitem", key, value)

    def __contains__(self, item: object) -> bool:
        return bool(self._ask("contains", item))

    def __instancecheck__(self, value: object) -> bool:
        if type(value) is not AnswerObject:
            _refuse(self, "isinstance with a copy and this class")
        return bool(self._ask("isinstance", value))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return _refuse(self, "the type")

    def __iter__(self) -> Any:
        return self._ask("iter")

    def __next__(self) -> Any:
        return self._ask("next")

    def __len__(self) -> int:
        return int(self._ask("len"))

    def __bool__(self) -> bool:
        return bool(self._ask("bool"))

    def __str__(self) -> str:
        return str(self._ask("str"))

    def __repr__(self) -> str:
        return str(self._ask("repr"))


def _refuse(one: AnswerObject, what: str) -> NoReturn:
    kind = object.__getattribute__(one, "_key")[1]
    client: AnswerClient = object.__getattribute__(one, "_client")
    client.refuse(
        f"the response gave a value of type {kind}, which is no plain data: the tests' process can't evaluate "
        f"{what} of it; {FIX} if the response may decide it"
    )


def _refused(name: str) -> Callable[..., Any]:
    return lambda self, *_: _refuse(self, name)


class TypeOfCopy(type):
    """The tests' `type`: of an object of the response's process there is none here."""

    def __new__(cls, *args: Any, **named: Any) -> Any:
        """Return the type of the one argument, or a new class."""
        if len(args) != 1:
            return super().__new__(cls, *args, **named)
        if type(args[0]) is AnswerObject:
            _refuse(args[0], "the type")
        return type(args[0])


for _name in (
    *("eq", "ne", "lt", "le", "gt", "ge", "hash"),
    *(
        f"{side}{one}"
        for side in ("", "r")
        for one in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
    ),
    *("enter", "exit", "await", "aiter", "anext", "aenter", "aexit", "reduce_ex", "subclasscheck"),
    *("neg", "abs", "round", "int", "float", "index", "complex"),
):
    setattr(AnswerObject, f"__{_name}__", _refused(f"__{_name}__"))
