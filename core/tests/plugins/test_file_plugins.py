"""A Python file in place of a package."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dovetail.cli.main import main
from dovetail.errors import (
    ConfigError,
    PluginBrokenError,
    PluginIncompatibleError,
    PluginNotFoundError,
)
from dovetail.interfaces import PluginContext, PluginRef
from dovetail.plugins import load_plugin_class, make_plugin
from dovetail.plugins.files import load_file_attribute
from dovetail.plugins.index import PluginIndex
from dovetail.plugins.kinds import KINDS
from dovetail.plugins.load import config_class, ref_for
from dovetail.sections import PluginSection, TrainerSection

TRACKER = """
import attrs
from dovetail.sections import PluginSection
from dovetail.interfaces import Tracker

@attrs.frozen(kw_only=True)
class Settings(PluginSection):
    every: int = 5

class Recorder(Tracker):
    Config = Settings

    def metrics_logged(self, step, metrics):
        pass

class Unfinished(Tracker):
    pass

class Ancient(Recorder):
    api = "<1.0"

number = 3
"""
REWARD = """
def compute_score(solution_str, ground_truth, **rest):
    return float(solution_str == ground_truth)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_tracker.py"
    path.write_text(TRACKER)
    return path


def ref(path: Path, attribute: str, kind: str = "tracker") -> PluginRef:
    return PluginRef(kind=kind, name=attribute, path=str(path), attribute=attribute)


def test_a_class_in_a_file_is_a_plugin(file: Path) -> None:
    raw = {"path": str(file), "attribute": "Recorder"}
    config = config_class("tracker", raw)
    assert config.__name__ == "Settings"
    found = ref_for("tracker", config(**raw, every=7))
    assert (found.name, found.distribution, found.path) == ("Recorder", None, str(file))
    made = make_plugin(pickle.loads(pickle.dumps(found)), PluginContext())
    assert (made.name, made.config.every) == ("Recorder", 7)
    assert made.api == f"=={KINDS['tracker'].api}"


def test_a_process_that_has_not_run_the_file_reads_a_ref_with_its_config(file: Path) -> None:
    config = config_class("tracker", {"path": str(file), "attribute": "Recorder"})
    found = ref_for("tracker", config(path=str(file), attribute="Recorder", every=7))
    code = (
        "import pickle, sys\n"
        "from dovetail.interfaces import PluginContext\n"
        "from dovetail.plugins import make_plugin\n"
        "made = make_plugin(pickle.load(sys.stdin.buffer), PluginContext())\n"
        "print(made.name, made.config.every, type(made.config) is type(made).Config)"
    )
    there = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(found), capture_output=True, check=False
    )
    assert there.stdout.split() == [b"Recorder", b"7", b"True"], there.stderr.decode()


