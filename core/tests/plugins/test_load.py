"""Loading installed plugins: the class, its Config, an instance, and what an author is told when it fails."""

from __future__ import annotations

import importlib.metadata
import pickle
import sys
from email.message import Message
from pathlib import Path

import numpy as np
import pytest

from dovetail.errors import (
    ConfigError,
    PluginBrokenError,
    PluginConflictError,
    PluginError,
    PluginNeedsError,
)
from dovetail.interfaces import PluginContext, PluginRef
from dovetail.plugins import load_plugin_class, make_plugin
from dovetail.plugins.load import config_class, ref_for
from dovetail.plugins.needs import Need, install_command
from dovetail.sections import PluginSection


def tracker(name: str) -> PluginRef:
    return PluginRef(kind="tracker", name=name)


def test_a_section_becomes_a_reference_a_class_and_an_instance(installed: Path) -> None:
    config = config_class("advantage", {"name": "acme"})
    assert config.__name__ == "MeanConfig"
    section = config(name="acme", shift=2.0)
    ref = ref_for("advantage", section)
    assert (ref.name, ref.distribution) == ("acme_mean", "acme-good")
    assert load_plugin_class(ref).__name__ == "Mean"
    estimator = make_plugin(pickle.loads(pickle.dumps(ref)), PluginContext())
    assert estimator.config.shift == 2.0
    result = estimator.estimate({"scores": np.array([1.0, 3.0])}, None)
    np.testing.assert_allclose(result.advantages, [-3.0, -1.0])


def test_config_class_imports_no_plugin_class(installed: Path) -> None:
    for name in [name for name in sys.modules if name.startswith("acme_good")]:
        del sys.modules[name]
    config_class("advantage", {"name": "acme_mean"})
    assert "acme_good.config" in sys.modules
    assert "acme_good.plugin" not in sys.modules


def test_a_section_that_was_never_narrowed_gives_the_defaults(installed: Path) -> None:
    ref = PluginRef(kind="advantage", name="acme_mean", config=PluginSection(name="acme_mean"))
    assert make_plugin(ref, PluginContext()).config.shift == 0.5


def test_a_config_of_another_plugin_is_refused(installed: Path) -> None:
    from dovetail.sections import RolloutSection

    ref = PluginRef(kind="advantage", name="acme_mean", config=RolloutSection())
    with pytest.raises(PluginError, match=r"config.*class, RolloutSection") as caught:
        make_plugin(ref, PluginContext())
    assert caught.value.hint == "give an instance of acme_good.config.MeanConfig"


def test_a_failure_at_import_names_cause_file_and_line(installed: Path) -> None:
    with pytest.raises(PluginBrokenError) as caught:
        load_plugin_class(tracker("crash"))
    assert "tracker/crash (acme-crash 1.0.0) can't be imported" in caught.value.message
    assert "RuntimeError: the moon" in caught.value.message
    assert "acme_crash/plugin.py:1" in caught.value.message
    assert "author of acme-crash" in caught.value.hint
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_unmet_need_says_what_to_install(installed: Path) -> None:
    with pytest.raises(PluginNeedsError) as caught:
        load_plugin_class(tracker("needy"))
    assert "needs acme-engine>=1.5 or acme-engine-cpu>=1.5 (not installed)" in caught.value.message
    assert (
        caught.value.hint
        == "pip install 'acme-needy[engine]' or pip install 'acme-needy[engine-cpu]'"
    )
    with pytest.raises(PluginNeedsError, match="tracker 'needy' of acme-needy needs acme-engine"):
        make_plugin(tracker("needy"), PluginContext())


def test_pre_releases_and_another_index_stand_in_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = Message()
    written["Project-URL"] = "Package index, https://index.example"
    written["Provides-Extra"] = "engine"
    monkeypatch.setattr(importlib.metadata, "metadata", lambda distribution: written)
    early, final = (
        Need((text,), met=False, found="not installed") for text in ("engine>=2.0rc1", "engine>=1")
    )
    command = "'acme[engine]' --extra-index-url https://index.example"
    assert install_command("acme", [final]) == f"pip install {command}"
    assert install_command("acme", [final, early]) == f"pip install --pre {command}"


def test_a_missing_dependency_that_is_no_declared_need_is_named(installed: Path) -> None:
    with pytest.raises(PluginBrokenError, match="No module named 'acme_dependency'") as caught:
        load_plugin_class(tracker("lacking"))
    assert caught.value.hint == "install the package that provides the module 'acme_dependency'"


def test_missing_methods_are_listed_with_their_signature(installed: Path) -> None:
    with pytest.raises(PluginBrokenError, match="does not implement metrics_logged") as caught:
        load_plugin_class(tracker("partial"))
    assert "dovetail.interfaces.Tracker" in (caught.value.hint)


def test_a_name_that_disagrees_is_refused_with_both(installed: Path) -> None:
    with pytest.raises(PluginBrokenError) as caught:
        load_plugin_class(tracker("misnamed"))
    assert "has name = 'other', but" in caught.value.message


def test_a_target_that_is_no_class_is_refused(installed: Path) -> None:
    with pytest.raises(PluginBrokenError, match=r"is function .* not a class") as caught:
        load_plugin_class(tracker("function"))
    assert "extends dovetail.interfaces.Tracker" in caught.value.hint


def test_a_config_that_does_not_exist_is_named(installed: Path) -> None:
    with pytest.raises(PluginBrokenError) as caught:
        config_class("tracker", {"name": "misconfigured"})
    assert "the config acme_config.config:Missing" in caught.value.message
    assert "No module named 'acme_config.config'" in caught.value.message


def test_loading_settles_a_conflict_by_distribution(installed: Path) -> None:
    with pytest.raises(PluginConflictError):
        load_plugin_class(tracker("twin"))
    assert load_plugin_class(tracker("twin@acme-twin-b")).__module__ == "acme_twin_b.plugin"
    ref = ref_for("tracker", PluginSection(name="twin@acme-twin-a"))
    assert (ref.name, ref.distribution) == ("twin", "acme-twin-a")
    assert load_plugin_class(ref).__module__ == "acme_twin_a.plugin"


def test_a_section_that_selects_nothing_says_what_there_is(installed: Path) -> None:
    for select in (
        lambda: ref_for("advantage", PluginSection()),
        lambda: config_class("advantage", {}),
    ):
        with pytest.raises(ConfigError, match="selects no plugin") as caught:
            select()
        assert "acme_mean" in caught.value.hint
