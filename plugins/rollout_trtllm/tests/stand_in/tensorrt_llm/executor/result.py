"""Results of the stand-in."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch


@dataclass(slots=True)
class Logprob:
    """How likely a token was."""

    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    """One sample."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: Any = field(default_factory=list)
    finish_reason: Literal["stop", "length", "timeout", "cancelled"] | None = None


class GenerationResult:
    """A request, which is awaited for its end."""

    def __init__(self) -> None:
        self.outputs: list[CompletionOutput] = [CompletionOutput(0)]
        self.context_logits: torch.Tensor | None = None
        self.error: str | None = None
        self.aborted = False

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Of the stand-in: the task that decodes."""
        self._task = asyncio.ensure_future(work)

    def abort(self) -> None:
        """It comes back with what it has."""
        self.aborted = True

    async def aresult(self) -> GenerationResult:
        """Its end."""
        await asyncio.shield(self._task)
        return self

    def __await__(self) -> Generator[Any, None, GenerationResult]:
        return self.aresult().__await__()
