"""What a training state holds, read as any other program would."""

from __future__ import annotations

import warnings

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load


def kept(engine, directory):
    """Save an engine's state; its float32 weights by name, whole."""
    engine.save(directory).result()
    reader = HuggingFaceStorageReader(str(directory / "weights"))
    found = reader.read_metadata().state_dict_metadata
    state = {name: torch.zeros(tuple(entry.size)) for name, entry in found.items()}
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        load(state, storage_reader=reader, no_dist=True)
    return state
