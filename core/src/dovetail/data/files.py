"""`files`: rows from parquet and JSONL files, with errors that name file and row."""

from __future__ import annotations

import glob
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.config.builtin import FilesConfig
from dovetail.data.file_groups import FileGroups, arrow_rows, reading
from dovetail.data.rows import FileRows, Rows
from dovetail.errors import DataError, nearest
from dovetail.interfaces.data import DatasetSource

FORMATS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
}
"""File name endings, and what such files hold."""

_MAGIC = b"PAR1"
"""First and last bytes of a parquet file."""
_OTHERS = (
    (b"version https://git-lfs", "a Git LFS pointer", "run `git lfs pull`"),
    (b"\x1f\x8b", "compressed by gzip", "unpack it: `gzip -d`"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "unpack it: `zstd -d`"),
    (b"BZh", "compressed by bzip2", "unpack it: `bzip2 -d`"),
    (b"\xfd7zXZ\x00", "compressed by xz", "unpack it: `xz -d`"),
    (b"PK\x03\x04", "a zip archive", "unpack it: `unzip`"),
    (b"ARROW1", "an Arrow file", "write it as Parquet, with pyarrow.parquet.write_table"),
    (b"\xff\xfe", "in UTF-16", "write it in UTF-8: `iconv -f UTF-16 -t UTF-8`"),
    (b"\xfe\xff", "in UTF-16", "write it in UTF-8: `iconv -f UTF-16 -t UTF-8`"),
)
"""First bytes of files that are neither Parquet nor JSONL, what they are, and what to do."""
_SHARED = ("data_source", "reward_model")
"""Columns that either every file has or none, since rows without them mean something else."""


class FilesSource(DatasetSource):
    """Reads local files whole. A path may be a pattern such as `data/*.parquet`, whose matches are sorted."""

    name = "files"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = FilesConfig

    def read(self, paths: Sequence[str]) -> Rows:
        """All rows of these files, in order; each row a mapping in verl's schema."""
        files = [self._read(name) for name in _names(paths)]
        _check_same_schema(files)
        return Rows(files)

    def stream(self, paths: Sequence[str]) -> FileGroups:
        """Row groups of Parquet, and lots of lines of JSONL, which is read once before, for their places."""
        names = _names(paths)
        parquet = [name for name in names if self._checked_format(name) == "parquet"]
        return FileGroups(names, parquet, _parse)

    def _read(self, name: str) -> FileRows:
        read = _read_parquet if self._checked_format(name) == "parquet" else _read_jsonl
        file = read(name)
        if not file.rows:
            raise DataError(
                f"{name} is empty: it has no rows", hint="write it again, or leave it out"
            )
        return file

    def _checked_format(self, name: str) -> str:
        """`parquet`, of a file that begins and ends as one, or `jsonl`."""
        path = Path(name)
        with reading(name), path.open("rb") as file:
            head = file.read(64)
        if not head:
            raise DataError(f"{name} is empty (0 bytes)", hint="write it again")
        for begin, what, fix in _OTHERS:
            if head.startswith(begin):
                raise DataError(f"{name} is {what}", hint=fix)
        found = self._format(path, head)
        if found == "parquet":
            _check_parquet(name, head)
        return found

    def _format(self, path: Path, head: bytes) -> str:
        if self.config.format != "auto":
            return str(self.config.format)
        if path.suffix.lower() in FORMATS:
            return FORMATS[path.suffix.lower()]
        if head.startswith(_MAGIC):
            return "parquet"
        raise DataError(
            f"{path} has the ending {path.suffix!r}; files end in {', '.join(FORMATS)}",
            hint="rename it, or set data.source={name: files, format: jsonl}",
        )


