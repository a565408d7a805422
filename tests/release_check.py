"""What is to be released installs and runs, from wheels alone. Usage: python tests/release_check.py DIST

`make release-check` builds DIST. Then: `twine check --strict`; on Python 3.11 and 3.12 an environment from DIST and a folder of
downloaded wheels, without the index, in which `dovetail demo` runs; on Python 3.13 what needs neither torch nor transformers.
Environments and downloads are below `.release/`, and what was downloaded is kept: of torch the CPU build, where pip knows of an index that has it
(`PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu`), else that for CUDA, with 2.7 GB a Python.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / ".release"
WHOLE, LIGHT = ("3.11", "3.12"), "3.13"
LIGHT_COMMANDS = (
    ("plugins", "list"),
    ("plugins", "show", "advantage/grpo"),
    ("config", "show", "model.path=tiny", "algorithm.preset=dapo"),
    ("config", "explain", "model.path=tiny", "rollout.n"),
    ("check", "--static", "model.path=tiny", "data.train_files=rows.jsonl", "reward.function=gsm8k"),
)  # fmt: skip
"""Listings and checks, which read manifests alone."""
ESTIMATE = """
import sys
import numpy as np
from dovetail.batch import Batch
from dovetail.interfaces import Groups, PluginContext
from dovetail_algorithms.estimators.grpo import GrpoEstimator

batch = Batch({"scores": np.array([1, 0, 0, 1], np.float32)})
estimator = GrpoEstimator(GrpoEstimator.Config(), PluginContext())
found = estimator.estimate(batch, Groups.of(np.zeros(4, np.int64))).advantages
assert np.allclose(found, np.array([1, -1, -1, 1]) * 0.75**0.5, atol=1e-4), found
assert "torch" not in sys.modules
"""
"""Advantages of GRPO, computed without torch."""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command and return what it printed.

    Raises:
        SystemExit: it failed; its output is printed.
    """
    sys.stdout.write(f"$ {' '.join(map(str, command))}\n")
    sys.stdout.flush()
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{done.stdout}\nrelease-check: exit code {done.returncode}")
    return done.stdout


def interpreter(version: str) -> str:
    """Return the interpreter of a version, of PATH or of pyenv.

    Raises:
        SystemExit: there is none.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [f"python{version}", *sorted(pyenv.glob(f"{version}.*/bin/python3"))]
    for candidate in candidates:
        found = shutil.which(str(candidate))
        works = found and subprocess.run([found, "-c", ""], check=False, capture_output=True)
        if found and works and not works.returncode:
            return found
    sys.exit(f"release-check: there is no Python {version}; install it, or put it on PATH")


def environment(version: str) -> Path:
    """Return the Python of a fresh environment of a version."""
    home = PLACE / f"venv-{version}"
    shutil.rmtree(home, ignore_errors=True)
    run(interpreter(version), "-m", "venv", home)
    return home / "bin" / "python"


def wheelhouse(python: Path, version: str, *requirements: str | Path) -> Path:
    """Download what requirements need from the index, and return the folder."""
    folder = PLACE / f"wheels-{version}"
    run(
        *(python, "-m", "pip", "download", "--quiet", "--dest", folder),
        *("--constraint", ROOT / "constraints-cpu.txt", "--find-links", sys.argv[1]),
        *requirements,
    )
    return folder


def whole(version: str, dist: Path) -> None:
    """Install everything without the index, and run the demo."""
    python = environment(version)
    folder = wheelhouse(python, version, "dovetail-rl", "dovetail-sdk")
    for stale in folder.glob("dovetail*"):
        stale.unlink()
    install = (python, "-m", "pip", "install", "--quiet", "--no-compile", "--no-index")
    run(*install, "--find-links", dist, "--find-links", folder, "dovetail-rl", "dovetail-sdk")
    run(python, "-m", "pip", "check")
    away = PLACE / f"away-{version}"
    shutil.rmtree(away, ignore_errors=True)
    away.mkdir()
    run(python.with_name("dovetail"), "demo", "trainer.total_steps=20", cwd=away)
    [summary] = away.glob("demo/runs/arithmetic/*/summary.json")
    found = json.loads(summary.read_text())
    if found["status"] != "completed" or not (summary.parent / "report.html").is_file():
        sys.exit(f"release-check: the demo ended as {found}")


def light(dist: Path) -> None:
    """List, check and estimate where neither torch nor transformers is installed."""
    python = environment(LIGHT)
    pip = (python, "-m", "pip", "install", "--quiet", "--no-compile", "--no-index")
    run(*pip, "--no-deps", *sorted(dist.glob("*.whl")))
    requires = "import importlib.metadata as m; print(*m.requires({!r}), sep='\\n')"
    needs = {
        need
        for name in ("dovetail-core", "dovetail-algorithms")
        for need in run(python, "-c", requires.format(name)).splitlines()
        if not need.startswith(("dovetail", "torch")) and "extra ==" not in need
    }
    run(*pip, "--find-links", wheelhouse(python, LIGHT, *needs), *needs)
    for command in LIGHT_COMMANDS:
        run(python.with_name("dovetail"), *command, cwd=PLACE)
    run(python, "-c", ESTIMATE)


def main() -> None:
    """Check the wheels of DIST."""
    dist = Path(sys.argv[1]).resolve()
    PLACE.mkdir(exist_ok=True)
    wheels = sorted(dist.glob("*.whl"))
    run(sys.executable, "-m", "twine", "check", "--strict", *wheels)
    light(dist)
    for version in WHOLE:
        whole(version, dist)
    sys.stdout.write(f"release-check: {len(wheels)} wheels install and run\n")


if __name__ == "__main__":
    main()
