"""Memory of this process: what it has of the host's, and the peaks of what it had of its accelerator's."""

from __future__ import annotations

import os
from pathlib import Path


def host_memory() -> dict[str, float]:
    """Return `rss_bytes`, the host memory that is resident for this process; nothing where the system has no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return {}
    return {"rss_bytes": float(pages * os.sysconf("SC_PAGE_SIZE"))}


def take_peaks(device: str) -> dict[str, float]:
    """Return the peaks since the last call, in bytes: `max_memory_allocated_bytes` by tensors, and
    `max_memory_reserved_bytes` by torch's allocator; nothing for a CPU.

    Args:
        device: torch device of this process.
    """
    if device.startswith("cpu"):
        return {}
    import torch

    peaks = {
        "max_memory_allocated_bytes": float(torch.accelerator.max_memory_allocated(device)),
        "max_memory_reserved_bytes": float(torch.accelerator.max_memory_reserved(device)),
    }
    # torch refuses to reset the figures of a device that this process has not used yet.
    if peaks["max_memory_reserved_bytes"]:
        torch.accelerator.reset_peak_memory_stats(device)
    return peaks
