"""MediaRef: a reference to an image of a prompt. Batches and requests carry references, never pixels."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from dovetail.errors import DataError

_FIELDS = frozenset({"kind", "digest", "path"})


@attrs.frozen(kw_only=True)
class MediaRef:
    """A reference to an image of a prompt.

    Every process that reads the image must be able to reach the image's path, so several machines must share the directory.
    """

    digest: str
    """SHA-256 of the file's bytes, hexadecimal: references with equal digests are the same image."""
    path: str
    """Absolute path of the file."""
    kind: Literal["image"] = "image"

    def read(self) -> bytes:
        """Return the file's bytes.

        Raises:
            DataError: the file is missing, can't be read, or has changed.
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
                f"{self.digest[:12]}…, and is {found[:12]}… now",
                hint="restore the old file, or start a new run",
            )
        return data

    def as_json(self) -> dict[str, str]:
        """Return the reference as a JSON object, for the column `media`."""
        return {"kind": self.kind, "digest": self.digest, "path": self.path}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> MediaRef:
        """Return the reference that `as_json` wrote.

        Raises:
            DataError: the value has other keys, or another kind of media.
        """
        if set(value) != _FIELDS or value["kind"] != "image":
            raise DataError(
                f"a reference to media has the keys {', '.join(sorted(map(str, value)))} and the kind "
                f"{value.get('kind')!r}; expected {', '.join(sorted(_FIELDS))}, and the kind 'image'"
            )
        return cls(digest=str(value["digest"]), path=str(value["path"]))
