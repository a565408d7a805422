"""What stands in the tests' process for an object of the response's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .evaluation import AnswerClient

FIX = "set tests=in_process"


class NotPlainError(TypeError):
    """The tests do with a value of the response what only its own process could do."""


class AnswerObject:
    """Stands for an object of the response's process that is no plain data: a function, an instance, an iterator.

    What is asked of it is done there, and gives plain data or another one. It compares with nothing.
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


def _refused(name: str) -> Callable[..., Any]:
    def refuse(self: AnswerObject, *_: object) -> Any:
        kind = object.__getattribute__(self, "_key")[1]
        raise NotPlainError(
            f"the response gave a value of type {kind}, which is no plain data: the tests' process can't evaluate "
            f"{name} of it; {FIX} if the response may decide it"
        )

    return refuse


for _name in (
    *("eq", "ne", "lt", "le", "gt", "ge", "hash"),
    *(
        f"{side}{one}"
        for side in ("", "r")
        for one in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
    ),
    *("neg", "abs", "round", "int", "float", "index", "complex"),
):
    setattr(AnswerObject, f"__{_name}__", _refused(f"__{_name}__"))
