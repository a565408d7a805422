"""The inline runtime: one worker a group in this process, from a plugin reference to a closed worker."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import attrs
import pytest
import torch

from dovetail.config.builtin import InlineConfig
from dovetail.dispatch import Mesh
from dovetail.errors import ConfigError, DispatchError, ModelError, RolloutError
from dovetail.interfaces import PluginContext, PluginRef, WorkerSpec
from dovetail.sections import PluginSection, RolloutSection
from dovetail.workers.inline import InlineRuntime

SOURCE = """
from dovetail.dispatch import Dispatch, Worker, register
from dovetail.errors import ModelError
from dovetail.interfaces import TrainEngine
from dovetail.interfaces import BaseRollout

LIFE = []

class Life:
    def start(self):
        meeting = getattr(self.config, "meeting", None)
        if meeting is not None:
            meeting.wait(120)
        LIFE.append(("start", self.context.role, self.context.rank))
        if self.context.role == "broken":
            raise ModelError("no such model")

    def close(self):
        LIFE.append(("close", self.context.role, self.context.rank))


class Engine(Life, TrainEngine):
    name = "Engine"
    api = ">=3.0,<4"

    def forward(self, batch, outputs): return batch
    def update(self, mini_batch, objective): return {}
    def weight_manifest(self, version): return (version, self.context.device, self.mesh)
    def send_weights(self, version, manifest): pass
    def save(self, directory): (directory / "life").write_text(repr(LIFE))
    def load(self, directory): pass
    def export(self, directory): pass


class Replica(Life, BaseRollout):
    name = "Replica"
    api = ">=1.0,<2"

    def submit(self, request): raise NotImplementedError
    async def abort(self, request_ids): pass
    async def pause(self, mode="wait"): pass
    async def resume(self): pass
    def receive_weights(self, version, manifest): pass
