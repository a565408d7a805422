"""What tests prove, counted by collecting them: `python tests/evidence.py FILE [PATH…]` writes it as JSON.

`{"suites": {"KIND/NAME": {TARGET: cases}}, "counts": {TOPIC: {TARGET: cases}}}`, where TARGET is the target of the Makefile that
runs a case, or `gpu` for one that needs a GPU. The site's page on evidence shows it.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from dovetail_sdk.testing.conformance.plugin import PluginConformance

ROOT = Path(__file__).resolve().parents[1]
TOPICS = {
    "kills": "tests/end_to_end/test_kills",
    "attacks": "plugins/rewards/tests/attacks/",
    "bad_inputs": "tests/end_to_end/test_bad_inputs.py",
    "trl": "tests/end_to_end/test_trl_losses.py",
    "verl": "tests/end_to_end/test_verl_numerics.py",
}
"""How paths of tests begin, by what they are counted as."""
TARGETS = {
    "gpu": "gpu",
    "proofs": "make proofs",
    "trl": "make proofs",
    "verl": "make proofs",
    "nightly": "make nightly",
}
"""Where a case with a mark runs, the first mark first; all others run in `make test`."""


def target(item: pytest.Item) -> str:
    """Return what runs a case."""
    return next((TARGETS[mark] for mark in TARGETS if item.get_closest_marker(mark)), "make test")


def checked(item: pytest.Item) -> str | None:
    """Return the plugin, as KIND/NAME, that a case of a conformance suite checks; None for other cases."""
    suite = getattr(item, "cls", None)
    if suite is None or not issubclass(suite, PluginConformance):
        return None
    # A suite of several plugins takes each as a parameter.
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    plugin = getattr(suite, "plugin", None) or parameters["plugin"]
    return f"{suite.kind}/{plugin.name}"


class Collector:
    """A plugin of pytest that counts what was collected."""

    def __init__(self) -> None:
        self.suites: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count cases by plugin and by topic."""
        for item in session.items:
            if name := checked(item):
                self.suites[name][target(item)] += 1
            path = Path(item.path).relative_to(ROOT).as_posix()
            for topic, begin in TOPICS.items():
                if path.startswith(begin):
                    self.counts[topic][target(item)] += 1


def collected(paths: Sequence[str]) -> dict[str, dict[str, dict[str, int]]]:
    """Collect tests, of the whole repository without paths, and return what was counted.

    Raises:
        SystemExit: a file can't be collected.
    """
    collector = Collector()
    ended = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *paths], [collector])
    if ended:
        sys.exit(f"collecting ended with {ended!r}")
    return {"suites": collector.suites, "counts": collector.counts}


if __name__ == "__main__":
    file = Path(sys.argv[1]).resolve()
    os.chdir(ROOT)
    file.write_text(json.dumps(collected(sys.argv[2:])))
