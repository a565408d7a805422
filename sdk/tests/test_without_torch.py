"""The SDK imports, writes packages of kinds on NumPy, and names its extra, where torch and the packages on it can't be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BLOCKED = ("torch", "transformers", "pyarrow", "PIL", "jaxtyping")
BLOCKED += ("dovetail_datasets", "dovetail_rollouts", "dovetail_stages")
HEAD = f"import sys\nsys.modules.update(dict.fromkeys({BLOCKED!r}))\n"
"""A None in `sys.modules` makes an import raise ModuleNotFoundError."""


def without(code: str, *arguments: str) -> str:
    """The output of a process that can't import the blocked packages."""
    command = [sys.executable, "-c", HEAD + code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_all_but_the_doubles_and_suites_imports() -> None:
    code = """
import importlib, pkgutil
import dovetail_sdk
for module in pkgutil.walk_packages(dovetail_sdk.__path__, "dovetail_sdk."):
    if not module.name.startswith("dovetail_sdk.testing.") and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
        print(module.name)
"""
    assert {"dovetail_sdk.manifest", "dovetail_sdk.check.run"} <= {*without(code).split()}


def test_packages_of_kinds_on_numpy_are_written(tmp_path: Path) -> None:
    code = """
from pathlib import Path
from dovetail_sdk.scaffold import new_plugin
for kind in ("advantage", "reward_function", "sample_filter", "tracker", "tool", "trainer"):
    made = new_plugin(kind, f"my_{kind}", Path(sys.argv[1]))
    text = (made / "pyproject.toml").read_text()
    assert "torch" not in text and "dovetail-rollouts" not in text, text
    print(next(made.rglob("dovetail-plugin.json")))
"""
    assert len(without(code, str(tmp_path)).splitlines()) == 6


def test_a_suite_that_needs_torch_names_the_extra() -> None:
    code = """
from dovetail.errors import PluginNeedsError
from dovetail_sdk import testing
from dovetail_sdk.testing import conformance
for module, name in ((conformance, "EngineConformance"), (testing, "TableEngine")):
    try:
        getattr(module, name)
    except PluginNeedsError as error:
        print(error.message, error.hint)
print(conformance.TrackerConformance.__name__, testing.make_sample.__name__)
"""
    engine, table, rest = without(code).splitlines()
    for line, name in ((engine, "EngineConformance"), (table, "TableEngine")):
        assert line.startswith(f"{name} needs the package torch")
        assert line.endswith("dovetail-sdk[torch]'")
    assert rest == "TrackerConformance make_sample"
