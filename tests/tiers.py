"""The tier of every plugin, worked out by running the conformance suite of its kind. Usage: python tests/tiers.py FILE

Writes `{"KIND/NAME": TIER}`; in place of a tier the reason where a suite did not run here, or `none`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dovetail.plugins.index import default_index
from dovetail_sdk.check.run import check_plugins

CORE = "dovetail-core"
"""Its own tests check its plugins."""


def tiers() -> dict[str, str]:
    """Check all plugins of this repository and return their tiers."""
    entries = [
        entry
        for entry in default_index().entries()
        if entry.distribution.startswith("dovetail-") and entry.distribution != CORE
    ]
    found = {}
    for report in check_plugins(entries):
        name = f"{report['plugin']['kind']}/{report['plugin']['name']}"
        found[name] = report["not_run"] or report["tier"] or "none"
        sys.stdout.write(f"{name}  {found[name]}\n")
        sys.stdout.flush()
    return dict(sorted(found.items()))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(tiers(), indent=2) + "\n")
