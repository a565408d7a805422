"""`dovetail check` and `dovetail config`, and what they leave unimported."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from dovetail.cli.main import main
from dovetail.config.plain_yaml import parse

pytestmark = pytest.mark.usefixtures("fake_plugins")


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: {path: x}\nrollout:\n  n: 4\n")
    return str(path)


def dovetail(*arguments: str):
    return CliRunner().invoke(main, list(arguments))


def test_check_says_ok(config_file):
    result = dovetail("check", config_file, "--static", "rollout=vllm")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("OK: ")


def test_check_prints_what_was_dropped(tmp_path):
    path = tmp_path / "hf.yaml"
    path.write_text("model: {path: x}\nrollout: {chunk_size: 2}\n")
    result = dovetail("check", str(path), "--static", "rollout=vllm")
    assert result.exit_code == 0
    assert f"warning: rollout.chunk_size = 2 ({path}:2): dropped" in result.stderr


def test_show_prints_yaml_that_is_the_resolved_config(config_file):
    result = dovetail("config", "show", config_file, "rollout.temperature=0.5")
    assert result.exit_code == 0, result.output
    shown, _ = parse(result.output)
    assert shown["rollout"]["n"] == 4
    assert shown["rollout"]["temperature"] == 0.5
    assert json.loads(dovetail("config", "show", "--json", config_file, "rollout.temperature=0.5").output) == shown  # fmt: skip


def test_explain_a_key_says_all_there_is_to_know(config_file):
    result = dovetail("config", "explain", config_file, "rollout.n")
    assert result.exit_code == 0, result.output
    rows = dict(line.split(maxsplit=1) for line in result.output.splitlines())
    assert rows == {
        "key": "rollout.n",
        "value": "4",
        "from": f"{config_file}:3",
        "type": "int",
        "allowed": ">= 1, <= 1048576",
        "default": "8",
        "meaning": "Number of responses to each prompt.",
    }


def test_explain_an_override_a_choice_a_required_key_and_a_list_entry(config_file):
    def explained(key, *overrides):
        result = dovetail("config", "explain", "--json", config_file, key, *overrides)
        assert result.exit_code == 0, result.output
        return json.loads(result.output)

    assert explained("seed", "seed=3")["origin"] == "override #1 'seed=3'"
    assert explained("model.dtype")["type"] == 'one of "float32", "bfloat16"'
    assert explained("model.path")["required"] is True
    assert explained("rollout.name", "rollout=vllm")["default"] == "hf"
    assert explained("tracking")["default"] == ["console", "jsonl"]
    entry = explained("tracking[1].name")
    assert (entry["value"], entry["origin"]) == ("jsonl", "default")
    assert "a tracker plugin" in explained("tracking[1]")["type"]
    assert explained("data.train_files", "data.train_files=[a,b]")["value"] == ["a", "b"]
    assert explained('reward.functions["a.b"].name', 'reward.functions["a.b"]=exact')["value"] == "exact"  # fmt: skip


def test_explain_a_section_lists_its_keys_and_without_a_key_all_of_them(config_file):
    section = dovetail("config", "explain", config_file, "actor.optim").output
    assert "AdamW" in section or "Optimizer" in section
    assert "actor.optim.lr" in section
    assert "rollout.n" not in section
    everything = dovetail("config", "explain", config_file).output
    assert everything.splitlines()[0].split() == ["KEY", "VALUE", "FROM"]
    assert "actor.optim.lr" in everything
    assert "rollout.n" in everything


@pytest.mark.parametrize(
    ("key", "hint"),
    [("rollout.m", "rollout.n"), ("lr", "actor.optim.lr"), ("tracking[7]", "tracking[")],
)
def test_explain_an_unknown_key_names_the_nearest(config_file, key, hint):
    result = dovetail("config", "explain", config_file, key)
    assert result.exit_code == 2
    assert f"the config has no key {key!r}" in result.stderr
    assert hint in result.stderr


@pytest.mark.parametrize("command", [("show",), ("show", "--json"), ("explain",)])
def test_controls_in_a_config_are_shown_and_not_carried_out(config_file, command):
    value = "a\x1b[2J\x9b1m\u202eb"
    result = dovetail(
        "config", command[0], config_file, f"project={json.dumps(value)}", *command[1:]
    )
    assert result.exit_code == 0, result.output
    assert not {"\x1b", "\x9b", "\u202e"} & set(result.output)
    if command == ("show",):
        assert parse(result.stdout)[0]["project"] == value


def test_a_direction_of_writing_in_yaml_reads_back_the_same(config_file):
    result = dovetail("config", "show", config_file, f"project={json.dumps('a' + chr(0x202E))}")
    assert r"\u202e" in result.stdout
    assert parse(result.stdout)[0]["project"] == "a\u202e"


def test_keys_are_explained_in_a_config_without_a_model(tmp_path):
    path = tmp_path / "no_model.yaml"
    path.write_text("rollout: {n: 4}\n")
    result = dovetail("config", "explain", str(path), "rollout.n", "seed", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)["explanations"]
    assert [(each["key"], each["value"]) for each in told] == [("rollout.n", 4), ("seed", 1)]
    assert (
        dovetail("config", "explain", str(path), "model.path", "model.dtype").stdout.count("key ")
        == 2
    )
    assert "not given" in dovetail("config", "explain", str(path), "model.path").stdout
    refused = dovetail("config", "show", str(path))
    assert "model.path: required," in refused.stderr
