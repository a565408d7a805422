"""The process in which plugins are checked. It writes one line of JSON for every fact, check and test."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import attrs
import pytest

from dovetail.errors import DovetailError, PluginBrokenError, PluginNeedsError
from dovetail.interfaces import Plugin
from dovetail.plugins.contract import config_of, import_object
from dovetail.plugins.entry import PluginEntry
from dovetail.plugins.index import default_index
from dovetail.plugins.load import load_entry
from dovetail.plugins.manifest import package_directories
from dovetail_sdk.check.facts import facts_of
from dovetail_sdk.check.process import ANSWERS, QUESTION
from dovetail_sdk.check.recorder import ResultRecorder
from dovetail_sdk.check.settings import settings_of
from dovetail_sdk.check.shipping import NotHereError, check_manifest, check_wheel
from dovetail_sdk.check.signatures import differences
from dovetail_sdk.check.suites import UNDER_TEST, suites_for
from dovetail_sdk.public import check_imports

_FINDING = "from dovetail_sdk.check.suites import UNDER_TEST\nglobals().update(UNDER_TEST)\n"


class Answers:
    """Writer of JSON lines that the parent process reads."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, **line: Any) -> None:
        """Write `line` as one line of JSON and flush the file."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def check(self, name: str, act: Callable[[], Any]) -> Any:
        """Call `act`, write whether it passed, failed or was skipped, and return its value; None unless it passed."""
        self.write(start=name)
        outcome, message, hint, result = "passed", None, None, None
        try:
            result = act()
        except (NotHereError, PluginNeedsError) as error:
            outcome, message, hint = "skipped", error.message, error.hint
        except DovetailError as error:
            outcome, message, hint = "failed", error.message, error.hint
        self.write(check={"name": name, "outcome": outcome, "message": message, "hint": hint})
        return result


def main() -> None:
    """Check the plugins that the parent process names in the file `QUESTION`, and write the results to the file `ANSWERS`.

    Both files are in the folder that the first command-line argument names.
    """
    folder = Path(sys.argv[1])
    asked = json.loads((folder / QUESTION).read_text())
    sys.path[:] = asked["path"]
    with (folder / ANSWERS).open("w") as file:
        answers = Answers(file)
        for wanted in asked["plugins"]:
            answers.write(plugin=wanted)
            _examine(_entry(**wanted), asked, answers)
            answers.write(checked=wanted)
        answers.write(done=True)


def _entry(kind: str, name: str, distribution: str) -> PluginEntry:
    return next(
        entry
        for entry in default_index().entries(kind)
        if (entry.name, entry.distribution) == (name, distribution)
    )


def _examine(entry: PluginEntry, asked: dict[str, Any], answers: Answers) -> None:
    package = entry.target.split(":")[0].split(".")[0]
    answers.check("imports", lambda: [*map(check_imports, package_directories(package))])
    cls = answers.check("class", lambda: _load(entry))
    if cls is None:
        return
    answers.check("signatures", lambda: _check_signatures(entry, cls))
    answers.check("manifest", lambda: check_manifest(entry))
    answers.check("wheel", lambda: check_wheel(entry))
    answers.write(facts={name: attrs.asdict(fact) for name, fact in facts_of(entry, cls).items()})
    unmet = [need for need in entry.needs if not need.met]
    if unmet:
        answers.write(unmet=" and ".join(f"{need} ({need.found})" for need in unmet))
        return
    found = answers.check("suite", lambda: suites_for(cls, entry.kind, package, asked["overrides"]))
    if found:
        answers.write(settings={name: settings_of(suite) for name, suite in found.items()})
        UNDER_TEST.clear()
        UNDER_TEST.update(found)
        _run_tests(answers, asked["only"], f"test_{entry.kind}_{entry.name}.py")


def _load(entry: PluginEntry) -> type[Plugin]:
    """Load a plugin's class, and check that the class and its Config have the types that its kind requires."""
    cls = load_entry(entry)
    config_of(cls, default_index().kind(entry.kind))
    return cls


def _check_signatures(entry: PluginEntry, cls: type) -> None:
    found = differences(cls, import_object(default_index().kind(entry.kind).interface))
    if found:
        raise PluginBrokenError(
            "; ".join(difference.text for difference in found),
            hint="; ".join(difference.hint for difference in found),
        )


def _run_tests(answers: Answers, only: str | None, file: str) -> None:
    """Run pytest in an empty folder, so that the settings and conftest files of the current folder have no effect.

    Args:
        answers: the writer of the results.
        only: a `-k` expression of pytest; None runs all tests.
        file: the name of the test file; it differs for each plugin, since pytest imports a name only once.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "pytest.ini").write_text("[pytest]\n")
        (place / file).write_text(_FINDING)
        arguments = [str(place), "-c", str(place / "pytest.ini"), "--rootdir", folder]
        arguments += ["-p", "no:cacheprovider", "--import-mode=importlib", "-q"]
        arguments += [f"--basetemp={place / 'tests'}"]
        if only:
            arguments += ["-k", only]
        code = pytest.main(arguments, plugins=[ResultRecorder(answers.write)])
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            answers.write(broken=f"pytest ended with {pytest.ExitCode(code).name}")


if __name__ == "__main__":
    main()
