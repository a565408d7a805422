"""Profiling of workers: what a recording holds, who takes part, and what can't be recorded here."""

from __future__ import annotations

import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import pytest
import torch

from dovetail.dispatch import Dispatch, Mesh, register
from dovetail.dispatch.profiling import ProfiledWorker, ProfileSpec
from dovetail.errors import ConfigError
from dovetail.interfaces import PluginContext
from dovetail.workers import InlineGroup


class Multiplier(ProfiledWorker):
    """Multiplies matrices."""

    def __init__(self, role: str = "actor", rank: int = 0, size: int = 1) -> None:
        self.context = PluginContext(role=role, rank=rank, mesh=Mesh(dp=size))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def multiply(self) -> None:
        """Forward and backward."""
        weight = torch.randn(20, 20, requires_grad=True)
        (weight @ weight).sum().backward()

    def close(self) -> None:
        """Nothing to do."""


@pytest.fixture
def spec(tmp_path: Path) -> ProfileSpec:
    return ProfileSpec(tool="torch", directory=tmp_path / "profiles", first=2, last=3)


def group(*roles_or_ranks: int, role: str = "actor") -> InlineGroup:
    """A group with workers of these ranks."""
    size = len(roles_or_ranks)
    workers = [Multiplier(role, rank, size) for rank in roles_or_ranks]
    return InlineGroup(workers, Mesh(dp=size), role=role)


def names(path: str) -> list[str]:
    """Names of a trace's events."""
    with gzip.open(path) as file:
        return [event.get("name", "") for event in json.load(file)["traceEvents"]]


def test_a_trace_holds_the_calls_between_start_and_stop_and_what_they_ran(spec) -> None:
    actor = group(0)
    actor.check_profile(spec).result()
    actor.multiply().result()
    actor.start_profile(spec).result()
    actor.multiply().result()
    actor.multiply().result()
    (path,) = actor.stop_profile().result()
    actor.multiply().result()
    assert path == str(spec.directory / "actor-rank0-steps2-3.json.gz")
    events = names(path)
    assert events.count("actor.multiply") == 2
    # Forward, and two products of the backward pass.
    assert events.count("aten::mm") == 6


def test_calls_on_any_thread_are_recorded_and_may_start_and_stop_it(spec) -> None:
    actor = group(0)
    for call in (lambda: actor.start_profile(spec), actor.multiply):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(lambda call=call: call().result()).result()
    actor.multiply().result()
    with ThreadPoolExecutor(1) as thread:
        (path,) = thread.submit(lambda: actor.stop_profile().result()).result()
    assert names(path).count("actor.multiply") == 2
    assert names(path).count("aten::mm") == 6


def test_roles_of_one_process_share_its_recording(spec) -> None:
    actor, critic = group(0), group(0, role="critic")
    actor.start_profile(spec).result()
    critic.start_profile(spec).result()
    critic.multiply().result()
    assert critic.stop_profile().result() is None
    (path,) = actor.stop_profile().result()
    assert Path(path).name == "actor-rank0-steps2-3.json.gz"
    assert "critic.multiply" in names(path)
    assert actor.stop_profile().result() is None


def test_only_the_ranks_that_are_named_record(spec) -> None:
    actor = group(0, 1, 2)
    actor.start_profile(attrs.evolve(spec, ranks=(1,))).result()
    actor.multiply().result()
    paths = actor.stop_profile().result()
    assert [path and Path(path).name for path in paths] == [
        None,
        "actor-rank1-steps2-3.json.gz",
        None,
    ]


@pytest.mark.parametrize("tool", ["memory", "nsys"])
def test_what_a_cpu_can_not_record_is_refused_before_it_starts(spec, tool: str) -> None:
    actor = group(0)
    wanted = attrs.evolve(spec, tool=tool)
    for call in (actor.check_profile, actor.start_profile):
        with pytest.raises(ConfigError, match=rf"profile\.tool={tool} .* cpu"):
            call(wanted).result()
    assert actor.stop_profile().result() is None
    actor.check_profile(attrs.evolve(wanted, ranks=(5,))).result()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("tool", ["torch", "memory", "nsys"])
def test_every_tool_records_an_accelerator(spec, tool: str) -> None:
    device = str(torch.accelerator.current_accelerator())
    worker = Multiplier()
    worker.context = attrs.evolve(worker.context, device=device)
    actor = InlineGroup([worker], Mesh(), role="actor")
    wanted = attrs.evolve(spec, tool=tool)
    actor.check_profile(wanted).result()
    actor.start_profile(wanted).result()
    kept = torch.randn(1 << 20, device=device)
    (kept * kept).sum().item()
    actor.multiply().result()
    paths = actor.stop_profile().result()
    if tool == "nsys":
        assert paths is None
    else:
        assert Path(paths[0]).stat().st_size > 1000
    if tool == "torch":
        with gzip.open(paths[0]) as file:
            assert any(e.get("cat") == "kernel" for e in json.load(file)["traceEvents"])


def test_a_tool_that_no_package_brings_is_refused_with_those_that_are_there(spec) -> None:
    with pytest.raises(ConfigError, match=r"'vtune'.* memory or nsys or torch"):
        group(0).check_profile(attrs.evolve(spec, tool="vtune")).result()
