"""Images in files: a reference to one where it lies, or to its bytes, kept under the name of their digest."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from dovetail.errors import DataError
from dovetail.interfaces import MediaRef


def reference_to(path: Path, data: bytes) -> MediaRef:
    """Return a reference to an existing file.

    Args:
        path: the path of the file.
        data: its bytes.
    """
    return MediaRef(digest=hashlib.sha256(data).hexdigest(), path=str(path.absolute()))


def keep(directory: Path, data: bytes) -> MediaRef:
    """Write bytes to a file named by their digest, unless it exists, and return a reference.

    A file of that name with other content is replaced. Several processes may keep the same bytes at once.

    Raises:
        DataError: the file can't be written.
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
