"""The table of the architecture: no boundary of core is crossed more often than it states, and nothing is larger."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import table
from code_lines import code_lines
from trace_step import demo_run, trace


@pytest.mark.parametrize("row", table.stated()["boundaries"])
def test_core_crosses_a_boundary_as_often_as_the_table_states(row: str) -> None:
    assert table.boundaries()[row] == table.stated()["boundaries"][row]["table"]


def test_the_table_has_a_row_for_every_package() -> None:
    rows = table.stated()
    for part, now in table.sizes().items():
        assert rows[part].keys() - {"all"} == now.keys(), part


@pytest.mark.parametrize("part", ["code", "tests", "docs"])
def test_nothing_is_larger_than_the_table_states(part: str) -> None:
    rows, now = table.stated()[part], table.sizes()[part]
    total = {"all": sum(now.values())} if "all" in rows else {}
    sizes = {**now, **total}
    assert not {n: count for n, count in sizes.items() if count > rows[n]["table"] * 1.02}


def test_code_lines_are_those_without_blanks_comments_and_docstrings() -> None:
    source = '''"""Doc."""

# why
X = """
two
"""  # a string with a name is code


def f(
    a,
):
    """Doc
    of two lines."""
    return a


class C:
    y: int = 1
    """Of a field."""
'''
    assert code_lines(source) == 3 + 4 + 2


@pytest.mark.parametrize(
    ("source", "counts"),
    [
        ("import torch.nn", (1, 0)),
        ("def f():\n    from torch import nn", (1, 0)),
        ("import PIL.Image", (1, 0)),
        ("if TYPE_CHECKING:\n    from torch import Tensor", (0, 0)),
        ("a = facts.config.rollout.n + self._config.reward.timeout", (0, 2)),
        ("config.data.rollout, other.rollout", (0, 0)),
    ],
)
def test_what_counts_as_crossing(source: str, counts: tuple[int, int]) -> None:
    tree, file = ast.parse(source), Path("run/x.py")
    found = (
        sum(table.imports(file, tree, package) for package in table.HEAVY),
        len([*table.section_reads(file, tree)]),
    )
    assert found == counts


@pytest.mark.parametrize("file", ["workers/x.py", "dispatch/x.py", "random_streams.py"])
def test_torch_may_stand_inside_functions_of_some_files(file: str) -> None:
    inside = "import attrs\n\ndef f():\n    import torch\n    import pyarrow"
    for source, package, counts in (
        (inside, "torch", False),
        (inside, "pyarrow", True),
        ("import torch", "torch", True),
    ):
        assert table.imports(Path(file), ast.parse(source), package) is counts


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="the table's figures are of Python 3.11"
)
@pytest.mark.nightly
def test_a_step_enters_no_more_than_the_table_states(tmp_path: Path) -> None:
    rows = table.stated()["step"]
    for name, count in trace(demo_run(tmp_path)).counts().items():
        assert count <= rows[name]["table"] * 1.02, name
