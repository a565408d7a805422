"""What travels between a manager and its worker processes: frames; pickles to the worker, plain JSON back.

A worker runs code that nobody has checked, so nothing of what it sends is unpickled.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from dovetail.interfaces import Failure, FailureKind, Outcome, Sample, Score, finite_float

LARGEST = 64 << 20
"""Bytes of a frame from a worker, at most: whoever sends more is no worker of ours any more."""
_HEADER = struct.Struct("!I")
_CUT = 1000
"""Characters of what can only be shown by its repr."""


class Garbled(ValueError):
    """What came is nothing that a worker sends."""


def frame(payload: bytes) -> bytes:
    """A payload with its length before it."""
    return _HEADER.pack(len(payload)) + payload


def receive(connection: socket.socket) -> bytes | None:
    """The next payload of a blocking connection; None at its end."""
    header = _exactly(connection, _HEADER.size)
    return None if header is None else _exactly(connection, _HEADER.unpack(header)[0])


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def take_frames(buffer: bytearray) -> Iterator[bytes]:
    """Take every whole payload out of a buffer.

    Raises:
        Garbled: a length is larger than any frame.
    """
    while len(buffer) >= _HEADER.size:
        (length,) = _HEADER.unpack_from(buffer)
        if length > LARGEST:
            raise Garbled(f"a frame of {length} bytes")
        if len(buffer) < _HEADER.size + length:
            return
        payload = bytes(buffer[_HEADER.size : _HEADER.size + length])
        del buffer[: _HEADER.size + length]
        yield payload


def arguments_of(sample: Sample, seen: frozenset[str]) -> dict[str, Any]:
    """What a function sees of a sample, and what selects the function."""
    keep = seen | {"data_source"}
    return {name: value for name, value in sample.arguments().items() if name in keep}


def pack_outcome(number: int, outcome: Outcome) -> bytes:
    """An outcome as JSON; extras that JSON lacks are shown by their repr."""
    if isinstance(outcome, Failure):
        body: list[Any] = [str(outcome.kind), outcome.message, outcome.retryable]
        return json.dumps([number, "failure", body]).encode()
    rewards = None if outcome.token_rewards is None else outcome.token_rewards.tolist()
    body = [outcome.value, rewards, dict(outcome.components), dict(outcome.extras)]
    try:
        return json.dumps([number, "score", body], default=_plain).encode()
    except (TypeError, ValueError, RecursionError):
        shown = {key: _shown(part) for key, part in outcome.extras.items()}
        return json.dumps([number, "score", [*body[:3], shown]]).encode()


def unpack_outcome(payload: bytes) -> tuple[int, Outcome]:
    """The job's number and its outcome.

    Raises:
        Garbled: it is no outcome.
    """
    try:
        number, what, body = json.loads(payload)
        if what == "failure":
            kind, message, retryable = body
            return int(number), Failure(
                kind=FailureKind(kind), message=str(message), retryable=bool(retryable)
            )
        value, rewards, components, extras = body
        score = finite_float(value)
        figures = {str(key): finite_float(part) for key, part in components.items()}
        if what != "score" or score is None or None in figures.values():
            raise Garbled("a score that is no finite number")
        return int(number), Score(
            value=score,
            token_rewards=None if rewards is None else np.asarray(rewards, np.float32),
            components={key: part for key, part in figures.items() if part is not None},
            extras=dict(extras),
        )
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise Garbled(f"{type(error).__name__}: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else _shown(value)


def _shown(value: Any) -> str:
    try:
        return repr(value)[:_CUT]
    except Exception as error:  # noqa: BLE001 - a user's own __repr__ may raise anything
        return f"<no repr: {type(error).__name__}>"
