"""The catalogue of the project's own plugins against those that are installed here."""

from __future__ import annotations

import pytest

from dovetail.config.schema import fields_of
from dovetail.plugins.catalogue import COMMANDS, FIRST_PARTY
from dovetail.plugins.entry import PluginEntry
from dovetail.plugins.index import default_index
from dovetail.plugins.load import config_class

ENTRIES = [entry for kind in FIRST_PARTY for entry in default_index().entries(kind)]
INSTALLED = {entry.distribution for entry in ENTRIES}


def _distribution(requirement: str) -> str:
    """`dovetail-trackers` of `dovetail-trackers[wandb]`."""
    return requirement.partition("[")[0]


HOMES = {_distribution(home) for names in FIRST_PARTY.values() for home in names.values()}


@pytest.mark.parametrize("kind", sorted(FIRST_PARTY))
def test_an_error_never_advises_to_install_what_is_not_there(kind: str) -> None:
    provided = {
        name: entry.distribution
        for entry in ENTRIES
        if entry.kind == kind
        for name in (entry.name, *entry.aliases)
    }
    promised = {name: _distribution(home) for name, home in FIRST_PARTY[kind].items()}
    promised = {name: home for name, home in promised.items() if home in INSTALLED}
    assert promised == {name: provided.get(name) for name in promised}
    assert HOMES <= INSTALLED


def test_every_plugin_of_a_package_in_the_catalogue_is_in_it() -> None:
    lacking = [
        entry.title
        for entry in ENTRIES
        if entry.distribution in HOMES and entry.name not in FIRST_PARTY[entry.kind]
    ]
    assert not lacking


def test_the_commands_of_the_projects_own_packages_are_in_it() -> None:
    installed = {
        f"{above}{entry_point.name}": distribution.name
        for group, above in (("dovetail.cli", ""), ("dovetail.cli.plugins", "plugins "))
        for entry_point, distribution in default_index().extensions(group)
        if distribution.name in {*HOMES, *COMMANDS.values()} and "." not in entry_point.name
    }
    here = {name: home for name, home in COMMANDS.items() if home in installed.values()}
    assert installed == here


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.title)
def test_what_a_plugin_says_that_it_lacks_is_no_key_of_its_own(entry: PluginEntry) -> None:
    cls = config_class(entry.kind, {"name": entry.name})
    assert not set(cls.unsupported_keys) & set(fields_of(cls))


def test_what_serving_engines_share_is_told_of_by_the_engine_that_is_none() -> None:
    classes = {
        entry.name: config_class(entry.kind, {"name": entry.name})
        for entry in ENTRIES
        if entry.kind == "rollout"
    }
    if not {"hf", "vllm", "sglang"} <= classes.keys():
        pytest.skip("needs the rollout plugins hf, vllm and sglang")
    hf = classes["hf"]
    shared = fields_of(classes["vllm"]).keys() & fields_of(classes["sglang"]).keys()
    assert shared <= fields_of(hf).keys() | hf.unsupported_keys.keys()
