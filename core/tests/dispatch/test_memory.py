"""Memory of a process: what is resident, and peaks that begin anew with every look."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dovetail.dispatch.profiling import host_memory, take_peaks

MIB = 2**20


def test_what_is_written_to_is_resident() -> None:
    before = host_memory()["rss_bytes"]
    held = np.ones(64 * MIB, np.uint8)
    grown = host_memory()["rss_bytes"] - before
    assert 60 * MIB < grown < 80 * MIB
    del held


def test_a_cpu_has_no_peaks() -> None:
    assert take_peaks("cpu") == {}


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_peaks_are_those_since_the_last_look() -> None:
    device = str(torch.accelerator.current_accelerator())
    take_peaks(device)
    held = torch.ones(64 * MIB, dtype=torch.uint8, device=device)
    more = torch.ones(64 * MIB, dtype=torch.uint8, device=device)
    del more
    peaks = take_peaks(device)
    rest = take_peaks(device)
    assert peaks["max_memory_allocated_bytes"] - rest["max_memory_allocated_bytes"] == 64 * MIB
    assert peaks["max_memory_reserved_bytes"] >= peaks["max_memory_allocated_bytes"]
    del held
