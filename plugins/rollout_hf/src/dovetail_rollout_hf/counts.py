"""What the engine counts while it works, and the metrics that come of it."""

from __future__ import annotations

import attrs

from dovetail.metrics import Mean, Metric, Sum


@attrs.define(kw_only=True)
class DecodeCounts:
    """Counts of the decode thread's work, which only that thread changes."""

    max_rows: int
    """Most rows that a batch may have."""
    steps: int = 0
    """Passes that drew a token for every running row."""
    generated_tokens: int = 0
    """Tokens drawn for samples that still ran."""
    prefill_tokens: int = 0
    """Tokens of prompts, and of samples that went on under new weights, that were run through the model at once."""

    def take(self) -> DecodeCounts:
        """Return the counts since the last call, and reset them."""
        taken = attrs.evolve(self)
        self.steps = self.generated_tokens = self.prefill_tokens = 0
        return taken

    def metrics(self) -> dict[str, Metric]:
        """Return metrics by name; they merge over replicas."""
        return {
            "rollout/generated_tokens": Sum(float(self.generated_tokens)),
            "rollout/prefill_tokens": Sum(float(self.prefill_tokens)),
            "rollout/running_samples": Mean(float(self.generated_tokens), float(self.steps)),
            "rollout/batch_occupancy": Mean(
                float(self.generated_tokens), float(self.steps * self.max_rows)
            ),
        }
