"""Every package works installed from its built wheel, with nothing of the checkout in sight."""

from __future__ import annotations

import configparser
import json
import subprocess
from pathlib import Path

import pytest

from dovetail.plugins.index import default_index

PACKAGES = (
    "dovetail",
    "dovetail_sdk",
    "dovetail_rollout_hf",
    "dovetail_train_fsdp2",
    "dovetail_algorithms",
    "dovetail_rewards",
    "dovetail_rewards_extra",
    "dovetail_transports",
    "dovetail_serving",
    "dovetail_stages",
    "dovetail_datasets",
    "dovetail_rollouts",
    "dovetail_inference",
    "dovetail_torch_engines",
    "dovetail_diagnosis",
    "dovetail_console",
    "dovetail_preflight",
    "dovetail_trackers",
    "dovetail_trainers",
    "dovetail_tools",
    "dovetail_agents",
    "dovetail_gateway",
    "dovetail_environments",
    "dovetail_environments_harbor",
    "dovetail_environments_openenv",
    "dovetail_environments_reasoning_gym",
    "dovetail_environments_textarena",
    "dovetail_environments_verifiers",
    "dovetail_optimizers",
    "dovetail_distillation",
    "dovetail_report",
    "dovetail_runtime_ray",
    "dovetail_demo",
    "dovetail_migrate",
)


def run(python: Path, *args: str, cwd: Path) -> str:
    """Standard output of the clean environment's Python."""
    done = subprocess.run(
        [str(python), *args], capture_output=True, text=True, cwd=cwd, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_nothing_resolves_to_the_checkout(clean_python: Path, root: Path, tmp_path: Path) -> None:
    code = f"import importlib, json\nprint(json.dumps([importlib.import_module(n).__file__ for n in {PACKAGES!r}]))"
    for file in json.loads(run(clean_python, "-c", code, cwd=tmp_path)):
        assert not Path(file).is_relative_to(root), file
        assert Path(file).is_relative_to(clean_python.parent.parent), file


@pytest.mark.parametrize("probe", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_every_plugin_is_compatible_and_loads(
    clean_python: Path, tmp_path: Path, probe: bool
) -> None:
    command = ["doctor", "--json"] if probe else ["plugins", "list", "--json"]
    listing = run(clean_python, "-m", "dovetail.cli.main", *command, cwd=tmp_path)
    plugins = json.loads(listing)["plugins"]
    assert {(p["kind"], p["name"]) for p in plugins} >= {
        ("rollout", "hf"),
        ("engine", "fsdp2"),
        ("advantage", "grpo"),
        ("source", "examples"),
        ("dataset", "files"),
        ("sampler", "shuffled"),
        ("objective", "policy"),
        ("policy_loss", "ppo_clip"),
        ("reward_manager", "naive"),
        ("runtime", "inline"),
        ("runtime", "ray"),
        ("weight_transport", "shared_memory"),
        ("trainer", "on_policy"),
        ("tool", "calculator"),
        ("tool", "python"),
        ("tool_parser", "hermes"),
    }
    for plugin in plugins:
        assert plugin["state"] == "compatible", plugin
        assert not probe or plugin["status"] == "loadable", plugin


def test_wheels_are_typed_and_carry_licence_and_manifest(wheels: Path, root: Path) -> None:
    import zipfile

    licence = (root / "LICENSE").read_bytes()
    for wheel in wheels.glob("*.whl"):
        archive = zipfile.ZipFile(wheel)
        names = archive.namelist()
        [place] = [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
        assert archive.read(place) == licence, wheel.name
        if wheel.name.startswith("dovetail_rl-"):
            continue
        assert any(name.endswith("/py.typed") for name in names), wheel.name
        entry_points = configparser.ConfigParser(delimiters="=")
        for name in names:
            if name.endswith(".dist-info/entry_points.txt"):
                entry_points.read_string(archive.read(name).decode())
        has_plugins = any(kind.group in entry_points for kind in default_index().kinds.values())
        has_manifest = any(name.endswith("/dovetail-plugin.json") for name in names)
        assert has_manifest == has_plugins, wheel.name


@pytest.mark.nightly  # its warm start takes most of a minute
def test_the_demo_runs_in_a_folder_of_the_user(clean_python: Path, tmp_path: Path) -> None:
    short = ("trainer.total_steps=2", "trainer.validate_before=false", "rollout.n=4")
    printed = run(clean_python.with_name("dovetail"), "demo", "--seed", "3", *short, cwd=tmp_path)
    assert "step 2/2" in printed
    summary = json.loads((tmp_path / "demo/runs/arithmetic/seed_3/summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["accuracy_after"] is not None
