"""Safetensors in a folder: written file by file as tensors arrive, and read as whole tensors even if several ranks wrote shards."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import CheckpointError

FILE_BYTES = 2 * 2**30
"""The largest size of a file, in bytes; a larger tensor has a file of its own."""


class SafetensorsWriter:
    """Writes one rank's safetensors files in a folder, with at most one file's tensors in memory.

    Errors are raised by `finish`, not by `add`: a rank that can't write must still take part in gathering the remaining tensors.

    Args:
        folder: the folder of the files.
        stem: the beginning of the files' names; ranks that write in one folder need different ones.
        file_bytes: the largest size of a file, in bytes.
    """

    def __init__(self, folder: Path, stem: str, file_bytes: int = FILE_BYTES) -> None:
        self._folder, self._stem, self._file_bytes = folder, stem, file_bytes
        self._waiting: dict[str, Tensor] = {}
        self._size = self._total = 0
        self._names: list[list[str]] = []
        self._failure: Exception | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor of any shape; a file is written when its size limit is reached."""
        if self._failure is not None:
            return
        size = tensor.numel() * tensor.element_size()
        if self._waiting and self._size + size > self._file_bytes:
            self._write()
        self._waiting[name] = tensor.to("cpu", copy=True).contiguous()
        self._size += size
        self._total += size

    def finish(self) -> None:
        """Write the remaining tensors to the last file.

        Raises:
            CheckpointError: a file could not be written.
        """
        if self._waiting:
            self._write()
        if self._failure is not None:
            raise CheckpointError(
                f"the directory {self._folder} can't be written: {self._failure}",
                hint="see that there is room on the disk, and that every rank sees the directory",
            ) from self._failure

    def finish_model(self) -> None:
        """Write the remaining tensors, and name and index the files as transformers expects.

        Raises:
            CheckpointError: a file could not be written.
        """
        self.finish()
        ours = {self._file(number) for number in range(1, len(self._names) + 1)}
        for old in set(self._folder.glob(f"{self._stem}*.safetensors*")) - ours:
            old.unlink()
        count = len(self._names)
        if count == 1:
            self._file(1).rename(self._folder / f"{self._stem}.safetensors")
            return
        places = {}
        for number, names in enumerate(self._names, start=1):
            renamed = f"{self._stem}-{number:05}-of-{count:05}.safetensors"
            places.update(dict.fromkeys(names, renamed))
            self._file(number).rename(self._folder / renamed)
        index = {"metadata": {"total_size": self._total}, "weight_map": places}
        place = self._folder / f"{self._stem}.safetensors.index.json"
        place.write_text(json.dumps(index, indent=2) + "\n")

    def _file(self, number: int) -> Path:
        return self._folder / f"{self._stem}-{number:05}.safetensors"

    def _write(self) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        self._names.append(list(self._waiting))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # transformers below 5 refuses a file without this metadata.
            save_file(self._waiting, self._file(len(self._names)), metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            self._failure = error
        self._waiting, self._size = {}, 0


class SafetensorsStore:
    """The tensors in a folder's safetensors files, each stored whole or in the shards that torch.distributed.checkpoint writes."""

    def __init__(self, folder: Path) -> None:
        """Read the files' headers.

        Raises:
            CheckpointError: the files can't be read, or there are none.
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
                hint="the checkpoint is incomplete: use another one",
            )

    @property
    def names(self) -> list[str]:
        """Names of the tensors, sorted."""
        return sorted(self._entries)

    def check(self, expected: Mapping[str, Iterable[int]]) -> None:
        """Check that the folder holds exactly tensors of these names and shapes.

        Raises:
            CheckpointError: names or shapes differ.
        """
        stored = {name: tuple(entry.size) for name, entry in self._entries.items()}
        shapes = {name: tuple(shape) for name, shape in expected.items()}
        wrong = [
            f"the tensor {name!r} is missing" for name in sorted(shapes.keys() - stored.keys())
        ]
        wrong += [
            f"the tensor {name!r} is not expected" for name in sorted(stored.keys() - shapes.keys())
        ]
        wrong += [
            f"the tensor {name!r} has shape {stored[name]}; expected {shape}"
            for name, shape in shapes.items()
            if name in stored and shape != stored[name]
        ]
        if wrong:
            raise CheckpointError(
                f"checkpoint {self._folder.parent} is of another model, adapter or optimizer: {wrong[0]}"
                + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""),
                hint="resume with the model, the adapter and the optimizer that the checkpoint was made with",
            )

    def read(self, names: list[str]) -> list[Tensor]:
        """Return whole tensors on the CPU, float32, in their unsharded shapes.

        Raises:
            CheckpointError: the files can't be read.
        """
        room = {name: torch.zeros(tuple(self._entries[name].size)) for name in names}
        self.fill(room)
        return [room[name] for name in names]

    def fill(self, tensors: Mapping[str, Tensor], *, alone: bool = True) -> None:
        """Read tensors of the folder into given tensors of any shape and dtype, or into this rank's shards.

        Args:
            tensors: the tensors to fill, by their names in the folder.
            alone: whether this process reads alone; otherwise all ranks read collectively.

        Raises:
            CheckpointError: the files can't be read.
        """
        from safetensors import SafetensorError
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        reader = HuggingFaceStorageReader(str(self._folder))
        try:
            # torch warns that it assumes a single process.
            with warnings.catch_warnings(action="ignore", category=UserWarning):
                load(dict(tensors), storage_reader=reader, no_dist=alone)
        except (OSError, SafetensorError, CheckpointException) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: BaseException) -> CheckpointError:
        return CheckpointError(f"checkpoint {self._folder} can't be read: {error}")
