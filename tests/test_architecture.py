"""Rules of the architecture: who may import whom, how long a file is, what every package ships."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
from collections import Counter, defaultdict
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dovetail.plugins.kinds import EXTENSION_GROUPS
from dovetail_sdk.public import LIBRARIES, private_imports

sys.path.insert(0, str(Path(__file__).with_name("architecture")))

from docstrings import sources

LIMIT = 400
"""Lines; most files are well below 300."""


def test_imports_keep_their_direction(root: Path) -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([str(lint)], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_no_file_is_longer_than_400_lines(root: Path) -> None:
    long = {str(p): n for p in sources(root) if (n := len(p.read_text().splitlines())) > LIMIT}
    assert not long


def test_no_two_public_classes_share_a_name(root: Path) -> None:
    places = defaultdict(list)
    for path in sources(root):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path}:{node.lineno}")
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_no_name_of_a_module_stands_four_times_in_a_package(root: Path) -> None:
    counts = Counter(
        (next(p for p in path.parents if p.name == "src"), path.name)
        for path in sources(root)
        if path.name != "__init__.py"
    )
    assert not {module: count for module, count in counts.items() if count > 3}


def test_every_file_has_a_docstring(root: Path) -> None:
    silent = [
        str(path)
        for path in sources(root)
        if path.read_text().strip() and not path.read_text().lstrip().startswith(('"""', 'r"""'))
    ]
    assert not silent


def test_nothing_but_the_cli_prints(root: Path) -> None:
    printing = [
        str(path)
        for path in sources(root)
        for line in path.read_text().splitlines()
        if line.lstrip().startswith("print(") and "/cli/" not in str(path)
    ]
    assert not printing


def test_every_package_has_its_parts(root: Path) -> None:
    plugins = [path.parent for path in root.glob("plugins/*/pyproject.toml")]
    assert len(plugins) > 9
    for package in (root / "core", root / "sdk", *plugins):
        for part in ("pyproject.toml", "README.md", "tests", "src"):
            assert (package / part).exists(), f"{package}/{part}"


def test_the_rules_of_imports_name_every_package(root: Path) -> None:
    rules = (root / ".importlinter").read_text()
    for package in root.glob("plugins/*/src/*"):
        # In the list of all, and in each rule about plugins; that plugins are independent does not concern libraries.
        named = re.findall(rf"\b{package.name}$|\b{package.name} ", rules, re.MULTILINE)
        assert len(named) >= 4 - (package.name in LIBRARIES), package.name


def test_plugins_import_public_names_only(root: Path) -> None:
    packages = sorted(root.glob("plugins/*/src"))
    assert len(packages) > 9
    assert [line for package in packages for line in private_imports(package)] == []


def layers(root: Path) -> dict[str, int]:
    """The height of every package of core, from the import rules; the lowest is 0."""
    rules = configparser.ConfigParser()
    rules.read(root / ".importlinter")
    lines = rules["importlinter:contract:core-has-layers"]["layers"].strip().splitlines()
    return {
        package.strip(): height
        for height, line in enumerate(reversed(lines))
        for package in line.split("|")
    }


def test_no_package_of_core_names_a_module_above_it_in_a_string(root: Path) -> None:
    height, source = layers(root), root / "core" / "src" / "dovetail"
    named = re.compile(r"dovetail\.(\w+)(\.\w+)*(:\w+)?")
    upward = [
        f"{path}:{node.lineno}: {node.value}"
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if (match := named.fullmatch(node.value)) and node.value not in EXTENSION_GROUPS
        if height.get(match[1], 0)
        > height.get(path.relative_to(source).parts[0].removesuffix(".py"), 99)
    ]
    assert not upward


def test_the_page_on_the_architecture_is_short_and_names_files_that_exist(root: Path) -> None:
    text = (root / "docs" / "architecture.md").read_text()
    assert len(text.split()) <= 2500
    assert [line for line in text.splitlines() if len(line) > 120] == []
    table = text.partition("## To change something, open")[2].partition("\n## ")[0]
    core = root / "core" / "src" / "dovetail"
    for row in table.splitlines()[4:]:
        for plugin, files in re.findall(r"(plugins/\w+)?(?:`: )?`([\w/]+(?:/|\.py))`", row):
            places = [core, *(root / plugin).glob("src/*")] if plugin else [core]
            assert any((place / files).exists() for place in places), (row, files)


def brought(distribution: str) -> set[str]:
    """What installing a distribution without extras installs, by normalised name."""
    found, left = set(), [distribution]
    while left:
        name = canonicalize_name(left.pop())
        if name in found:
            continue
        try:
            needs = metadata.requires(name) or ()
        except metadata.PackageNotFoundError:
            continue  # not installed here
        found.add(name)
        for need in map(Requirement, needs):
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                left.append(need.name)
    return found


def test_core_brings_no_models_no_tables_no_images_no_plotting_and_no_http_server() -> None:
    there = brought("dovetail-core")
    assert {"numpy", "structlog"} <= there
    assert not there & {"torch", "jaxtyping", "transformers", "pyarrow", "pillow", "tokenizers"}
    plotting = {"matplotlib", "plotly", "altair", "seaborn", "bokeh", "pandas"}
    servers = {"fastapi", "starlette", "uvicorn", "flask", "aiohttp", "tornado", "django"}
    assert not there & (plotting | servers)


RUNS = re.compile(r'(\.venv[\w-]*)/bin/python -m pytest\b.*? -m "?([\w ()]+?)"?((?: [\w/]+)*)\)?\n')
"""Runs of pytest in the Makefile: environment, expression of marks, folders. Those with `-k` run some tests alone, and are none."""


def test_every_test_is_run_by_a_target_of_the_makefile(
    root: Path, pytestconfig: pytest.Config
) -> None:
    conftest = pytestconfig.pluginmanager.get_plugin(str(root / "conftest.py"))
    makefile = (root / "Makefile").read_text()
    runs = RUNS.findall(makefile.replace("$(PYTEST)", ".venv/bin/python -m pytest"))
    known = {*conftest.APART, "nightly", "hypothesis"}

    def is_run(path: Path, marks: set[str]) -> bool:
        apart = marks - {"nightly", "ray"}
        environment = f".venv-{min(apart)}" if apart else ".venv"
        return any(
            where == environment
            and eval(expression, {mark: mark in marks for mark in known})
            and path.relative_to(root).parts[0] in (folders.split() or path.parts)
            and not conftest.pytest_ignore_collect(
                path, SimpleNamespace(getoption=lambda _, marks=expression: marks)
            )
            for where, expression, folders in runs
        )

    left_out = []
    folders = ("core", "sdk", "plugins", "tests")
    for path in (file for folder in folders for file in root.glob(f"{folder}/**/test_*.py")):
        named = {*re.findall(r"\bmark\.(\w+)", path.read_text())}
        if conftest.starts_ray(path):
            named.add("ray")
        for mark in named & {*conftest.APART} or {""}:
            for nightly in {"", "nightly"} & {"", *named}:
                if not is_run(path, {mark, nightly} - {""}):
                    left_out.append((str(path), mark, nightly))
    assert not left_out
