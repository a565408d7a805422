"""Adapters inside vLLM: received low-rank weights become the only adapter, which all requests use."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from dovetail.errors import WeightSyncError
from dovetail.interfaces import AdapterSpec, WeightManifest
from dovetail_serving import without_room

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The adapter ranks that vLLM supports (its argument `max_lora_rank`)."""


def room_for(rank: int) -> int:
    """Return the smallest adapter rank supported by vLLM that is at least `rank`.

    Raises:
        WeightSyncError: `rank` is above the largest supported rank.
    """
    for room in RANKS:
        if rank <= room:
            return room
    raise WeightSyncError(
        f"vLLM can't load an adapter of rank {rank}; expected {RANKS[-1]} or less"
    )


def adapter_name(version: int) -> str:
    """Return vLLM's name for the adapter of this weight version; vLLM's prefix cache distinguishes adapters by name."""
    return f"dovetail-{version}"


def add_adapter(worker: Any, manifest: WeightManifest, tensors: list[tuple[str, Tensor]]) -> int:
    """Load an adapter into this worker, and remove the previous adapter.

    vLLM reads adapters from directories in peft's format. The adapter is written to a temporary directory, in memory (tmpfs) if
    possible, which is deleted after vLLM has read it.

    Args:
        worker: the vLLM worker.
        manifest: the manifest of the adapter.
        tensors: all tensors, in the manifest's shapes, verified.

    Returns:
        vLLM's id of the adapter: the weight version plus 1.

    Raises:
        WeightSyncError: vLLM was started without support for adapters.
    """
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    if manifest.adapter is None or worker.vllm_config.lora_config is None:
        raise without_room(manifest.version, "vLLM")
    number = manifest.version + 1
    directory = Path(tempfile.mkdtemp(prefix="dovetail-adapter-", dir=_in_memory()))
    try:
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors},
            str(directory / "adapter_model.safetensors"),
        )
        (directory / "adapter_config.json").write_text(json.dumps(peft_config(manifest.adapter)))
        before = set(worker.list_loras())
        if number in before:
            worker.remove_lora(number)
        worker.add_lora(LoRARequest(adapter_name(manifest.version), number, str(directory)))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for old in before - {number}:
        worker.remove_lora(old)
    return number


def peft_config(spec: AdapterSpec) -> dict[str, Any]:
    """Return the content of peft's `adapter_config.json` for an adapter."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "use_rslora": spec.rank_stabilised,
        "use_dora": spec.dora,
        "target_modules": list(spec.target_modules),
        "bias": "none",
    }


def _in_memory() -> str | None:
    memory = Path("/dev/shm")  # noqa: S108 - only a directory of its own below it, which mkdtemp makes private
    return str(memory) if memory.is_dir() and os.access(memory, os.W_OK) else None
