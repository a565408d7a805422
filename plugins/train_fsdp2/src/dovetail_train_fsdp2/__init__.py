"""A training engine on PyTorch: one process, on a CPU or one accelerator."""
