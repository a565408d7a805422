"""An update inside a worker: in which order, what is told of a failure, and what only later releases have."""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dovetail.errors import WeightSyncError
from dovetail.interfaces import WeightManifest
from dovetail.serving import WeightEnd, manifest_info, merged_outcomes
from dovetail_rollout_trtllm import loading
from dovetail_rollout_trtllm.driver import Driver, EngineDeadError
from dovetail_rollout_trtllm.loading import Update
from dovetail_rollout_trtllm.worker import _END, DovetailWorker

CPU = torch.device("cpu")


class Layer(nn.Module):
    """A module with TensorRT-LLM's hooks."""

    def __init__(self, acts: list[str]) -> None:
        super().__init__()
        for hook in ("pre_reload_weights", "process_weights_after_loading", "post_load_weights"):
            setattr(self, hook, lambda hook=hook: acts.append(hook))


class FakeWorker(DovetailWorker):
    """A worker that notes what is done with it."""

    device_id = 0

    def __init__(self) -> None:
        self.acts: list[str] = []
        self.pieces: list[dict[str, torch.Tensor]] = []
        removed = Layer(self.acts)
        removed._weights_removed = True  # type: ignore[assignment]
        loader = SimpleNamespace(reload=self._reload)
        model_engine = SimpleNamespace(
            model=nn.ModuleList([Layer(self.acts), removed]), model_loader=loader
        )
        self.engine = SimpleNamespace(
            model_engine=model_engine,
            resource_manager="resources",
            control_action=self._control,
            reset_prefix_cache=lambda: self.acts.append("reset"),
        )

    @contextmanager
    def _control(self) -> Any:
        self.acts.append("stopped")
        yield
        self.acts.append("goes on")

    def _reload(self, model: nn.Module, weights: Any, allow_partial_loading: bool = False) -> None:
        assert allow_partial_loading
        self.acts.append("reload")
        self.pieces.append(weights)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> FakeWorker:
    monkeypatch.setattr(loading, "finalizer", lambda: None)
    return FakeWorker()


def _tensors(count: int, last: Exception | None = None) -> Any:
    for index in range(count):
        yield f"t{index}", torch.full((4,), float(index))
    if last is not None:
        raise last


def test_weights_go_in_by_pieces_and_are_finished_before_anything_runs(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "PIECE_BYTES", 32)
    Update(worker, CPU).load(_tensors(3), lasting=True)
    assert worker.acts == [
        "stopped",
        "pre_reload_weights",
        *["reload"] * 2,
        "process_weights_after_loading",
        "post_load_weights",
        "reset",
        "goes on",
    ]
    assert [sorted(piece) for piece in worker.pieces] == [["t0", "t1"], ["t2"]]


def test_tensors_that_do_not_last_are_copied(worker: FakeWorker) -> None:
    shared = torch.zeros(2)

    def tensors() -> Any:
        for index in range(3):
            shared.fill_(index)
            yield f"t{index}", shared

    Update(worker, CPU).load(tensors(), lasting=False)
    assert [float(tensor[0]) for tensor in worker.pieces[0].values()] == [0.0, 1.0, 2.0]


def test_nothing_was_changed_where_the_first_piece_did_not_come(worker: FakeWorker) -> None:
    update = Update(worker, CPU)
    with pytest.raises(WeightSyncError):
        update.load(_tensors(1, WeightSyncError("digest")), lasting=True)
    assert not update.changed
    assert worker.acts == ["stopped"]


def test_what_broke_off_later_is_told_apart_and_not_finished(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "PIECE_BYTES", 16)
    worker.engine.model_engine.model_loader.abort_update_weights = lambda: worker.acts.append(
        "abort"
    )
    update = Update(worker, CPU)
    with pytest.raises(WeightSyncError):
        update.load(_tensors(3, WeightSyncError("digest")), lasting=True)
    assert update.changed
    assert worker.acts[-1] == "abort"
    assert "post_load_weights" not in worker.acts
    assert "reset" not in worker.acts


def test_what_later_releases_have_is_used_where_it_is(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    acts, engine = worker.acts, worker.engine.model_engine
    engine.unwrap_compiled_model_for_refit = lambda: acts.append("unwrap")
    engine.restore_compiled_model_after_refit = acts.append
    engine.model_loader.begin_update_weights = lambda: acts.append("begin")
    monkeypatch.setattr(loading, "finalizer", lambda: lambda whose: whose.acts.append("finalize"))
    Update(worker, CPU).load(_tensors(1), lasting=True)
    assert acts == [
        "stopped",
        *["unwrap", "begin", "pre_reload_weights", "reload", "finalize"],
        *["resources", "reset", "goes on"],
    ]


def test_a_worker_tells_of_a_failure_and_does_not_raise(worker: FakeWorker) -> None:
    told = json.loads(worker.dovetail_receive("{}"))
    assert "KeyError" in told["error"]
    assert not told["changed"]


def test_a_worker_that_fails_calls_the_update_off(worker: FakeWorker) -> None:
    reasons: list[str] = []
    transport: Any = SimpleNamespace(
        receiver=lambda: None, call_off=lambda manifest, reason: reasons.append(reason)
    )
    vars(worker)[_END] = WeightEnd(transport)
    info = json.dumps(manifest_info(WeightManifest(version=1, kind="delta", tensors=())))
    told = json.loads(worker.dovetail_receive(info))
    assert reasons == [told["error"]]
    off = json.dumps({**told, "error": "told so", "called_off": True})
    assert merged_outcomes([off, json.dumps(told)], version=1).error == f"{reasons[0]} in worker 1"


def test_one_workers_failure_is_the_updates_and_any_change_counts() -> None:
    well = json.dumps({"error": None, "hint": None, "changed": True, "adapter": None})
    ill = json.dumps({"error": "digest of t1", "hint": "h", "changed": False, "adapter": None})
    found = merged_outcomes([well, ill], version=3)
    assert found.error == "weight update 3 failed: digest of t1 in worker 1"
    assert found.changed
    assert merged_outcomes([well, well], version=3).error is None


def test_a_dead_worker_is_the_engines_death() -> None:
    class ActorDiedError(RuntimeError):
        pass

    class Dead:
        async def collective_rpc(self, method: str, args: Any = ()) -> Any:
            raise ActorDiedError("killed")

    driver = Driver(Dead(), sleeps=False)  # type: ignore[arg-type]
    with pytest.raises(EngineDeadError, match="killed"):
        asyncio.run(driver.reset_cache())
    assert driver.dead is not None
    with pytest.raises(EngineDeadError):
        asyncio.run(driver.score([[1, 2]]))
