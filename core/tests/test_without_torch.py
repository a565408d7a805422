"""Core works where torch, transformers, PyArrow and Pillow can't be imported, and plugins on NumPy alone pass their suites there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BLOCKED = ("torch", "transformers", "pyarrow", "PIL")
ON_TORCH = ("dovetail_datasets", "dovetail_rollouts", "dovetail_stages")
"""Packages that need them, and that neither core nor the SDK requires."""
MOST = 160
"""MB of memory at the peak."""
PEAK = """
from pathlib import Path
status = Path("/proc/self/status")
lines = status.read_text().splitlines() if status.exists() else ["VmHWM: 0 kB"]
peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
print(f"peak {peak // 1000} MB")
"""
"""`ru_maxrss` is not less than what the process that started this one had. Where there is no /proc, nothing is measured."""


def without(code: str, *arguments: str, blocked: tuple[str, ...] = BLOCKED) -> tuple[str, int]:
    """What a process prints that can't import the blocked packages, and its peak of memory in MB."""
    # A None in `sys.modules` makes an import raise ModuleNotFoundError.
    head = f"import sys\nsys.modules.update(dict.fromkeys({blocked!r}))\n"
    command = [sys.executable, "-c", head + code + PEAK, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    printed, _, peak = done.stdout.rpartition("peak ")
    return printed, int(peak.split()[0])


def test_the_packages_are_blocked() -> None:
    code = "for name in sys.argv[1:]:\n    try: __import__(name)\n    except ModuleNotFoundError: print(name)\n"
    printed, _ = without(code, *BLOCKED)
    assert printed.split() == [*BLOCKED]


def test_every_public_name_of_core_resolves() -> None:
    code = """
import importlib
from dovetail_sdk import public
public.LIBRARIES = ()
for module, names in public.public_names().items():
    for name in names:
        getattr(importlib.import_module(module), name)
        print(f"{module}.{name}")
"""
    printed, peak = without(code)
    assert {"dovetail.train", "dovetail.interfaces.TrainEngine"} <= {*printed.split()}
    assert peak < MOST


def test_a_run_is_planned_with_doubles_of_an_engine_and_of_what_surrounds_it() -> None:
    code = """
from dovetail.config import config_from_mapping
from dovetail.interfaces import (
    OUTPUTS, ExperienceSource, Optimizer, PlannedPart, Stage, StageSet, StepRows, TrainEngine, Trainer,
)
from dovetail.planning import make_plan
from dovetail.sections import EngineSection
from dovetail_sdk.testing import temporary_plugins

def double(interface, api, **own):
    named = {"name": "double", "api": api, **own}
    return type(f"{interface.__name__}Double", (interface,), dict.fromkeys(interface.__abstractmethods__) | named)

doubles = [
    double(TrainEngine, ">=3.0,<4", Config=EngineSection, outputs=classmethod(lambda *_: OUTPUTS)),
    double(Optimizer, ">=1.0,<2"),
    double(Trainer, ">=1.0,<3", source=classmethod(lambda *_: "double")),
    double(
        ExperienceSource,
        ">=1.0,<3",
        rows=classmethod(lambda *_: StepRows(name="rows", samples=4)),
        gives=classmethod(lambda *_: frozenset({"response_ids", "response_mask"})),
        parts_of_step=classmethod(lambda *_: [PlannedPart(name="read", who="double", because="given")]),
    ),
    double(
        Stage,
        ">=1.0,<3",
        phase="update",
        requires=classmethod(lambda *_: {"response_ids"}),
        roles=classmethod(lambda *_: ("actor",)),
        because=classmethod(lambda *_: "learns"),
    ),
    double(StageSet, ">=1.0,<2", stages=("double",)),
]
config = {
    "model": {"path": "nowhere"},
    "trainer": "double",
    "actor": {"engine": "double", "optim": "double"},
    "critic": {"engine": "double", "optim": "double"},
    "ref": {"engine": "double"},
    "algorithm": {"stage_set": "double"},
}
with temporary_plugins(*doubles):
    plan = make_plan(config_from_mapping(config, []).config)
for part in (*plan.collection, *plan.stages, *plan.models):
    print(part.because)
"""
    printed, peak = without(code)
    assert printed.splitlines() == ["given", "learns", "the policy"]
    assert peak < MOST


def test_plugins_on_numpy_pass_their_suites() -> None:
    code = """
import pytest
# Without the repository's settings, as in a package of a user.
code = pytest.main(["-c", "/dev/null", "-p", "no:cacheprovider", "-q", "-ra", sys.argv[1]])
assert not code, code
"""
    suites = Path(__file__).with_name("numpy_plugins.py")
    printed, peak = without(code, str(suites), blocked=(*BLOCKED, *ON_TORCH))
    assert " passed" in printed
    assert peak < MOST