def _expand(path: str) -> list[str]:
    """The files that a path or pattern names."""
    name = str(Path(path).expanduser())
    if Path(name).is_file():
        return [name]
    if Path(name).is_dir():
        raise DataError(f"{path} is a directory", hint=f"name its files: {path}/*.parquet")
    if glob.has_magic(name):
        found = glob.iglob(name, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        matches = sorted(match for match in found if Path(match).is_file())
        if matches:
            return matches
        raise DataError(f"no file matches {path!r} in {Path.cwd()}", hint=_beside(Path(name)))
    raise DataError(f"there is no file {path!r} in {Path.cwd()}", hint=_beside(Path(name)))


def _beside(path: Path) -> str:
    """What there is in place of a missing file."""
    folder = path.parent
    if not folder.is_dir():
        return f"there is no directory {str(folder)!r} either"
    names = sorted(entry.name for entry in folder.iterdir() if entry.suffix.lower() in FORMATS)
    if not names:
        return f"there are no data files in {str(folder.resolve())!r}"
    close = nearest(path.name, names)
    if close:
        return f"did you mean {str(folder / close)!r}?"
    return f"in {str(folder.resolve())!r} there are: {', '.join(names[:10])}"


def _names(paths: Sequence[str]) -> list[str]:
    return [name for path in paths for name in _expand(path)]


def _check_parquet(name: str, head: bytes) -> None:
    if not head.startswith(_MAGIC):
        raise DataError(
            f"{name} is not a parquet file: it begins with {head[:16]!r}, not with {_MAGIC!r}",
            hint=_looks_like(head),
        )
    with reading(name), Path(name).open("rb") as file:
        file.seek(-4, 2)
        tail = file.read()
    if tail != _MAGIC:
        raise DataError(
            f"{name} is not a whole parquet file: it ends with {tail!r}, not with {_MAGIC!r}",
            hint="it was cut off: copy or write it again",
        )


def _read_parquet(name: str) -> FileRows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = arrow_rows(pq.read_table(name))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"{name} can't be read as parquet: {error}", hint="write it again"
        ) from error
    return FileRows(path=name, rows=rows)


def _looks_like(head: bytes) -> str:
    if head.lstrip()[:1] in (b"{", b"["):
        return "it looks like JSON: name it .jsonl, one object a line"
    return "write it with pandas' to_parquet or pyarrow.parquet.write_table"


def _read_jsonl(name: str) -> FileRows:
    rows: list[Mapping[str, Any]] = []
    lines: list[int] = []
    with reading(name), Path(name).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                rows.append(_parse(line, f"{name}, line {number}"))
                lines.append(number)
    return FileRows(path=name, rows=rows, lines=lines)


def _parse(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8: {error}", hint=_not_json(line)) from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where} is not JSON: {error.msg} at column {error.colno}: {line[:60]!r}",
            hint=_not_json(line),
        ) from error
    except (ValueError, RecursionError) as error:
        what = (
            "is nested too deeply"
            if isinstance(error, RecursionError)
            else "has a number of too many digits"
        )
        raise DataError(
            f"{where} {what}: {line[:60]!r}", hint="correct the row, or remove it"
        ) from error
    if not isinstance(row, dict):
        raise DataError(
            f"{where} holds {type(row).__name__} {str(row)[:60]!r}, not an object",
            hint='JSONL has one object a line, such as {"prompt": "…"}',
        )
    return row


def _not_json(line: bytes) -> str:
    if line.startswith(_MAGIC):
        return "it is a parquet file: name it .parquet"
    if line.lstrip()[:1] == b"[" or line.strip() == b"{":
        return "it is JSON over several lines; JSONL has one object a line"
    return "JSONL has one object a line, in UTF-8"


def _check_same_schema(files: Sequence[FileRows]) -> None:
    """Refuse files of which some have `data_source` or `reward_model`, and others lack it."""
    for column in _SHARED:
        having = [file for file in files if column in file.columns]
        if having and len(having) < len(files):
            lacking = next(file for file in files if file not in having)
            raise DataError(
                f"the files have different schemas: {having[0].path} has the column {column!r}, "
                f"{lacking.path} has not (its columns: {', '.join(lacking.columns)})",
                hint=f"write {column!r} in all of them, or in none",
            )
