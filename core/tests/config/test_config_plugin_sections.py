"""Plugin sections: narrowed to the plugin's class, switched by one key, given by name or by file."""

from __future__ import annotations

import attrs
import pytest

from dovetail.config import config_from_mapping
from dovetail.sections import PluginSection, RuntimeSection


def test_a_section_is_of_the_class_of_the_plugin_that_it_names(build):
    config = build({"rollout": {"name": "vllm", "gpu_memory_utilization": 0.9}}).config
    assert type(config.rollout).__name__ == "VllmConfig"
    assert config.rollout.gpu_memory_utilization == 0.9
    assert config.rollout.n == 8


def test_absent_sections_select_their_default_plugins_down_to_nested_ones(build):
    config = build().config
    assert config.rollout.name == "hf"
    assert config.rollout.weight_transport is None
    assert config.runtime.default_transport() == "in_process"
    assert config.critic.loss_aggregation.name == "token_mean"
    assert config.actor.engine.name == "fsdp2"
    assert config.ref.engine is None
    assert config.reward.function is None
    assert config.algorithm.kl.in_loss is None
    assert [tracker.name for tracker in config.tracking] == ["console", "jsonl"]
    assert build({"algorithm": {"kl": {"in_loss": {}}}}).config.algorithm.kl.in_loss.controller.name == "fixed"  # fmt: skip


def test_a_bare_string_stands_for_a_name_wherever_a_plugin_is_selected(build):
    config = build(
        {
            "rollout": "vllm",
            "reward": {"manager": {"name": "wrap", "inner": "wrap"}, "functions": {"a": "exact"}},
            "tracking": ["console", {"name": "tensorboard"}],
        }
    ).config
    assert config.rollout.name == "vllm"
    assert config.reward.manager.inner.name == "wrap"
    assert config.reward.manager.inner.inner.name == "naive"
    assert config.reward.functions == {"a": PluginSection(name="exact")}
    assert [tracker.name for tracker in config.tracking] == ["console", "tensorboard"]


def test_switching_the_plugin_drops_what_earlier_layers_wrote_for_the_other_one(build):
    loaded = build(
        {"rollout": {"name": "hf", "chunk_size": 4, "n": 2}},
        "rollout.name=vllm",
    )
    assert loaded.config.rollout.n == 2
    assert loaded.warnings == (
        "rollout.chunk_size = 4 (mapping): dropped: rollout 'vllm', chosen by override #1 'rollout.name=vllm', has no such key",
    )


def test_all_that_is_dropped_of_a_section_is_one_warning(load):
    loaded = load(
        "model: {path: x}\nrollout: {name: vllm, engine_args: {a: 1}, tensor_parallel_size: 2}\n",
        "rollout: {gpu_memory_utilization: 0.4}\n",
        overrides=("rollout.name=hf",),
    )
    (warning,) = loaded.warnings
    assert warning.startswith('rollout.engine_args = {"a": 1}, rollout.tensor_parallel_size = 2, ')
    assert "rollout.gpu_memory_utilization = 0.4 (" in warning
    assert "a.yaml:2, " in warning
    assert warning.endswith(
        "b.yaml:1): dropped: rollout 'hf', chosen by override #1 'rollout.name=hf', has no such keys"
    )


def test_a_key_beside_the_name_that_chose_another_plugin_is_an_error(problems, load):
    (problem,) = problems({"rollout": {"name": "vllm", "chunk_size": 4}})
    assert problem.startswith("rollout.chunk_size = 4 (mapping): unknown key; rollout 'vllm' has ")
    (problem,) = problems({}, "rollout.chunk_size=4", "rollout=vllm")
    assert "override #1" in problem
    (problem,) = problems({"rollout": "vllm"}, "rollout.chunk_size=4")
    assert "unknown key" in problem


def test_naming_the_same_plugin_again_drops_nothing(load):
    loaded = load(
        "model: {path: x}\nrollout: {name: hf, chunk_size: 4}", "rollout: {name: hf, n: 3}"
    )
    assert (loaded.config.rollout.chunk_size, loaded.config.rollout.n) == (4, 3)
    assert loaded.warnings == ()


def test_a_key_written_for_the_default_plugin_is_dropped_when_a_later_layer_names_another(load):
    loaded = load("model: {path: x}\nrollout: {chunk_size: 4}", "rollout: vllm")
    (warning,) = loaded.warnings
    assert "a.yaml:2" in warning
    assert "b.yaml:1" in warning


def test_null_takes_an_optional_plugin_away_and_what_was_said_before_with_it(build):
    mapping = {"reward": {"function": {"path": "r.py"}}}
    assert build(mapping).config.reward.function == PluginSection(
        path="r.py", attribute="compute_score"
    )
    assert build(mapping, "reward.function=null").config.reward.function is None


def test_a_file_stands_in_place_of_a_name(build):
    config = build({"algorithm": {"advantage": {"path": "my.py", "attribute": "Mine"}}}).config
    assert config.algorithm.advantage == PluginSection(path="my.py", attribute="Mine")
    later = build({"algorithm": {"advantage": {"path": "my.py", "attribute": "Mine"}}}, "algorithm.advantage=rloo")  # fmt: skip
    assert later.config.algorithm.advantage == PluginSection(name="rloo")
    earlier = build({"algorithm": {"advantage": "grpo"}}, "algorithm.advantage={path: a.py, attribute: A}")  # fmt: skip
    assert earlier.config.algorithm.advantage == PluginSection(path="a.py", attribute="A")


@pytest.mark.parametrize(
    ("advantage", "complaint"),
    [
        ({"name": "grpo", "path": "a.py"}, "gives both name = 'grpo' (mapping) and path = 'a.py'"),
        ({"path": "a.py"}, "the class in a.py that"),
        ({"name": "grpo", "attribute": "A"}, "needs `path`"),
        ({"name": 3}, "expected text; put the value in quotes"),
        (None, "kind advantage"),
        (["grpo"], "plugin's name"),
        ("grop", "did you mean 'grpo'?"),
    ],
)
def test_a_selection_that_selects_nothing_or_two_things_is_refused(problems, advantage, complaint):
    (problem,) = problems({"algorithm": {"advantage": advantage}})
    assert problem.startswith("algorithm.advantage")
    assert complaint in problem


def test_an_optional_plugin_section_without_a_name_is_refused(problems):
    (problem,) = problems({"reward": {"function": {"attribute": "f"}}})
    assert "reward.function.attribute" in problem
    (problem,) = problems({"ref": {"engine": {}}})
    assert "ref.engine: selects no plugin" in problem


def test_a_plugin_whose_class_is_no_section_of_its_kind_is_a_problem_not_a_crash(lookup):
    @attrs.frozen(kw_only=True)
    class Stranger:
        n: int = 1

    def find(kind, section):
        return Stranger if kind == "rollout" else lookup(kind, section)

    with pytest.raises(ValueError, match="extend RolloutSection"):
        config_from_mapping({"model": {"path": "x"}}, resolver=find)


def test_an_annotation_that_a_config_cannot_hold_is_a_problem_not_a_crash(lookup):
    @attrs.frozen(kw_only=True)
    class Odd(RuntimeSection):
        when: complex = 1j
        """Not a plain value."""
        fit: int = 1
        """Plain."""

    def find(kind, section):
        return Odd if kind == "runtime" else lookup(kind, section)

    mapping = {"model": {"path": "x"}, "runtime": {"name": "inline", "when": 3}}
    with pytest.raises(ValueError, match=r"runtime.when = 3 .*complex.*can't hold"):
        config_from_mapping(mapping, resolver=find)
