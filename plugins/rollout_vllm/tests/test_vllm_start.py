"""The time limit for the start of an engine in separate processes."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from dovetail.errors import RolloutError
from dovetail.interfaces import PluginContext
from dovetail.sections import ModelSection
from dovetail.workers import turn_path
from dovetail_rollout_vllm import engine_backend
from dovetail_rollout_vllm.config import VllmRolloutConfig
from dovetail_rollout_vllm.engine_backend import EngineBackend
from dovetail_rollout_vllm.metrics_endpoint import MetricsEndpoint
from dovetail_rollout_vllm.worker import LOG_VARIABLE
from dovetail_serving import free_port


def test_time_counts_from_the_end_of_the_turn_and_the_processes_start_before(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, over = threading.Event(), threading.Event()

    async def make(*_: Any) -> None:
        engine = _sleeper("EngineCore")
        begun.set()
        assert over.wait(120)
        engine.kill()
        engine.join()

    def await_turn(path: Path) -> None:
        assert path == turn_path(tmp_path.resolve())
        assert begun.wait(120)
        over.set()

    monkeypatch.setattr(engine_backend, "require", lambda logger: None)
    monkeypatch.setattr(engine_backend, "await_turn", await_turn)
    monkeypatch.setattr(EngineBackend, "_make", make)
    model = ModelSection(path=str(tiny), dtype="float32")
    backend = EngineBackend(
        VllmRolloutConfig(name="vllm", start_timeout=120.0),
        PluginContext(model=model, run_directory=tmp_path),
    )
    backend.start()
    backend.close()


@pytest.mark.parametrize("after", [0.0, 3.0])
def test_a_start_that_hangs_ends_with_its_processes_and_its_thread(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, after: float
) -> None:
    bystander = _sleeper("EngineCore")
    engines: list[BaseProcess] = []

    async def make(*_: Any) -> None:
        """Wait for the engine's process, which starts after `after` seconds, in the event loop's thread, as vLLM does."""
        time.sleep(after)
        engines.append(_sleeper("EngineCore"))
        engines[0].join()
        raise RuntimeError("Engine core initialization failed")

    monkeypatch.setattr(engine_backend, "require", lambda logger: None)
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


@pytest.mark.parametrize(
    ("cache", "at_once"), [({"kv_cache_memory_bytes": 2**26}, True), ({}, False)]
)
def test_replicas_with_a_cache_of_known_size_start_at_once_each_with_its_own_environment(
    tmp_path: Path,
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    cache: dict[str, int],
    at_once: bool,
) -> None:
    starting, most = 0, 0
    both = threading.Barrier(2)
    environments: dict[int, str | None] = {}
    lock = threading.Lock()

    async def make(backend: EngineBackend, *_: Any) -> None:
        nonlocal starting, most
        with lock:
            starting += 1
            most = max(most, starting)
        environments[backend._context.rank] = os.environ.get(LOG_VARIABLE)
        engine = _sleeper("EngineCore")
        if at_once:
            both.wait(120)
        with lock:
            starting -= 1
        engine.kill()
        engine.join()

    monkeypatch.setattr(engine_backend, "require", lambda logger: None)
    monkeypatch.setattr(EngineBackend, "_make", make)
    monkeypatch.delenv(LOG_VARIABLE, raising=False)
    model = ModelSection(path=str(tiny), dtype="float32")
    config = VllmRolloutConfig(name="vllm", start_timeout=120.0, engine_args=dict(cache))
    backends = [
        EngineBackend(config, PluginContext(model=model, run_directory=tmp_path, rank=rank))
        for rank in range(2)
    ]
    with ThreadPoolExecutor() as threads:
        list(threads.map(EngineBackend.start, backends))
    for backend in backends:
        backend.close()
    assert most == (2 if at_once else 1)
    assert environments == {rank: str(backend.log) for rank, backend in enumerate(backends)}
    assert len(set(environments.values())) == 2
    assert LOG_VARIABLE not in os.environ


def test_metrics_that_can_not_be_served_are_refused_before_an_engine_is_made(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    made: list[int] = []

    async def make(*_: Any) -> None:
        made.append(1)

    monkeypatch.setattr(EngineBackend, "_make", make)

    def start(port: int) -> None:
        EngineBackend(
            VllmRolloutConfig(name="vllm", metrics_port=port),
            PluginContext(
                model=ModelSection(path=str(tiny), dtype="float32"), run_directory=tmp_path
            ),
        ).start()

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RolloutError, match=r"can't be served(?s:.)*another port"):
            start(taken.getsockname()[1])
    first = MetricsEndpoint(free_port())
    try:
        with pytest.raises(RolloutError, match=r"one replica in a process(?s:.)*runtime=ray"):
            start(free_port())
    finally:
        first.close()
    assert not made
    MetricsEndpoint(free_port()).close()


def _sleeper(name: str) -> BaseProcess:
    process = multiprocessing.get_context("spawn").Process(
        target=time.sleep, args=(600,), name=name, daemon=True
    )
    process.start()
    return process
