"""Settings of the trainers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from dovetail.sections import TrainerSection


@attrs.frozen(kw_only=True)
class StreamingConfig(TrainerSection):
    """Settings of the trainer `streaming`, which trains while further samples are generated.

    If its samples may come from earlier weights, sets `algorithm.rollout_correction: decoupled_token_is` (importance weights per token).
    """

    max_staleness: int = attrs.field(default=1, validator=attrs.validators.ge(0))
    """Maximum number of weight updates that the rollout receives between the start of a prompt and the step that trains on its samples.
    New prompts start while fewer than (max_staleness + 1) · sync_every · data.train_batch_size prompts are outstanding. A prompt is
    outstanding from its start until the first weight update after the step that trains on it. 0 with sync_every 1 is on-policy."""
    sync_every: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """Number of steps between two updates of the rollout's weights."""
    on_sync: Literal["drain", "abort", "keep"] = "drain"
    """Treatment of running responses when weights are sent. drain: wait until all responses have finished. abort: interrupt the responses,
    and continue from their tokens under the new weights. keep: pause the responses in the engine, and continue under the new weights with
    the old KV cache. Sets `rollout.partial_rollout` and `rollout.keep_cache`.
    """

    over_sampling: float | None = None
    """Limit of outstanding prompts, in multiples of a step's prompts: at least sync_every, below (max_staleness + 1) · sync_every. A step
    takes the prompts that finish first; the other prompts continue, and are trained on within max_staleness. null: as many prompts as
    max_staleness allows, taken in the order in which they started."""

    def __attrs_post_init__(self) -> None:
        most = self.steps_behind + 1
        if self.over_sampling is not None and not self.sync_every <= self.over_sampling < most:
            fix = "leave over_sampling out" + (
                ", or raise max_staleness" if self.over_sampling >= most else ""
            )
            raise ValueError(
                f"over_sampling = {self.over_sampling:g}; expected at least sync_every = {self.sync_every}, and less than "
                f"(max_staleness + 1) · sync_every = {most}: {fix}"
            )

    @property
    def steps_behind(self) -> int:
        """The maximum age, in steps, of the weights that generate a step's samples."""
        return (self.max_staleness + 1) * self.sync_every - 1

    def settings(self) -> Mapping[str, Any]:
        if not self.steps_behind:
            return {}
        return {
            "algorithm": {"rollout_correction": "decoupled_token_is"},
            "rollout": {
                "partial_rollout": self.on_sync != "drain",
                "keep_cache": self.on_sync == "keep",
            },
        }


@attrs.frozen(kw_only=True)
class SupervisedConfig(TrainerSection):
    """Settings of `supervised`, which trains on a dataset's examples. For conversations, sets `actor.objective: nll`."""

    examples: Literal["conversations", "preferences", "unpaired_preferences"] = "conversations"
    """Kind of the rows: conversations (`messages`, or `prompt` and `response`), preference pairs (`prompt`, `chosen`,
    `rejected`), or responses rated individually (`prompt`, `response`, `label`)."""

    def settings(self) -> Mapping[str, Any]:
        return {"actor": {"objective": "nll"}} if self.examples == "conversations" else {}
