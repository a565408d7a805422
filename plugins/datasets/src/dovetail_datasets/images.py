"""Reads the images of a dataset's row, matches them with the prompt, and keeps their bytes in files.

In verl's format, the column `images` lists files, and messages contain `<image>` for each file, in order. Messages of
typed parts (`{"type": "image"}`) work too, and may contain the images themselves.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from dovetail.errors import DataError
from dovetail.interfaces import MediaRef

PLACEHOLDER = "<image>"
"""The placeholder of an image in a message's text."""
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,")
_LONGEST_SHOWN = 255
"""Maximum length of a path that an error message shows in full; a longer text is probably not a path but, for example, base64."""
_HINT = (
    "give a path relative to the dataset's folder or to the working directory, or an absolute path; "
    "an image in base64 must begin with 'data:image/png;base64,'"
)


@attrs.frozen(kw_only=True, eq=False)
class RawImage:
    """An image of a row: its bytes, or the path of its file."""

    data: bytes | None = None
    path: str | None = None

    def read(self, folder: str | None) -> FoundImage:
        """Read the image: return its bytes and, if it has one, the path of its file.

        Args:
            folder: the folder of the dataset's file. A relative path is looked up there, then in the working directory.

        Raises:
            DataError: the file is missing or can't be read.
        """
        if self.data is not None:
            return FoundImage(data=self.data, path=None)
        name = str(self.path).removeprefix("file://")
        places = [Path(folder) / name] if folder is not None else []
        places.append(Path(name).expanduser())
        shown = repr(name if len(name) <= _LONGEST_SHOWN else name[:60] + "…")
        try:
            path = next((place for place in places if place.is_file()), None)
        except OSError as error:
            raise DataError(
                f"the image file {shown} can't be read: {error.strerror}", hint=_HINT
            ) from error
        if path is None:
            raise DataError(
                f"there is no image file {shown}"
                + (f", neither in {folder!r} nor in {str(Path.cwd())!r}" if folder else ""),
                hint=_HINT,
            )
        try:
            return FoundImage(data=path.read_bytes(), path=path)
        except OSError as error:
            raise DataError(
                f"the image file {str(path)!r} can't be read: {error.strerror}", hint=_HINT
            ) from error


@attrs.frozen(kw_only=True, eq=False)
class FoundImage:
    """An image's bytes, in memory while its prompt is processed."""

    data: bytes
    path: Path | None

    def kept(self, directory: Path) -> MediaRef:
        """Return a reference to the image's file; if it has none, to a copy of the bytes in this directory."""
        return (
            keep(directory, self.data) if self.path is None else reference_to(self.path, self.data)
        )


def images_in(value: object, column: str, where: str) -> tuple[RawImage, ...]:
    """Return the images of a row's column.

    Args:
        value: None, an image, or a list of images. An image is a path, bytes, a base64 data URL, or a mapping with `bytes` or `path` (as
            the library datasets stores images).
        column: the name of the column, for messages.
        where: the row, for messages.

    Raises:
        DataError: an entry is of another type.
    """
    if value is None:
        return ()
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (str, bytes, Mapping)):
        value = [value]
    if not isinstance(value, Sequence):
        raise DataError(
            f"{where}: the column {column!r} is {shown(value)}; expected a list of images",
            hint="write an image as a path, as bytes, or as a mapping with 'bytes' or 'path'",
        )
    return tuple(
        image_of(entry, f"{where}: image {number} of {column!r}")
        for number, entry in enumerate(value)
    )


def image_of(entry: object, where: str) -> RawImage:
    """Return the image that one entry of an image column, or an image part of a message, contains.

    Raises:
        DataError: the entry is neither a path, nor bytes, nor a data URL, nor a mapping with one of them; or it is a web address.
    """
    if isinstance(entry, Mapping):
        given = [entry.get(key) for key in ("bytes", "path", "image")]
        entry = next((part for part in given if part is not None), None)
    if isinstance(entry, str) and (url := _DATA_URL.match(entry)):
        try:
            return RawImage(data=base64.b64decode(entry[url.end() :], validate=True))
        except ValueError as error:
            raise DataError(
                f"{where} is a data URL whose base64 can't be decoded: {error}",
                hint="encode the image again, or remove the row",
            ) from error
    if isinstance(entry, str) and entry:
        if entry.startswith(("http://", "https://")):
            raise DataError(
                f"{where} is the URL {entry[:80]!r}; expected a local file, since images are not downloaded",
                hint="download the image, and write its path into the row",
            )
        return RawImage(path=entry)
    if isinstance(entry, (bytes, bytearray)):
        return RawImage(data=bytes(entry))
    raise DataError(
        f"{where} is {shown(entry)}; expected a path or bytes",
        hint="write an image as a path, as bytes, or as a mapping with 'bytes' or 'path'",
    )


