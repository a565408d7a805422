"""FileGroups: rows of Parquet and JSONL files, read group by group."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from dovetail.data.rows import unfilled
from dovetail.errors import DataError
from dovetail.interfaces.data import PlacedRow, RowGroups

JSONL_GROUP = 1024
"""Rows of a group of a JSONL file; those of a Parquet file are its row groups."""
_BATCH = 1024
"""Rows of a row group that are decoded at once."""


@attrs.frozen(kw_only=True)
class _Group:
    path: str
    size: int
    first: int
    """Row of the file; in JSONL its line, counted from 1."""
    place: int
    """Number of the row group; in JSONL the byte where the first line begins."""
    is_parquet: bool


class FileGroups(RowGroups):
    """Groups of files, in order.

    Args:
        parquet: these files are Parquet, by name; the others are JSONL.
        names: of all files.
        parse: a line of JSONL, given with its place, as a row.

    Raises:
        DataError: a file can't be read, or has no rows.
    """

    def __init__(
        self,
        names: Sequence[str],
        parquet: Sequence[str],
        parse: Callable[[bytes, str], Mapping[str, Any]],
    ) -> None:
        self._parse = parse
        self._groups: list[_Group] = []
        digest = hashlib.blake2b(digest_size=8)
        for name in names:
            index = _parquet_groups if name in parquet else _jsonl_groups
            groups = list(index(name, digest))
            if not groups:
                raise DataError(
                    f"{name} is empty: it has no rows", hint="write it again, or leave it out"
                )
            self._groups += groups
        self._digest = digest.hexdigest()

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(group.size for group in self._groups)

    def read(self, group: int, start: int = 0) -> Iterator[PlacedRow]:
        found = self._groups[group]
        return self._parquet(found, start) if found.is_parquet else self._jsonl(found, start)

    def folder(self, group: int) -> str:
        return str(Path(self._groups[group].path).parent)

    def digest(self) -> str:
        return self._digest

    def _parquet(self, group: _Group, start: int) -> Iterator[PlacedRow]:
        import pyarrow as pa

        try:
            # Without `pre_buffer`, which reads a whole row group ahead.
            with _open(group.path) as file:
                first = group.first
                for batch in file.iter_batches(_BATCH, row_groups=[group.place]):
                    if start < len(batch):
                        rows = arrow_rows(batch.slice(start))
                        for number, row in enumerate(rows, first + start):
                            yield f"{group.path}, row {number}", row
                    start = max(start - len(batch), 0)
                    first += len(batch)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _unreadable(group.path, error) from error

    def _jsonl(self, group: _Group, start: int) -> Iterator[PlacedRow]:
        with reading(group.path), Path(group.path).open("rb") as file:
            file.seek(group.place)
            left = group.size
            for number, line in enumerate(file, group.first):
                if not line.strip():
                    continue
                if group.size - left >= start:
                    place = f"{group.path}, line {number}"
                    yield place, self._parse(line, place)
                left -= 1
                if not left:
                    return
        raise DataError(
            f"{group.path} has changed since the run began: {left} rows are gone from line {group.first} on",
            hint="restore the file, and resume the run",
        )


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Raise an error of the system as a DataError that names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{name} can't be read: {error.strerror or error}",
            hint="see that it is there, and that you may read it",
        ) from error


def arrow_rows(table: Any) -> list[dict[str, Any]]:
    """Return the rows of a table or record batch of Arrow; messages and `tools` without the keys that Arrow filled."""
    filled = [field.name for field in table.schema if _may_be_filled(field)]
    rows: list[dict[str, Any]] = table.to_pylist()
    for name in filled:
        for row in rows:
            row[name] = unfilled(row[name])
    return rows


def _may_be_filled(field: Any) -> bool:
    """Whether a column holds messages with nested fields, such as calls, or tools. What a message itself lacks may be null."""
    import pyarrow.types as types

    kind = field.type
    if not (types.is_list(kind) or types.is_large_list(kind)):
        return False
    struct = kind.value_type
    if not types.is_struct(struct):
        return False
    return field.name == "tools" or (
        struct.get_field_index("role") >= 0 and any(types.is_nested(part.type) for part in struct)
    )


def _open(name: str) -> Any:
    import pyarrow.parquet as pq

    return pq.ParquetFile(name, pre_buffer=False, buffer_size=2**20)


def _unreadable(name: str, error: Exception) -> DataError:
    return DataError(f"{name} can't be read as parquet: {error}", hint="write it again")


def _parquet_groups(name: str, digest: Any) -> Iterator[_Group]:
    """Row groups that have rows; the digest is over the footer, which has the place and the statistics of every column."""
    import pyarrow as pa

    try:
        with Path(name).open("rb") as raw:
            raw.seek(-8, 2)
            raw.seek(-8 - int.from_bytes(raw.read(4), "little"), 2)
            digest.update(raw.read())
        with _open(name) as file:
            metadata = file.metadata
            sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable(name, error) from error
    first = 0
    for place, size in enumerate(sizes):
        if size:
            yield _Group(path=name, size=size, first=first, place=place, is_parquet=True)
        first += size


def _jsonl_groups(name: str, digest: Any) -> Iterator[_Group]:
    """Lots of lines with rows; the whole file is read once, for their places and the digest."""
    size, first, place, at = 0, 1, 0, 0
    with reading(name), Path(name).open("rb") as file:
        for number, line in enumerate(file, start=1):
            digest.update(line)
            if line.strip():
                if not size:
                    first, place = number, at
                size += 1
            at += len(line)
            if size == JSONL_GROUP:
                yield _Group(path=name, size=size, first=first, place=place, is_parquet=False)
                size = 0
    if size:
        yield _Group(path=name, size=size, first=first, place=place, is_parquet=False)
