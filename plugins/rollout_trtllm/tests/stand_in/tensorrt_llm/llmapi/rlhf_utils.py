"""The stand-in's own extension of workers, without the later `finalize_weight_update`."""

from __future__ import annotations


class WorkerExtension:
    """Nobody's but TensorRT-LLM's own."""

    def reset_prefix_cache(self) -> None:
        """As the real one's."""
