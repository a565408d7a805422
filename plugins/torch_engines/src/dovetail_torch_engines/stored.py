"""StoredCheckpoint: the tensors of a Hugging Face checkpoint by name, read from their files on request, whole or by rows."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Any, Self
from zipfile import is_zipfile

import torch
from torch import Tensor

from dovetail.errors import ModelError
from dovetail.sections import ModelSection

FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
"""The names of files that may hold or index a checkpoint's tensors; the first that exists is used."""
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class StoredCheckpoint:
    """A Hugging Face checkpoint on this machine: a directory, or a hub model in the hub's cache.

    Use it in a with-block; the files are closed at the end.
    """

    def __init__(self, section: ModelSection) -> None:
        self._files = _files_by_name(section)
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self._files)

    @property
    def sliceable(self) -> bool:
        """Whether rows of tensors can be read alone: true for safetensors, false for pickled files."""
        return bool(self._files) and all(f.suffix == ".safetensors" for f in self._files.values())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in safetensors."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of a tensor in safetensors; None if it is not one of torch's common floating-point dtypes."""
        return _DTYPES.get(self._slice(name).get_dtype())

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Return rows `first` to `last` (exclusive) of a tensor in safetensors, [last − first, …], reading only them. A scalar is
        returned whole.
        """
        part = self._slice(name)
        return part[first:last] if part.get_shape() else self._file(name).get_tensor(name)

    def tensor(self, name: str) -> Tensor:
        """Return a whole tensor of any file, in its stored shape and dtype."""
        if self._files[name].suffix != ".safetensors":
            return unpickled(self._files[name])[name]
        return self._file(name).get_tensor(name)

    def file(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._files[name]

    def _slice(self, name: str) -> Any:
        return self._file(name).get_slice(name)

    def _file(self, name: str) -> Any:
        path = self._files[name]
        if path not in self._open:
            from safetensors import safe_open

            self._open[path] = self._stack.enter_context(safe_open(str(path), framework="pt"))
        return self._open[path]


def bad_weight(section: ModelSection, seconds: float) -> tuple[str, Path] | None:
    """Return the name and file of a model's first tensor with NaN or infinity; None if none is found within `seconds`."""
    until = monotonic() + seconds
    with StoredCheckpoint(section) as stored:
        for name in sorted(stored.names):
            if monotonic() >= until:
                break
            tensor = stored.tensor(name)
            if tensor.is_floating_point() and not tensor.isfinite().all():
                return name, stored.file(name)
    return None


def _files_by_name(section: ModelSection) -> dict[str, Path]:
    """Return the file of every tensor of the checkpoint, by the tensor's name."""
    for name in FILES:
        if (file := _cached(section, name)) is None:
            continue
        if file.suffix != ".json":
            return dict.fromkeys(_names(file), file)
        places = read_index(file)
        files = {part: _cached(section, part) for part in set(places.values())}
        return {key: found for key, part in places.items() if (found := files[part])}
    return {}


def _cached(section: ModelSection, name: str) -> Path | None:
    from transformers.utils import cached_file

    path = str(Path(section.path).expanduser())
    try:
        found = cached_file(path, name, revision=section.revision)
    except OSError:
        return None
    return None if found is None else Path(found)


def _names(file: Path) -> list[str]:
    if file.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(str(file), framework="pt") as tensors:
            return list(tensors.keys())
    return list(unpickled(file))


def read_index(file: Path) -> dict[str, str]:
    """Return the file name of each tensor of a checkpoint, by tensor name, from the checkpoint's index.

    Raises:
        ModelError: the file can't be read as an index.
    """
    try:
        places: dict[str, str] = json.loads(file.read_bytes())["weight_map"]
        if all(isinstance(part, str) for part in places.values()):
            return places
        why = "its weight_map assigns a tensor to something other than a file name"
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
    raise ModelError(
        f"the file {file} can't be read as an index of weights: {why}",
        hint="fetch or export the model again",
    )


def unpickled(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a pickled file by name, in their shapes and dtypes, without running code from the file.

    Raises:
        ModelError: the file has no tensors, or objects that torch does not unpickle as tensors.
    """
    hint = "fetch the model again, or use its safetensors files"
    try:
        found = torch.load(file, weights_only=True, mmap=is_zipfile(file), map_location="cpu")
    except Exception as error:  # damaged bytes raise errors of any class
        why = "can't be loaded: it is damaged or holds objects other than tensors, which are not unpickled"
        if isinstance(error, FileNotFoundError | PermissionError):
            why = f"can't be read: {error.strerror}"
        raise ModelError(f"the file {file} {why}", hint=hint) from error
    pairs = found.items() if isinstance(found, dict) else ()
    tensors = {
        key: each for key, each in pairs if isinstance(each, Tensor) and isinstance(key, str)
    }
    if not tensors:
        raise ModelError(
            f"the file {file} holds an object of type {type(found).__name__} without tensors; expected a mapping of names to tensors",
            hint=hint,
        )
    return tensors
