"""The dataset source `files`: rows of local files; errors name file and row."""

from __future__ import annotations

import glob
import hashlib
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.errors import DataError, nearest
from dovetail.interfaces import DatasetSource, PluginConfig
from dovetail_datasets.config import FilesConfig
from dovetail_datasets.file_groups import DataFile, FileGroups, digest_of_file, reading, unpack
from dovetail_datasets.shards import cache_root

FORMATS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".arrow": "arrow",
}
"""Formats by file name ending."""
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Compressions by the file name ending after the format's ending."""
_PACKED = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"))
"""First bytes of compressed files, with the compression; such files are unpacked."""
_OTHERS = (
    (b"version https://git-lfs", "a Git LFS pointer", "run `git lfs pull`"),
    (b"BZh", "compressed by bzip2", "unpack it with `bzip2 -d`"),
    (b"\xfd7zXZ\x00", "compressed by xz", "unpack it with `xz -d`"),
    (b"PK\x03\x04", "a zip archive", "unpack it with `unzip`"),
    (b"\xff\xfe", "in UTF-16", "write it in UTF-8: `iconv -f UTF-16 -t UTF-8`"),
    (b"\xfe\xff", "in UTF-16", "write it in UTF-8: `iconv -f UTF-16 -t UTF-8`"),
)
"""First bytes of files in formats that can't be read, with the name of the format and a fix."""
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(.*)")


class FilesSource(DatasetSource):
    """Reads local files. A path may be a pattern such as `data/*.parquet`, whose matches are sorted, or a folder that the package `datasets`
    wrote.
    """

    name = "files"
    api = ">=1.0,<2"
    capabilities = frozenset({"deterministic"})
    Config = FilesConfig

    def read(self, paths: Sequence[str]) -> list[Mapping[str, Any]]:
        """Return all rows of these files, in order; each row a mapping."""
        groups, rows = self.stream(paths), []
        for number in range(len(groups.sizes)):
            for _, row in groups.read(number):
                if isinstance(row, DataError):
                    raise row
                rows.append(row)
        return rows

    def stream(self, paths: Sequence[str]) -> FileGroups:
        """Return the rows of these files in row groups."""
        return FileGroups([self._file(name) for path in paths for name in _expand(path)])

    @classmethod
    def write(cls, config: PluginConfig, rows: Iterable[Mapping[str, Any]], folder: Path) -> Path:
        """Write rows as a Parquet file into a folder, and return its path."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        sink = pa.BufferOutputStream()
        try:
            pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), sink)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise DataError(
                f"the rows can't be written as a Parquet table: {error}",
                hint="give each row the same columns, and all values of a column one type",
            ) from error
        content = sink.getvalue().to_pybytes()
        path = folder / f"{hashlib.sha256(content).hexdigest()[:16]}.parquet"
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def _file(self, name: str) -> DataFile:
        """Return a file with its format; a compressed file is unpacked into the cache."""
        path = Path(name)
        head = _head(name, path)
        ending = path.suffix.lower()
        for begin, compression in _PACKED:
            if head.startswith(begin):
                path, ending = self._unpacked(name, compression), Path(path.stem).suffix.lower()
                head = _head(name, path)
        for begin, what, fix in _OTHERS:
            if head.startswith(begin):
                raise DataError(f"the file {name} can't be read: it is {what}", hint=fix)
        return DataFile(name=name, path=path, format=self._format(name, ending, head))

    def _unpacked(self, name: str, compression: str) -> Path:
        """Unpack a compressed file into the cache, unless done before, and return the path, which the file's digest determines."""
        folder = cache_root(self.context.cache_dir) / "unpacked"
        path = folder / digest_of_file(name, Path(name)).hex()
        if path.is_file():
            return path
        with reading(str(folder)):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as own:
                unpack(name, compression, Path(own) / path.name)
                if digest_of_file(name, Path(name)).hex() != path.name:
                    raise DataError(
                        f"the file {name} changed while it was unpacked",
                        hint="try again once the file is complete",
                    )
                (Path(own) / path.name).replace(path)
        return path

    def _format(self, name: str, ending: str, head: bytes) -> str:
        found = FORMATS.get(ending) if self.config.format == "auto" else self.config.format
        if found is None and head.startswith(b"PAR1"):
            return "parquet"
        if found is None:
            raise DataError(
                f"the file {name} has the ending {ending!r}; expected one of {', '.join(FORMATS)}, optionally followed by {' or '.join(COMPRESSIONS)}",
                hint="rename the file, or set its format, as in data.source={name: files, format: jsonl}",
            )
        return "json" if found == "jsonl" and head.lstrip()[:1] == b"[" else found


