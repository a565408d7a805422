"""Builds CHANGELOG.md from the change fragments of every package, by towncrier. Usage: python tests/changelog.py [VERSION]

With a version, its section is written on top and the fragments are removed. Without, the section is printed and nothing
changes. Either refuses a fragment whose name is not `<number>.<topic>.<added|changed|fixed|removed>.md`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# `ignore`, though empty, makes towncrier refuse names that it can't read instead of passing over them.
SETTINGS = """\
[tool.towncrier]
directory = "."
filename = "CHANGELOG.md"
template = "{template}"
title_format = "## {{version}} ({{project_date}})"
ignore = []
"""
TYPE = """
[[tool.towncrier.type]]
directory = "{0}"
name = "{0}"
showcontent = true
"""
SECTION = """
[[tool.towncrier.section]]
name = "{0}"
path = "{0}/changes"
"""
TEMPLATE = """\
{% for package, types in sections.items() if types %}

### {{ package }}

{% for type in definitions if type in types %}
{% for text in types[type] %}
- {{ type | capitalize }}: {{ text.split() | join(" ") }}
{% endfor %}
{% endfor %}
{% endfor %}
"""


def settings(root: Path, template: Path) -> str:
    """Return towncrier's settings, with a section for each package below `root` that has fragments."""
    fragments = [*root.glob("*/changes/*"), *root.glob("plugins/*/changes/*")]
    packages = sorted({fragment.parents[1].relative_to(root).as_posix() for fragment in fragments})
    # Without any section towncrier takes every file of `root` for a fragment.
    packages = packages or ["core"]
    return (
        SETTINGS.format(template=template.as_posix())
        + "".join(TYPE.format(name) for name in ("added", "changed", "fixed", "removed"))
        + "".join(SECTION.format(package) for package in packages)
    )


def build(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Write the section of the version in `arguments`, or print it where there is none; return towncrier's exit status."""
    how = ["--yes", "--version", *arguments] if arguments else ["--draft", "--version", "next"]
    with tempfile.TemporaryDirectory() as folder:
        config, template = Path(folder, "towncrier.toml"), Path(folder, "section.md")
        template.write_text(TEMPLATE)
        config.write_text(settings(root, template))
        command = [sys.executable, "-m", "towncrier", "build", "--dir", str(root)]
        command += ["--config", str(config), *how]
        # In `root`: git removes the fragments of the repository that it is started in.
        return subprocess.run(command, cwd=root, check=False).returncode


if __name__ == "__main__":
    sys.exit(build(sys.argv[1:]))
