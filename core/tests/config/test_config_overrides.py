"""Overrides: what `key=value` means, on the command line and on top of files."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from dovetail.config.keys import format_path, parse_path


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("rollout.n=4", "rollout.n", 4),
        ("actor.optim.lr=1e-6", "actor.optim.lr", 1e-6),
        ("actor.optim.lr=1", "actor.optim.lr", 1.0),
        ("experiment=yes", "experiment", "yes"),
        ("experiment='3'", "experiment", "3"),
        ("experiment=a=b", "experiment", "a=b"),
        ("actor.mini_batch_size=null", "actor.mini_batch_size", None),
        ("actor.mini_batch_size=", "actor.mini_batch_size", None),
        ("trainer.validate_before=false", "trainer.validate_before", False),
        ("rollout.stop=[END, '${x}']", "rollout.stop", ("END", "${x}")),
        ("rollout.stop_token_ids=[1, 2]", "rollout.stop_token_ids", (1, 2)),
        ("data.train_files=one.parquet", "data.train_files", ("one.parquet",)),
        ("rollout.name=vllm", "rollout.name", "vllm"),
        ("rollout=vllm", "rollout.name", "vllm"),
        ("algorithm.kl.in_loss={coef: 0.5}", "algorithm.kl.in_loss.coef", 0.5),
    ],
)
def test_an_override_sets_a_value_of_the_fields_type(build, override, path, value):
    loaded = build({"actor": {"mini_batch_size": 64}}, override)
    found = loaded.config
    for key in path.split("."):
        found = getattr(found, key)
    assert found == value
    assert type(found) is type(value)


def test_a_list_entry_is_changed_by_its_index_and_the_next_free_index_appends(build):
    loaded = build({}, "tracking[1].name=tensorboard", "tracking[2]=jsonl")
    assert [tracker.name for tracker in loaded.config.tracking] == [
        "console",
        "tensorboard",
        "jsonl",
    ]


def test_a_list_index_reaches_into_the_list_of_a_file(build):
    loaded = build({"data": {"train_files": ["a", "b"]}}, "data.train_files[0]=c")
    assert loaded.config.data.train_files == ("c", "b")
    one = build({"data": {"train_files": "a"}}, "data.train_files[1]=b")
    assert one.config.data.train_files == ("a", "b")


def test_an_index_beyond_the_list_says_how_long_it_is(problems):
    assert problems({}, "tracking[3].name=jsonl") == (
        "tracking[3] (override #1 'tracking[3].name=jsonl'): the list has 2 entries; the next free index is [2]",
    )


def test_the_order_of_overrides_of_one_section_does_not_matter_but_the_last_value_wins(build):
    first = build({}, "rollout=vllm", "rollout.tensor_parallel_size=2").config
    second = build({}, "rollout.tensor_parallel_size=2", "rollout=vllm").config
    assert first == second
    assert first.rollout.tensor_parallel_size == 2
    assert build({}, "seed=2", "seed=3").config.seed == 3


def test_a_reward_function_is_chosen_for_a_data_source_with_dots_and_slashes(build):
    loaded = build(
        {}, 'reward.functions["org/set.v1"]=gsm8k', "reward.functions.openai/gsm8k=gsm8k"
    )
    assert {key: f.name for key, f in loaded.config.reward.functions.items()} == {
        "org/set.v1": "gsm8k",
        "openai/gsm8k": "gsm8k",
    }


def test_a_template_that_is_no_yaml_reaches_a_verbatim_field_as_it_is(build):
    for template in ("{{ messages }}", "{% for m in messages %}${m}{% endfor %}", "12", "a: b"):
        config = build({}, f"model.chat_template={template}").config
        assert config.model.chat_template == template


@pytest.mark.parametrize(
    "override",
    [
        "reward.manager={name: wrap, options: {cpus: 2, say: '${x}'}}",
        "reward.manager.options={cpus: 2, say: '${x}'}",
        "reward.manager.options.cpus=2",
    ],
)
def test_values_within_a_verbatim_mapping_keep_their_types(build, override):
    manager = {"reward": {"manager": {"name": "wrap", "options": {"say": "${x}"}}}}
    config = build(manager, override).config
    assert config.reward.manager.options == {"cpus": 2, "say": "${x}"}


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("rollout.n", "the form key=value"),
        ("+rollout.n=4", "write rollout.n=4"),
        ("~rollout.n=4", "null unsets"),
        ("rollout..n=4", "key path"),
        ("=4", "key path"),
        ("[0]=4", "name of a section"),
        ("rollout.stop=[a", "not YAML"),
        ("rollout[0]=a", "plugin's name"),
        ("seed[0]=1", "is not a list"),
        (f"odd{'.x' * 2000}=1", "expected at most 100"),
    ],
)
def test_a_bad_override_is_named_with_its_number(problems, override, complaint):
    (problem,) = problems({}, override)
    assert f"override #1 '{override}'" in problem
    assert complaint in problem


@given(
    st.lists(
        st.one_of(st.text(min_size=1), st.integers(min_value=0, max_value=99)), min_size=1
    ).filter(lambda path: isinstance(path[0], str) and path[0] != "")
)
def test_a_key_path_reads_back_as_it_was_written(path):
    assert parse_path(format_path(tuple(path))) == tuple(path)
