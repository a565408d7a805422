"""The lint of docstrings finds what it is for, and nothing in this repository."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import docstrings

OVERRIDE = '''
class A:
    def f(self, x: Tensor) -> None:
        """Do it to [N]."""
class B(A):
    def f(self, x: Tensor) -> None: ...
'''


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('def f() -> int:\n    """Return the number of rows."""', ""),
        ('def f() -> int:\n    """The number of rows."""', "'The'"),
        ('def f() -> int:\n    """Returns the number of rows."""', "'Returns'"),
        ('def f() -> int:\n    """`rows`, counted."""', "''"),
        ('def read_manifests() -> None:\n    """Read the manifest."""', "only repeats"),
        ('def read_manifests() -> None:\n    """Read the manifest of a package."""', ""),
        ('@property\ndef size(self) -> int:\n    """The size."""', ""),
        ('def twice(config: C) -> Iterator[Finding]:\n    """The penalty counts twice."""', ""),
        ('def test_it_works(self) -> None:\n    """It holds for engines alone."""', ""),
        ("def f() -> int: ...", ""),
    ],
)
def test_a_first_line_is_a_verb_and_more_than_the_name(source: str, found: str) -> None:
    (function,) = ast.parse(source).body
    assert isinstance(function, docstrings.Function)
    fault = docstrings.first_line_fault(function) or ""
    assert found in fault
    assert bool(found) == bool(fault)


@pytest.mark.parametrize(
    ("source", "silent"),
    [
        ('def f(x: Tensor) -> None:\n    """Do it."""', True),
        ('def f(x: Tensor) -> None:\n    """Do it to x, [N, T]."""', False),
        ('def f(x_NT: Tensor) -> None:\n    """Do it."""', False),
        ('def f(x: Float[Tensor, \'N\']) -> None:\n    """Do it."""', False),
        ('def f() -> np.ndarray:\n    """Make it."""', True),
        ('def _f(x: Tensor) -> None:\n    """Do it."""', False),
        (OVERRIDE, False),
    ],
)
def test_shapes_are_in_names_annotations_or_docstrings(source: str, silent: bool) -> None:
    assert bool([f for f in docstrings.faults({"x.py": source}) if "shapes" in f]) == silent


def test_the_docstrings_of_this_repository_have_no_fault() -> None:
    files = docstrings.sources(docstrings.ROOT)
    assert len(files) > 500
    assert docstrings.faults({str(path): path.read_text() for path in files}) == []
