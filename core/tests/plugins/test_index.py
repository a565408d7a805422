"""Discovery, states and choice by name, over real installed distributions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.errors import PluginConflictError, PluginIncompatibleError, PluginNotFoundError
from dovetail.plugins.entry import PluginEntry
from dovetail.plugins.index import PluginIndex, default_index
from dovetail.plugins.kinds import KINDS, Kind

ARENA = {
    "name": "arena",
    "interface": "acme_arenas.base:Arena",
    "api": "1.2",
    "section": "dovetail.sections:PluginSection",
}


def entry(name: str, distribution: str | None = None) -> PluginEntry:
    [found] = [
        e
        for e in default_index().entries()
        if e.name == name and distribution in (None, e.distribution)
    ]
    return found


def test_a_good_plugin_is_compatible_and_described_without_being_imported(installed: Path) -> None:
    good = entry("acme_mean")
    assert (good.state, good.reason) == ("compatible", None)
    assert (good.kind, good.distribution, good.version) == ("advantage", "acme-good", "1.2.0")
    assert good.interface == ">=1.0,<2"
    assert good.capabilities == ("deterministic",)
    assert not [name for name in sys.modules if name.startswith("acme_")]


def test_another_interface_version_is_rejected_with_both_versions(installed: Path) -> None:
    future = entry("future")
    assert future.state == "rejected"
    assert ">=2.0,<3" in future.reason
    assert f"has {KINDS['tracker'].api}" in future.reason
    assert future.fix == "pip install --upgrade acme-future dovetail-core"


def test_another_python_is_rejected(installed: Path) -> None:
    snake = entry("snake")
    assert snake.state == "rejected"
    assert "needs Python >=3.99" in snake.reason


def test_two_distributions_with_one_name_are_in_conflict(installed: Path) -> None:
    a, b = entry("twin", "acme-twin-a"), entry("twin", "acme-twin-b")
    assert a.state == b.state == "conflict"
    assert a.reason == "also claimed by acme-twin-b 2.5.0"
    assert "name: twin@acme-twin-a" in a.fix


def test_a_missing_manifest_is_invalid_and_says_what_makes_one(installed: Path) -> None:
    bare = entry("bare")
    assert bare.state == "invalid"
    assert "acme-bare has no dovetail-plugin.json" in bare.reason
    assert "python -m dovetail_sdk manifest" in bare.fix


@pytest.mark.parametrize(
    ("name", "distribution", "reason"),
    [
        ("drifted", "acme-drifted", "gives the target acme_drifted.plugin:Old"),
        ("kindly", "acme-kind", "is of kind 'sampler', but the"),
    ],
)
def test_a_manifest_that_disagrees_with_the_entry_point_is_invalid(
    installed: Path, name: str, distribution: str, reason: str
) -> None:
    [found] = [
        e
        for e in default_index().entries("tracker")
        if (e.name, e.distribution) == (name, distribution)
    ]
    assert found.state == "invalid"
    assert reason in found.reason
    assert "python -m dovetail_sdk manifest" in found.fix


def test_what_only_the_manifest_lists_is_shown_with_the_way_out(installed: Path) -> None:
    [found] = [e for e in default_index().entries("sampler") if e.name == "kindly"]
    assert found.state == "invalid"
    assert "no installed entry point" in found.reason
    assert "install acme-kind again" in found.fix


def test_an_unknown_group_is_reported_with_the_nearest_kind(installed: Path) -> None:
    [typo] = default_index().entries("trackr")
    assert typo.state == "invalid"
    assert "'dovetail.trackr'" in typo.reason
    assert "'dovetail.tracker'" in typo.fix


def test_a_stray_double_of_a_distribution_does_not_conflict(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stray = tmp_path / "acme_good.egg-info"
    stray.mkdir()
    (stray / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: Acme_Good\nVersion: 0.1\n")
    (stray / "entry_points.txt").write_text(
        "[dovetail.advantage]\nacme_mean = acme_good.plugin:Old\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    shadowed = PluginIndex.discover().entries("advantage")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(tmp_path)] + [str(tmp_path)])
    real = PluginIndex.discover().entries("advantage")
    [first] = [e for e in shadowed if e.name == "acme_mean"]
    [last] = [e for e in real if e.name == "acme_mean"]
    assert (first.version, first.state) == ("0.1", "invalid")
    assert (last.version, last.state) == ("1.2.0", "compatible")


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("entry_points.txt", "[dovetail.tracker]\nno equals sign here\n", "can't be read"),
        ("METADATA", "no header at all\n", "no field Name"),
    ],
)
def test_damaged_metadata_is_reported_and_breaks_no_other_plugin(
    installed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    content: str,
    complaint: str,
) -> None:
    damaged = tmp_path / "acme_damaged-1.0.dist-info"
    damaged.mkdir()
    (damaged / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-damaged\nVersion: 1.0\n")
    (damaged / "entry_points.txt").write_text("[dovetail.tracker]\nx = acme_damaged:X\n")
    (damaged / file).write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    index = PluginIndex.discover()
    assert index.find("advantage", "acme_mean").version == "1.2.0"
    [problem] = index.problems
    assert str(tmp_path) in problem
    assert complaint in problem


def test_a_name_or_an_alias_finds_the_plugin(installed: Path) -> None:
    assert default_index().find("advantage", "acme_mean") == default_index().find(
        "advantage", "acme"
    )


def test_an_unknown_name_gets_what_there_is_and_the_nearest(installed: Path) -> None:
    with pytest.raises(PluginNotFoundError) as caught:
        default_index().find("advantage", "acme_main")
    assert "plugin is named 'acme_main'" in caught.value.message
    assert "installed: acme_mean" in caught.value.message
    assert "acme-good" not in caught.value.message
    assert caught.value.hint == "did you mean 'acme_mean'?"


def test_the_nearest_name_ignores_case(installed: Path) -> None:
    with pytest.raises(PluginNotFoundError) as caught:
        default_index().find("advantage", "ACME_MEAN")
    assert caught.value.hint == "did you mean 'acme_mean'?"


@pytest.mark.parametrize("kind", ["advantage", "policy_loss"])
@pytest.mark.parametrize("name", ["paper", "Paper"])
def test_the_name_of_a_preset_in_place_of_a_part_leads_to_the_preset(kind: str, name: str) -> None:
    entry = PluginEntry("preset", "paper", "acme", "1.0", "p:P", "compatible")
    with pytest.raises(PluginNotFoundError) as caught:
        PluginIndex((entry,)).find(kind, name)
    assert caught.value.hint is not None
    assert caught.value.hint.endswith("algorithm.preset=paper")


@pytest.mark.parametrize(
    ("kind", "name", "hint"),
    [
        ("rollout", "vllm", "pip install dovetail-rollout-vllm"),
        ("runtime", "ray", "pip install dovetail-runtime-ray"),
        ("engine", "megatron", "pip install dovetail-train-megatron"),
        ("tracker", "wandb", "pip install 'dovetail-trackers[wandb]'"),
        ("rollout", "vllm@dovetail", "pip install dovetail-rollout-vllm"),
        ("rollout", "vllm@acme-rollouts", "pip install acme-rollouts"),
        ("rollout", "vlm", "did you mean 'vllm'? Install it: pip install dovetail-rollout-vllm"),
    ],
)
def test_a_first_party_plugin_that_is_not_installed_gets_its_install_command(
    kind: str, name: str, hint: str
) -> None:
    with pytest.raises(PluginNotFoundError) as caught:
        PluginIndex(()).find(kind, name)
    assert caught.value.hint == hint


def test_a_plugin_of_another_kind_is_mentioned(installed: Path) -> None:
    with pytest.raises(PluginNotFoundError, match="kind advantage"):
        default_index().find("tracker", "acme_mean")


def test_an_unknown_kind_gets_the_nearest() -> None:
    with pytest.raises(PluginNotFoundError) as caught:
        PluginIndex(()).find("rolout", "hf")
    assert caught.value.hint == "did you mean 'rollout'?"


def test_a_conflict_names_both_with_versions_and_the_line_that_settles_it(installed: Path) -> None:
    with pytest.raises(PluginConflictError) as caught:
        default_index().find("tracker", "twin")
    assert "acme-twin-a 1.0.0 and acme-twin-b 2.5.0" in caught.value.message
    assert "name: twin@acme-twin-a or name: twin@acme-twin-b" in caught.value.hint
    assert default_index().find("tracker", "twin@acme-twin-b").version == "2.5.0"
    assert default_index().find("tracker", "twin@Acme_Twin.B").version == "2.5.0"


def test_a_distribution_that_lacks_the_plugin_is_refused_with_those_that_have_it(
    installed: Path,
) -> None:
    with pytest.raises(PluginNotFoundError) as caught:
        default_index().find("tracker", "twin@acme-twin-c")
    assert "'acme-twin-c' has" in caught.value.message
    assert "acme-twin-a 1.0.0, acme-twin-b 2.5.0" in caught.value.message


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("future", "acme-future 1.0.0 is rejected:"),
        (
            "bare",
            "acme-bare 1.0.0 is invalid: the distribution acme-bare has no dovetail-plugin.json",
        ),
    ],
)
def test_an_unusable_plugin_is_refused_with_its_reason(
    installed: Path, name: str, text: str
) -> None:
    with pytest.raises(PluginIncompatibleError) as caught:
        default_index().find("tracker", name)
    assert f"tracker plugin {name!r} is installed but can't be used" in caught.value.message
    assert text in caught.value.message
    assert caught.value.hint == entry(name).fix


def test_needs_are_judged_apart_from_the_state(installed: Path) -> None:
    needy = entry("needy")
    assert needy.state == "compatible"
    [need] = needy.needs
    assert not need.met
    assert str(need) == "acme-engine>=1.5 or acme-engine-cpu>=1.5"


# -- kinds that packages bring ---------------------------------------------------------------------

Index = Callable[..., PluginIndex]


@pytest.fixture
def index_with(arenas: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Index:
    """The index of a process that also has a distribution with these kinds."""

    def make(*kinds: dict[str, str], **how: str) -> PluginIndex:
        monkeypatch.syspath_prepend(str(arenas(*kinds, **how)))
        return PluginIndex.discover()

    return make


def test_a_package_brings_a_kind_and_plugins_of_it(index_with: Index) -> None:
    before = [*PluginIndex.discover().kinds]
    index = index_with(ARENA)
    assert index.kinds["arena"] == Kind(**ARENA)
    assert before[: len(KINDS)] == [*KINDS]
    assert sorted(index.kinds) == sorted([*before, "arena"])
    assert index.find("arena", "maze").distribution == "acme-arenas"
    assert not [problem for problem in index.problems if "arena" in problem]


def test_a_plugin_for_another_version_of_a_packages_kind_is_rejected(index_with: Index) -> None:
    [maze] = index_with(ARENA, api=">=2.0,<3").entries("arena")
    assert maze.state == "rejected"
    assert "1.2" in str(maze.reason)


@pytest.mark.parametrize(
    ("kinds", "declared", "why"),
    [
        ((), "arena", "the manifest"),
        (({**ARENA, "name": "rollout"},), "rollout", "kind has that"),
        (({"name": "arena"},), "arena", "interface"),
    ],
)
def test_a_kind_that_can_not_be_taken_is_named_and_breaks_nothing_else(
    index_with: Index, kinds: tuple[dict[str, str], ...], declared: str, why: str
) -> None:
    before = PluginIndex.discover().kinds
    index = index_with(*kinds, declared=declared)
    [problem] = [text for text in index.problems if "acme-arenas" in text]
    assert repr(declared) in problem
    assert why in problem
    assert index.kinds.keys() == before.keys()
    assert [entry.state for entry in index.entries("arena")] == ["invalid"]
    assert index.find("rollout", "hf").usable
