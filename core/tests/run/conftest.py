"""A run composed of real parts over scripted workers."""

from composed_run import compose, worker_group

__all__ = ["compose", "worker_group"]