def test_a_relative_path_becomes_absolute(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    section = PluginSection(path="my_tracker.py", attribute="Recorder")
    assert ref_for("tracker", section).path == str(file)


def test_one_content_gives_one_class_and_a_change_gives_another(file: Path) -> None:
    first = load_plugin_class(ref(file, "Recorder"))
    assert load_plugin_class(ref(file, "Recorder")) is first
    file.write_text(TRACKER + "\nextra = 1\n")
    assert load_plugin_class(ref(file, "Recorder")) is not first


def test_a_change_of_the_same_size_within_a_second_is_seen(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    load_file_attribute(file, "number")
    time = file.stat().st_mtime_ns
    file.write_text(file.read_text().replace("number = 3", "number = 4"))
    os.utime(file, ns=(time, time))
    assert load_file_attribute(file, "number") == 4


def test_a_plain_function_is_a_reward_function(tmp_path: Path) -> None:
    path = tmp_path / "my_reward.py"
    path.write_text(REWARD)
    assert config_class("reward_function", {"path": str(path)}) is PluginSection
    found = ref_for("reward_function", PluginSection(path=str(path)))
    assert found.attribute == "compute_score"
    reward = make_plugin(found, PluginContext())
    assert reward.compute_score(solution_str="4", ground_truth="4", data_source=None) == 1.0
    assert load_file_attribute(str(path), "compute_score")("3", "4") == 0.0


def test_a_function_that_a_package_makes_a_tool_of_names_the_package_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "add.py"
    path.write_text("def add(a: int) -> int:\n    return a + 1\n")
    monkeypatch.setattr("dovetail.plugins.files.default_index", lambda: PluginIndex([]))
    with pytest.raises(PluginNotFoundError, match="package dovetail-tools") as error:
        load_plugin_class(ref_for("tool", PluginSection(path=str(path), attribute="add")))
    assert error.value.hint == "pip install dovetail-tools"


def test_a_plain_function_is_no_plugin_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "my_reward.py"
    path.write_text(REWARD)
    with pytest.raises(PluginBrokenError, match=r"compute_score of .*my_reward\.py is function"):
        load_plugin_class(ref(path, "compute_score"))


def test_a_class_without_a_config_takes_the_section_of_its_kind(tmp_path: Path) -> None:
    path = tmp_path / "my_loop.py"
    path.write_text(
        "from dovetail.interfaces.trainer import Trainer\n"
        "class Loop(Trainer):\n    def run(self, run):\n        pass\n"
    )
    assert config_class("trainer", {"path": str(path), "attribute": "Loop"}) is TrainerSection


def test_a_missing_file_names_the_nearest_beside_it(file: Path) -> None:
    with pytest.raises(PluginNotFoundError) as caught:
        load_file_attribute(str(file.parent / "my_tracer.py"), "Recorder")
    assert "does not exist" in caught.value.message
    assert caught.value.hint == "did you mean 'my_tracker.py'?"


def test_a_missing_attribute_names_the_nearest_and_what_there_is(file: Path) -> None:
    with pytest.raises(PluginNotFoundError) as caught:
        load_plugin_class(ref(file, "Recoder"))
    assert "has no attribute 'Recoder'" in caught.value.message
    assert "Ancient, Recorder, Settings" in caught.value.message
    assert caught.value.hint == "did you mean 'Recorder'?"


@pytest.mark.parametrize(
    ("attribute", "text"),
    [
        ("number", "is int 3, not a class"),
        ("Unfinished", "does not implement metrics_logged"),
        ("Settings", "not Tracker"),
    ],
)
def test_what_is_no_plugin_is_refused(file: Path, attribute: str, text: str) -> None:
    with pytest.raises(PluginBrokenError, match=text):
        load_plugin_class(ref(file, attribute))


def test_another_interface_version_is_refused(file: Path) -> None:
    with pytest.raises(PluginIncompatibleError, match=r"the tracker interface <1\.0"):
        load_plugin_class(ref(file, "Ancient"))


@pytest.mark.parametrize(
    ("source", "text", "hint"),
    [
        ("x = 1\nraise OSError('no disk')\n", ":2 fails: OSError: no disk", "fix the file"),
        ("x = (\n", ":1 fails: SyntaxError", "fix the file"),
        ("import acme_helpers\n", ":1 fails: ModuleNotFoundError", "'acme_helpers'"),
    ],
)
def test_a_failing_file_names_the_line(tmp_path: Path, source: str, text: str, hint: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(PluginBrokenError) as caught:
        load_file_attribute(str(path), "x")
    assert f"{path}{text}" in caught.value.message
    assert hint in caught.value.hint


def test_name_and_path_together_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"plugin 'jsonl'.*file 'x\.py'"):
        ref_for("tracker", PluginSection(name="jsonl", path="x.py", attribute="X"))


def test_a_file_needs_an_attribute(file: Path) -> None:
    with pytest.raises(ConfigError, match="does not name the class"):
        ref_for("tracker", PluginSection(path=str(file)))


LABELLED = """
from dovetail.interfaces import AdvantageEstimator
from dovetail.interfaces import SampleFilter

class Bare(AdvantageEstimator):
    def estimate(self, columns, groups):
        pass

class Scoped(Bare):
    scope = "group"

class Misspelt(Scoped):
    level = "tokens"

class Whole(Scoped):
    level = "token"

class Sieve(SampleFilter):
    def keep(self, columns, groups):
        pass
"""


@pytest.mark.parametrize(
    ("kind", "attribute", "words", "fix"),
    [
        ("advantage", "Bare", "expected 'sample' or 'group' or 'batch'", "scope = 'sample'"),
        ("advantage", "Scoped", "expected 'sample' or 'token'", "level = 'sample'"),
        ("advantage", "Misspelt", "has level = 'tokens'; expected 'sample' or 'token'", "level = 'sample'"),
        ("sample_filter", "Sieve", "expected 'drop' or 'mask'", "action = 'drop'"),
    ],
)  # fmt: skip
def test_attributes_that_an_interface_asks_for_are_missed_when_the_class_is_loaded(
    tmp_path: Path, kind: str, attribute: str, words: str, fix: str
) -> None:
    path = tmp_path / "labelled.py"
    path.write_text(LABELLED)
    assert load_plugin_class(ref(path, "Whole", "advantage")).__name__ == "Whole"
    with pytest.raises(PluginBrokenError) as caught:
        load_plugin_class(ref(path, attribute, kind))
    assert words in caught.value.message
    assert fix in (caught.value.hint or "")


def test_a_kind_has_the_article_that_it_takes(file: Path) -> None:
    for kind, words in (("advantage", "an advantage plugin"), ("tracker", "a tracker plugin")):
        with pytest.raises(PluginBrokenError) as caught:
            load_plugin_class(ref(file, "number", kind))
        assert words in (caught.value.hint or "")


def test_threads_that_load_one_file_at_once_get_one_class(tmp_path: Path) -> None:
    path = tmp_path / "slow_to_run.py"
    path.write_text("import time\ntime.sleep(0.1)\nclass Reward: pass\n")
    together = threading.Barrier(4)

    def load(_: int) -> object:
        together.wait(120)
        return load_file_attribute(str(path), "Reward")

    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(load, range(4)))) == 1


