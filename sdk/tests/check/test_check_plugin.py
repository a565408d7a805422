"""The check of an installed plugin: the content of the report, and the advice to the author about errors."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from dovetail.cli.main import main
from dovetail.errors import PluginError
from dovetail.plugins.entry import PluginEntry
from dovetail_console.conformance_report import FILE_NAME, tier
from dovetail_sdk import commands
from dovetail_sdk.check import shipping
from dovetail_sdk.check.run import check_plugins
from dovetail_sdk.scaffold import new_plugin


def of(report, name):
    return next(check for check in report["checks"] if check["name"] == name)


def test_a_sound_plugin_under_the_suite_that_its_package_declares(checked, site, index):
    report = checked("sound")
    assert {check["name"]: check["outcome"] for check in report["checks"]} == dict.fromkeys(
        ["declaration", "imports", "class", "signatures", "manifest", "wheel", "suite"], "passed"
    )
    assert all(fact["holds"] for fact in report["facts"].values()), report["facts"]
    outcomes = {test["name"]: test for test in report["tests"]}
    assert outcomes["TestSound::test_of_its_own"]["outcome"] == "passed"
    expected = outcomes.pop("TestSound::test_a_group_thinned_to_one_gives_zero")
    assert (expected["outcome"], expected["reason"]) == ("expected", "it gives 1 there, on purpose")
    assert {test["outcome"] for test in outcomes.values()} == {"passed"}
    assert report["settings"] == {"TestSound": {"config": {}, "weights": [1.0, 2.0]}}
    assert report["tier"] == "silver"
    assert report["interface"] == {"range": ">=1.0,<2", "version": "1.1"}

    shipped = site / "dovetail_acme_sound" / FILE_NAME
    shipped.write_text(json.dumps({"schema": 1, "reports": [report]}))
    shown = CliRunner().invoke(main, ["plugins", "show", "advantage/acme_sound"]).output
    assert "conformance   silver (" in shown, shown
    assert "1 expected to fail" in shown
    details = CliRunner().invoke(main, ["plugins", "show", "acme_sound", "--json"]).output
    assert json.loads(details)["plugins"][0]["conformance"]["tier"] == "silver"
    shipped.unlink()


def test_the_command_takes_settings_and_ships_the_report(index, site):
    place = site / "dovetail_acme_sound" / FILE_NAME
    arguments = ["plugins", "check", "acme_sound", "scale=2.5", "-k", "shape or thinned", "--ship"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert (
        "expected TestSound::test_a_group_thinned_to_one_gives_zero: it gives 1 there"
        in done.output
    )
    assert "passed    TestSound::test_shape_and_dtype_follow_the_level[0]" in done.output
    [report] = json.loads(place.read_text())["reports"]
    place.unlink()
    assert report["config"] == ["scale=2.5"]
    assert "TestSound ran with scale=2.5, weights = [1.0, 2.0]" in done.output
    assert report["settings"]["TestSound"]["config"] == {"scale": 2.5}
    assert report["tier"] is None


@pytest.mark.parametrize(
    ("name", "check", "words", "hint"),
    [
        ("missing", "class", "implement estimate", "estimate(self, columns"),
        ("signature", "signatures", "be called with (columns=…, groups=…)", "estimate(columns: Batch"),
        ("config", "class", "extend PluginSection", "@attrs.frozen(kw_only=True)"),
        ("manifest", "manifest", 'aliases is [], should be ["other"]', "dovetail_sdk manifest"),
        ("nothing", "class", "has no attribute 'AcmeNothing'", "report it"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_class_is_said_with_its_mend(checked, name, check, words, hint):
    report = checked(name, only="name")
    found = of(report, check)
    assert found["outcome"] == "failed"
    assert words in found["message"]
    assert hint in found["hint"]
    assert report["tier"] is None


def test_a_written_objective_is_held_against_its_formula(checked):
    report = checked("formula", kind="objective", only="oracles")
    assert {test["outcome"] for test in report["tests"]} == {"failed"}
    assert report["tier"] is None


def test_a_crash_is_a_line_of_the_report_that_names_the_test(checked):
    report = checked("crash")
    assert of(report, "process")["outcome"] == "failed"
    assert "exit code 7" in of(report, "process")["message"]
    assert "test_shape_and_dtype_follow_the_level[0]" in of(report, "process")["message"]
    assert {test["outcome"] for test in report["tests"]} == {"passed"}
    assert report["tier"] is None


def test_a_plugin_that_takes_too_long_ends_its_process(checked):
    report = checked("sound", timeout=0.01)
    assert "killed after 0.01 s" in of(report, "process")["message"]
    assert report["tier"] is None


def test_settings_change_the_config_of_a_declared_suite(checked):
    report = checked("sound", "scale=2.5", only="of_its_own")
    [told] = report["tests"]
    assert told["name"] == "TestSound::test_of_its_own"
    assert told["outcome"] == "failed"
    assert "config.scale == 1.0" in told["reason"]


def test_many_are_checked_one_after_the_other_whatever_one_of_them_does(index):
    mine = [e for e in index.entries("advantage") if e.name in ("acme_crash", "acme_sound")]
    reports = {r["plugin"]["name"]: r for r in check_plugins(mine, only="shape_and_dtype")}
    assert set(reports) == {"acme_crash", "acme_sound"}
    assert of(reports["acme_crash"], "process")["outcome"] == "failed"
    assert {test["outcome"] for test in reports["acme_sound"]["tests"]} == {"passed"}


def test_a_wrong_setting_is_told_as_any_config_is(checked):
    suite = of(checked("sound", "scael=2"), "suite")
    assert suite["outcome"] == "failed"
    assert "did you mean" in suite["message"] + (suite["hint"] or "")


def test_the_table_of_all_has_a_line_for_each_and_sums(index, monkeypatch):
    mine = tuple(e for e in index.entries("advantage") if e.name in ("acme_nothing", "acme_sound"))
    chosen = dataclasses.replace(index, all_entries=mine)
    monkeypatch.setattr(commands, "default_index", lambda: chosen)
    done = CliRunner().invoke(main, ["plugins", "check", "--all", "-k", "thinned"])
    assert done.exit_code == 1, done.output
    lines = [line.split() for line in done.output.splitlines()]
    assert ["advantage/acme_nothing", "failed", "-", "-", "-", "-"] in [line[:6] for line in lines]
    assert ["advantage/acme_sound", "none", "-", "-", "1", "-"] in [line[:6] for line in lines]
    assert "has no attribute 'AcmeNothing'" in done.output
    assert "expected: it gives 1 there, on purpose (advantage/acme_sound)" in done.output
    assert "2 plugins, 1 failed; 1 tests in " in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "advantage", "grpo"], "did you mean 'advantage/grpo'?"),
        (["check"], "or give --all"),
        (["check", "--all", "grpo"], "leave out 'grpo'"),
        (["check", "grpo", "--kind", "advantage"], "--kind needs --all"),
        (["check", "--all", "--kind", "advntage"], "plugins of the kind 'advntage'"),
        (["check", "inline"], "belongs to dovetail-core"),
        (["check", "--all", "--kind", "dispatch_mode"], "besides dovetail-core"),
        (["show", "advantage", "grpo"], "did you mean 'advantage/grpo'?"),
    ],
)
def test_what_can_not_be_meant_is_said(arguments, words):
    done = CliRunner().invoke(main, ["plugins", *arguments])
    assert done.exit_code == 2
    assert words in done.output


def test_an_unknown_plugin_and_an_ambiguous_name_are_refused(index):
    unknown = CliRunner().invoke(main, ["plugins", "check", "acme_soud"])
    assert unknown.exit_code == 2
    assert "did you mean 'acme_sound'?" in unknown.output
    several = CliRunner().invoke(main, ["plugins", "check", "grpo"])
    assert several.exit_code == 2
    assert "dovetail plugins check advantage/grpo" in several.output


RESULTS = {
    "checks": [{"outcome": "passed"}],
    "facts": {"typed": {"holds": True}},
    "tests": [{"outcome": "passed"}, {"outcome": "passed"}],
}


@pytest.mark.parametrize(
    ("change", "earned"),
    [
        ({}, "platinum"),
        ({"tests": [{"outcome": "passed"}, {"outcome": "skipped"}]}, "gold"),
        ({"tests": [{"outcome": "passed"}, {"outcome": "expected"}]}, "silver"),
        ({"facts": {"typed": {"holds": False}}}, "bronze"),
        ({"facts": {}}, "bronze"),
        ({"tests": [{"outcome": "passed"}, {"outcome": "failed"}]}, None),
        ({"checks": [{"outcome": "failed"}]}, None),
        ({"tests": []}, None),
        ({"tests": [], "tier": "platinum"}, None),
    ],
)
def test_the_tier_follows_from_the_results(change, earned):
    assert tier({**RESULTS, **change}) == earned


def test_a_wheel_built_without_the_manifest_is_told(tmp_path, monkeypatch):
    package = new_plugin("advantage", "acme_bare", tmp_path)
    pyproject = package / "pyproject.toml"
    text = pyproject.read_text()
    packages = 'packages = ["src/dovetail_acme_bare"]\n'
    pyproject.write_text(text.replace(packages, packages + 'exclude = ["*.json"]\n'))
    url = json.dumps({"url": package.as_uri(), "dir_info": {"editable": True}})
    metadata = SimpleNamespace(read_text=lambda name: url)
    monkeypatch.setattr(shipping, "installed", lambda entry: SimpleNamespace(metadata=metadata))
    entry = PluginEntry(
        kind="advantage",
        name="acme_bare",
        distribution="dovetail-acme-bare",
        version="0.1.0",
        target="dovetail_acme_bare.plugin:AcmeBare",
        state="compatible",
    )
    with pytest.raises(
        PluginError, match=r"lacks the manifest dovetail_acme_bare/dovetail-plugin\.json"
    ):
        shipping.check_wheel(entry)
    pyproject.write_text(text)
    shipping.built_file.cache_clear()  # cached, since in use a source does not change
    shipping.check_wheel(entry)
