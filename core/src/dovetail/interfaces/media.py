"""MediaRef: a file beside a prompt, named by its content. Batches and requests carry these, never pixels."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from dovetail.errors import DataError

_FIELDS = frozenset({"kind", "digest", "path"})


@attrs.frozen(kw_only=True)
class MediaRef:
    """One image of a prompt, by reference.

    Processes that read it reach its path: where there are several machines, the directory is one that they share.
    """

    digest: str
    """SHA-256 of the file's bytes, hexadecimal: two references with one digest are one image."""
    path: str
    """Where the bytes lie, an absolute path."""
    kind: Literal["image"] = "image"

    def read(self) -> bytes:
        """The file's bytes.

        Raises:
            DataError: the file is gone, can't be read, or is no longer what it was.
        """
        try:
            data = Path(self.path).read_bytes()
        except OSError as error:
            raise DataError(
                f"the image {self.path!r} can't be read: {error.strerror or error}",
                hint="every process of a run reads images by their path: leave them where they are, on a "
                "file system that all machines share",
            ) from error
        found = hashlib.sha256(data).hexdigest()
        if found != self.digest:
            raise DataError(
                f"the image {self.path!r} has changed since the prompts were read: its SHA-256 was "
                f"{self.digest[:12]}…, and is {found[:12]}…",
                hint="put the old file back, or start the run anew",
            )
        return data

    def as_json(self) -> dict[str, str]:
        """The reference as a JSON object, for the column `media`."""
        return {"kind": self.kind, "digest": self.digest, "path": self.path}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> MediaRef:
        """The reference that `as_json` wrote.

        Raises:
            DataError: it is no such object.
        """
        if set(value) != _FIELDS or value["kind"] != "image":
            raise DataError(
                f"a reference to media has the keys {', '.join(sorted(map(str, value)))} and the kind "
                f"{value.get('kind')!r}; it has {', '.join(sorted(_FIELDS))}, and the kind 'image'"
            )
        return cls(digest=str(value["digest"]), path=str(value["path"]))


def reference_to(path: Path, data: bytes) -> MediaRef:
    """A reference to a file where it lies.

    Args:
        path: of the file.
        data: its bytes.
    """
    return MediaRef(digest=hashlib.sha256(data).hexdigest(), path=str(path.absolute()))


def keep(directory: Path, data: bytes) -> MediaRef:
    """Write bytes into a directory under the name of their digest, unless they are there, and refer to them.

    A file of that name with other content is replaced. Several processes may keep the same bytes at once.

    Raises:
        DataError: they can't be written.
    """
    digest = hashlib.sha256(data).hexdigest()
    path = directory.absolute() / digest[:2] / digest
    try:
        if not (path.is_file() and path.read_bytes() == data):
            _write(path, data)
    except OSError as error:
        raise DataError(
            f"an image of {len(data):,} bytes can't be written to {str(directory)!r}: {error.strerror or error}",
            hint="set data.media_dir to a directory with room that this run may write to",
        ) from error
    return MediaRef(digest=digest, path=str(path))


def _write(path: Path, data: bytes) -> None:
    """Write beside and rename: whoever finds the file finds all of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, beside = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        # mkstemp makes files for their owner alone; other users' processes may be workers of the run
        Path(beside).chmod(0o644)
        Path(beside).replace(path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
