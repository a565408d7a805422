"""Checks that a dataset source follows the interface: its groups, rows and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dovetail.errors import ConfigError, DataError, PluginBrokenError
from dovetail.interfaces import DatasetSource, PluginContext
from dovetail.interfaces.data import RowGroups
from dovetail_datasets.config import FilesConfig
from dovetail_datasets.rows import CheckedGroups

ROWS = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}]


class Groups(RowGroups):
    """One group that claims a number of rows."""

    def __init__(self, rows: Any, sizes: Any = (3,)) -> None:
        self._rows, self._sizes = rows, sizes

    @property
    def sizes(self) -> Any:
        return self._sizes

    def read(self, group: int, start: int = 0) -> Iterator[Any]:
        for place, row in enumerate(self._rows[start:], start):
            if isinstance(row, ZeroDivisionError):
                raise row
            yield row if isinstance(row, tuple) else (f"row {place}", row)

    def digest(self) -> str:
        return "d"


class Given(DatasetSource):
    """A source that returns the given value, or raises the given error."""

    name = "given"

    def __init__(self, streamed: Any, whole: Any = None) -> None:
        super().__init__(FilesConfig(), PluginContext())
        self._streamed, self._whole = streamed, whole

    def read(self, paths: Any) -> Any:
        return _answer(self._whole)

    def stream(self, paths: Any) -> Any:
        return super().stream(paths) if self._streamed is None else _answer(self._streamed)


def _answer(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


def read(streamed: Any, whole: Any = None, start: int = 0) -> list[Any]:
    groups = CheckedGroups(Given(streamed, whole), ["x"])
    return [row for _, row in groups.read(0, start)]


def test_sound_groups_and_rows_that_are_read_whole_come_as_they_are() -> None:
    for source in (Given(Groups(ROWS)), Given(None, ROWS)):
        groups = CheckedGroups(source, ["x"])
        assert (groups.sizes, groups.folder(0)) == ((3,), None)
        assert list(groups.read(0)) == [(f"row {n}", row) for n, row in enumerate(ROWS)]
        assert [row for _, row in groups.read(0, 2)] == ROWS[2:]
    assert groups.digest() != CheckedGroups(Given(None, ROWS[:2]), ["x"]).digest()


def test_a_row_that_alone_is_bad_is_given_in_its_place() -> None:
    bad = DataError("row 1 is bad")
    assert read(Groups([ROWS[0], bad, ROWS[2]])) == [ROWS[0], bad, ROWS[2]]


@pytest.mark.parametrize("error", [ConfigError("its own setting is wrong"), DataError("no file")])
def test_a_sources_own_error_is_not_swallowed(error) -> None:
    with pytest.raises(type(error), match=str(error)):
        read(error, whole=ROWS)
    with pytest.raises(type(error), match=str(error)):
        read(None, whole=error)


@pytest.mark.parametrize(
    ("streamed", "whole", "says"),
    [
        (ZeroDivisionError("oops"), ROWS, "ZeroDivisionError: oops"),
        (None, ZeroDivisionError("oops"), "ZeroDivisionError: oops"),
        (Groups([*ROWS[:2], ZeroDivisionError("oops")]), None, "ZeroDivisionError: oops"),
        (ROWS, None, "`stream` returned list"),
        (None, {"prompt": ["a"]}, "type dict"),
        (None, "text", "type str"),
        (None, [ROWS[0], "b"], "row 1 of group 0 is"),
        (Groups([ROWS[0], None, ROWS[2]]), None, "row 1 of group 0 is"),
        (Groups([ROWS[0], (3, {}), ROWS[2]]), None, "`read` yielded (3, {}) for row 1 of group 0"),
        (Groups(ROWS[:2]), None, "group 0 ended after 2 row(s); `sizes` says 3"),
        (Groups([*ROWS, *ROWS]), None, "group 0 ended after 6 row(s); `sizes` says 3"),
        (Groups(ROWS, sizes=(3, 0)), None, "has no row"),
        (Groups(ROWS, sizes=(2.5,)), None, "TypeError"),
    ],
)
def test_what_breaks_the_interface_names_the_source(streamed, whole, says) -> None:
    with pytest.raises(PluginBrokenError) as error:
        read(streamed, whole)
    assert says in error.value.message
    assert "dataset/given" in error.value.message


def test_no_rows_at_all_are_the_files_fault() -> None:
    for streamed, whole in ((Groups([], sizes=()), None), (None, [])):
        with pytest.raises(DataError, match=r"no rows .*\bx\b"):
            read(streamed, whole)
