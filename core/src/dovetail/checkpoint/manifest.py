"""The manifest of a checkpoint: every file with its size and SHA-256."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from dovetail.checkpoint.mark import Mark
from dovetail.errors import CheckpointError

MANIFEST = "manifest.json"
SCHEMA = 1


@attrs.frozen(kw_only=True)
class FileEntry:
    """Size and hash of one file as written."""

    size: int
    """Size in bytes."""
    sha256: str
    """Hexadecimal digest."""


@attrs.frozen(kw_only=True)
class CheckpointManifest:
    """The content of `manifest.json`, which lists the files of a checkpoint."""

    step: int
    """Finished training steps."""
    sequence: int
    """Sequence number of the save, which rises by 1 with every save of the run: the latest checkpoint has the highest."""
    files: Mapping[str, FileEntry]
    """Every file, by its path relative to the checkpoint, with `/` as separator."""
    mark: Mark | None = None
    """Metric and value if the checkpoint was the best one when saved; else None."""

    @property
    def total_bytes(self) -> int:
        """Total size of the files in bytes."""
        return sum(entry.size for entry in self.files.values())

    @classmethod
    def of(
        cls, directory: Path, *, step: int, sequence: int, mark: Mark | None = None
    ) -> CheckpointManifest:
        """Return the manifest of a directory, after reading and hashing every file.

        Raises:
            CheckpointError: the directory has no file, or an entry that is neither a file nor a folder.
        """
        files = {path.relative_to(directory).as_posix(): _entry(path) for path in walk(directory)}
        if not files:
            raise CheckpointError(
                f"the checkpoint of step {step} has no files; expected at least one"
            )
        if MANIFEST in files:
            raise CheckpointError(
                f"the file name {MANIFEST} at the top of a checkpoint is reserved for its list of files; use another name"
            )
        return cls(step=step, sequence=sequence, files=files, mark=mark)

    def to_json(self) -> str:
        """Return the content of `manifest.json`."""
        fields = {"schema": SCHEMA, **attrs.asdict(self)}
        return json.dumps(fields, indent=1, sort_keys=True) + "\n"

    @classmethod
    def read(cls, directory: Path) -> CheckpointManifest:
        """Return the manifest of a checkpoint.

        Raises:
            CheckpointError: the manifest is missing, damaged, or of another schema version.
        """
        path = directory / MANIFEST
        try:
            fields = json.loads(path.read_bytes())
            if fields["schema"] != SCHEMA:
                raise CheckpointError(
                    f"the checkpoint manifest {path} has schema {fields['schema']!r}, but this version reads {SCHEMA}",
                    hint="read it with the version of dovetail-core that wrote it",
                )
            files = {name: FileEntry(**entry) for name, entry in fields["files"].items()}
            mark = Mark(**fields["mark"]) if fields.get("mark") else None
            return cls(step=fields["step"], sequence=fields["sequence"], files=files, mark=mark)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{directory} is not a complete checkpoint: it has no {MANIFEST}"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"the checkpoint manifest {path} is damaged: {type(error).__name__}: {error}"
            ) from error

    def damages(self, directory: Path) -> Iterator[str]:
        """Yield one sentence for each missing or changed file of a checkpoint."""
        for name, expected in self.files.items():
            path = directory / name
            try:
                size = path.stat().st_size
                if size != expected.size:
                    yield f"{name} has {size} bytes instead of {expected.size}"
                elif _sha256(path) != expected.sha256:
                    yield f"{name} does not have the contents that were written (its SHA-256 differs)"
            except FileNotFoundError:
                yield f"{name} is missing"
            except OSError as error:
                yield f"{name} can't be read: {error}"


def walk(directory: Path) -> Iterator[Path]:
    """Yield every file below a directory, sorted.

    Raises:
        CheckpointError: an entry is a link, or neither a file nor a folder.
    """
    for path in sorted(directory.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise CheckpointError(
                f"the checkpoint's entry {path.relative_to(directory)} is not a plain file: a checkpoint must not depend on other files",
                hint="write a copy of the file instead of a link",
            )
        if path.is_file():
            yield path


def _entry(path: Path) -> FileEntry:
    return FileEntry(size=path.stat().st_size, sha256=_sha256(path))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
