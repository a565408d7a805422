"""Counts of the engine's work, and the metrics computed from them."""

from __future__ import annotations

import attrs

from dovetail.metrics import Mean, Metric, Sum


@attrs.define(kw_only=True)
class DecodeCounts:
    """Counts of the decode thread's work, which only this thread changes."""

    max_rows: int
    """Maximum number of rows of the running batch."""
    steps: int = 0
    """Number of decoding steps; each samples one token for every running row."""
    generated_tokens: int = 0
    """Number of tokens sampled for running samples."""
    prefill_tokens: int = 0
    """Number of tokens computed in prefill passes, over prompts and over running samples after a weight update."""

    def take(self) -> DecodeCounts:
        """Return the counts since the last call, and reset them."""
        taken = attrs.evolve(self)
        self.steps = self.generated_tokens = self.prefill_tokens = 0
        return taken

    def metrics(self) -> dict[str, Metric]:
        """Return metrics of the counts, by name, to be merged over replicas."""
        return {
            "rollout/generated_tokens": Sum(float(self.generated_tokens)),
            "rollout/prefill_tokens": Sum(float(self.prefill_tokens)),
            "rollout/running_samples": Mean(float(self.generated_tokens), float(self.steps)),
            "rollout/batch_occupancy": Mean(
                float(self.generated_tokens), float(self.steps * self.max_rows)
            ),
        }
