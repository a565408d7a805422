"""The wire form of a batch between environments: a JSON header, and one buffer an array. No pickle, no copy.

The header is `{"wire": 1, "length": N, "columns": [{"name", "kind", "dtype", "shape", "buffers"}]}`; `buffers` are
places in the list of buffers: `[values]` for a dense column, `[values, offsets]` for a ragged one, `[JSON text]` for
an object column. Numbers are little-endian.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dovetail.batch.ragged import PLAIN_KINDS, Ragged
from dovetail.errors import ColumnError

WIRE_VERSION = 1


def encode(columns: Mapping[str, Any], length: int) -> tuple[bytes, list[memoryview]]:
    """Header and buffers of these columns. Buffers share the arrays' memory where those are contiguous.

    Raises:
        ColumnError: an object column holds what JSON can't say.
    """
    buffers: list[memoryview] = []

    def place(buffer: memoryview) -> int:
        buffers.append(buffer)
        return len(buffers) - 1

    entries = []
    for name, values in columns.items():
        entry: dict[str, Any] = {"name": name}
        if isinstance(values, list):
            entry |= {"kind": "object", "buffers": [place(_json_buffer(name, values))]}
        else:
            ragged = isinstance(values, Ragged)
            data = _little_endian(values.values if ragged else values)
            entry |= {
                "kind": "ragged" if ragged else "dense",
                "dtype": data.dtype.str,
                "shape": list(data.shape),
                "buffers": [place(_raw(data))],
            }
            if ragged:
                entry["buffers"].append(place(_raw(_little_endian(values.offsets))))
        entries.append(entry)
    header = {"wire": WIRE_VERSION, "length": length, "columns": entries}
    return json.dumps(header, separators=(",", ":")).encode(), buffers


def decode(header: bytes, buffers: Sequence[Any]) -> tuple[dict[str, Any], int]:
    """Columns and N of what `encode` wrote; arrays are views of the buffers, and read-only where those are.

    Raises:
        ColumnError: another wire version, or header and buffers do not fit.
    """
    fields = _header(header)
    columns = {}
    try:
        for entry in fields["columns"]:
            columns[entry["name"]] = _column(entry, [buffers[i] for i in entry["buffers"]])
        return columns, int(fields["length"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, ColumnError):
            raise
        raise ColumnError(
            f"the wire form of a batch is damaged: {type(error).__name__}: {error} "
            f"(after {len(columns)} columns, with {len(buffers)} buffers)"
        ) from error


def _header(header: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(bytes(header))
        version = fields["wire"]
    except (ValueError, KeyError, TypeError) as error:
        raise ColumnError(f"this is no wire form of a batch: {error}") from error
    if version != WIRE_VERSION:
        raise ColumnError(
            f"a batch came in wire version {version}, but this side speaks {WIRE_VERSION}",
            hint="install the same version of dovetail-core on both sides",
        )
    return dict(fields)


def _column(entry: Mapping[str, Any], buffers: list[Any]) -> Any:
    kind = entry["kind"]
    if kind == "object":
        return list(json.loads(bytes(buffers[0])))
    if kind not in {"dense", "ragged"}:
        raise ColumnError(f"column {entry['name']!r} has the unknown kind {kind!r}")
    dtype = np.dtype(entry["dtype"])
    if dtype.kind not in PLAIN_KINDS:
        raise ColumnError(f"column {entry['name']!r} has the unknown dtype {dtype}")
    values = np.frombuffer(buffers[0], np.uint8).view(dtype).reshape(entry["shape"])
    if kind == "dense":
        return values
    return Ragged(values, np.frombuffer(buffers[1], np.uint8).view("<i8"))


def _json_buffer(name: str, values: list[Any]) -> memoryview:
    try:
        return memoryview(json.dumps(values, separators=(",", ":")).encode())
    except (TypeError, ValueError) as error:
        raise ColumnError(
            f"column {name!r} can't travel: {error}",
            hint="an object column holds JSON values: text, numbers, lists and mappings",
        ) from error


def _little_endian(array: np.ndarray) -> np.ndarray:
    dtype = array.dtype.newbyteorder("<")
    return np.ascontiguousarray(array, dtype=dtype)


def _raw(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
