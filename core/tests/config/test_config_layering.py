"""Layers: which value wins, where it came from, and what `${…}` means."""

from __future__ import annotations

import json

import pytest

from dovetail.config.serialise import dump_yaml


def test_later_files_win_and_overrides_win_over_files(load):
    loaded = load(
        "model: {path: x}\nrollout:\n  n: 2\n  temperature: 0.5\n",
        "rollout:\n  n: 3\ndata: {train_files: [c]}\n",
        overrides=("rollout.temperature=0.7",),
    )
    assert (loaded.config.rollout.n, loaded.config.rollout.temperature) == (3, 0.7)


def test_provenance_names_the_file_with_its_line_the_override_or_the_default(load, tmp_path):
    loaded = load(
        "model:\n  path: x\nrollout: vllm\n",
        "rollout:\n  n: 3\ndata:\n  train_files:\n    - a\n    - b\n",
        overrides=("seed=4", "tracking[1].name=tensorboard"),
    )
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    expected = {
        "model.path": f"{a}:2",
        "rollout.name": f"{a}:3",
        "rollout.n": f"{b}:2",
        "rollout.temperature": "default",
        "data.train_files[1]": f"{b}:6",
        "seed": "override #1 'seed=4'",
        "tracking[0].name": "default",
        "tracking[1].name": "override #2 'tracking[1].name=tensorboard'",
        "rollout.engine_args": "default",
    }
    assert {key: loaded.provenance[key] for key in expected} == expected


def test_a_list_replaces_a_list_and_free_mappings_merge(load):
    loaded = load(
        "model: {path: x}\nrollout: {name: vllm, stop: [a, b], engine_args: {a: {x: 1}, l: [1]}}",
        "rollout: {stop: [c], engine_args: {a: {y: 2}}}",
        overrides=("rollout.engine_args.a.z=3", "rollout.engine_args.l[1]=2"),
    )
    assert loaded.config.rollout.stop == ("c",)
    assert loaded.config.rollout.engine_args == {"a": {"x": 1, "y": 2, "z": 3}, "l": [1, 2]}


def test_null_resets_what_earlier_layers_said_of_an_optional_section(load):
    base = "model: {path: x}\nalgorithm: {kl: {in_loss: {coef: 0.5}}}"
    assert load(base, "algorithm: {kl: {in_loss: null}}").config.algorithm.kl.in_loss is None
    again = load(
        base,
        "algorithm: {kl: {in_loss: null}}",
        overrides=("algorithm.kl.in_loss.estimator=k1",),
    )
    assert again.config.algorithm.kl.in_loss.coef == 0.001


@pytest.mark.parametrize("later", [[1], {"a": 1}, "text", None])
@pytest.mark.parametrize("earlier", [2, "text", [2], {"a": {"b": 2}}, None])
def test_a_value_of_another_kind_replaces_that_of_a_lower_layer(load, earlier, later):
    loaded = load(
        f"model: {{path: x}}\nrollout: {{name: vllm, engine_args: {{key: {json.dumps(earlier)}}}}}",
        f"rollout: {{engine_args: {{key: {json.dumps(later)}}}}}",
    )
    assert loaded.config.rollout.engine_args == {"key": later}


def test_anchors_and_merge_keys_of_yaml_work(load):
    loaded = load(
        "model: {path: x}\n"
        "actor:\n  optim: &adam {lr: 1e-5, eps: 1e-7}\n"
        "rollout: {name: vllm, engine_args: {<<: *adam, lr: 2}}\n"
    )
    assert loaded.config.rollout.engine_args == {"lr": 2, "eps": 1e-7}


def test_values_interpolate_given_and_default_values_and_the_environment(load, monkeypatch):
    monkeypatch.setenv("DOVETAIL_TEST_ENGINE", "vllm")
    config = load(
        "model: {path: base}\n"
        "experiment: ${model.path}-n${rollout.n}-t${data.train_batch_size}\n"
        "rollout:\n  name: ${oc.env:DOVETAIL_TEST_ENGINE}\n  n: 4\n  validation: {n: '${..n}'}\n"
        "data:\n  train_files: [a, b]\n  val_files: ${.train_files}\n"
        "ref: {engine: '${actor.engine}'}\n"
    ).config
    assert config.experiment == "base-n4-t128"
    assert config.rollout.name == "vllm"
    assert config.rollout.validation.n == 4
    assert config.data.val_files == ("a", "b")
    assert config.ref.engine.name == "fsdp2"


def test_the_layer_that_wins_is_what_an_interpolation_sees(load):
    loaded = load(
        "model: {path: a}\nexperiment: ${model.path}", "model: {path: b}", overrides=("seed=7", "project=s${seed}")
    )  # fmt: skip
    assert (loaded.config.experiment, loaded.config.project) == ("b", "s7")


@pytest.mark.parametrize("text", ["${{ x }}", "${model.path}", "a ${", r"\${x} \\"])
def test_templates_and_patterns_are_never_interpolated(build, text):
    config = build(
        {
            "model": {"path": "m", "chat_template": text},
            "rollout": {"stop": [text]},
            "experiment": "${model.path}-${rollout.stop}",
            "project": "${model.chat_template}" if "model.path" not in text else "p",
        }
    ).config
    assert config.model.chat_template == text
    assert config.rollout.stop == (text,)


def test_an_escaped_interpolation_stays_as_it_is(build):
    assert build({"experiment": r"a\${b}"}).config.experiment == "a${b}"


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("${nothing.there}", "'nothing.there' not found"),
        ("${oc.env:DOVETAIL_NO_SUCH_VARIABLE}", "'DOVETAIL_NO_SUCH_VARIABLE' not found"),
        ("${experiment}", "ecursive"),
        ("${", "can't be resolved"),
    ],
)
def test_an_interpolation_that_fails_is_a_problem_among_the_others(problems, value, complaint):
    found = problems({"experiment": value, "seed": "1"})
    assert len(found) == 2
    (problem,) = (p for p in found if p.startswith("experiment = "))
    assert complaint in problem


def test_an_interpolated_value_is_checked_like_any_other(problems):
    (problem,) = problems({"seed": "${model.path}"})
    assert problem.startswith('seed = "tiny" (mapping): expected int, got text')


def test_a_section_decoded_from_an_environment_variable_is_written_unresolved(load, monkeypatch):
    monkeypatch.setenv("DOVETAIL_TEST_SECTION", "{n: 3}")
    given = "${oc.decode:${oc.env:DOVETAIL_TEST_SECTION}}"
    text = f"model: {{path: x}}\nrollout:\n  validation: '{given}'\n"
    loaded = load(text)
    assert loaded.config.rollout.validation.n == 3
    assert f"validation: {given}" in dump_yaml(loaded.config, loaded.from_environment)
    loaded = load(text, overrides=("rollout.validation.temperature=0.25",))
    assert given not in dump_yaml(loaded.config, loaded.from_environment)
