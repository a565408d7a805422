"""A training engine on PyTorch, in one process or sharded over several, on CPUs or accelerators."""
