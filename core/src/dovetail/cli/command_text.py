"""What a command of a package says of itself, read from its source: listing commands imports nothing of their packages."""

from __future__ import annotations

import ast
import importlib.util
from importlib.metadata import EntryPoint
from pathlib import Path


def about(entry_point: EntryPoint) -> str:
    """Return the first sentence of a command's docstring; empty where its source can't be read, or has none."""
    package, _, inside = entry_point.module.partition(".")
    try:
        spec = importlib.util.find_spec(package)
        places = (spec and spec.submodule_search_locations) or []
        path = Path(places[0]).joinpath(*inside.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        tree = ast.parse(file.read_text("utf-8"))
    except (ImportError, IndexError, OSError, SyntaxError, ValueError):
        return ""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == entry_point.attr:
            text = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
            return text.partition(". ")[0].removesuffix(".") + "." if text else ""
    return ""
