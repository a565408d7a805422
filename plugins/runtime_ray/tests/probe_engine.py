"""An engine without a model, which reports its environment and fails in every way on request."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.batch import Batch
from dovetail.dispatch import Dispatch, register
from dovetail.errors import NumericsError
from dovetail.interfaces import TrainEngine
from dovetail.metrics import Sum
from dovetail.sections import EngineSection


class OnlyHere(Exception):
    """An error whose class can't be loaded in another process."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class ProbeEngine(TrainEngine):
    name = "probe"
    api = ">=3.0,<4"
    Config = EngineSection

    def start(self) -> None:
        import torch

        self.context.logger.info("probe started", rank=self.context.rank)
        self.drawn = float(torch.rand((), dtype=torch.float64))

    def forward(self, batch: Batch, outputs: frozenset[str]) -> Batch:
        return Batch({"ids": batch["ids"], "rank": np.full(len(batch), self.rank, dtype=np.int64)})

    def update(self, mini_batch: Batch, objective: Any) -> dict[str, Any]:
        return {"samples": Sum(len(mini_batch))}

    def weight_manifest(self, version: int) -> Any:
        return version

    def send_weights(self, version: int, manifest: Any) -> None:
        """Send nothing."""

    def save(self, directory: Path) -> None:
        """Save nothing."""

    load = export = save

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def where(self) -> dict[str, Any]:
        import torch
        import torch.distributed as dist

        return {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "rank": self.context.rank,
            "role": self.context.role,
            "device": self.context.device,
            "cwd": str(Path.cwd()),
            "world": dist.get_world_size() if dist.is_initialized() else 1,
            "threads": torch.get_num_threads(),
            "omp": os.environ.get("OMP_NUM_THREADS"),
            "environment": os.environ.get("DOVETAIL_PROBE"),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "drawn": self.drawn,
            "rewards": self.context.reward_functions,
            "tokenizer": self.context.tokenizer,
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def summed(self, value: float) -> float:
        """Sum a value over the ranks that share a batch."""
        return float(self.context.reduction.sum(np.array([value * (self.rank + 1)]))[0])

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def echo(self, value: Any) -> Any:
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pause_for(self, seconds: float, ranks: tuple[int, ...] = (0, 1)) -> int:
        if self.rank in ranks:
            time.sleep(seconds)
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pause_until(self, there: Path) -> int:
        """Wait until this file exists."""
        while not there.exists():
            time.sleep(0.01)
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def warn(self) -> None:
        self.context.logger.warning("the probe is worried", about="nothing")
        logging.getLogger("some.library").warning("a library is worried")
        warnings.warn("so is Python", stacklevel=1)
        print("printed by the probe", flush=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self, how: str, ranks: tuple[int, ...], others: str = "return") -> int:
        """Fail on these ranks; the other ranks return, hang in a collective, or sleep."""
        if self.rank in ranks:
            return self._failing(how)
        if others == "collective":
            self.context.reduction.sum(np.zeros(1))
        elif others == "sleep":
            _sleep_for_long()
        return self.rank

    def _failing(self, how: str) -> Any:
        match how:
            case "numerics":
                raise NumericsError("the loss is not finite", sample_ids=("a",))
            case "value":
                raise ValueError(f"rank {self.rank} does not like this")
            case "only_here":
                raise OnlyHere(1, 2)
            case "unpicklable":
                return threading.Lock()
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(3)
            case "hang":
                _sleep_for_long()
        return None


def _sleep_for_long() -> None:
    time.sleep(3600)


class BrokenEngine(ProbeEngine):
    """An engine whose start fails on rank 1."""

    name = "broken"

    def start(self) -> None:
        if self.rank == 1:
            raise ValueError("rank 1 finds no model")
