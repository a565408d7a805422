"""Lists public functions whose docstring says too little. Usage: python tests/architecture/docstrings.py

The first line begins with a verb of `verbs.txt` and does not only repeat the function's name; names, jaxtyping or the docstring, its own
or that of the method that it overrides, give the shapes of tensors and arrays. Properties, preflight rules and tests of conformance
suites say what they are instead of what they do: their first line is free.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERBS = frozenset(Path(__file__).with_name("verbs.txt").read_text().split())
SMALL = re.compile(
    "a|all|an|and|as|at|by|each|every|for|from|get|here|in|is|its?|of|on|one|or|return|that|the|their|them|these|this|to|with",
    re.IGNORECASE,
)
"""Words that add nothing to a name."""
ARRAY = re.compile(r"\b(Tensor|ndarray|Ragged)\b")
TYPED = re.compile(r"\b(Float|Int|Bool|Real|Num|Shaped|UInt)\d*\[")
SUFFIXED = re.compile(r"\w+_[A-Z0-9]*[A-Z][A-Z0-9]*")
STATED = re.compile(
    r"(?<!\w)\[([\w…*+−×·./ -]+(, ?[\w…*+−×·./ -]+)*)?\](?!\()|\b(shaped?|shapes|scalars?)\b"
)
Function = ast.FunctionDef | ast.AsyncFunctionDef
Classes = dict[str, ast.ClassDef]


def sources(root: Path) -> list[Path]:
    """Return every source file of every package below `root`."""
    return sorted(
        path
        for pattern in ("core/src", "sdk/src", "plugins/*/src")
        for folder in root.glob(pattern)
        for path in folder.rglob("*.py")
    )


def public_functions(tree: ast.Module) -> Iterator[tuple[Function, ast.ClassDef | None]]:
    """Yield the public functions of a module, and the public methods of its public classes each with its class."""
    for owner in (None, *(n for n in tree.body if isinstance(n, ast.ClassDef))):
        if owner is None or not owner.name.startswith("_"):
            for node in (owner or tree).body:
                if isinstance(node, Function) and not node.name.startswith("_"):
                    yield node, owner


def says_what_it_does(function: Function) -> bool:
    """Return whether a function is one whose first line is to begin with a verb."""
    marks = [ast.unparse(decorator) for decorator in function.decorator_list]
    returned = ast.unparse(function.returns) if function.returns else ""
    rule = re.fullmatch(r"(Iterator|Iterable|list|Sequence)\[Finding\]", returned)
    described = any("property" in mark or ".group(" in mark for mark in marks)
    return not (rule or described or function.name.startswith("test_"))


def stem(word: str) -> str:
    """Return a word without the ending of a plural or of a third person, in lower case."""
    return re.sub(r"(ie|e)?s?$", "", word.lower())


def first_line_fault(function: Function) -> str | None:
    """Return what is wrong with the first line of a docstring; None where nothing is, or there is no docstring."""
    text = ast.get_docstring(function)
    if text is None or not says_what_it_does(function):
        return None
    line = text.splitlines()[0]
    first = re.split(r"[^\w-]", line, maxsplit=1)[0]
    if first not in VERBS:
        return f"begins with {first!r}; expected a verb of tests/architecture/verbs.txt"
    said = {stem(word) for word in re.findall(r"[A-Za-z]+", line) if not SMALL.fullmatch(word)}
    if said <= {stem(word) for word in function.name.split("_")}:
        return f"{line!r} only repeats the name; expected what the name does not say"
    return None


def bases(owner: ast.ClassDef | None, classes: Classes) -> Iterator[ast.ClassDef]:
    """Yield the classes of this repository that a class extends, at any distance."""
    for node in owner.bases if owner else ():
        base = classes.get(ast.unparse(node).partition("[")[0].rpartition(".")[2])
        if base is not None and base is not owner:
            yield base
            yield from bases(base, classes)


def states_shapes(function: Function, owner: ast.ClassDef | None, classes: Classes) -> bool:
    """Return whether the shapes of a function's tensors and arrays are given; True where it has none."""
    own = function.args
    arguments = [*own.posonlyargs, *own.args, *own.kwonlyargs, *filter(None, [own.vararg])]
    named = [(a.arg, a.annotation) for a in arguments] + [(function.name, function.returns)]
    given = [(name, ast.unparse(annotation)) for name, annotation in named if annotation]
    silent = [
        name
        for name, annotation in given
        if ARRAY.search(annotation)
        and not TYPED.search(annotation)
        and not SUFFIXED.fullmatch(name)
    ]
    text = ast.get_docstring(function)
    if not silent or (text is not None and STATED.search(text)):
        return True
    return text is None and any(
        method.name == function.name and states_shapes(method, base, classes)
        for base in bases(owner, classes)
        for method in base.body
        if isinstance(method, Function)
    )


def faults(texts: dict[str, str]) -> list[str]:
    """Return a line for each fault of the docstrings in source texts by file."""
    trees = {file: ast.parse(text) for file, text in texts.items()}
    classes = {
        n.name: n for tree in trees.values() for n in tree.body if isinstance(n, ast.ClassDef)
    }
    found = []
    for file, tree in trees.items():
        for function, owner in public_functions(tree):
            place = f"{file}:{function.lineno}: {function.name}"
            if fault := first_line_fault(function):
                found.append(f"{place}: {fault}")
            if not states_shapes(function, owner, classes):
                found.append(f"{place}: no shapes of its tensors; expected such as [N, T]")
    return found


if __name__ == "__main__":
    listed = faults({str(path.relative_to(ROOT)): path.read_text() for path in sources(ROOT)})
    sys.exit("\n".join([*listed, f"{len(listed)} faults in docstrings"]) if listed else 0)
