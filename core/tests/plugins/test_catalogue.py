"""The catalogue of the project's own plugins against those that are installed here."""

from __future__ import annotations

import pytest

from dovetail.config.schema import fields_of
from dovetail.plugins.catalogue import FIRST_PARTY
from dovetail.plugins.entry import PluginEntry
from dovetail.plugins.index import default_index
from dovetail.plugins.load import config_class

ENTRIES = [entry for kind in FIRST_PARTY for entry in default_index().entries(kind)]
INSTALLED = {entry.distribution for entry in ENTRIES}


@pytest.mark.parametrize("kind", sorted(FIRST_PARTY))
def test_an_error_never_advises_to_install_what_is_not_there(kind: str) -> None:
    provided = {
        name: entry.distribution
        for entry in ENTRIES
        if entry.kind == kind
        for name in (entry.name, *entry.aliases)
    }
    promised = {name: home for name, home in FIRST_PARTY[kind].items() if home in INSTALLED}
    assert promised == {name: provided.get(name) for name in promised}
    assert {home for names in FIRST_PARTY.values() for home in names.values()} <= INSTALLED


def test_every_plugin_of_a_package_in_the_catalogue_is_in_it() -> None:
    homes = {home for names in FIRST_PARTY.values() for home in names.values()}
    lacking = [
        entry.title
        for entry in ENTRIES
        if entry.distribution in homes and entry.name not in FIRST_PARTY[entry.kind]
    ]
    assert not lacking


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.title)
def test_what_a_plugin_says_that_it_lacks_is_no_key_of_its_own(entry: PluginEntry) -> None:
    cls = config_class(entry.kind, {"name": entry.name})
    assert not set(cls.lacks) & set(fields_of(cls))
