"""Docstrings of config fields, read from the source because attrs does not keep them."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Mapping

import attrs


def field_docs(cls: type) -> dict[str, str]:
    """Return the docstring below each field of an attrs class, by field name, inherited fields included; undocumented fields are left out.

    A field that a subclass declares again without a docstring keeps the base's docstring.
    """
    docs: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        docs.update(own_docs(owner))
    return {field.name: docs[field.name] for field in attrs.fields(cls) if field.name in docs}


@functools.cache
def own_docs(cls: type) -> Mapping[str, str]:
    """Return the docstring below each attribute that a class itself declares; empty if the class's source can't be read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):
        return {}
    docs: dict[str, str] = {}
    for field, below in itertools.pairwise(tree.body[0].body):  # type: ignore[attr-defined]
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(ast.Constant(str(text))),
            ):
                docs[name] = inspect.cleandoc(text)
    return docs
