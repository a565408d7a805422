"""The time that an engine in processes of its own may take to start."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from dovetail.config.sections import ModelSection
from dovetail.dispatch.loading import turn_path
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
