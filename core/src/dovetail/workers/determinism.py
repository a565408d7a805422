"""Kernels that give the same result in every run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Make torch refuse nondeterministic kernels within the block, in this process.

    The runtime does the same in the processes that it starts.
    """
    import torch

    # cuBLAS reads this variable when its first handle is made (docs.nvidia.com/cuda/cublas, reproducibility).
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