def _head(name: str, path: Path) -> bytes:
    with reading(name), path.open("rb") as file:
        head = file.read(64)
    if not head:
        raise DataError(
            f"the file {name} is empty (0 bytes)", hint="write the file again, or leave it out"
        )
    return head


def _expand(path: str) -> list[str]:
    """Return the files that a path, pattern or folder names."""
    name = str(Path(path).expanduser())
    if Path(name).is_file():
        return [name]
    if Path(name).is_dir():
        return _arrow_files(path, Path(name))
    if glob.has_magic(name):
        found = glob.iglob(name, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        matches = sorted(match for match in found if Path(match).is_file())
        if matches:
            _check_shards(matches)
            return matches
        raise DataError(
            f"no file matches the pattern {path!r} (working directory: {Path.cwd()})",
            hint=_beside(Path(name)),
        )
    raise DataError(
        f"the file {path!r} does not exist (working directory: {Path.cwd()})",
        hint=_beside(Path(name)),
    )


def _arrow_files(path: str, folder: Path) -> list[str]:
    """Return the files that `state.json` lists, in a folder that `Dataset.save_to_disk` wrote."""
    if (folder / "dataset_dict.json").is_file():
        with reading(path):
            splits = sorted(each.name for each in folder.iterdir() if each.is_dir())
        raise DataError(
            f"the folder {path} is a DatasetDict, with the datasets {', '.join(splits) or '(none)'}; expected one dataset",
            hint=f"name the folder of one dataset: {path}/{splits[0] if splits else 'train'}",
        )
    state = folder / "state.json"
    if not state.is_file():
        inside = [each.name for each in folder.iterdir() if _is_data(each)]
        raise DataError(
            f"{path} is a directory{'' if inside else ' without data files'}; expected a file, a pattern, or a folder that `datasets` wrote with save_to_disk",
            hint=f"name the files in it: {path}/*{Path(inside[0]).suffix if inside else '.parquet'}",
        )
    try:
        listed = [
            folder / each["filename"] for each in json.loads(state.read_bytes())["_data_files"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"the file {state}, which lists a dataset's files, can't be read: {error}",
            hint="save the dataset again, with save_to_disk",
        ) from error
    for file in listed:
        if not file.is_file():
            raise DataError(
                f"the file {file} is missing, but {state} lists it",
                hint="copy the folder again, with all files",
            )
    return [str(file) for file in listed]


def _check_shards(names: Sequence[str]) -> None:
    """Refuse an incomplete set of numbered files, such as `train-00001-of-00003.parquet` without the other two."""
    found: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for name in names:
        if match := _SHARD.fullmatch(name):
            found[match[1], match[3], match[4]].add(int(match[2]))
    for (begin, count, end), numbers in found.items():
        missing = sorted({*range(int(count))} - numbers)
        if missing:
            raise DataError(
                f"the file {begin}-{missing[0]:05}-of-{count}{end} is missing: only {len(numbers)} of the {int(count)} numbered files were found",
                hint="copy the missing file into the same folder, or name the files one by one",
            )


def _is_data(path: Path) -> bool:
    plain = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    return plain.suffix.lower() in FORMATS


def _beside(path: Path) -> str:
    """Return a hint for a missing file: a similar name, or the data files in its folder."""
    folder = path.parent
    if not folder.is_dir():
        return f"correct the path: the directory {str(folder)!r} does not exist either"
    names = sorted(entry.name for entry in folder.iterdir() if _is_data(entry))
    if not names:
        return f"correct the path: the directory {str(folder.resolve())!r} has no data files"
    close = nearest(path.name, names)
    if close:
        return f"did you mean {str(folder / close)!r}?"
    return f"choose one of the files in {str(folder.resolve())!r}: {', '.join(names[:10])}"
