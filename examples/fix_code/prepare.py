"""Small functions with one bug each, as JSON lines: an operator, a comparison or a number was changed.

A row's asserts hold for the function as it was, and one of them fails for the broken one. Functions of held-out rows
are in no training row.
Usage: `python examples/fix_code/prepare.py` writes train.jsonl and val.jsonl into demo/fix_code.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dovetail.interfaces import PluginContext
from dovetail_rewards.config_code import CodeConfig
from dovetail_rewards.functions.code import Code

FUNCTIONS = {
    "def is_leap(year):\n    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)": [
        "assert is_leap(1900) == False",
        "assert is_leap(2000) == True",
        "assert is_leap(2024) == True",
        "assert is_leap(2023) == False",
    ],
    "def mean(values):\n    return sum(values) / len(values)": [
        "assert mean([1, 2, 6]) == 3.0",
        "assert mean([5]) == 5.0",
    ],
    "def last(values, count):\n    return values[len(values) - count:]": [
        "assert last([1, 2, 3], 2) == [2, 3]",
        "assert last('abc', 1) == 'c'",
    ],
    "def is_even(number):\n    return number % 2 == 0": [
        "assert is_even(4) == True",
        "assert is_even(7) == False",
    ],
    "def clamp(x, low, high):\n    if x < low:\n        return low\n    if x > high:\n        return high\n    return x": [
        "assert clamp(5, 1, 3) == 3",
        "assert clamp(0, 1, 3) == 1",
        "assert clamp(2, 1, 3) == 2",
    ],
    "def factorial(n):\n    result = 1\n    for i in range(2, n + 1):\n        result = result * i\n    return result": [
        "assert factorial(5) == 120",
        "assert factorial(1) == 1",
    ],
    "def count_vowels(text):\n    count = 0\n    for letter in text:\n        if letter in 'aeiou':\n            count = count + 1\n    return count": [
        "assert count_vowels('banana') == 3",
        "assert count_vowels('sky') == 0",
    ],
    "def evens(values):\n    return [v for v in values if v % 2 == 0]": [
        "assert evens([1, 2, 4, 5]) == [2, 4]"
    ],
    "def fahrenheit(celsius):\n    return celsius * 9 / 5 + 32": [
        "assert fahrenheit(100) == 212.0",
        "assert fahrenheit(-40) == -40.0",
        "assert fahrenheit(0) == 32.0",
    ],
    "def triangle(n):\n    return n * (n + 1) // 2": [
        "assert triangle(4) == 10",
        "assert triangle(7) == 28",
    ],
    "def distance(a, b):\n    return ((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2) ** 0.5": [
        "assert distance((0, 0), (3, 4)) == 5.0",
        "assert distance((1, 1), (1, 3)) == 2.0",
    ],
    "def gcd(a, b):\n    while b != 0:\n        a, b = b, a % b\n    return a": [
        "assert gcd(12, 18) == 6",
        "assert gcd(7, 5) == 1",
    ],
}
"""Functions, and asserts that hold for them."""
HELD_OUT = 3
SWAPS: dict[type[ast.AST], tuple[type[Any], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Lt: (ast.LtE, ast.Gt),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
    ast.In: (ast.NotIn,),
}


def changes(node: ast.AST) -> list[tuple[str, Any]]:
    """Fields of a node with wrong values: an operator, a comparison, or a number larger by one."""
    match node:
        case ast.Constant(value=int() as value):
            return [("value", value + 1)]
        case ast.BinOp(op=op) | ast.BoolOp(op=op):
            return [("op", swap()) for swap in SWAPS.get(type(op), ())]
        case ast.Compare(ops=[op]):
            return [("ops", [swap()]) for swap in SWAPS.get(type(op), ())]
    return []


def broken(source: str) -> Iterator[str]:
    """Yield the function with one bug, each in turn."""
    for place, node in enumerate(ast.walk(ast.parse(source))):
        for field, value in changes(node):
            tree = ast.parse(source)
            setattr(list(ast.walk(tree))[place], field, value)
            yield ast.unparse(tree)


def row(source: str, tests: list[str]) -> dict[str, Any]:
    """One problem, in the columns of `data.train_files`."""
    text = (
        f"This function has a bug:\n\n```python\n{source}\n```\n\nIt should pass:\n\n{chr(10).join(tests)}\n\n"
        "Find the bug with the tool python, then answer with the whole function in a ```python block."
    )
    return {
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"ground_truth": json.dumps({"tests": tests})},
    }


def prepare(directory: Path) -> None:
    """Write every bug of every function that its asserts find, those of the last functions apart."""
    code = Code(CodeConfig(time_limit=1.0), PluginContext())
    rows: dict[str, list[dict[str, Any]]] = {"train": [], "val": []}
    for number, (source, tests) in enumerate(FUNCTIONS.items()):
        part = rows["train" if number < len(FUNCTIONS) - HELD_OUT else "val"]
        for bug in broken(source):
            found = code.compute_score(None, f"```python\n{bug}\n```", {"tests": tests})
            part += [row(bug, tests)] if found["score"] == 0.0 else []
    directory.mkdir(parents=True, exist_ok=True)
    for name, part in rows.items():
        lines = [json.dumps(one) for one in part]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{directory / name}.jsonl: {len(lines)} rows")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo/fix_code"), help="directory")
    prepare(parser.parse_args().out)
