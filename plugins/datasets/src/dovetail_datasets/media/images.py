"""Decodes an image file to RGB, so that the process that counts the image's tokens and every engine get the same pixels."""

from __future__ import annotations

import io
import struct
import warnings
from typing import Any

from dovetail.errors import DataError

_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    EOFError,
    struct.error,
)
"""Errors that Pillow's decoders, and its reader and writer of EXIF, raise for damaged files."""


def open_image(data: bytes, name: str) -> Any:
    """Decode an image to RGB, rotated by its EXIF orientation, without alpha.

    Args:
        data: the bytes of a file in a format that Pillow reads (PNG, JPEG, WebP, …).
        name: the image's name in errors.

    Returns:
        A `PIL.Image.Image` of mode RGB.

    Raises:
        DataError: the bytes are not an image, are cut off, have malformed EXIF, or hold more pixels than Pillow thinks safe.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    if not data:
        raise DataError(
            f"{name} is empty (0 bytes)", hint="write the image again, or remove the row"
        )
    try:
        with warnings.catch_warnings():
            # Up to twice its limit, Pillow only warns of an image that is too large.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data)) as image:
                return ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError as error:
        raise DataError(
            f"{name} is not in an image format that Pillow can read: its {len(data):,} bytes begin with {data[:8]!r}",
            hint="convert the image to PNG, JPEG or WebP, or remove the row",
        ) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(
            f"{name} is too large: {error}", hint="scale the image down, or remove the row"
        ) from error
    except _BROKEN as error:
        raise DataError(
            f"{name} is a broken image: {error}",
            hint="copy or write the image again, or remove the row",
        ) from error
