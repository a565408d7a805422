"""Prints the table of the architecture: what `table.toml` states, what it is now, and what it becomes.

Usage: python tests/architecture/table.py [--step]      (`make table` gives `--step`, which trains for half a minute)

Rows of sizes are code lines as `code_lines.py` counts them, and words of Markdown files. Rows of boundaries are tested by
`test_boundaries.py`; sizes and steps, too, which fail above 102% of the table.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from code_lines import lines_below

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core" / "src" / "dovetail"
HEAVY = ("torch", "transformers", "pyarrow", "PIL")
ON_TORCH = ("workers", "dispatch", "random_streams.py")
"""Parts of core that may import torch inside functions."""
SECTIONS = ("rollout", "reward", "algorithm")
"""Sections of the config that belong to sources and stages."""


def stated() -> dict[str, dict[str, Any]]:
    """Return the rows of `table.toml` by part."""
    return tomllib.loads(Path(__file__).with_name("table.toml").read_text())


def packages() -> list[str]:
    """Return the folders of every distribution with code."""
    return [
        "core",
        "sdk",
        *sorted(str(p.parent.relative_to(ROOT)) for p in ROOT.glob("plugins/*/pyproject.toml")),
    ]


def sizes() -> dict[str, dict[str, int]]:
    """Return code lines of every package and of its tests, and the words of the documentation."""
    code = {name: lines_below(ROOT / name / "src") for name in packages()}
    tests = {name: lines_below(ROOT / name / "tests") for name in packages()}
    return {
        "code": code,
        "tests": {**tests, "tests": lines_below(ROOT / "tests")},
        "docs": {"words": words()},
    }


def words() -> int:
    """Return the words of all Markdown files but change fragments."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return sum(
        len((ROOT / f).read_text().split())
        for f in listed.stdout.splitlines()
        if "/changes/" not in f
    )


def boundaries() -> dict[str, int]:
    """Return how often core crosses each boundary."""
    from dovetail_sdk.public import public_names

    dependencies = tomllib.loads((ROOT / "core" / "pyproject.toml").read_text())["project"][
        "dependencies"
    ]
    manifest = json.loads((CORE / "dovetail-plugin.json").read_text())
    trees = {file.relative_to(CORE): ast.parse(file.read_text()) for file in CORE.rglob("*.py")}
    return {
        "dependencies": len(dependencies),
        "plugins": len(manifest["plugins"]),
        "public_names": sum(
            len(names)
            for module, names in public_names().items()
            if module.partition(".")[0] == "dovetail"
        ),
        **{
            f"files_with_{name}": sum(imports(file, tree, name) for file, tree in trees.items())
            for name in HEAVY
        },
        "reads_of_sections": sum(
            1 for file, tree in trees.items() for _ in section_reads(file, tree)
        ),
    }


def imports(file: Path, tree: ast.Module, package: str) -> bool:
    """Whether a file of core imports a package where it may not: torch may stand inside functions of `ON_TORCH`."""
    if package == "torch" and file.parts[0] in ON_TORCH:
        inside = {
            node
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            for node in ast.walk(function)
        }
        return package in roots(tree, inside)
    return package in roots(tree)


def roots(tree: ast.Module, apart: Collection[ast.AST] = ()) -> set[str]:
    """Return the first parts of the modules that a file imports, unless for type checking alone or in one of the nodes `apart`."""
    typed = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if node in typed or node in apart:
            continue
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def section_reads(file: Path, tree: ast.Module) -> Iterator[str]:
    """Yield the reads of `config.rollout`, `config.reward` and `config.algorithm` in a file of core outside `sections` and `config`."""
    if file.parts[0] not in ("sections", "config"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in SECTIONS:
                owner = ast.unparse(node.value)
                if owner.rpartition(".")[2] in ("config", "_config"):
                    yield ast.unparse(node)


def step() -> dict[str, int]:
    """Return the functions and files that a step enters."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).with_name("trace_step.py")), folder]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print the table."""
    now = {"boundaries": boundaries(), **sizes()}
    if "--step" in sys.argv:
        now["step"] = step()
    table = stated()
    for part, rows in now.items():
        total = {"all": sum(rows.values())} if len(rows) > 1 and part in ("code", "tests") else {}
        sys.stdout.write(f"\n{part:24}{'table':>10}{'now':>10}{'aim':>10}\n")
        for name, count in {**rows, **total}.items():
            row = table[part].get(name, {})
            shown = (
                f"{value:,}" if value is not None else ""
                for value in (row.get("table"), count, row.get("aim"))
            )
            sys.stdout.write(f"{name:24}" + "".join(f"{text:>10}" for text in shown) + "\n")


if __name__ == "__main__":
    main()
