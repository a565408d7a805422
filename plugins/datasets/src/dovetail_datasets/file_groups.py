"""FileGroups: reads files group by group. Formats: Parquet, JSONL, JSON arrays, and Arrow files of the package `datasets`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import attrs

from dovetail.errors import DataError
from dovetail.interfaces import PlacedRow, RowGroups
from dovetail_datasets.rows import unfilled

LINES = 1024
"""The number of rows in a group of a JSON file. A Parquet file's groups are its row groups, an Arrow file's its record batches."""
_BATCH = 1024
"""Number of rows of a row group that are decoded together."""
_MAGIC = b"PAR1"
"""First and last bytes of a Parquet file."""


@attrs.frozen(kw_only=True)
class DataFile:
    """A file of a dataset, decompressed if it was compressed."""

    name: str
    """The file's name in messages."""
    path: Path
    """The path of the file's content, which is another file if the original is compressed."""
    format: str
    """The file's format: `parquet`, `jsonl`, `json` or `arrow`."""


class FileGroups(RowGroups):
    """The rows of files in groups of consecutive rows (such as Parquet's row groups), in the order of the files.

    Args:
        files: the files, at least one.

    Raises:
        DataError: a file can't be read, or has no rows.
    """

    def __init__(self, files: Sequence[DataFile]) -> None:
        self._files = [_READERS[file.format](file) for file in files]
        digest = hashlib.blake2b(digest_size=8)
        for file in self._files:
            digest.update(file.digest)
        self._digest = digest.hexdigest()
        self._places = [(file, number) for file in self._files for number in range(len(file.sizes))]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(file.sizes[number] for file, number in self._places)

    def read(self, group: int, start: int = 0) -> Iterator[PlacedRow]:
        file, number = self._places[group]
        return file.read(number, start)

    def folder(self, group: int) -> str:
        return str(Path(self._places[group][0].name).parent)

    def digest(self) -> str:
        return self._digest


class _Reader:
    """Counts the rows of a file's groups, and reads the rows. Reading fails if the file has changed after the rows were counted."""

    def __init__(self, file: DataFile) -> None:
        self.name, self.path = file.name, file.path
        self.digest: bytes
        self.sizes: list[int] = []
        self._state = self._now()
        self._count()
        self._check()
        if not self.sizes:
            raise DataError(
                f"the file {self.name} has no rows", hint="write the file again, or leave it out"
            )
        self._firsts = [0, *accumulate(self.sizes)]

    def read(self, number: int, start: int) -> Iterator[PlacedRow]:
        """Yield the rows of the group with the index `number`, beginning with the row with the index `start` in the group."""
        raise NotImplementedError

    def _count(self) -> None:
        """Set `sizes`, the number of rows of each group, and `digest`, the digest of the file's content."""
        raise NotImplementedError

    def _check(self) -> None:
        """Refuse a file that was written or replaced since its rows were counted, since its rows may have changed."""
        if self._now() != self._state:
            raise DataError(
                f"the file {self.name} has changed since its rows were counted: it was written to, or replaced",
                hint="restore the file and resume the run, or start another run once the file is complete",
            )

    def _now(self) -> tuple[int, ...]:
        """Return inode, size and modification time, which change if the file is written or replaced."""
        with reading(self.name):
            found = self.path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns


class _Parquet(_Reader):
    def _count(self) -> None:
        _check_whole(self.name, self.path)
        self.digest = digest_of_file(self.name, self.path)
        with self._opened() as file:
            found = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            self._groups = [i for i, size in enumerate(found) if size]
            self.sizes = [size for size in found if size]

    def read(self, number: int, start: int) -> Iterator[PlacedRow]:
        first = self._firsts[number]
        self._check()
        with self._opened() as file:
            for batch in file.iter_batches(_BATCH, row_groups=[self._groups[number]]):
                if start < len(batch):
                    rows = arrow_rows(batch.slice(start))
                    self._check()
                    for place, row in enumerate(rows, first + start):
                        yield f"{self.name}, row {place}", row
                start = max(start - len(batch), 0)
                first += len(batch)

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            # `pre_buffer` would read a whole row group into memory.
            with pq.ParquetFile(self.path, pre_buffer=False, buffer_size=2**20) as file:
                yield file
        except DataError:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _unreadable(self.name, "parquet", error) from error


class _Arrow(_Reader):
    """Reads the record batches of an Arrow IPC file or stream, mapped into memory."""

    def _count(self) -> None:
        import pyarrow as pa

        self.digest = digest_of_file(self.name, self.path)
        try:
            with pa.memory_map(str(self.path)) as file:
                content = file.read_buffer()
            if content[:6].to_pybytes() == b"ARROW1":
                found = pa.ipc.open_file(content)
                batches = [found.get_batch(i) for i in range(found.num_record_batches)]
            else:
                batches = list(pa.ipc.open_stream(content))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _unreadable(self.name, "Arrow", error) from error
        self._batches = [batch for batch in batches if len(batch)]
        self.sizes = [len(batch) for batch in self._batches]

    def read(self, number: int, start: int) -> Iterator[PlacedRow]:
        for place in range(start, self.sizes[number], _BATCH):
            # Reading a mapped file that was truncated ends the process with SIGBUS.
            self._check()
            rows = arrow_rows(self._batches[number].slice(place, _BATCH))
            self._check()
            for row, columns in enumerate(rows, self._firsts[number] + place):
                yield f"{self.name}, row {row}", columns


