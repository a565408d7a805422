"""Safetensors in a folder: written file by file as tensors come, and read whole whichever ranks wrote their pieces."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import CheckpointError
from dovetail.training import unwritable

FILE_BYTES = 2 * 2**30
"""Size of a file, at most, or that of one tensor."""


class SafetensorsWriter:
    """One rank's files in a folder. What goes wrong is kept and raised at the end, so that ranks stay together."""

    def __init__(self, folder: Path, stem: str) -> None:
        self._folder, self._stem = folder, stem
        self._waiting: dict[str, Tensor] = {}
        self._size = self._files = 0
        self._failure: OSError | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor of any shape; files are written as they fill."""
        if self._failure is not None:
            return
        size = tensor.numel() * tensor.element_size()
        if self._waiting and self._size + size > FILE_BYTES:
            self._write()
        self._waiting[name] = tensor.to("cpu", copy=True).contiguous()
        self._size += size

    def finish(self) -> None:
        """Write what is left.

        Raises:
            CheckpointError: a file could not be written.
        """
        if self._waiting:
            self._write()
        if self._failure is not None:
            raise unwritable(self._folder, self._failure) from self._failure

    def _write(self) -> None:
        from safetensors.torch import save_file

        self._files += 1
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file(self._waiting, self._folder / f"{self._stem}-{self._files:05}.safetensors")
        except OSError as error:
            self._failure = error
        self._waiting, self._size = {}, 0


class SafetensorsStore:
    """The tensors of a folder, whole or in the pieces that torch.distributed.checkpoint writes."""

    def __init__(self, folder: Path) -> None:
        """Read the files' headers.

        Raises:
            CheckpointError: they can't be read.
        """
        from safetensors import SafetensorError
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

        self._folder = folder
        try:
            found = HuggingFaceStorageReader(str(folder)).read_metadata()
        except (OSError, SafetensorError, ValueError) as error:
            raise self._unreadable(error) from error
        self._entries: Mapping[str, Any] = found.state_dict_metadata
        if not self._entries:
            raise CheckpointError(
                f"checkpoint {folder.parent} has no {folder.name}/*.safetensors",
                hint="it is incomplete",
            )

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """See that it holds tensors of these names and shapes, and no others.

        Raises:
            CheckpointError: it does not.
        """
        stored = {name: tuple(entry.size) for name, entry in self._entries.items()}
        wrong = [f"it lacks {name!r}" for name in sorted(expected.keys() - stored.keys())]
        wrong += [f"it has {name!r} besides" for name in sorted(stored.keys() - expected.keys())]
        wrong += [
            f"{name!r} has shape {stored[name]} there and {shape} here"
            for name, shape in expected.items()
            if name in stored and shape != stored[name]
        ]
        if wrong:
            raise CheckpointError(
                f"checkpoint {self._folder.parent} is of another model, adapter or optimizer: {wrong[0]}"
                + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""),
                hint="resume with the model, the adapter and the optimizer that the checkpoint was made with",
            )

    def read(self, names: list[str]) -> list[Tensor]:
        """Whole tensors on the CPU, float32, in the shapes that they have over all pieces.

        Raises:
            CheckpointError: they can't be read.
        """
        from safetensors import SafetensorError
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        room = {name: torch.zeros(tuple(self._entries[name].size)) for name in names}
        try:
            with warnings.catch_warnings(action="ignore", category=UserWarning):
                load(
                    dict(room),
                    storage_reader=HuggingFaceStorageReader(str(self._folder)),
                    no_dist=True,
                )
        except (OSError, SafetensorError, CheckpointException) as error:
            raise self._unreadable(error) from error
        return [room[name] for name in names]

    def _unreadable(self, error: BaseException) -> CheckpointError:
        return CheckpointError(f"checkpoint {self._folder} can't be read: {error}")
