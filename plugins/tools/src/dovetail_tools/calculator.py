"""Calculator: arithmetic, parsed as a Python expression and evaluated without executing code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dovetail.errors import ToolError
from dovetail.interfaces import Tool, ToolResult, ToolSchema

MAX_LENGTH = 1000
"""Maximum characters of an expression."""
MAX_BITS = 14284
"""Maximum bits of a whole number: 4300 digits, the most that Python converts to text. Arithmetic on such numbers takes microseconds."""

_Number = int | float
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_CONSTANTS = {"pi": math.pi, "e": math.e}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "round": lambda value, digits=None: _round(value, digits),
    **{
        name: getattr(math, name)
        for name in (
            "sqrt",
            "exp",
            "log",
            "log2",
            "log10",
            "sin",
            "cos",
            "tan",
            "asin",
            "acos",
            "atan",
            "floor",
            "ceil",
            "gcd",
        )
    },
}
_SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Work out an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "Such as (3 + 4.5) * 2**10 / sqrt(2). Operators: + - * / // % **. "
                    f"Functions: {', '.join(_FUNCTIONS)}. Constants: pi, e.",
                }
            },
            "required": ["expression"],
        },
    },
}


class Calculator(Tool):
    """Arithmetic on numbers; whole numbers are exact up to 4300 digits."""

    name = "calculator"
    api = ">=2.0,<3"

    def schemas(self) -> Sequence[ToolSchema]:
        return (_SCHEMA,)

    async def call(self, state: Any, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult(content=calculate(arguments["expression"]))


def calculate(expression: str) -> str:
    """Return the value of an arithmetic expression, as Python prints it.

    Raises:
        ToolError: the text is not arithmetic, has no value, or a number in it is too large.
    """
    if len(expression) > MAX_LENGTH:
        raise ToolError(f"the expression has {len(expression)} characters; expected {MAX_LENGTH} at most")  # fmt: skip
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except ToolError:
        raise
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:  # fmt: skip
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise ToolError(f"{expression[:100]!r} has no value: {reason}") from error


def _value(node: ast.AST) -> _Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _checked(value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp() if type(node.op) in _OPERATORS:
            return _checked(_OPERATORS[type(node.op)](_value(node.operand)))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _checked(_power(_value(left), _value(right)))
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return _checked(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
            return _checked(_FUNCTIONS[name](*map(_value, node.args)))
    shown = ast.unparse(node)[:100]
    raise ToolError(f"{shown!r} is not arithmetic; expected numbers, the operators + - * / // % **, the functions {', '.join(_FUNCTIONS)}, and the constants pi and e")  # fmt: skip


def _round(value: _Number, digits: int | None) -> _Number:
    """Round a number to `digits` decimal places; raise a ToolError if `digits` is so large that rounding would take long."""
    if isinstance(digits, int) and abs(digits) > MAX_BITS:
        raise ToolError(
            f"rounding to {str(digits)[:20]} digits is not possible; expected at most {MAX_BITS}"
        )
    return round(value, digits)


def _power(base: _Number, exponent: _Number) -> _Number:
    """Compute base ** exponent; raise a ToolError if computing it would take long, or if the result is complex."""
    if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1:
        bits = base.bit_length() * abs(exponent)
        if bits > 2 * MAX_BITS:
            raise ToolError(f"{base}**{exponent} is too large"[:200])
    value = base**exponent
    if isinstance(value, complex):
        raise ToolError(f"{base}**{exponent} is not a real number"[:200])
    return value


def _checked(value: Any) -> _Number:
    if not isinstance(value, int | float):
        raise ToolError(f"{str(value)[:100]!r} is not a number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ToolError(f"a number has {value.bit_length()} bits; expected {MAX_BITS} at most")
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError(f"the value is {value}, which is not a number")
    return value
