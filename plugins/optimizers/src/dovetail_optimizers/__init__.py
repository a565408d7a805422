"""Optimizers of PyTorch and torchao, and learning-rate schedules."""
