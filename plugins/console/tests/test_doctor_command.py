"""`dovetail doctor`: broken parts of the environment, and examinations that packages add."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from click.testing import CliRunner

from dovetail.cli.main import main
from dovetail.plugins.distributions import Installed
from dovetail.plugins.index import default_index
from dovetail_console import examinations, host
from dovetail_console.commands import doctor as doctor_module
from dovetail_console.commands.doctor import print_report
from dovetail_console.probe import probed


@pytest.fixture
def patients(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Show the doctor only the plugins with these names."""

    def choose(names: str) -> None:
        index = default_index()
        entries = tuple(e for e in index.entries() if e.name in names.split())
        chosen = dataclasses.replace(index, all_entries=entries)
        monkeypatch.setattr(doctor_module, "default_index", lambda: chosen)
        monkeypatch.setattr(host, "cpu_torch_on_gpu_host", lambda: None)

    return choose


def test_the_doctor_reports_everything_and_exits_with_1_where_something_is_broken(patients) -> None:
    patients("acme_mean crash future needy")
    done = CliRunner().invoke(main, ["doctor", "--json"])
    assert done.exit_code == 1, done.output
    report = json.loads(done.stdout)
    assert report["schema"] == 1
    assert any(row["what"].startswith("sandbox level") for row in report["examined"])
    assert report["torch"]["version"]
    assert report["torch"]["threads"] >= 1
    assert {"attrs", "omegaconf", "torch", "transformers", "pyarrow"} <= {
        d["name"] for d in report["dependencies"]
    }
    assert not [d for d in report["dependencies"] if d["problem"]]
    found = {p["name"]: p for p in report["plugins"]}
    assert found["acme_mean"]["status"] == "loadable"
    assert found["acme_mean"]["problem"] is None
    assert found["needy"]["problem"] is None
    assert "the moon is full" in found["crash"]["problem"]
    text = "\n".join(report["problems"])
    assert "tracker/future (acme-future 1.0.0) is rejected" in text
    assert "→ pip install --upgrade acme-future dovetail-core" in text
    assert "needy" not in text

    with CliRunner().isolation() as (out, *_):
        print_report(report)
    text = out.getvalue().decode()
    assert "problem: tracker/crash (acme-crash 1.0.0) is broken" in text
    assert "unmet: acme-engine>=1.5 or acme-engine-cpu>=1.5" in text
    assert "DEPENDENCY" in text
    assert text.endswith("2 problems\n")


def test_a_trial_survives_failures_and_crashes_at_import(installed: Path) -> None:
    found = {p.entry.name: p for p in probed(default_index().entries("tracker"))}
    assert (found["crash"].entry.state, found["crash"].status) == ("compatible", "broken")
    assert "RuntimeError: the moon" in str(found["crash"].reason)
    assert found["dies"].status == "broken"
    assert found["dies"].reason == "its import ends the process: exit code 3"
    assert "does not implement metrics_logged" in str(found["partial"].reason)
    # An unmet need is not the plugin's fault.
    assert (found["needy"].status, found["needy"].reason) == ("compatible", None)
    assert found["future"].status == "rejected"


def test_the_doctor_exits_with_0_where_only_a_need_is_unmet(patients) -> None:
    patients("acme_mean needy")
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 0, done.output
    last = done.stdout.splitlines()[-1]
    assert last == "nothing is broken, but tracker/needy can't run here: not all needs are met"


def declared(monkeypatch, tmp_path: Path, body: str) -> None:
    """Declare one examination, in a module with this body."""
    (tmp_path / "acme_examination.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    point = EntryPoint("oven", "acme_examination:examine", "dovetail.doctor")
    acme = Installed("acme", "1.2", None, (point,), metadata=None)
    index = dataclasses.replace(default_index(), distributions=(acme,))
    monkeypatch.setattr(examinations, "default_index", lambda: index)


OVEN = "def examine():\n    print('warm')\n    return [dict(what='oven', available=True, detail='200 °C', problem=None)]\n"


def test_what_a_package_has_examined_is_a_table(monkeypatch, tmp_path: Path) -> None:
    declared(monkeypatch, tmp_path, OVEN)
    [row] = examinations.examine_extensions()
    assert row == {"owner": "oven of acme 1.2", "what": "oven", "available": True, "detail": "200 °C", "problem": None}  # fmt: skip


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("def examine():\n    return 3", "not iterable"),
        ("def examine():\n    return [{'what': 'oven'}]", "expected what, available"),
        (OVEN.replace("True", "'yes'"), "a row is 'yes'"),
        ("def examine():\n    import os; os._exit(3)", "exit code 3"),
        ("def examine():\n    import time; time.sleep(60)", "longer than 1.5 s"),
    ],
)
def test_an_examination_that_fails_is_a_problem_of_its_package(
    monkeypatch, tmp_path: Path, body: str, words: str
) -> None:
    declared(monkeypatch, tmp_path, body)
    timeout = 1.5 if "sleep" in body else 240.0
    [row] = examinations.examine_extensions(timeout)
    assert words in row["problem"]
    assert "oven of acme 1.2" in row["problem"]
    assert "→ report it to the author of acme" in row["problem"]


def test_the_host_and_the_engines_that_plugins_need_are_told(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    told = host.described()
    assert told["processors"] >= 1
    assert told["free_disk_bytes"] > 0
    assert told["variables"]["CUDA_VISIBLE_DEVICES"] == "3"
    engines = doctor_module.examine_engines()
    wanted = {(name, *e["any_of"]): e for e in engines for name in e["plugins"]}
    for entry in default_index().entries():
        for need in entry.needs:
            engine = wanted[(f"{entry.kind}/{entry.name}", *need.any_of)]
            assert engine["met"] == need.met
            assert engine["found"]
