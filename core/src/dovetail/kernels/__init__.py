"""Kernels for accelerators, each beside an implementation in torch operations that gives the same."""
