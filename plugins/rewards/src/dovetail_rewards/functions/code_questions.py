"""Analysis of assert tests: the response's names that the tests use, and operations that work only in the response's process."""

from __future__ import annotations

import ast
import builtins
import collections
import itertools
import symtable
import sys
from collections.abc import Iterable, Iterator

from dovetail_rewards.functions.code_truth import AssertTests, Tests

_ASKS_IN_PROCESS = frozenset({"id", "callable", "globals", "locals"})
_AWAITING = (ast.Await, ast.AsyncFor, ast.AsyncWith)
_PATCHES = frozenset(
    {"patch", "monkeypatch", "redirect_stdout", "redirect_stderr", "stdin", "stdout", "stderr"}
)
_HOMES_OF_PATCHES = frozenset({"sys", "mock", "contextlib"})
"""Modules through which tests change or read global state of the response's process."""


def names_used(tests: Iterable[str]) -> list[str]:
    """Return the names that tests take from the response: global names that the tests read and never bind.

    Built-in names are included only if there are no other names, so that a response can't replace `set` or `sorted` in a test of another
    function.
    """
    read: set[str] = set()
    bound: set[str] = set()
    for table in (table for text in tests for table in _scopes(text)):
        top = table.get_type() == "module"
        for symbol in table.get_symbols():
            if top or symbol.is_global():
                if symbol.is_referenced():
                    read.add(symbol.get_name())
                if symbol.is_assigned() or symbol.is_imported():
                    bound.add(symbol.get_name())
    free = read - bound
    return sorted(free - set(dir(builtins)) or free)


def modules_used(tests: Iterable[str]) -> list[str]:
    """Return those of `names_used` that tests use only as a module (of the standard library, NumPy or pandas): `math` in `math.isclose(…)`.

    A response that defines an object with such a name could otherwise decide what the test compares.
    """
    texts = list(tests)
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    loaded = collections.Counter(node.id for node in nodes if isinstance(node, ast.Name))
    based = collections.Counter(
        node.value.id
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    )
    known = sys.stdlib_module_names | {"np", "numpy", "pd", "pandas"}
    return [name for name in names_used(texts) if name in known and loaded[name] == based[name]]


def only_in_process(tests: Tests) -> str | None:
    """Return why the tests must run in the response's process, or None if a separate process can run them.

    The reason is an operation of the tests, such as `is`, that fails on copies of the response's values.
    """
    if not isinstance(tests, AssertTests):
        return None
    texts = [tests.setup, *tests.tests]
    names = set(names_used(texts))
    for node in (node for text in texts for node in ast.walk(ast.parse(text))):
        asks = (
            (isinstance(node, ast.Compare) and _compares_identity(node))
            or isinstance(node, _AWAITING)
            or (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in _ASKS_IN_PROCESS - names
            )
            or (isinstance(node, ast.Name) and node.id in _PATCHES - names)
            or (
                isinstance(node, ast.Attribute)
                and node.attr in _PATCHES
                and isinstance(node.value, ast.Name)
                and node.value.id in _HOMES_OF_PATCHES
            )
            or (isinstance(node, ast.ClassDef) and any(_is_of(base, names) for base in node.bases))
            or (isinstance(node, ast.withitem) and _is_of(node.context_expr, names))
        )
        if asks:
            return (
                f"`{ast.unparse(node):.80}` in the tests can't be evaluated outside the response's process: the tests' process has "
                "only copies of the response's values; set tests=in_process if the response may influence the result"
            )
    return None


def _is_of(node: ast.expr, names: set[str]) -> bool:
    """Return whether a node is one of the response's names, or a call or attribute of such a name."""
    while isinstance(node, (ast.Call, ast.Attribute)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.Name) and node.id in names


def _compares_identity(node: ast.Compare) -> bool:
    sides = [node.left, *node.comparators]
    return any(
        isinstance(operator, (ast.Is, ast.IsNot)) and not any(map(_is_same_in_copies, pair))
        for operator, pair in zip(node.ops, itertools.pairwise(sides), strict=True)
    )


def _is_same_in_copies(node: ast.expr) -> bool:
    """Return whether a node is the same object in every process: a singleton such as None, or a call of `type` with one argument.

    In the tests' process, `type` raises an error for copies of the response's values (`TypeOfCopy`), so it never returns a wrong type.
    """
    if isinstance(node, ast.Constant):
        return node.value is None or node.value is ... or isinstance(node.value, bool)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "type" and len(node.args) == 1
    return isinstance(node, ast.Name) and node.id == "NotImplemented"


def _scopes(text: str) -> Iterator[symtable.SymbolTable]:
    tables = [symtable.symtable(text, "tests", "exec")]
    while tables:
        table = tables.pop()
        yield table
        tables += table.get_children()
