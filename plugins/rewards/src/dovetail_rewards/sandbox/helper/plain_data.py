"""The messages between the two processes of assert tests: values as lines of JSON, never pickled."""

from __future__ import annotations

import base64
import collections
import datetime as dt
import decimal
import fractions
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

MAX_MESSAGE_BYTES = 8 << 20
"""Maximum size of one message, in bytes. A response's process that sends a larger one counts as lost."""
_ARRAY_KINDS = "biufcSUmM"
"""Kinds of dtypes that can be sent as bytes: numbers, texts and times, but not objects."""
_SCALARS = (str, int, float)
_ATOMS = frozenset({type(None), bool, *_SCALARS})
_PAIRS = (collections.OrderedDict, collections.Counter, dict)
_SEQUENCES = (list, tuple, set, frozenset)
_REDUCED = (
    fractions.Fraction,
    decimal.Decimal,
    range,
    slice,
    dt.datetime,
    dt.date,
    dt.time,
    dt.timedelta,
)
"""Types whose `__reduce__` gives the constructor's arguments as plain data."""
_ARGUMENTS: dict[Any, Callable[[Any], tuple[Any, ...]]] = {
    complex: lambda value: (value.real, value.imag),
    collections.deque: lambda value: ([*value], value.maxlen),
    dt.timezone: lambda value: (value.utcoffset(None),),
    type(...): lambda _: (),
    type(NotImplemented): lambda _: (),
}
"""Functions by type, from a value to the arguments with which the type's constructor recreates the value."""
_CONSTRUCTED = (*_REDUCED, *_ARGUMENTS)
_TYPES: dict[str, Any] = {
    kind.__name__: kind for kind in (*_PAIRS, *_SEQUENCES, *_CONSTRUCTED, bytes, bytearray)
}


def is_array(value: object) -> Any:
    """Return whether a value is a NumPy array, of any shape and dtype."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(type(value), numpy.ndarray)


def encode(value: Any, keep: Callable[[object], list[Any]], *, exact: bool) -> Any:
    """Return a value as JSON. A str, int, float, bool or None stays as it is; other values become lists `[type name, *parts]`.

    Args:
        value: any object.
        keep: a function that returns a placeholder for a value that is not plain data, or raises.
        exact: whether to pass instances of subclasses to `keep`; otherwise, they are encoded as their base type.
    """
    kind: Any = type(value)
    if kind in _ATOMS:
        return value
    if kind in _REDUCED and type(getattr(value, "tzinfo", None)) in (type(None), dt.timezone):
        return _constructed(kind.__name__, kind.__reduce__(value)[1], keep, exact=exact)
    if kind in _ARGUMENTS:
        return _constructed(kind.__name__, _ARGUMENTS[kind](value), keep, exact=exact)
    if is_array(value):
        return _encoded_array(value) if value.dtype.kind in _ARRAY_KINDS else keep(value)
    if kind.__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), keep, exact=exact)
    for base in (*_PAIRS, *_SEQUENCES):
        if kind is base or (not exact and isinstance(value, base)):
            items: Any = base.items(value) if base in _PAIRS else base.__iter__(value)
            # Most items are scalars. Skipping the call of `encode` for them saves most of the time of a long list.
            return [
                base.__name__,
                *(
                    item if type(item) in _ATOMS else encode(item, keep, exact=exact)
                    for item in items
                ),
            ]
    if issubclass(kind, (bytes, bytearray)):
        return [kind.__name__, *value] if kind in (bytes, bytearray) else keep(value)
    if not exact and isinstance(value, _SCALARS):
        scalar = next(scalar for scalar in _SCALARS if isinstance(value, scalar))
        return getattr(scalar, f"__{scalar.__name__}__")(value)
    return keep(value)


def _constructed(name: str, args: tuple[Any, ...], keep: Any, *, exact: bool) -> list[Any]:
    return [name, *(encode(part, keep, exact=exact) for part in args)]


def _encoded_array(value: Any) -> list[Any]:
    data = base64.b64encode(value.tobytes()).decode()
    return ["ndarray", value.dtype.str, list(value.shape), data]


def decode(data: Any, kept: Callable[..., object]) -> Any:
    """Return the value that `encode` encoded; `kept` is a function that returns the object for a placeholder (see `encode`)."""
    if not isinstance(data, list):
        return data
    name, *parts = data
    if name in ("reference", "import"):
        return kept(*parts)
    if name == "ndarray":
        dtype, shape, content = parts
        flat = importlib.import_module("numpy").frombuffer(base64.b64decode(content), dtype)
        return flat.reshape(shape).copy()
    kind = _TYPES[name]
    values = [decode(part, kept) if type(part) is list else part for part in parts]
    if kind is collections.Counter:
        return kind(dict(values))
    return kind(*values) if kind in _CONSTRUCTED else kind(values)


def change(ours: Any, theirs: Any) -> None:
    """Make the mutable value `ours` equal to `theirs`, its copy that the other process changed; immutable values are unchanged."""
    if isinstance(ours, (list, bytearray)):
        ours[:] = theirs
    elif isinstance(ours, (dict, set, collections.deque)):
        ours.clear()
        (ours.extend if isinstance(ours, collections.deque) else ours.update)(theirs)
    elif is_array(ours) and (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype):
        ours[...] = theirs


class MessageSocket:
    """Sends and receives lines of JSON over the socket at standard input; for all other code, standard input is then empty."""

    def __init__(self) -> None:
        self._fd = os.dup(0)
        self._file = open(self._fd, "rb", closefd=False)  # noqa: SIM115 - for as long as the process lives
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = open(os.devnull)  # noqa: PTH123, SIM115
        if hasattr(sys, "set_int_max_str_digits"):
            sys.set_int_max_str_digits(0)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message as one line of JSON.

        Raises:
            ValueError: the message has more than `MAX_MESSAGE_BYTES`.
            OSError: the other process has ended.
        """
        data = memoryview(json.dumps(message).encode() + b"\n")
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"a message of {len(data)} bytes is too long; expected at most {MAX_MESSAGE_BYTES}"
            )
        while data:
            data = data[os.write(self._fd, data) :]

    def receive(self) -> dict[str, Any] | None:
        """Return the next message; None at the end of the stream.

        Raises:
            ValueError: the bytes are not a message.
        """
        line = self._file.readline(MAX_MESSAGE_BYTES + 1)
        if not line:
            return None
        message = json.loads(line) if line.endswith(b"\n") else None
        if not isinstance(message, dict):
            raise ValueError("the line received is not a message; expected a JSON object")  # noqa: TRY004 - as JSON that is none
        return message
