"""Describe what the plugin uses of TensorRT-LLM: names, parameters, annotations as text, and defaults; no code.

`python extract.py TREE` prints the description of a source tree or a site-packages directory, by `ast`: nothing is imported.
`python extract.py TREE --check` compares it with `tensorrt_llm.json` beside this file, says what differs, and exits with 1 if
anything is missing there that the plugin uses: the first thing to do where TensorRT-LLM is installed.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DESCRIPTION = HERE / "tensorrt_llm.json"


def described() -> dict[str, Any]:
    """The committed description."""
    found: dict[str, Any] = json.loads(DESCRIPTION.read_text(encoding="utf-8"))
    return found


def extract(tree: Path, wanted: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Describe classes of a source tree.

    Args:
        tree: the directory that holds the package.
        wanted: members by the full name of their class.

    Returns:
        By full name: `bases`, `fields` (name: annotation and default as text), `methods` (name: whether it is
        asynchronous, and its parameters). Classes and members that the tree lacks are left out.
    """
    found = {}
    for full_name, members in wanted.items():
        module, _, name = full_name.rpartition(".")
        node = _class_in(tree, module, name)
        if node is not None:
            found[full_name] = _described(node, members)
    return found


def exports(tree: Path, module: str) -> set[str]:
    """The names that a module defines or imports, on its top level or below an `if` or `try` there."""
    names: set[str] = set()
    for node in ast.walk(_parsed(tree, module) or ast.Module(body=[], type_ignores=[])):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """What another tree says otherwise: whether something is missing there, and what it is in words.

    Args:
        ours: the description's classes.
        theirs: of `extract`.
    """
    for name, one in ours.items():
        other = theirs.get(name)
        if other is None:
            yield True, f"{name} is missing"
            continue
        for kind in ("fields", "methods"):
            for member, what in one[kind].items():
                if member not in other[kind]:
                    yield not _late(what), f"{name}.{member} is missing"
                elif _plain(what) != _plain(other[kind][member]):
                    yield False, f"{name}.{member} is {json.dumps(other[kind][member])}"


def main(words: Sequence[str] | None = None) -> int:
    """Print a description, or compare one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path)
    parser.add_argument("--check", action="store_true")
    told = parser.parse_args(words)
    ours = described()["classes"]
    theirs = extract(
        told.tree, {name: [*one["fields"], *one["methods"]] for name, one in ours.items()}
    )
    if not told.check:
        sys.stdout.write(json.dumps(theirs, indent=1) + "\n")
        return 0
    found = sorted(differences(ours, theirs), reverse=True)
    for missing, text in found:
        sys.stdout.write(f"{'MISSING' if missing else 'differs'}: {text}\n")
    sys.stdout.write(f"{len(theirs)} of {len(ours)} classes found, {len(found)} differences\n")
    return int(any(missing for missing, _ in found))


def _late(what: Mapping[str, Any]) -> bool:
    """Whether only some of the supported releases have it."""
    return bool(what.get("later"))


def _plain(what: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in what.items() if key != "later"}


def _parsed(tree: Path, module: str) -> ast.Module | None:
    place = tree.joinpath(*module.split("."))
    for file in (place.with_suffix(".py"), place / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text(encoding="utf-8"))
    return None


def _class_in(tree: Path, module: str, name: str) -> ast.ClassDef | None:
    for node in ast.walk(_parsed(tree, module) or ast.Module(body=[], type_ignores=[])):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    return None


def _described(node: ast.ClassDef, members: Sequence[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    methods: dict[str, Any] = {}
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            fields[statement.target.id] = _field(statement.annotation, statement.value)
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                fields[_text(target) or ""] = _field(None, statement.value)
    for function in node.body:
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for name, annotation in _attributes(function):
            fields.setdefault(name, _field(annotation, None))
        if _is_property(function):
            fields[function.name] = _field(function.returns, None)
            continue
        methods[function.name] = {
            "async": isinstance(function, ast.AsyncFunctionDef),
            "parameters": list(_parameters(function.args)),
        }
    return {
        "bases": [_text(base) for base in node.bases],
        "fields": {name: one for name, one in fields.items() if name in members},
        "methods": {name: one for name, one in methods.items() if name in members},
    }


def _field(annotation: ast.expr | None, default: ast.expr | None) -> dict[str, Any]:
    return {"annotation": _text(annotation), "default": _text(default)}


def _is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(_text(one) in {"property", "cached_property"} for one in function.decorator_list)


def _attributes(
    function: ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[tuple[str, ast.expr | None]]:
    """The attributes that a method sets, with their annotations."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if _text(node.value) == "self":
                yield node.attr, None
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute):
            yield node.target.attr, node.annotation


def _parameters(given: ast.arguments) -> Iterator[dict[str, Any]]:
    positional = [*given.posonlyargs, *given.args]
    missing = [None] * (len(positional) - len(given.defaults))
    for parameter, default in zip(positional, [*missing, *given.defaults], strict=True):
        if parameter.arg != "self":
            yield _parameter(parameter, "positional", default)
    if given.vararg is not None:
        yield _parameter(given.vararg, "rest", None)
    for parameter, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield _parameter(parameter, "keyword", default)
    if given.kwarg is not None:
        yield _parameter(given.kwarg, "keywords", None)


def _parameter(parameter: ast.arg, kind: str, default: ast.expr | None) -> dict[str, Any]:
    return {
        "name": parameter.arg,
        "kind": kind,
        "annotation": _text(parameter.annotation),
        "default": _text(default),
    }


def _text(node: ast.expr | None) -> str | None:
    return None if node is None else ast.unparse(node)


if __name__ == "__main__":
    sys.exit(main())
