"""The supported releases of an engine, by version and by the names that they define."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from dovetail.errors import PluginNeedsError
from dovetail_serving import DrivenEngine, missing_names

Install = Callable[..., DrivenEngine]

MODULES = {
    "__init__.py": "from .late import *\n_LAZY = {'Lazy': '.a'}\ndef __getattr__(name): ...\n",
    "late.py": "from . import deep\nSTARRED = 1\n",
    "deep/__init__.py": "",
    "deep/a.py": "class A:\n    inner = 1\ntry:\n    from b import B as C\nexcept ImportError:\n    C: int = 0\n",
    "spaces/far.py": "def far():\n    local = 1\n",
}


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a fake engine with a version, and a plugin module with the given text."""

    def put(version: str, plugin: str = "from motor.deep.a import A\n", **modules: str) -> Any:
        engine = {**MODULES, **{f"{name}.py": text for name, text in modules.items()}}
        written(tmp_path / "motor", engine)
        written(tmp_path / "driver", {"__init__.py": "", "uses.py": plugin})
        about = f"Metadata-Version: 2.1\nName: motor-cpu\nVersion: {version}\n"
        written(tmp_path / "motor_cpu.dist-info", {"METADATA": about})
        monkeypatch.syspath_prepend(tmp_path)
        return DrivenEngine(
            title="Motor",
            package="motor",
            distributions=("motor", "motor-cpu"),
            plugin="driver",
            oldest=Version("1.4"),
            newest=Version("1.9"),
            lacks="it has no wheels",
        )

    return put


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("from motor import STARRED, deep, Lazy", []),
        ("from motor.deep import a", []),
        ("from motor.deep.a import A, B", ["motor.deep.a.B"]),
        ("from motor.deep.a import C", []),
        ("from motor.deep.a import inner", ["motor.deep.a.inner"]),
        ("def late():\n    from motor.spaces.far import far, local", ["motor.spaces.far.local"]),
        ("import motor.spaces", []),
        ("import motor.gone", ["motor.gone"]),
        ("from motor.gone import x, y", ["motor.gone.x", "motor.gone.y"]),
        ("from motor import Starred", ["motor.Starred"]),
        ("from motors import whatever\nfrom . import own\nimport os", []),
    ],
)
def test_names_are_looked_for_in_the_sources(tmp_path: Path, line: str, missing: list[str]) -> None:
    plugin = written(tmp_path / "driver", {"inside/uses.py": line + "\n"})
    assert missing_names(plugin, written(tmp_path / "motor", MODULES)) == tuple(missing)


@pytest.mark.parametrize("version", ["1.4", "1.4.0+cpu", "1.9.7", "1.8.dev3"])
def test_a_release_that_was_tried_is_taken(install: Install, version: str) -> None:
    engine = install(version)
    release = engine.installed()
    assert release is not None
    assert not engine.untried(release)
    engine.require("pip install it")


def test_a_newer_release_is_taken_and_spoken_of(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        install("1.10").require("pip install it", logging.getLogger("motor"))
    assert "motor-cpu 1.10 is untested" in caplog.text
    assert "Motor 1.4 to 1.9" in caplog.text


@pytest.mark.parametrize(
    ("version", "plugin", "words"),
    [
        ("1.3.9", "", "needs Motor 1.4 or.*motor-cpu 1.3.9 is installed"),
        ("of tomorrow", "", "needs Motor 1.4 or newer"),
        ("1.5", "from motor.deep import B\n", r"motor\.deep\.B, which motor-cpu 1\.5 lacks"),
    ],
)
def test_what_is_not_driven_is_refused(
    install: Install, version: str, plugin: str, words: str
) -> None:
    with pytest.raises(PluginNeedsError, match=words):
        install(version, plugin).require("pip install it")


def test_an_engine_that_is_not_there_is_refused(install: Install, tmp_path: Path) -> None:
    engine = install("1.5")
    (tmp_path / "motor").rename(tmp_path / "elsewhere")
    with pytest.raises(PluginNeedsError, match="its package `motor` is missing"):
        engine.require("pip install it")
    (tmp_path / "motor_cpu.dist-info").rename(tmp_path / "gone")
    assert engine.installed() is None
    with pytest.raises(PluginNeedsError, match="not installed"):
        engine.require("pip install it")


@pytest.mark.parametrize(
    ("version", "severity", "words"),
    [
        ("0.32.1", None, ""),
        ("0.99", "warning", "vllm 0.99 is untested: this plugin was tested with vLLM 0.24 to"),
        ("0.31", "error", " vllm.lora.request.LoRARequest"),
    ],
)
def test_check_says_what_is_wrong_with_an_installed_engine(
    judge: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    severity: str | None,
    words: str,
) -> None:
    about = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    written(tmp_path, {"vllm-0.dist-info/METADATA": about, "vllm/__init__.py": ""})
    monkeypatch.syspath_prepend(tmp_path)
    if severity != "error":
        monkeypatch.setattr(DrivenEngine, "missing_names", lambda self: ())
    found = judge("engine_release", {"rollout": {"name": "vllm"}})
    assert [finding.severity for finding in found] == ([severity] if severity else [])
    assert all(words in finding.message for finding in found)
    joined = {"name": "vllm", "mode": "server", "urls": ["http://127.0.0.1:8000"]}
    assert judge("engine_release", {"rollout": joined}) == []
    assert judge("engine_release", {"rollout": {"name": "hf"}}) == []