def with_images(
    prompt: list[dict[str, Any]] | str, images: tuple[RawImage, ...], where: str
) -> tuple[list[dict[str, Any]] | str, tuple[RawImage, ...]]:
    """Return the prompt with one part, or one placeholder in its text, for each image; and the images in their order.

    Messages become lists of typed parts. The prompt of a row without images is returned unchanged, even if it contains placeholders.

    Args:
        prompt: messages, or a text.
        images: the images of the row's column.
        where: the row, for messages.

    Raises:
        DataError: the numbers of placeholders and images differ, images are given twice, or a part is of no known type.
    """
    if isinstance(prompt, str):
        _check_count(prompt.count(PLACEHOLDER) if images else 0, len(images), where)
        return prompt, images
    if not images and not count_images(prompt):
        return prompt, ()
    inline: list[RawImage] = []
    typed = [_typed(message, bool(images), inline, where) for message in prompt]
    marks = count_images(typed)
    if inline and images:
        raise DataError(
            f"{where}: the row gives images twice: {len(inline)} in its messages and {len(images)} in a column",
            hint="remove the images from the messages or from the column",
        )
    images = images or tuple(inline)
    _check_count(marks, len(images), where)
    return typed, images


def count_images(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of image parts in these messages."""
    return sum(_is_image(part) for message in messages for part in _parts(message))


def in_parts(text: str) -> list[dict[str, Any]]:
    """Return a text as typed parts, with an image part in place of each `<image>`."""
    parts: list[dict[str, Any]] = []
    for number, between in enumerate(text.split(PLACEHOLDER)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": between}] if between else []
    return parts


def _typed(
    message: Mapping[str, Any], split: bool, inline: list[RawImage], where: str
) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        if not split or PLACEHOLDER not in content:
            return dict(message)
        return {**message, "content": in_parts(content)}
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": [_part(part, inline, where) for part in content]}


def _part(part: Any, inline: list[RawImage], where: str) -> dict[str, Any]:
    """Return a typed part in the form of chat templates; an image in the part is moved to `inline`."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image":
        held = {key: part.get(key) for key in ("image", "bytes", "path")}
        if any(value is not None for value in held.values()):
            given = next(value for value in held.values() if value is not None)
            inline.append(image_of(given, f"{where}: an image of its messages"))
        return {"type": "image"}
    raise DataError(
        f"{where}: a message has the part {shown(part)}; expected a part of type 'text' or 'image'",
        hint="write {'type': 'text', 'text': '…'} or {'type': 'image'}",
    )


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _check_count(marks: int, images: int, where: str) -> None:
    if marks != images:
        raise DataError(
            f"{where}: the row refers to {marks} {'image' if marks == 1 else 'images'}, but has {images}",
            hint=f"write {PLACEHOLDER} once for each image, in the order of the images",
        )


def shown(value: object) -> str:
    """Return a value as an error shows it: its first 60 characters, and its type."""
    return f"{repr(value)[:60]} ({type(value).__name__})"


def reference_to(path: Path, data: bytes) -> MediaRef:
    """Return a reference to an existing file.

    Args:
        path: the path of the file.
        data: the bytes of the file, for the digest in the reference.
    """
    return MediaRef(digest=hashlib.sha256(data).hexdigest(), path=str(path.absolute()))


def keep(directory: Path, data: bytes) -> MediaRef:
    """Write bytes to a file named by their digest, unless that file has them already, and return a reference to the file.

    Several processes may keep the same bytes at once.

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
            hint="set data.media_dir to a writable directory with free space",
        ) from error
    return MediaRef(digest=digest, path=str(path))


def _write(path: Path, data: bytes) -> None:
    """Write a temporary file beside the path and rename it, so that readers never see an incomplete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, beside = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        # mkstemp makes the file readable by its owner only, but workers of the run may belong to other users.
        Path(beside).chmod(0o644)
        Path(beside).replace(path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
