"""Rules about environments of roles: missing packages are reported, and the advice for roles that need an environment."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.interfaces import Finding
from dovetail.plugins import default_index
from dovetail.plugins.entry import PluginEntry
from dovetail.plugins.manifest import PluginManifest
from dovetail_preflight import surroundings

Judge = Callable[..., list[Finding]]


def test_an_environment_that_fits_is_not_spoken_of(judge: Judge) -> None:
    runtime = {"name": "ray", "environments": {"rollout": sys.executable}}
    assert judge("environment_unfit", {"runtime": runtime}) == []


def test_one_that_is_not_here_is_a_warning_for_it_may_be_elsewhere(
    judge: Judge, tmp_path: Path
) -> None:
    runtime = {"name": "ray", "environments": {"rollout": str(tmp_path / "gone")}}
    (found,) = judge("environment_unfit", {"runtime": runtime})
    assert found.severity == "warning"
    assert "virtual environment" in found.message


@pytest.mark.parametrize(
    ("runtime", "short"),
    [
        ({"gpus_per_node": 4096}, True),
        ({"gpus_per_node": 4096, "ray_init": {"num_gpus": 4096}}, False),
        ({"gpus_per_node": 4096, "address": "auto"}, False),
        ({"nodes": 2}, True),
        ({"nodes": 2, "address": "10.0.0.1:6379"}, False),
        ({"workers_per_node": 4096}, False),
        ({"pools": {"a": {"roles": "actor", "gpus_per_node": 4096}}}, True),
    ],
)
def test_a_machine_with_less_than_its_pools_ask_for_is_a_warning(
    judge: Judge, monkeypatch: pytest.MonkeyPatch, runtime: Any, short: bool
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    found = judge("environment_unfit", {"runtime": {"name": "ray", **runtime}})
    assert [f.severity for f in found] == ["warning"] * short


@pytest.mark.parametrize(
    ("isolated", "here", "named", "errors"),
    [
        (True, False, False, 1),
        (True, False, True, 0),
        (True, True, False, 0),
        (False, False, False, 0),
    ],
)
def test_a_plugin_that_wants_an_environment_of_its_own(
    isolated: bool,
    here: bool,
    named: bool,
    errors: int,
    judge: Judge,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = default_index().find

    def find(kind: str, name: str) -> PluginEntry:
        entry = real(kind, name)
        if entry.kind != "rollout":
            return entry
        assert isinstance(entry.manifest, PluginManifest)
        needs = (("attrs>=20" if here else "acme-engine>=3",),)
        return replace(entry, manifest=replace(entry.manifest, needs=needs, isolated=isolated))

    monkeypatch.setattr(surroundings, "default_index", lambda: SimpleNamespace(find=find))
    runtime: dict[str, Any] = {"name": "ray"}
    if named:
        runtime["environments"] = {"rollout": "/opt/acme"}
    found = judge("environment_missing", {"runtime": runtime})
    assert [finding.severity for finding in found] == ["error"] * errors
    for finding in found:
        assert "needs acme-engine>=3 (not installed) in" in finding.message
        assert "runtime.environments.rollout=DIRECTORY" in str(finding.hint)


def test_what_joined_servers_need_is_not_looked_for_here(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = default_index().find

    def find(kind: str, name: str) -> PluginEntry:
        entry = real(kind, name)
        assert isinstance(entry.manifest, PluginManifest)
        needs = (("acme-engine>=3",),)
        return replace(entry, manifest=replace(entry.manifest, needs=needs, isolated=True))

    monkeypatch.setattr(surroundings, "default_index", lambda: SimpleNamespace(find=find))
    rollout = {"name": "sglang", "urls": ["http://127.0.0.1:30000"]}
    found = judge("environment_missing", {"runtime": {"name": "ray"}, "rollout": rollout})
    del rollout["urls"]
    own = judge("environment_missing", {"runtime": {"name": "ray"}, "rollout": rollout})
    assert len(own) == len(found) + 1
