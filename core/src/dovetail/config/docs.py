"""Field docstrings, read from source: attrs keeps none."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
from collections.abc import Mapping

import attrs


def field_docs(cls: type) -> dict[str, str]:
    """The docstring below each field of an attrs class, inherited fields included; fields without one are left out.

    A field that a subclass declares again without a docstring keeps its base's.
    """
    docs: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        docs.update(_docs_of(owner.__module__).get(owner.__qualname__, {}))
    return {field.name: docs[field.name] for field in attrs.fields(cls) if field.name in docs}


@functools.cache
def _docs_of(module_name: str) -> Mapping[str, Mapping[str, str]]:
    """Qualified class name to field name to docstring, for a module whose source is at hand."""
    module = sys.modules.get(module_name)
    if module is None or module_name == "builtins":
        return {}
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):
        source = "".join(linecache.getlines(getattr(module, "__file__", None) or ""))
    docs: dict[str, dict[str, str]] = {}
    _collect(ast.parse(source), "", docs)
    return docs


def _collect(node: ast.AST, prefix: str, docs: dict[str, dict[str, str]]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            name = f"{prefix}{child.name}"
            docs[name] = _class_docs(child)
            _collect(child, f"{name}.", docs)
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            _collect(child, f"{prefix}{child.name}.<locals>.", docs)
        elif isinstance(child, ast.If | ast.Try):
            _collect(child, prefix, docs)


def _class_docs(node: ast.ClassDef) -> dict[str, str]:
    docs: dict[str, str] = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            docs[field.target.id] = inspect.cleandoc(below.value.value)
    return docs
