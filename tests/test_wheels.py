"""Every package works installed from its built wheel, with nothing of the checkout in sight."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

PACKAGES = (
    "dovetail",
    "dovetail_sdk",
    "dovetail_rollout_hf",
    "dovetail_train_fsdp2",
    "dovetail_algorithms",
    "dovetail_rewards",
    "dovetail_transports",
    "dovetail_trainers",
    "dovetail_runtime_ray",
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


def test_every_plugin_is_compatible_and_loads(clean_python: Path, tmp_path: Path) -> None:
    listing = run(
        clean_python,
        "-m",
        "dovetail.cli.main",
        "plugins",
        "list",
        "--json",
        "--probe",
        cwd=tmp_path,
    )
    plugins = json.loads(listing)["plugins"]
    assert {(p["kind"], p["name"]) for p in plugins} >= {
        ("rollout", "hf"),
        ("engine", "fsdp2"),
        ("advantage", "grpo"),
        ("policy_loss", "ppo_clip"),
        ("reward_manager", "naive"),
        ("runtime", "inline"),
        ("runtime", "ray"),
        ("weight_transport", "shared_memory"),
        ("trainer", "on_policy"),
    }
    for plugin in plugins:
        assert plugin["state"] == "compatible", plugin
        assert plugin["probe"] == "loadable", plugin


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
        has_plugins = any(name.endswith("entry_points.txt") for name in names)
        if has_plugins and "sdk" not in wheel.name:
            assert any(name.endswith("/dovetail-plugin.json") for name in names), wheel.name
