"""Dovetail beside the packages that an engine's image has: nothing of them moves, and the page on engines says what they are."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
IMAGES = sorted((ROOT / "constraints").glob("*.txt"))
WHOLE = ("dovetail-rl", "dovetail-runtime-ray")
INSTALLED = {
    "vllm": (*WHOLE, "dovetail-rollout-vllm"),
    "sglang": (*WHOLE, "dovetail-rollout-sglang"),
    # It pins a transformers that training is too new for: an environment of its own for the rollout.
    "sglang-0.5.15": ("dovetail-runtime-ray", "dovetail-rollout-sglang"),
}
"""What goes into an image, by its name or its engine's."""
MANYLINUX = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)]


@pytest.fixture(params=IMAGES, ids=lambda path: path.stem)
def image(request: pytest.FixtureRequest) -> Path:
    return request.param


def versions(image: Path) -> dict[str, Version]:
    lines = image.read_text().splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {name: Version(version) for name, version in pairs}


@cache
def projects() -> dict[str, list[str]]:
    """The requirements of every distribution of this repository."""
    files = [ROOT, ROOT / "core", ROOT / "sdk", *(ROOT / "plugins").iterdir()]
    found = (tomllib.loads((f / "pyproject.toml").read_text())["project"] for f in files)
    return {project["name"]: project["dependencies"] for project in found}


def requirements(image: Path) -> Iterator[Requirement]:
    """What Dovetail's packages in an image want of other projects."""
    due = list(INSTALLED.get(image.stem, INSTALLED.get(image.stem.partition("-")[0], ())))
    assert due, f"{image.stem} is of no known engine"
    seen: set[str] = set()
    while due:
        name = due.pop()
        if name in seen:
            continue
        seen.add(name)
        for text in projects()[name]:
            requirement = Requirement(text)
            if requirement.name in projects():
                due.append(requirement.name)
            else:
                yield requirement


def test_nothing_of_an_image_has_to_move(image: Path) -> None:
    here = versions(image)
    moved = {
        str(requirement): str(here[name])
        for requirement in requirements(image)
        if (name := canonicalize_name(requirement.name)) in here
        and here[name] not in requirement.specifier
    }
    assert not moved


def test_the_page_on_engines_says_what_is_in_an_image(image: Path) -> None:
    engine, _, release = image.stem.partition("-")
    page = (ROOT / "docs" / "engines.md").read_text()
    rows = [
        [cell.strip().replace("\\", "") for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if re.match(rf"\| {engine} .*\b{re.escape(release)}\b", line, re.IGNORECASE)
    ]
    (row,) = [row for row in rows if len(row) == 5]
    here = versions(image)
    assert here[engine] == Version(release)
    assert here["torch"] in SpecifierSet(f"=={row[1]}")
    assert here["transformers"] in SpecifierSet(row[2])
    assert Version("3.12") in SpecifierSet(row[3])


@pytest.mark.parametrize("file", ["Dockerfile", "dovetail.def"])
def test_a_container_installs_beside_the_newest_image_of_its_engine(file: str) -> None:
    text = (ROOT / "examples" / "containers" / file).read_text()
    named = re.findall(r"(?:vllm-openai|sglang):v([\d.]+\d)", text)
    assert named
    for engine in ("vllm", "sglang"):
        newest = max((p.stem.partition("-")[2] for p in IMAGES if p.stem.startswith(engine)), key=Version)  # fmt: skip
        if f"{engine}-openai:" in text or f"{engine}:" in text:
            assert newest in named


@pytest.mark.nightly
def test_pip_finds_versions_of_all_else_beside_an_image(image: Path, tmp_path: Path) -> None:
    """Downloads metadata alone. An index that can't be reached fails it."""
    wanted = sorted({str(requirement) for requirement in requirements(image)})
    platforms = [f"--platform={name}" for name in (*MANYLINUX, "manylinux2014_x86_64")]
    # What pip reads of this machine's configuration may hold constraints of its own.
    command = [
        sys.executable, "-m", "pip", "install", "--isolated", "--dry-run", "--ignore-installed", "--quiet",
        "--only-binary=:all:", "--python-version=3.12", "--implementation=cp", *platforms,
        f"--target={tmp_path}", f"--constraint={image}", "--report=-", *wanted,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    chosen = [entry["metadata"] for entry in json.loads(done.stdout)["install"]]
    here = versions(image)
    found = {canonicalize_name(one["name"]): Version(one["version"]) for one in chosen}
    assert {name: v for name, v in found.items() if here.get(name, v) != v} == {}
    assert {"omegaconf", "torch"} <= found.keys()
