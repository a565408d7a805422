"""What runs the stand-in's steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import torch

from tensorrt_llm._torch.pyexecutor.model_engine import PyTorchModelEngine


class PyExecutor:
    """Of one worker."""

    def __init__(self, llm_args: Any) -> None:
        self.model_engine = PyTorchModelEngine(llm_args)
        self.resource_manager = object()
        self.prefixes: dict[Any, Any] = {}
        self.asleep: set[Any] = set()
        self._active = 0
        self._controlled = False

    @contextmanager
    def control_action(self) -> Iterator[Any]:
        """Everything that runs has ended, and nothing starts."""
        while self._active:
            time.sleep(0.001)
        self._controlled = True
        try:
            yield self
        finally:
            self._controlled = False

    def reset_prefix_cache(self) -> None:
        """Forget prefixes."""
        self.prefixes.clear()

    # Of the stand-in

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """A request that runs."""
        while self._controlled:
            await asyncio.sleep(0.001)
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1

    @torch.no_grad()
    def step(self, ids: torch.Tensor, cache: Any) -> Any:
        """One step of one request."""
        if self.asleep:
            raise RuntimeError(f"memory of {sorted(self.asleep)} is not there")
        return self.model_engine.model(ids, past_key_values=cache, use_cache=True)

    def spoil_prefixes(self) -> None:
        """What is left of keys and values once their memory was another's."""
        for cache, logits_V in self.prefixes.values():
            logits_V.zero_()
            for layer in cache.layers:
                layer.keys.zero_()
                layer.values.zero_()
