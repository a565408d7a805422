"""Every field of every section says what it is."""

from __future__ import annotations

import attrs
import pytest

from dovetail.config import builtin
from dovetail.config.docs import field_docs
from dovetail.config.schema import bounds, fields_of, is_section
from dovetail.sections import run as sections

SECTIONS = sorted(
    {
        value
        for module in (sections, builtin)
        for value in vars(module).values()
        if is_section(value)
    },
    key=lambda cls: cls.__qualname__,
)


@pytest.mark.parametrize("cls", SECTIONS, ids=lambda cls: cls.__name__)
def test_every_field_has_a_docstring_and_every_section_too(cls):
    assert set(field_docs(cls)) == set(attrs.fields_dict(cls))
    assert cls.__doc__


@pytest.mark.parametrize("cls", SECTIONS, ids=lambda cls: cls.__name__)
def test_every_section_is_frozen_and_keyword_only_with_types_that_resolve(cls):
    assert fields_of(cls)
    assert all(attribute.kw_only for attribute in attrs.fields(cls))
    with pytest.raises(TypeError):
        cls("positional")


def test_a_fields_docstring_is_inherited_and_may_be_replaced():
    @attrs.frozen(kw_only=True)
    class Narrow(sections.RolloutSection):
        n: int = 4
        """Another meaning."""
        top_k: int = 3
        depth: int = 1

    docs = field_docs(Narrow)
    assert docs["n"] == "Another meaning."
    assert docs["top_k"] == field_docs(sections.RolloutSection)["top_k"]
    assert "depth" not in docs


def test_bounds_are_read_from_the_validators():
    data, rollout = fields_of(sections.DataSection), fields_of(sections.RolloutSection)
    assert bounds(data["train_batch_size"].attribute) == ">= 1, <= 1048576"
    assert bounds(data["val_batch_size"].attribute) == ">= 1, <= 1048576"
    assert bounds(rollout["top_p"].attribute) == "> 0, <= 1"
    assert bounds(rollout["ignore_eos"].attribute) == ""
