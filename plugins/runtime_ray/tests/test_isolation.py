"""Environments of roles: another interpreter reports its packages, and errors name both values of a mismatch."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dovetail.config import load_config
from dovetail.config.builtin import InlineConfig
from dovetail.errors import (
    ConfigError,
    PlanError,
    PluginIncompatibleError,
    PluginNeedsError,
)
from dovetail_runtime_ray.isolation import (
    EnvironmentInfo,
    EnvironmentProblem,
    environment_problems,
    facts_here,
    facts_of,
    interpreter_of,
    plugins_of_roles,
    require_environment,
)

SEE = Path(__file__).resolve().parents[3] / "tests" / "see_environment.py"
DISK = {"kind": "weight_transport", "name": "disk", "distribution": "dovetail-rollouts"}
KEY = "runtime.environments.rollout"


def venv(place: Path, *, sees_us: bool) -> Path:
    """A virtual environment; `sees_us`: with all packages of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    if sees_us:
        subprocess.run([str(place / "bin" / "python"), str(SEE), sys.prefix], check=True)
    return place


def pretend(place: Path, name: str, version: str) -> None:
    """Install an empty distribution of this name and version."""
    (packages,) = place.glob("lib/python*/site-packages")
    folder = packages / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = venv(tmp_path_factory.mktemp("environments") / "other", sees_us=True)
    pretend(place, "attrs", "1.2.3")
    return place


def facts(**changes: Any) -> EnvironmentInfo:
    known = {
        "executable": "/there/bin/python",
        "python": "3.12.4",
        "packages": {"dovetail-core": "0.1.0"},
        "build": "cuda 13.0",
        "nccl": "2.27.5",
    }
    return EnvironmentInfo(**(known | changes))


def plugin(**changes: Any) -> dict[str, Any]:
    return {**DISK, "version": "0.1.0", "sha256": None, "unmet": [], **changes}


def test_another_interpreter_tells_what_it_has(other: Path) -> None:
    here = facts_here([DISK], ["attrs"])
    there = facts_of(interpreter_of(str(other), KEY), [DISK], ["attrs"])
    assert there.executable == str(other / "bin" / "python")
    assert there.python == here.python
    # Both interpreters load the same code.
    assert there.plugins == here.plugins
    assert [item["unmet"] for item in there.plugins] == [[]]
    (problem,) = environment_problems(here, there)
    assert (
        problem.message == f"it has attrs 1.2.3, and the controller attrs {here.packages['attrs']}"
    )
    assert problem.hint.startswith(f"{other}/bin/python -m pip install attrs==")


def test_files_of_the_working_directory_are_not_imported_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "platform.py").write_text("python_version = lambda: '9.9.9'\n")
    monkeypatch.chdir(tmp_path)
    assert facts_of(interpreter_of(sys.executable, KEY)).python == platform.python_version()


def test_an_environment_without_dovetail_says_how_to_get_it(tmp_path: Path) -> None:
    bare = venv(tmp_path / "bare", sees_us=False)
    with pytest.raises(
        PluginIncompatibleError, match=r"No module named 'dovetail_runtime_ray'"
    ) as caught:
        facts_of(interpreter_of(str(bare), KEY))
    assert str(caught.value.hint).startswith(
        f"{bare}/bin/python -m pip install dovetail-runtime-ray=="
    )


def test_an_environment_of_another_python_is_told_of_that_first(tmp_path: Path) -> None:
    """Also if that Python can't import dovetail."""
    pretender = tmp_path / "python"
    pretender.write_text(
        f"#!{sys.executable} -IS\n"
        "import platform, sys\n"
        "platform.python_version = lambda: '3.9.18'\n"
        "del sys.argv[0]\n"
        "exec(sys.argv.pop(1))\n"
    )
    pretender.chmod(0o755)
    here = facts_here().python
    with pytest.raises(PluginIncompatibleError) as caught:
        facts_of(pretender, [DISK])
    said = f"the environment of {pretender} has Python 3.9.18, and the controller {here}"
    assert caught.value.message == said
    wanted = here.rpartition(".")[0]
    assert (
        caught.value.hint == f"make it with Python {wanted}, and install there what the role needs"
    )


