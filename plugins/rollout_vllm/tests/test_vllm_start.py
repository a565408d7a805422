"""The time that an engine in processes of its own may take to start."""

from __future__ import annotations

import multiprocessing
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from dovetail.config.sections import ModelSection
from dovetail.dispatch.loading import turn_path
from dovetail.errors import RolloutError
from dovetail.interfaces.plugin import PluginContext
from dovetail_rollout_vllm import engine_backend
from dovetail_rollout_vllm.config import VllmRolloutConfig
from dovetail_rollout_vllm.engine_backend import EngineBackend
from dovetail_rollout_vllm.versions import Release


def test_time_counts_from_the_end_of_the_turn_and_the_processes_start_before(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, over = threading.Event(), threading.Event()

    async def make(*_: Any) -> None:
        begun.set()
        assert over.wait(20)

    def await_turn(path: Path) -> None:
        assert path == turn_path(tmp_path.resolve())
        assert begun.wait(20)
        over.set()

    monkeypatch.setattr(engine_backend, "require", lambda: Release("vllm", "0.24.0"))
    monkeypatch.setattr(engine_backend, "await_turn", await_turn)
    monkeypatch.setattr(EngineBackend, "_make", make)
    model = ModelSection(path=str(tiny), dtype="float32")
    backend = EngineBackend(
        VllmRolloutConfig(name="vllm", start_timeout=10.0),
        PluginContext(model=model, run_directory=tmp_path),
    )
    backend.start()
    backend.close()


def test_a_start_that_hangs_ends_with_its_processes_and_its_thread(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bystander = _sleeper("EngineCore")
    engines: list[BaseProcess] = []

    async def make(*_: Any) -> None:
        """As vLLM does it: the event loop's thread waits for the engine's process."""
        engines.append(_sleeper("EngineCore"))
        engines[0].join()
        raise RuntimeError("Engine core initialization failed")

    monkeypatch.setattr(engine_backend, "require", lambda: Release("vllm", "0.24.0"))
    monkeypatch.setattr(EngineBackend, "_make", make)
    model = ModelSection(path=str(tiny), dtype="float32")
    backend = EngineBackend(
        VllmRolloutConfig(name="vllm", start_timeout=2.0),
        PluginContext(model=model, run_directory=tmp_path, rank=7),
    )
    with pytest.raises(RolloutError, match="not ready within 2 seconds"):
        backend.start()
    assert not engines[0].is_alive()
    assert "vllm-7" not in {thread.name for thread in threading.enumerate()}
    assert bystander.is_alive()
    bystander.kill()
    bystander.join()


def _sleeper(name: str) -> BaseProcess:
    process = multiprocessing.get_context("spawn").Process(
        target=time.sleep, args=(600,), name=name, daemon=True
    )
    process.start()
    return process
