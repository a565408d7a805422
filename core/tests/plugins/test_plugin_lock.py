"""The plugin lock: what a run used, and what has changed since."""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.errors import PluginError, PluginNotFoundError
from dovetail.interfaces import PluginRef
from dovetail.plugins.lock import lock_for, now_for, read_lock, refs_of, write_lock
from dovetail.plugins.lock_differences import compare, differences

GOOD = PluginRef(kind="advantage", name="acme_mean", distribution="acme-good")


@pytest.fixture
def lock(installed: Path) -> dict:
    return lock_for([GOOD, GOOD])


def test_a_wheel_is_locked_by_version(lock: dict) -> None:
    assert lock["schema"] == 1
    assert lock["plugins"] == [
        {
            "kind": "advantage",
            "name": "acme_mean",
            "distribution": "acme-good",
            "version": "1.2.0",
            "api": ">=1.0,<2",
            "target": "acme_good.plugin:Mean",
        }
    ]


def test_a_file_is_locked_by_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "loop.py"
    path.write_text("def compute_score(solution_str):\n    return 1.0\n")
    ref = PluginRef(
        kind="reward_function", name="compute_score", path=str(path), attribute="compute_score"
    )
    before = lock_for([ref])
    [locked] = before["plugins"]
    assert locked["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_text("def compute_score(solution_str):\n    return 2.0\n")
    warnings, refusals = compare(before, lock_for(refs_of(before)))
    assert not refusals
    [warning] = warnings
    assert "the code of reward_function/compute_score" in warning
    assert "has changed" in warning


def test_an_editable_install_is_locked_by_the_hash_of_its_package(
    world: Path, tmp_path: Path, editable_install
) -> None:
    code = (
        "import json, site, sys; site.addsitedir(sys.argv[1])\n"
        "from dovetail.interfaces.runtime import PluginRef\n"
        "from dovetail.plugins.lock import lock_for\n"
        "print(json.dumps(lock_for([PluginRef(kind='tracker', name='live')])))"
    )
    target, source = editable_install

    def locked() -> dict:
        done = subprocess.run(
            [sys.executable, "-c", code, str(target)], capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)

    before = locked()
    (source / "plugin.py").write_text((source / "plugin.py").read_text() + "\n# changed\n")
    after = locked()
    assert before["plugins"][0]["version"] == after["plugins"][0]["version"]
    assert compare(before, before) == ([], [])
    warnings, refusals = compare(before, after)
    assert not refusals
    assert "the code of tracker/live (acme-live) has changed" in warnings[0]


@pytest.mark.parametrize(
    ("change", "warning", "refusal"),
    [
        ({}, None, None),
        ({"version": "1.3.0"}, "was version 1.2.0 and is 1.3.0 now", None),
        ({"sha256": "abc"}, "has changed (SHA-256 none before, abc now)", None),
        ({"api": ">=1.1,<2"}, None, "for interface >=1.0,<2 and is for >=1.1,<2 now"),
        ({"distribution": "other"}, None, "came from acme-good and comes from other now"),
    ],
)
def test_compare_warns_and_refuses(
    lock: dict, change: dict, warning: str | None, refusal: str | None
) -> None:
    new = copy.deepcopy(lock)
    new["plugins"][0].update(change)
    warnings, refusals = compare(lock, new)
    assert len(warnings) == (warning is not None)
    assert len(refusals) == (refusal is not None)
    assert all(warning in text for text in warnings)
    assert all(refusal in text for text in refusals)


def test_another_choice_of_plugins_warns(lock: dict) -> None:
    empty = {**lock, "plugins": []}
    assert compare(lock, empty) == (["advantage/acme_mean was used before and is not used now"], [])
    assert compare(empty, lock) == (["advantage/acme_mean is used now and was not before"], [])


def test_a_lock_survives_the_disk(lock: dict, tmp_path: Path) -> None:
    write_lock(tmp_path / "plugins.lock.json", lock)
    assert read_lock(tmp_path) == read_lock(tmp_path / "plugins.lock.json") == lock
    assert refs_of(lock) == [GOOD]


def test_a_lock_that_is_missing_or_unreadable_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="plugin lock"):
        read_lock(tmp_path)
    path = tmp_path / "plugins.lock.json"
    path.write_text("{")
    with pytest.raises(PluginError, match="can't be read"):
        read_lock(path)
    path.write_text('{"schema": 9}')
    with pytest.raises(PluginError, match="has schema 9"):
        read_lock(path)


def test_locking_what_is_gone_is_an_error(installed: Path) -> None:
    with pytest.raises(PluginNotFoundError, match="plugin is named 'gone'"):
        lock_for([PluginRef(kind="advantage", name="gone")])


def test_packages_that_plugins_depend_on_are_in_it() -> None:
    lock = lock_for([PluginRef(kind="tracker", name="jsonl")])
    assert lock["packages"]["attrs"] == importlib.metadata.version("attrs")
    other = {**lock, "python": "3.0.1", "packages": {**lock["packages"], "attrs": "1.2.3"}}
    del other["packages"]["cattrs"]
    warnings, refusals = compare(other, lock)
    assert not refusals
    assert warnings == [
        f"Python was 3.0.1 and is {lock['python']} now",
        f"the package attrs was 1.2.3 and is {lock['packages']['attrs']} now",
        f"the package cattrs was absent and is {lock['packages']['cattrs']} now",
    ]
    # Locks of before did not say.
    assert compare({k: v for k, v in lock.items() if k != "packages"}, lock) == ([], [])


def test_environments_of_roles_are_in_it(tmp_path: Path) -> None:
    disk = PluginRef(kind="weight_transport", name="disk")
    ray = PluginRef(kind="runtime", name="ray")
    lock = lock_for([disk, ray], {"rollout": sys.executable, "actor": str(tmp_path / "far")})
    here = lock["environments"]["rollout"]
    assert (here["path"], here["python"]) == (sys.executable, lock["python"])
    assert here["packages"] == lock_for([disk])["packages"]
    assert lock["environments"]["actor"] == {"path": str(tmp_path / "far")}
    assert now_for(lock) == (lock, {})

    old = copy.deepcopy(lock)
    old["environments"]["rollout"]["packages"]["attrs"] = "1.2.3"
    old["environments"]["actor"] = {"path": "/near", "python": "3.12.1", "packages": {}}
    old["environments"]["ref"] = {"path": "/ref"}
    assert [(d.subject, d.what, d.was) for d in differences(old, lock)] == [
        ("environment actor", "environment", "/near"),
        ("environment actor", "environment", "/near"),
        ("environment ref", "environment", "/ref"),
        ("attrs in the environment of rollout", "package", "1.2.3"),
    ]


def test_a_plugin_that_is_gone_is_refused(lock: dict) -> None:
    lock["plugins"].append({"kind": "tracker", "name": "left", "distribution": "acme-left"})
    new, gone = now_for(lock)
    (found,) = differences(lock, new, gone)
    assert found.refused
    assert found.text.startswith(
        "tracker/left of acme-left can't be found any more: no tracker plugin"
    )


def test_another_engine_is_named_with_what_that_means() -> None:
    was, now = ({"packages": {"vllm": version, "attrs": version}} for version in ("1.0", "2.0"))
    [attrs, vllm], refused = compare(was, now)
    assert attrs == "the package attrs was 1.0 and is 2.0 now"
    assert vllm.startswith(
        "the package vllm was 1.0 and is 2.0 now: other kernels sample the responses"
    )
    assert refused == []
