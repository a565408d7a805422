"""The registry of instructions. Each has a name, the function that checks a response, and the arguments of this function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import attrs

from dovetail.errors import nearest

Check = TypeVar("Check", bound=Callable[..., bool])

Relation = Literal["less than", "at least"]
"""The required relation of a count to its bound."""


@attrs.frozen
class Instruction:
    """A kind of instruction that a program can check, with the types of its arguments."""

    name: str
    """The instruction's name, such as `keywords:existence`."""
    holds: Callable[..., bool]
    """A function `holds(text, **arguments)` that returns whether a response follows the instruction."""
    arguments: Mapping[str, Any]
    """The type of each argument, by name."""
    optional: frozenset[str]
    """Arguments that may be absent."""

    def complaint(self, given: Mapping[str, Any]) -> str | None:
        """Return the reason why the given arguments are invalid, or None."""
        lacking = [
            name for name in self.arguments if name not in given and name not in self.optional
        ]
        if lacking:
            return f"instruction {self.name} lacks the argument(s) {', '.join(lacking)}"
        for name, value in given.items():
            if name not in self.arguments:
                close = nearest(name, self.arguments)
                return f"instruction {self.name} has no argument {name!r}" + (
                    f"; nearest: {close!r}" if close else ""
                )
            wanted = self.arguments[name]
            if not _is(value, wanted):
                return (
                    f"instruction {self.name} has {name}={value!r:.60}; expected {_named(wanted)}"
                )
        return None


INSTRUCTIONS: dict[str, Instruction] = {}
"""The instructions by name. `@instruction("my:name")` adds an instruction, which ground truths may then name."""


def instruction(name: str) -> Callable[[Check], Check]:
    """Register the decorated function as the instruction `name`.

    The function's first parameter is the response. Its keyword parameters are the instruction's arguments, annotated with `int`, `str`,
    `tuple[str, ...]` or `Relation`.
    """

    def add(holds: Check) -> Check:
        hints = get_type_hints(holds)
        parameters = list(inspect.signature(holds).parameters.values())[1:]
        INSTRUCTIONS[name] = Instruction(
            name,
            holds,
            {parameter.name: hints[parameter.name] for parameter in parameters},
            frozenset(p.name for p in parameters if p.default is not p.empty),
        )
        return holds

    return add


def compare(count: int, relation: str, bound: int) -> bool:
    """Return whether a count is less than a bound (`relation` "less than") or at least the bound ("at least")."""
    return count < bound if relation == "less than" else count >= bound


def _is(value: Any, wanted: Any) -> bool:
    if get_origin(wanted) is Literal:
        return value in get_args(wanted)
    if get_origin(wanted) is tuple:
        texts = isinstance(value, (list, tuple)) and len(value) > 0
        return texts and all(isinstance(part, str) and part for part in value)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return isinstance(value, wanted) and value != ""


def _named(wanted: Any) -> str:
    if get_origin(wanted) is Literal:
        return " or ".join(map(repr, get_args(wanted)))
    return {int: "a whole number from 0", str: "a text"}.get(wanted, "a list of texts")
