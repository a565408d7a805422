"""Shape annotations checked at run time, for classes whose modules import torch and jaxtyping for type checkers only.

jaxtyping's import hook (`--jaxtyping-packages` of its pytest plugin) checks every function of a module, but needs the
names of the module's annotations at run time. Light modules do not import these names; `checked` imports them, and
checks the classes of such modules. It needs `beartype`.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, get_type_hints

import pytest
from beartype import beartype
from jaxtyping import jaxtyped


@contextmanager
def checked(*classes: type) -> Iterator[None]:
    """Check calls of the classes' constructors, methods and properties against their annotated shapes while the context lasts.

    Axes are checked within each call: an axis that several arguments name must have one size. The fields of an attrs class are
    checked against each other whenever an instance is created.

    Raises:
        jaxtyping.TypeCheckError: arguments or result of a call do not match the annotations.
    """
    with pytest.MonkeyPatch.context() as patch:
        for cls in classes:
            names = _names(sys.modules[cls.__module__])
            for name, member in list(vars(cls).items()):
                function = _function(member)
                if function is not None and function.__annotations__:
                    # The decorator reads the annotations from the function, where they are still strings.
                    patch.setattr(function, "__annotations__", get_type_hints(function, names))
                    patch.setattr(cls, name, jaxtyped(member, typechecker=beartype))
        yield


def _function(member: object) -> FunctionType | None:
    if isinstance(member, classmethod | staticmethod):
        member = member.__func__
    elif isinstance(member, property):
        member = member.fget
    return member if isinstance(member, FunctionType) else None


def _names(module: ModuleType) -> dict[str, Any]:
    """Return the module's names, including those that it imports only for type checkers."""
    names = dict(vars(module))
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            imports = compile(ast.Module(node.body, []), str(module.__file__), "exec")
            exec(imports, names)  # noqa: S102 - the module's own import statements
    return names
