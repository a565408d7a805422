"""Where the files of models are on this machine, and what configs and headers of safetensors say."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import attrs

from dovetail.errors import ModelError
from dovetail.sections import ModelSection


def model_directory(path: str, section: ModelSection) -> Path | None:
    """Where a model or a tokenizer lies on this machine: its directory, or the hub's cache of it; None where it does not."""
    # What is wrong with a path is said where it is read.
    with suppress(OSError, RuntimeError, ValueError):
        directory = Path(path).expanduser()
        if directory.is_dir():
            return directory
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(path, "config.json", revision=section.revision)
        return Path(cached).parent if isinstance(cached, str) else None
    return None


@attrs.frozen
class StoredTensor:
    """A tensor of a checkpoint."""

    file: Path
    shape: tuple[int, ...]


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model's files by name; of safetensors read from the files' headers.

    Raises:
        ModelError: there are no weights, or a file is missing, truncated or holds none.
    """
    from dovetail.training.stored import FILES, read_index

    name = next((name for name in FILES if (directory / name).is_file()), None)
    if name is None:
        raise ModelError(f"{directory} has no weights; expected {FILES[1]} or {FILES[0]}")
    file = directory / name
    if file.suffix != ".json":
        return _tensors(file)
    places = read_index(file)
    parts = {part: _tensors(directory / part) for part in sorted(set(places.values()))}
    for tensor, part in places.items():
        if tensor not in parts[part]:
            raise ModelError(f"{directory / part} has no tensor {tensor}, which {file.name} names")
    return {tensor: parts[part][tensor] for tensor, part in places.items()}


def _tensors(file: Path) -> dict[str, StoredTensor]:
    from dovetail.training.stored import unpickled

    if file.suffix == ".safetensors":
        return _header(file)
    return {name: StoredTensor(file, tuple(each.shape)) for name, each in unpickled(file).items()}


def _header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file. It begins with its header's length in 8 bytes, and the header, which is JSON."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            written = opened.read(length) if length <= size - 8 else None
    except OSError as error:
        raise ModelError(f"{file} can't be read: {error.strerror}") from error
    if written is None:
        raise ModelError(
            f"{file} has {size:,} bytes, which end before its header does: it is truncated or no safetensors file"
        )
    try:
        tensors = {n: facts for n, facts in json.loads(written).items() if n != "__metadata__"}
        expected = 8 + length + max((t["data_offsets"][1] for t in tensors.values()), default=0)
        shapes = {name: StoredTensor(file, tuple(t["shape"])) for name, t in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(f"{file} has no header of safetensors that can be read") from error
    if size != expected:
        fault = "it is truncated" if size < expected else "something follows its tensors"
        raise ModelError(f"{file} has {size:,} bytes; expected {expected:,} by its header: {fault}")
    return shapes
