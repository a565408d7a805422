"""Frames between a rollout and its server: a JSON header, and arrays as raw bytes.

A frame is `b"DVT1"`, two little-endian uint32 (bytes of the header, bytes of the arrays), the header and the arrays, one after
the other. The header's key `arrays` has the dtype and length of each array. With log-probabilities, engines' own endpoints write
JSON for every token; in a frame, a response of T tokens takes 8 T bytes and no work per token.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from dovetail.errors import RolloutError

MEDIA_TYPE = "application/x-dovetail-frames"

_START = b"DVT1"
_SIZES = struct.Struct("<II")
_HEAD_BYTES = len(_START) + _SIZES.size
_DTYPES: dict[str, np.dtype[Any]] = {
    "<i4": np.dtype("<i4"),
    "<i8": np.dtype("<i8"),
    "<f4": np.dtype("<f4"),
}


@attrs.frozen(kw_only=True, eq=False)
class Frame:
    """One binary message: a JSON header and arrays."""

    header: Mapping[str, Any]
    """The message's JSON values."""
    arrays: tuple[np.ndarray, ...] = ()
    """Read-only arrays of one dimension, int32, int64 or float32."""


def pack(header: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> bytes:
    """Return a frame as bytes.

    Args:
        header: JSON values; the key `arrays` is reserved.
        arrays: int32, int64 or float32 [n] each.
    """
    described = [[array.dtype.newbyteorder("<").str, len(array)] for array in arrays]
    head = json.dumps({**header, "arrays": described}, separators=(",", ":")).encode()
    body = [np.ascontiguousarray(array, array.dtype.newbyteorder("<")) for array in arrays]
    sizes = _SIZES.pack(len(head), sum(array.nbytes for array in body))
    return b"".join((_START, sizes, head, *(array.tobytes() for array in body)))


class Unpacker:
    """Assembles frames from pieces of a byte stream."""

    def __init__(self) -> None:
        self._waiting = bytearray()

    @property
    def unfinished(self) -> bool:
        """Whether a frame has begun but is incomplete."""
        return bool(self._waiting)

    def feed(self, piece: bytes) -> Iterator[Frame]:
        """Yield the frames that this piece completes.

        Raises:
            RolloutError: the bytes are not frames.
        """
        self._waiting += piece
        while len(self._waiting) >= _HEAD_BYTES:
            if not self._waiting.startswith(_START):
                raise RolloutError(
                    f"the server's answer is not a Dovetail frame: {_excerpt(piece)}"
                )
            head_bytes, body_bytes = _SIZES.unpack_from(self._waiting, len(_START))
            whole = _HEAD_BYTES + head_bytes + body_bytes
            if len(self._waiting) < whole:
                return
            frame = bytes(self._waiting[:whole])
            del self._waiting[:whole]
            yield _read(frame, head_bytes)


def unpack(data: bytes) -> Frame:
    """Return the single frame in these bytes.

    Raises:
        RolloutError: the bytes are not exactly one frame.
    """
    unpacker = Unpacker()
    frames = list(unpacker.feed(data))
    if len(frames) != 1 or unpacker.unfinished:
        raise RolloutError(
            f"a message has {len(frames)} complete Dovetail frames; expected exactly one and no further bytes: {_excerpt(data)}"
        )
    return frames[0]


def _read(frame: bytes, head_bytes: int) -> Frame:
    end = _HEAD_BYTES + head_bytes
    try:
        header = json.loads(frame[_HEAD_BYTES:end])
        arrays = []
        for name, length in header.pop("arrays"):
            dtype = _DTYPES[name]
            arrays.append(np.frombuffer(frame, dtype, count=length, offset=end))
            end += length * dtype.itemsize
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RolloutError(f"a frame from the server can't be read: {error!r}") from error
    if end != len(frame):
        raise RolloutError(
            f"a frame from the server is damaged: it has {len(frame)} bytes; expected {end}, as its header says"
        )
    return Frame(header=header, arrays=tuple(arrays))


def _excerpt(data: bytes) -> str:
    return repr(data[:80])
