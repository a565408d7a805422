"""Packages from `dovetail plugins new` build, install, pass their own tests, and are listed, selected and trained with."""

from __future__ import annotations

import json
import sys
import tomllib

import attrs
import pytest
import yaml

from dovetail.errors import PluginError
from dovetail.sections import EpisodeSection, PluginSection
from dovetail_sdk.scaffold import KINDS, LICENCES, new_plugin
from dovetail_sdk.scaffold.new import EXTENSIONS
from dovetail_sdk.testing import tiny_model_and_tokenizer

PYTEST = ("-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:jaxtyping")  # fmt: skip
DOVETAIL = ("-m", "dovetail.cli.main")

SELECT = """
import json, sys
from dovetail.config import config_from_mapping
from dovetail.config.plain_yaml import parse
from dovetail.plugins.index import default_index
from dovetail_console.plugin_page import page_of
for entry in default_index().entries():
    if entry.name.startswith("my_"):
        shown, _ = parse(page_of(entry.manifest).example)
        config_from_mapping({"model": {"path": "tiny"}, **(shown or {})})
        print(entry.kind)
"""


def own_tests(environment, home, *kinds):
    suites = [str(environment.packages[kind] / "tests") for kind in kinds]
    printed = environment.run(*PYTEST, "--rootdir", str(home), *suites, cwd=home)
    assert "passed" in printed
    assert "failed" not in printed


def listed(environment, home, *, imported=False):
    """Check that each plugin is listed; with `imported`, also that `dovetail doctor` can import it."""
    asked = ("doctor", "--json") if imported else ("plugins", "list", "--json")
    found = json.loads(environment.run(*DOVETAIL, *asked, cwd=home))["plugins"]
    mine = {p["kind"]: p for p in found if p["name"].startswith("my_")}
    assert set(mine) == set(environment.packages) - set(EXTENSIONS)
    for plugin in mine.values():
        assert plugin["state"] == "compatible", plugin
        assert not imported or plugin["status"] == "loadable", plugin


def clean(environment, home):
    folders = [str(package) for package in environment.packages.values()]
    environment.run("-m", "ruff", "check", "--no-cache", *folders, cwd=home)
    environment.run("-m", "ruff", "format", "--check", "--no-cache", *folders, cwd=home)
    described = [str(p) for k, p in environment.packages.items() if k not in EXTENSIONS]
    environment.run("-m", "dovetail_sdk", "manifest", "--check", *described, cwd=home)


def selected(environment, home):
    kinds = environment.run("-c", SELECT, cwd=home).split()
    assert sorted(kinds) == sorted(set(environment.packages) - set(EXTENSIONS))


@pytest.mark.timeout(1200)
def test_small_kinds_pass_their_own_tests(main, tmp_path):
    own_tests(main, tmp_path, "advantage", "policy_loss", "reward_function")


def test_the_main_kinds_are_listed_selected_and_clean(main, tmp_path):
    listed(main, tmp_path)
    selected(main, tmp_path)
    clean(main, tmp_path)


def test_a_run_trains_with_nothing_but_written_plugins(main, tmp_path):
    model = tiny_model_and_tokenizer(tmp_path / "model", vocab_size=300)
    rows = [{"prompt": f"{n} + 1 =", "reward_model": {"ground_truth": str(n + 1)}} for n in range(4)]  # fmt: skip
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = tmp_path / "runs"
    settings = {
        "model.path": model, "model.dtype": "float32", "data.train_files": data, "data.train_batch_size": 2,
        "data.max_prompt_length": 64, "data.max_response_length": 6, "data.plain_prompts": "raw",
        "rollout.name": "my_rollout", "rollout.n": 2, "actor.engine": "my_engine", "actor.optim.lr": 1e-3,
        "algorithm.advantage": "my_advantage", "algorithm.policy_loss": "my_policy_loss",
        "reward.function": "my_reward_function", "trainer.total_steps": 2, "runtime.device": "cpu",
        "output_dir": run, "project": "written", "experiment": "first",
    }  # fmt: skip
    config = tmp_path / "config.yaml"
    config.write_text("seed: 1\n")
    overrides = [f"{key}={value}" for key, value in settings.items()]
    main.run(*DOVETAIL, "train", str(config), *overrides, cwd=tmp_path)
    [directory] = run.glob("*/*")
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["status"] == "completed"
    lock = json.loads((directory / "plugins.lock.json").read_text())
    mine = {p["kind"] for p in lock["plugins"] if p["name"].startswith("my_")}
    assert mine == set(main.packages)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_every_kind_passes_its_own_tests(everything, tmp_path):
    own_tests(everything, tmp_path, *KINDS)


