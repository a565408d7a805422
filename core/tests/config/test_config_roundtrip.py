"""A config written down builds the same config again."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from dovetail.config import config_from_mapping
from dovetail.config.plain_yaml import dump, parse
from dovetail.config.serialise import dump_yaml, to_mapping

TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.text("${}\\ .ab:'\"\n#-0159e_~"),
    st.sampled_from(
        [
            "1e-6",
            "yes",
            "null",
            "~",
            "010",
            "${a.b}",
            r"\${",
            "???",
            "=",
            "<<",
            "1:30",
            "a\x85b",
            "\u2028 ",
        ]
    ),
)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), TEXT)
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=8,
)


@given(PLAIN)
def test_yaml_reads_back_what_was_written(value):
    read, _ = parse(dump(value))
    assert read == value
    assert repr(read) == repr(value)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=20
)
@given(
    text=TEXT,
    template=st.one_of(st.none(), TEXT),
    stop=st.lists(TEXT, max_size=2),
    lr=st.floats(min_value=0, allow_infinity=False, width=32),
    args=st.dictionaries(TEXT, PLAIN, max_size=2),
)
def test_any_config_survives_being_written_down(lookup, text, template, stop, lr, args):
    assume("\\u0000" not in json.dumps([text, template, stop, args]))  # is refused
    mapping = {
        "model": {"path": "m", "chat_template": template},
        "project": _literal(text),
        "rollout": {"name": "vllm", "stop": stop, "engine_args": _literal(args)},
        "actor": {"optim": {"lr": lr}},
        "reward": {"function": {"path": "r.py"}, "functions": {"a.b": {"name": "exact"}}},
        "tracking": [],
    }
    loaded = config_from_mapping(mapping, resolver=lookup)
    config = loaded.config
    assert config.project == text
    assert config.model.chat_template == template
    assert config.rollout.stop == tuple(stop)
    assert config.rollout.engine_args == args
    again, _ = parse(dump_yaml(config))
    assert again == to_mapping(config)
    assert config_from_mapping(again, resolver=lookup).config == config
    with_given, _ = parse(dump_yaml(config, given=loaded.given))
    once_more = config_from_mapping(with_given, resolver=lookup)
    assert (once_more.config, once_more.given) == (config, loaded.given)


def _literal(value):
    """Escape what would be interpolated, independently of the code under test."""
    if isinstance(value, str):
        pieces = value.split("${")
        return "${".join(
            piece + "\\" * (len(piece) - len(piece.rstrip("\\")) + 1) if last else piece
            for piece, last in zip(pieces, [*[True] * (len(pieces) - 1), False], strict=True)
        )
    if isinstance(value, dict):
        return {key: _literal(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_literal(child) for child in value]
    return value


def test_defaults_are_written_out_and_the_way_a_plugin_was_selected_is_kept(build):
    mapping = to_mapping(build({"reward": {"function": {"path": "r.py"}}}).config)
    assert mapping["rollout"]["chunk_size"] == 16
    assert mapping["rollout"]["name"] == "hf"
    assert "path" not in mapping["rollout"]
    assert mapping["reward"]["function"] == {"path": "r.py", "attribute": "compute_score"}
    assert mapping["ref"] == {
        "engine": None,
        "path": None,
        "update": None,
        "override_config": None,
        "max_tokens_per_micro_batch": None,
        "offload": False,
    }


def test_configs_compare_by_value_cannot_change_and_pickle(build):
    config = build({"data": {"train_files": "a"}}).config
    assert config == build({"data": {"train_files": ["a"]}}).config
    with pytest.raises(AttributeError):
        config.seed = 3
    assert pickle.loads(pickle.dumps(config.data)) == config.data