def test_what_is_no_environment_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"runtime.environments.rollout=.* neither a virtual"
    ) as caught:
        interpreter_of(str(tmp_path / "gone"), KEY)
    assert f"-m venv {tmp_path}/gone" in str(caught.value.hint)
    assert interpreter_of("/far/env", KEY, exists=False) == Path("/far/env/bin/python")
    assert interpreter_of("/far/bin/python3.12", KEY, exists=False) == Path("/far/bin/python3.12")
    assert interpreter_of(sys.executable, KEY) == Path(sys.executable)


@pytest.mark.parametrize(
    ("here", "there", "said"),
    [
        ({}, {}, None),
        ({}, {"python": "3.12.9"}, None),
        ({}, {"python": "3.11.4"}, "it has Python 3.11.4, and the controller 3.12.4"),
        ({}, {"packages": {"dovetail-core": None}}, "it has no dovetail-core, and the"),
        ({}, {"build": "cuda 12.9"}, "built for cuda 12.9, and the trainer's for cuda 13.0"),
        ({}, {"nccl": "2.27.9"}, None),
        ({}, {"nccl": "2.28.3"}, "it has NCCL 2.28.3, and the trainer 2.27.5"),
        (
            {"plugins": [plugin()]},
            {"plugins": [plugin(version="0.2.0")]},
            "has version 0.2.0; expected 0.1.0",
        ),
        (
            {"plugins": [plugin()]},
            {"plugins": [plugin(missing="no such plugin")]},
            "it lacks weight_transport 'disk' of dovetail-rollouts: no such plugin",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_both_values(
    here: dict[str, Any], there: dict[str, Any], said: str | None
) -> None:
    found = list(environment_problems(facts(**here), facts(**there), accelerators=True))
    assert len(found) == (said is not None)
    assert all(str(said) in problem.message for problem in found)
    if said is not None:
        with pytest.raises(PluginIncompatibleError, match="is not usable:"):
            require_environment("the environment", found)


def test_on_cpus_builds_and_nccl_may_differ() -> None:
    assert not list(environment_problems(facts(), facts(build="cpu", nccl=None)))


def test_what_is_missing_there_is_a_need_with_its_command() -> None:
    unmet = ["vllm>=0.24 (not installed)", "pip install vllm"]
    found = list(
        environment_problems(facts(plugins=[plugin()]), facts(plugins=[plugin(unmet=[unmet])]))
    )
    with pytest.raises(PluginNeedsError, match=r"needs vllm>=0.24 \(not installed\)") as caught:
        require_environment("it", found)
    assert caught.value.hint == "pip install vllm"
    # With a further problem, installing the package is not enough.
    with pytest.raises(PluginIncompatibleError):
        require_environment("it", [*found, EnvironmentProblem("it has Python 2", "make another")])


def test_a_role_is_asked_for_what_its_processes_load() -> None:
    items = [{"kind": kind} for kind in ("rollout", "weight_transport", "engine", "tracker")]
    assert [item["kind"] for item in plugins_of_roles(["rollout"], items)] == [
        "rollout",
        "weight_transport",
    ]
    assert [item["kind"] for item in plugins_of_roles(["actor"], items)] == [
        "weight_transport",
        "engine",
    ]


def test_a_runtime_without_processes_refuses_environments() -> None:
    config = InlineConfig(name="inline", environments={"rollout": "/opt/vllm"})
    with pytest.raises(PlanError, match=r"rollout='/opt/vllm'.* runs.*in this") as caught:
        config.pools_for(("actor", "rollout"))
    assert "runtime.name=ray" in str(caught.value.hint)
    with pytest.raises(PlanError, match=r"environments.rolout.*role") as caught:
        InlineConfig(environments={"rolout": "/x"}).pools_for(("actor", "rollout"))
    assert caught.value.hint == "did you mean 'rollout'?"


def test_environments_are_paths(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: {path: m}\nruntime: {environments: {rollout: 3}}\n")
    with pytest.raises(ConfigError, match=r"runtime.environments.rollout = 3"):
        load_config(path)