@pytest.mark.nightly
def test_every_kind_is_listed_selected_and_clean(everything, tmp_path):
    listed(everything, tmp_path, imported=True)
    selected(everything, tmp_path)
    clean(everything, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_every_kind_type_checks(everything, tmp_path):
    sources = [str(place) for p in everything.packages.values() for place in p.glob("src/*")]
    flags = ("--strict", "--explicit-package-bases", "--namespace-packages")
    # Uses this interpreter's packages, since mypy does not follow code in .pth files.
    command = ("-m", "mypy", *flags, "--python-executable", sys.executable)
    everything.run(*command, "--cache-dir", str(tmp_path / "cache"), *sources, cwd=tmp_path)


@pytest.mark.parametrize(
    ("kind", "name", "licence", "words"),
    [
        ("advantages", "mine", "MIT", "did you mean advantage"),
        ("advantage", "My-Name", "MIT", "lower-case"),
        ("advantage", "lambda", "MIT", "can't be a plugin's name"),
        ("advantage", "mine", "GPL", "unknown licence 'GPL'"),
    ],
)
def test_a_wrong_kind_name_or_licence_is_refused(tmp_path, kind, name, licence, words):
    with pytest.raises(PluginError, match=words):
        new_plugin(kind, name, tmp_path, licence=licence)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("licence", LICENCES)
def test_the_licence_stands_in_the_metadata(tmp_path, licence):
    package = new_plugin("preflight", f"mine_{LICENCES.index(licence)}", tmp_path, licence=licence)
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    assert project["license"] == licence
    assert ("classifiers" in project) == licence.startswith("LicenseRef")


def test_the_manifest_of_a_stage_has_its_phase_and_leaves_columns_to_the_plan(tmp_path):
    package = new_plugin("stage", "phased", tmp_path)
    [file] = package.glob("src/*/dovetail-plugin.json")
    [plugin] = json.loads(file.read_text())["plugins"]
    assert plugin["facts"] == {"phase": "estimate"}
    assert plugin["requires"] is plugin["provides"] is None


def test_an_agent_loop_has_the_limits_of_an_episode(tmp_path):
    [file] = new_plugin("agent_loop", "again", tmp_path).glob("src/*/dovetail-plugin.json")
    [plugin] = json.loads(file.read_text())["plugins"]
    keys = {field["name"] for field in plugin["config_schema"]["fields"]}
    limits = attrs.fields_dict(EpisodeSection).keys() - attrs.fields_dict(PluginSection).keys()
    assert keys >= limits


def test_the_tests_of_a_stage_install_the_plugins_of_a_default_config(tmp_path):
    for kind, needed in (("stage", True), ("advantage", False)):
        package = new_plugin(kind, f"needs_{kind}", tmp_path)
        project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
        extra = project["optional-dependencies"]["test"]
        assert any(name.startswith("dovetail-rl") for name in extra) == needed


@pytest.mark.parametrize("kind", ["advantage", "cli"])
def test_a_repository_has_workflows_that_run_what_the_package_has(tmp_path, kind):
    plain = new_plugin(kind, "plain", tmp_path)
    package = new_plugin(kind, "whole", tmp_path, repository=True)
    added = {p.relative_to(package).as_posix() for p in package.rglob("*") if p.is_file()}
    added = {name for name in added if not (plain / name.replace("whole", "plain")).exists()}
    workflows = package / ".github" / "workflows"
    assert added == {".github/workflows/release.yml", ".pre-commit-config.yaml", "CHANGELOG.md", "CONTRIBUTING.md"}  # fmt: skip
    described = kind not in EXTENSIONS
    for file in workflows.iterdir():
        document = yaml.safe_load(file.read_text())
        assert document["permissions"] == {"contents": "read"}
        assert all(job["timeout-minutes"] for job in document["jobs"].values())
    tests = yaml.safe_load((workflows / "test.yml").read_text())["jobs"]
    ran = [step.get("run", "") for job in tests.values() for step in job["steps"]]
    assert "pytest" in ran
    assert (f"dovetail plugins check {kind}/whole" in ran) == described
    assert any("manifest --check" in command for command in ran) == described
    [hooks] = yaml.safe_load((package / ".pre-commit-config.yaml").read_text())["repos"]
    assert ("manifest" in [hook["id"] for hook in hooks["hooks"]]) == described


def test_an_existing_directory_is_left_alone(tmp_path):
    new_plugin("advantage", "mine", tmp_path)
    with pytest.raises(PluginError, match="already exists"):
        new_plugin("advantage", "mine", tmp_path)