"""


@pytest.fixture
def spec(tmp_path: Path):
    source = tmp_path / "plugins_of_this_test.py"
    source.write_text(SOURCE)

    def make(kind: str, attribute: str, role: str) -> WorkerSpec:
        ref = PluginRef(
            kind=kind, name=attribute, path=str(source), attribute=attribute, config=PluginSection()
        )
        return WorkerSpec(role=role, plugin=ref, context=PluginContext(seed=5))

    return make


def inline(device: str = "cpu") -> InlineRuntime:
    return InlineRuntime(InlineConfig(name="inline", device=device), PluginContext())


def test_a_group_of_one_from_a_reference(spec, tmp_path):
    runtime = inline()
    mesh = Mesh(dp=1)
    group = runtime.worker_group(spec("engine", "Engine", "actor"), mesh)
    assert group.weight_manifest(4).result() == (4, "cpu", mesh)
    assert group.offload().result() is None
    worker = group.workers[0]
    assert (worker.context.role, worker.context.seed, worker.rank) == ("actor", 5, 0)
    group.save(tmp_path).result()
    assert (tmp_path / "life").read_text() == "[('start', 'actor', 0)]"
    runtime.close()
    runtime.close()
    group.save(tmp_path).result()
    assert (tmp_path / "life").read_text() == "[('start', 'actor', 0), ('close', 'actor', 0)]"


def test_replicas_are_the_engines_themselves_and_close_last_first(spec):
    runtime = inline()
    replicas = runtime.rollout_replicas(spec("rollout", "Replica", "rollout"), 2)
    assert [replica.context.rank for replica in replicas] == [0, 1]
    life = sys.modules[type(replicas[0]).__module__].LIFE
    runtime.close()
    assert life[-2:] == [("close", "rollout", 1), ("close", "rollout", 0)]
    with pytest.raises(DispatchError, match="at least 1 replica, not 0"):
        runtime.rollout_replicas(spec("rollout", "Replica", "rollout"), 0)


def test_a_replica_starts_again_with_its_number(spec):
    runtime = inline()
    first, second = runtime.rollout_replicas(spec("rollout", "Replica", "rollout"), 2)
    again = runtime.restart_replica(second)
    assert again is not second
    assert again.context.rank == 1
    life = sys.modules[type(first).__module__].LIFE
    assert life[-2:] == [("close", "rollout", 1), ("start", "rollout", 1)]
    with pytest.raises(RolloutError, match="did not start it"):
        runtime.restart_replica(second)
    runtime.close()


def test_engines_with_processes_of_their_own_start_at_the_same_time(spec):
    class Elsewhere(RolloutSection):
        meeting = threading.Barrier(3)
        in_process = False

    wanted = spec("rollout", "Replica", "rollout")
    plugin = attrs.evolve(wanted.plugin, config=Elsewhere())
    runtime = inline()
    replicas = runtime.rollout_replicas(attrs.evolve(wanted, plugin=plugin), 3)
    assert [replica.context.rank for replica in replicas] == [0, 1, 2]
    runtime.close()


def test_a_group_and_replicas_that_start_at_the_same_time_are_closed_together(spec, monkeypatch):
    wanted = spec("rollout", "Replica", "rollout")
    inline().rollout_replicas(wanted, 1)  # as in a run, the file of both is loaded before
    both_look = threading.Barrier(2)

    def device(_: InlineRuntime) -> str:
        with suppress(threading.BrokenBarrierError):  # one looks, and the other waits for it
            both_look.wait(0.5)
        return "cpu"

    monkeypatch.setattr(InlineRuntime, "device", device)
    runtime = inline()
    with ThreadPoolExecutor(1) as thread:
        starting = thread.submit(runtime.rollout_replicas, wanted, 1)
        group = runtime.worker_group(spec("engine", "Engine", "actor"), Mesh())
        starting.result()
    life = sys.modules[type(group.workers[0]).__module__].LIFE
    runtime.close()
    assert {role for what, role, _ in life if what == "close"} == {"actor", "rollout"}


def test_a_worker_that_fails_to_start_is_closed_and_says_why(spec, tmp_path):
    runtime = inline()
    with pytest.raises(ModelError, match="no such model"):
        runtime.worker_group(spec("engine", "Engine", "broken"), Mesh())
    group = runtime.worker_group(spec("engine", "Engine", "actor"), Mesh())
    runtime.close()
    group.save(tmp_path).result()
    assert "('close', 'broken', 0)" in (tmp_path / "life").read_text()


def test_a_larger_mesh_needs_another_runtime(spec):
    with pytest.raises(DispatchError, match="actor asks for dp=2 × tp=2 = 4") as caught:
        inline().worker_group(spec("engine", "Engine", "actor"), Mesh(dp=2, tp=2))
    assert "runtime=ray" in str(caught.value)


def test_a_plugin_of_another_kind_is_refused(spec):
    runtime = inline()
    with pytest.raises(DispatchError, match=r"'Replica' can't be actor:.*not a Worker"):
        runtime.worker_group(spec("rollout", "Replica", "actor"), Mesh())
    with pytest.raises(DispatchError, match=r"'Engine' can't be rollout:.*not a BaseRollout"):
        runtime.rollout_replicas(spec("engine", "Engine", "rollout"), 1)


def test_the_device_is_the_accelerator_where_there_is_one():
    assert inline("cpu").device() == "cpu"
    here = torch.accelerator.current_accelerator(check_available=True)
    expected = "cpu" if here is None else f"{here.type}:{torch.accelerator.current_device_index()}"
    assert inline("auto").device() == expected


def test_an_accelerator_is_taken_by_its_own_name(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu")
    )
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 2)
    assert inline("auto").device() == "xpu:2"
    assert inline("xpu:1").device() == "xpu:1"
    with pytest.raises(ConfigError, match=r"'mps' is not available: .* sees.*xpu"):
        inline("mps").device()


def test_a_word_that_is_no_device_is_refused():
    with pytest.raises(ConfigError, match=r"device='gpu' is.*cpu"):
        inline("gpu").device()