WAITS = """
import threading
from dovetail.plugins.files import load_file_attribute
thread = threading.Thread(target=load_file_attribute, args=({other!r}, "x"), daemon=True)
thread.start()
thread.join(120)
stuck = thread.is_alive()
"""


def test_a_file_may_wait_for_a_thread_that_loads_another(tmp_path: Path) -> None:
    other, path = tmp_path / "other.py", tmp_path / "waits.py"
    other.write_text("x = 1\n")
    path.write_text(WAITS.format(other=str(other)))
    assert not load_file_attribute(str(path), "stuck")


def test_a_class_that_extends_another_of_its_file_has_a_name_of_its_own(file: Path) -> None:
    file.write_text(TRACKER + "\nclass Second(Recorder):\n    pass\n")
    refs = [
        PluginRef(kind="tracker", name=name, path=str(file), attribute=name)
        for name in ("Recorder", "Second")
    ]
    assert [load_plugin_class(ref).name for ref in refs] == ["Recorder", "Second"]


def with_helpers(folder: Path, answer: int) -> Path:
    """A file that imports a module and a package beside it, one at once and one when it is called."""
    (folder / "beside_package").mkdir(parents=True)
    (folder / "beside_package" / "__init__.py").write_text(
        f"from beside_module import ANSWER\nOWN = {answer}\n"
    )
    (folder / "beside_module.py").write_text(f"ANSWER = {answer}\n")
    file = folder / "uses_others.py"
    file.write_text(
        "import beside_package\n"
        "def compute_score():\n    import beside_module\n    return beside_package.ANSWER, beside_package.OWN, beside_module.ANSWER\n"
    )
    return file


def test_a_file_imports_modules_beside_it_also_when_it_is_called(tmp_path: Path) -> None:
    file = with_helpers(tmp_path / "a", 1)
    assert load_file_attribute(str(file), "compute_score")() == (1, 1, 1)


def test_files_of_two_folders_have_each_their_own_modules_beside_them(tmp_path: Path) -> None:
    first = load_file_attribute(str(with_helpers(tmp_path / "a", 1)), "compute_score")
    second = load_file_attribute(str(with_helpers(tmp_path / "b", 2)), "compute_score")
    assert first()[:2] == (1, 1)
    assert second() == (2, 2, 2)


def test_a_module_beside_a_file_hides_no_installed_one_once_the_file_has_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "tabnanny.py").write_text("")
    file = tmp_path / "plain.py"
    file.write_text("def compute_score():\n    import tabnanny\n    return tabnanny.__file__\n")
    sys.modules.pop("tabnanny", None)
    assert not load_file_attribute(str(file), "compute_score")().startswith(str(tmp_path))


def test_config_show_runs_no_file_that_a_config_names(tmp_path: Path) -> None:
    config_file = tmp_path / "c.yaml"
    config_file.write_text("model: {path: x}\n")

    def dovetail(*arguments: str) -> Result:
        return CliRunner().invoke(main, [*arguments])

    file = tmp_path / "plugin.py"
    file.write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\nraise ValueError\n")
    chosen = [
        f"reward.function={{path: {file}, depth: 3, words: {{a: [1, b]}}}}",
        f"algorithm.preset={{path: {file}, attribute: Best}}",
        f"rollout={{path: {file}, attribute: Mine, n: 2, speed: 0.5}}",
        f"tracking=[jsonl, {{path: {file}, attribute: Board}}]",
    ]
    result = dovetail("config", "show", str(config_file), *chosen, "--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert not (tmp_path / "was_run").exists()
    assert (shown["reward"]["function"]["depth"], shown["reward"]["function"]["words"]) == (
        3,
        {"a": [1, "b"]},
    )
    assert (shown["rollout"]["n"], shown["rollout"]["speed"]) == (2, 0.5)
    assert dovetail("check", "--static", str(config_file), *chosen).exit_code == 2
    assert (tmp_path / "was_run").exists()
