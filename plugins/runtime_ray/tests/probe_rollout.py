"""A scripted rollout that runs in another process, and dies on request."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.errors import WeightSyncError
from dovetail.interfaces import Completion, RolloutRequest
from dovetail.metrics import Metric, Sum
from dovetail_sdk.testing.scripted_rollout import Script, ScriptedRollout


class ProbeRollout(ScriptedRollout):
    """A rollout that acts on words in a request's id, such as `dies`."""

    name = "probe"

    def __init__(self, config: Any = None, context: Any = None) -> None:
        super().__init__(config, context)
        self.script = Script(delay=0.001)

    async def submit(self, request: RolloutRequest) -> AsyncIterator[Completion]:
        here = f"on-{self.context.rank}" in request.request_id
        count = 0
        async for completion in super().submit(request):
            # A retry, such as after a restart, does not kill the replica again.
            dies = "dies" in request.request_id and "#retry" not in request.request_id
            if count == 1 and here and dies:
                os.kill(os.getpid(), signal.SIGKILL)
            if count == 1 and "breaks" in request.request_id:
                raise ValueError(f"{request.request_id} breaks")
            if "slow" in request.request_id:
                await asyncio.sleep(3600)
            yield completion
            count += 1

    def receive_weights(self, version: int, manifest: Any) -> None:
        time.sleep(0.2)
        if manifest == f"dies-on-{self.context.rank}":
            os.kill(os.getpid(), signal.SIGKILL)
        if manifest == "bad":
            raise WeightSyncError("the weights are not what was sent")
        super().receive_weights(version, manifest)

    @property
    def receivers(self) -> int:
        return 2

    async def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.full(len(ids_L) - 1, -float(self.version), np.float32) for ids_L in sequences]

    def metrics(self) -> dict[str, Metric]:
        tokenizer = getattr(self.context, "tokenizer", None)
        known = 0 if tokenizer is None else len(tokenizer)
        return {"rollout/requests": Sum(len(self.requests)), "rollout/vocabulary": Sum(known)}

    def sleep(self, tags: frozenset[str], *, keep_weights: bool = True) -> int:
        return super().sleep(tags) if keep_weights else -1

    def close(self) -> None:
        super().close()
        if self.context is not None and self.context.run_directory is not None:
            (Path(self.context.run_directory) / f"closed-{self.context.rank}").touch()
