"""Commands stay light: a listing imports no plugin and nothing heavy, and each command has a budget of modules."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dovetail.plugins.index import default_index

WATCHED = """
import json, sys, traceback
arguments, forbidden = json.loads(sys.argv[1])
guilty = []

def watch(event, details):
    # Looking for a package (`find_spec`) is no import, and raises no such event.
    name = details[0] if event == "import" else ""
    if any(name == word or name.startswith(word + ".") for word in forbidden) and not guilty:
        frames = [f for f in traceback.extract_stack() if "importlib" not in f.filename][:-1]
        guilty.append(name + " is imported by\\n" + "".join(traceback.format_list(frames)))

sys.addaudithook(watch)
before = set(sys.modules)
from dovetail.cli.main import main
try:
    main(arguments, prog_name="dovetail")
except SystemExit:
    pass
print("\\0" + json.dumps({"guilty": guilty, "modules": sorted(set(sys.modules) - before)}))
"""
HEAVY = ("torch", "transformers", "ray", "numpy", "structlog", "omegaconf", "stevedore", "pluggy")
PLUGINS = sorted(
    {e.target.split(":")[0].split(".")[0] for e in default_index().entries()} - {"dovetail"}
)
LISTINGS: dict[str, tuple[list[str], int]] = {
    "help": (["--help"], 200),
    "plugins help": (["plugins", "--help"], 200),
    "list": (["plugins", "list"], 250),
    "list as JSON": (["plugins", "list", "--json"], 250),
    "list of a kind": (["plugins", "list", "--kind", "rollout"], 250),
}
"""Command → its arguments, and how many modules it may import beyond a bare interpreter's."""


def watched(arguments: list[str], forbidden: list[str]) -> dict[str, list[str]]:
    command = [sys.executable, "-c", WATCHED, json.dumps([arguments, forbidden])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout.rpartition("\0")[2])
    return found


@pytest.mark.parametrize(("arguments", "budget"), LISTINGS.values(), ids=LISTINGS)
def test_a_listing_imports_no_plugin_nothing_heavy_and_few_modules(arguments, budget):
    found = watched(arguments, [*HEAVY, *PLUGINS])
    assert not found["guilty"], "\n".join(found["guilty"])
    count = len(found["modules"])
    assert count <= budget, f"{count} modules: {', '.join(found['modules'])}"


@pytest.mark.parametrize("arguments", [["plugins", "show", "rollout/hf"], ["plugins", "show", "advantage/grpo"]])  # fmt: skip
def test_a_plugins_page_comes_from_its_manifest_alone(arguments):
    found = watched(arguments, ["torch", "transformers", "ray", *PLUGINS])
    assert not found["guilty"], "\n".join(found["guilty"])


def test_the_stack_of_whoever_imports_is_shown():
    found = watched(["plugins", "list"], ["dovetail.plugins.index"])
    [guilty] = found["guilty"]
    assert guilty.startswith("dovetail.plugins.index is imported by")
    assert "cli/plugins.py" in guilty or "cli/main.py" in guilty
