"""An image file's bytes as an RGB picture: the same in the process that counts its tokens and in every engine."""

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
"""What Pillow's decoders, and its reader and writer of EXIF, raise for bytes that are not as they should be."""


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
        raise DataError(f"{name} is empty (0 bytes)", hint="write it again")
    try:
        with warnings.catch_warnings():
            # Pillow only warns of what is large beyond reason, up to twice its limit.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data)) as image:
                return ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError as error:
        raise DataError(
            f"{name} is not an image that Pillow knows: its {len(data):,} bytes begin with {data[:8]!r}",
            hint="images are PNG, JPEG, WebP and the like",
        ) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{name} is too large: {error}", hint="scale it down") from error
    except _BROKEN as error:
        raise DataError(
            f"{name} is a broken image: {error}",
            hint="copy or write it again, or remove the row",
        ) from error