class _Lines(_Reader):
    """Reads JSONL in groups of lines, whose positions it finds by reading the whole file once."""

    def _count(self) -> None:
        digest = hashlib.blake2b()
        self._begins: list[tuple[int, int]] = []
        """For each group, the line number of its first row, counted from 1, and this line's byte offset."""
        size = at = 0
        with reading(self.name), self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                digest.update(line)
                if line.strip():
                    if not size:
                        self._begins.append((number, at))
                    size += 1
                at += len(line)
                if size == LINES:
                    self.sizes.append(size)
                    size = 0
        self.sizes += [size] if size else []
        self.digest = digest.digest()

    def read(self, number: int, start: int) -> Iterator[PlacedRow]:
        first, at = self._begins[number]
        with reading(self.name), self.path.open("rb") as file:
            file.seek(at)
            filled = (found for found in enumerate(file, first) if found[1].strip())
            lines = list(islice(filled, self.sizes[number]))
        self._check()
        for count, line in lines[start:]:
            place = f"{self.name}, line {count}"
            yield place, _parsed(line, place)


class _Array(_Reader):
    """Reads a JSON array, whose objects it keeps in memory."""

    def _count(self) -> None:
        with reading(self.name):
            content = self.path.read_bytes()
        self.digest = hashlib.blake2b(content).digest()
        found = _parsed(content, self.name, list)
        if isinstance(found, DataError):
            raise found
        self._rows: list[Any] = found
        whole, rest = divmod(len(self._rows), LINES)
        self.sizes = [LINES] * whole + ([rest] if rest else [])

    def read(self, number: int, start: int) -> Iterator[PlacedRow]:
        first = number * LINES
        for place in range(first + start, first + self.sizes[number]):
            where, row = f"{self.name}, row {place}", self._rows[place]
            yield where, row if isinstance(row, dict) else _no_object(where, row)


_READERS: Mapping[str, type[_Reader]] = {
    "parquet": _Parquet,
    "arrow": _Arrow,
    "jsonl": _Lines,
    "json": _Array,
}


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Convert an operating-system error in the block to a DataError that names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the path {name} can't be read: {error.strerror or error}",
            hint="check that the path exists, and that you have permission to read it",
        ) from error


def digest_of_file(name: str, path: Path) -> bytes:
    """Return the SHA-256 digest of a file's content, 32 bytes; `name` is the file's name in errors."""
    with reading(name), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def unpack(name: str, compression: str, target: Path) -> None:
    """Decompress the file `name` into the file `target`.

    Raises:
        DataError: the file is damaged, or the disk is full.
    """
    import pyarrow as pa

    try:
        with (
            pa.input_stream(name, compression=compression) as packed,
            target.open("wb") as plain,
        ):
            shutil.copyfileobj(packed, plain, 2**20)
    except (pa.ArrowException, OSError, EOFError) as error:
        raise DataError(
            f"the file {name} can't be unpacked as {compression}: {error}",
            hint=f"copy or write the file again, and check that there is free space in {target.parent.parent} (data.cache_dir)",
        ) from error


def arrow_rows(table: Any) -> list[dict[str, Any]]:
    """Return the rows of an Arrow table or record batch, without the null keys that Arrow added to messages and `tools`."""
    filled = [field.name for field in table.schema if _may_be_filled(field)]
    rows: list[dict[str, Any]] = table.to_pylist()
    for name in filled:
        for row in rows:
            row[name] = unfilled(row[name])
    return rows


def _may_be_filled(field: Any) -> bool:
    """Return whether a column may have nested keys that Arrow filled with nulls: a column of tools, or of messages with nested fields.

    Args:
        field: the `pyarrow.Field` of the column.
    """
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


def _unreadable(name: str, what: str, error: Exception) -> DataError:
    return DataError(
        f"the file {name} can't be read as {what}: {error}", hint="write the file again"
    )


def _check_whole(name: str, path: Path) -> None:
    with reading(name), path.open("rb") as file:
        head = file.read(16)
        file.seek(-min(4, len(head)), os.SEEK_END)
        tail = file.read()
    if not head.startswith(_MAGIC):
        looks_json = head.lstrip()[:1] in (b"{", b"[")
        raise DataError(
            f"the file {name} is not a parquet file: it begins with {head!r}, not with {_MAGIC!r}",
            hint="the file looks like JSON: give it the ending .jsonl, with one object a line"
            if looks_json
            else "write the file with pandas' to_parquet or pyarrow.parquet.write_table",
        )
    if tail != _MAGIC:
        raise DataError(
            f"the file {name} is not a complete parquet file: it ends with {tail!r}, not with {_MAGIC!r}",
            hint="the file was cut off: copy or write it again",
        )


def _parsed(content: bytes, where: str, wanted: type = dict) -> Any:
    """Return the JSON value of a line or file; a DataError if it is not JSON, or not of the type `wanted`."""
    try:
        found = json.loads(content)
    except UnicodeDecodeError as error:
        return DataError(f"{where} is not UTF-8: {error}", hint=_not_json(content))
    except json.JSONDecodeError as error:
        return DataError(
            f"{where} is not JSON: {error.msg} at column {error.colno}: {content[:60]!r}",
            hint=_not_json(content),
        )
    except (ValueError, RecursionError) as error:
        what = (
            "is nested too deeply"
            if isinstance(error, RecursionError)
            else "has a number of too many digits"
        )
        return DataError(f"{where} {what}: {content[:60]!r}", hint="correct the row, or remove it")
    return found if isinstance(found, wanted) else _no_object(where, found)


def _no_object(where: str, found: object) -> DataError:
    return DataError(
        f"{where} holds a JSON value of type {type(found).__name__}, {str(found)[:60]!r}; expected an object",
        hint='write each row as an object, such as {"prompt": "…"}',
    )


def _not_json(line: bytes) -> str:
    if line.startswith(_MAGIC):
        return "the file is a parquet file: give it the ending .parquet"
    if line.strip() == b"{":
        return "the object extends over several lines: write each object on one line"
    return "write one JSON object a line, in UTF-8; or a JSON array, which begins with ["
