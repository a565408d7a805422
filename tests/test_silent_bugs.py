"""The table of silent bugs: each row says where the bug was met, and names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROWS = [
    line
    for line in (ROOT / "docs" / "silent-bugs.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and "[" in line
]


def names_of_tests(file: Path) -> set[str]:
    """Return the names of a file's tests, those of its classes too."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    }


@pytest.mark.parametrize("row", ROWS, ids=[row.split("|")[1].strip()[:60] for row in ROWS])
def test_a_row_names_a_report_and_tests_that_exist(row: str) -> None:
    _, _, reported, here, named, _ = row.split("|")
    assert re.search(r"\(https://github\.com/[\w.-]+/[\w.-]+/issues/\d+\)", reported)
    assert here.strip()
    tests = re.findall(r"`([\w./]+)::(\w+)`", named)
    assert tests
    for file, test in tests:
        assert test in names_of_tests(ROOT / file), f"{file}::{test}"


def test_the_table_has_its_rows() -> None:
    assert len(ROWS) >= 35
