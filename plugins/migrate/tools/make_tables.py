"""Make the tables of verl's config files from its wheels.

    python make_tables.py verl-0.9.1-py3-none-any.whl

A wheel comes from `pip download verl==0.9.1 --no-deps`. A table holds keys, defaults and defaults lists, and no comments.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import yaml

from dovetail_migrate.verl.compose import _Loader, without_targets

TABLES = Path(__file__).parents[1] / "src" / "dovetail_migrate" / "verl" / "tables"
_CONFIG = re.compile(r"verl/(?:trainer|experimental/\w+)/config/(?P<name>.+)\.yaml")


def main() -> None:
    """Write a table of verl's config files for each verl wheel among the arguments."""
    for wheel in sys.argv[1:]:
        version = Path(wheel).name.split("-")[1]
        found: dict[str, Any] = {}
        with zipfile.ZipFile(wheel) as archive:
            for path in sorted(archive.namelist()):
                match = _CONFIG.fullmatch(path)
                if match is None or "_generated_" in path:
                    continue
                text = archive.read(path).decode()
                tree = yaml.load(text, _Loader) or {}  # noqa: S506 - a SafeLoader
                if (line := re.search(r"^#\s*@package\s+(\S+)", text, re.MULTILINE)) is not None:
                    tree["# @package"] = line[1]
                found[match["name"]] = without_targets(tree)
        target = TABLES / f"verl-{version}.json"
        lines = [f"{json.dumps(name)}: {json.dumps(tree)}" for name, tree in found.items()]
        target.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
        print(f"{target}: {len(found)} files")


if __name__ == "__main__":
    main()
