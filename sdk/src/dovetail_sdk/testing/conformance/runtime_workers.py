"""Workers for the suite of runtimes: small, without a model, and loaded from this file in whatever process they live."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import numpy as np

from dovetail.interfaces import (
    BaseRollout,
    Completion,
    FinishReason,
    PauseMode,
    RolloutRequest,
    WeightManifest,
)
from dovetail.sections import RolloutSection


class EchoRollout(BaseRollout):
    """Answers every prompt with the run's seed, its own number and the prompt."""

    name = "EchoRollout"
    api = ">=1.0,<2"
    Config = RolloutSection

    async def submit(self, request: RolloutRequest) -> AsyncIterator[Completion]:
        tokens = [self.context.seed, self.context.rank, *request.prompt_ids.tolist()]
        for sample in range(request.n):
            yield Completion(
                request_id=request.request_id,
                sample=sample,
                response_ids=np.array(tokens, dtype=np.int64),
                finish_reason=FinishReason.STOP,
                weight_versions=np.zeros(len(tokens), dtype=np.int64),
            )

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Everything is over at once."""

    async def pause(self, mode: PauseMode = PauseMode.WAIT) -> None:
        """Nothing runs."""

    async def resume(self) -> None:
        """Nothing was stopped."""

    def receive_weights(self, version: int, manifest: WeightManifest) -> None:
        """It has no weights."""
