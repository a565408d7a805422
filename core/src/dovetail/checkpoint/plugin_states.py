"""Plugins' states in a checkpoint: JSON values in `state.json`, NumPy arrays and scalars in `state.safetensors` beside it.

An array's name in the file is its path in the states as JSON, such as `["estimator", "baselines", 2]`. The JSON holds a
description in the array's place, and reading puts the array back there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.errors import CheckpointError
from dovetail.interfaces.plugin import Plugin

ARRAYS = "state.safetensors"
"""The file of arrays; absent if no state has an array."""
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
"""Dtypes that arrays and NumPy scalars of a state may have."""
_ALLOWED = (
    "a checkpoint keeps None, bool, int, float, str, lists, tuples, mappings with string keys, "
    f"numpy.ndarray and NumPy scalars of {', '.join(DTYPES)}"
)


def write_states(directory: Path, plugins: Mapping[str, Plugin]) -> dict[str, Any]:
    """Write the arrays in the plugins' states to `state.safetensors`; without arrays, no file is written.

    Returns:
        The states by the plugins' names, for `json.dumps`, with a description in place of each array.

    Raises:
        CheckpointError: a state holds a value that a checkpoint can't keep; the error names plugin, path and type.
    """
    states, kept = _collected(plugins)
    if kept:
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        # safetensors writes raw memory, so arrays must be C-contiguous; `ascontiguousarray` would give 0-d arrays an axis.
        arrays = {name: np.asarray(value, order="C") for name, value in kept.items()}
        scalars = [name for name, value in kept.items() if isinstance(value, np.generic)]
        try:
            save_file(arrays, directory / ARRAYS, metadata={"scalars": json.dumps(scalars)})
        except SafetensorError as error:
            raise CheckpointError(
                f"the states of {', '.join(plugins)} hold {len(arrays)} arrays and NumPy scalars, which can't be saved: {error}",
                hint="store the numbers in fewer, larger arrays",
            ) from error
    return states


def check_states(plugins: Mapping[str, Plugin]) -> None:
    """Check that a checkpoint can keep the state of every plugin.

    Raises:
        CheckpointError: a state holds a value that a checkpoint can't keep.
    """
    _collected(plugins)


def _collected(plugins: Mapping[str, Plugin]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the plugins' states by name, as JSON values, and the arrays in the states by path."""
    states: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    for name, plugin in plugins.items():
        state = plugin.state()
        try:
            if not isinstance(state, Mapping):
                raise _refused((), f"a {_type(state)}", "return a mapping with string keys")
            states[name] = _plain(state, (name,), kept)
        except CheckpointError as error:
            error.during(f"the checkpoint can't keep the state of {name} ({_type(plugin)})")
            raise
        except RecursionError as error:
            raise CheckpointError(
                f"the state of {name} ({_type(plugin)}) contains itself, or is nested too deep"
            ) from error
    return states, kept


def read_states(directory: Path, states: dict[str, Any]) -> dict[str, Any]:
    """Replace the descriptions of arrays in the states by the arrays of a verified checkpoint, in place, and return the states.

    Args:
        directory: the checkpoint.
        states: the result of `write_states`, read back from JSON.
    """
    if (directory / ARRAYS).exists():
        from safetensors import safe_open

        with safe_open(directory / ARRAYS, framework="np") as stored:
            scalars = set(json.loads(stored.metadata()["scalars"]))
            for name in stored.keys():  # noqa: SIM118 - it is not a mapping
                *parents, last = json.loads(name)
                array = stored.get_tensor(name)
                reduce(getitem, parents, states)[last] = array[()] if name in scalars else array
    return states


def _plain(value: object, path: tuple[str | int, ...], kept: dict[str, Any]) -> Any:
    """Return a value as a JSON value, with a description in place of each NumPy array and scalar.

    The arrays and scalars are added to `kept`, by their path in JSON. `path`, the path of the value, begins with the plugin's name.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, np.generic) or type(value) is np.ndarray:  # np.float64 is a float too
        dtype = value.dtype.newbyteorder("=").name
        if dtype not in DTYPES:
            raise _refused(path[1:], f"a {_type(value)} of dtype {value.dtype}")
        kept[json.dumps(path)] = value
        return f"{dtype} {list(value.shape)} in {ARRAYS}"
    if isinstance(value, float):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, (*path, place), kept) for place, item in enumerate(value)]
    if not isinstance(value, Mapping):
        raise _refused(path[1:], f"a {_type(value)}")
    plain = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise _refused(path[1:], f"a mapping with the key {key!r} of type {_type(key)}")
        plain[key] = _plain(item, (*path, key), kept)
    return plain


def _refused(path: tuple[str | int, ...], what: str, hint: str = _ALLOWED) -> CheckpointError:
    place = "".join(f"[{part!r}]" for part in path)
    return CheckpointError(f"state(){place} is {what}", hint=hint)


def _type(value: object) -> str:
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__name__}"
