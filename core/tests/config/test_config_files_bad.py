"""Files that are not a config: each gets a clear error, beside those in the messages of tests/end_to_end/bad_inputs."""

from __future__ import annotations

import pytest

from dovetail.config import load_config
from dovetail.errors import ConfigError


def _error(path, **options) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(path, **options)
    return caught.value


def test_a_directory_points_to_the_config_inside(tmp_path):
    assert "is a directory" in str(_error(tmp_path))
    (tmp_path / "config.yaml").touch()
    assert str(tmp_path / "config.yaml") in str(_error(tmp_path))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"# only a comment\n", "is empty"),
        (b"just text\n", "single value 'just text'"),
        (b"model: {path: x\nseed: 1\n", "line 2 is not YAML"),
        (b"model: {1: x}\n", "the key 1 below"),
        (b"a: 1\n---\nb: 2\n", "single document"),
        (b"seed: \x00\n", "special characters"),
        (b"PAR1\x15\x00\x15", "not YAML"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_config_says_what_it_is(tmp_path, content, complaint):
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    error = _error(path)
    assert complaint in str(error)
    assert str(path) in str(error)
    assert error.hint
    assert error.exit_code == 2


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        ("a: {b: 1\nc: 2\n", "opens on line 1"),
        ("x: 1\na: [1,\nb: 3\n", "opens on line 2"),
        ("a: {b: 1}}\n", "`}`"),
        ("a: [1]]\n", "`]`"),
        ("a: {x} y\n", "quotes"),
        ("a: {{ x }}\n", "quote"),
        ("a: 1\n  b: 2\n", "indent"),
        ("a:\n    b: 1\n  c: 2\n", "indent"),
        ("a:\n  - 1\n - 2\n", "indent"),
        ("a:\n  b: 1\n  - 2\n", "indent"),
        ("  a: 1\nb: 2\n", "left margin"),
        ("a: 1\n---\nb: 2\n", "`---`"),
        ("a: b: c\n", "quotes"),
        ("a: @x\n", "quotes"),
        ("a: *x\n", "quote"),
        ("a: 1\nb\nc: 2\n", "line 2"),
        ("a: 1\nb: 'x\nc: 1\n", "opens on line 2"),
        ("a: 'it's'\n", "single quotes"),
        (r'a: "C:\data"', "single quotes"),
        ("a: | x\n", "line after"),
        ("a: \x07\n", "remove the character"),
    ],
)
def test_bad_yaml_gets_the_fix_of_its_fault(tmp_path, content, hint):
    path = tmp_path / "c.yaml"
    path.write_text(content)
    assert hint in str(_error(path).hint)


def test_an_unreadable_file_says_why(tmp_path, monkeypatch):
    path = tmp_path / "c.yaml"
    path.touch()

    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "read_text", refuse)
    assert "can't be read" in str(_error(path))


def test_problems_of_a_file_name_its_lines(tmp_path, lookup):
    path = tmp_path / "c.yaml"
    path.write_text("model:\n  path: x\nrollout:\n  n: '3'\n  tempurature: 1.0\n")
    error = _error(path, resolver=lookup)
    assert error.message.startswith(f"{path}: 2 problems in the config\n")
    assert f'rollout.n = "3" ({path}:4): expected int, got text' in error.message
    assert f"rollout.tempurature = 1.0 ({path}:5): unknown key; did you mean rollout.temperature?" in error.message  # fmt: skip


@pytest.mark.parametrize("content", ["[" * 2000, "a: " + "{a: " * 2000, "- " * 2000])
def test_a_text_that_is_nested_very_deep_is_refused_at_once(tmp_path, content):
    path = tmp_path / "c.yaml"
    path.write_text(content + ("]" * 2000 if content[0] == "[" else ""))
    assert "config can hold" in _error(path).message


@pytest.mark.parametrize(("first", "more"), [("[x, x]", "[{0}, {0}]"), ("{{k: x}}", "{{<<: [{0}, {0}], l{1}: {0}}}")])  # fmt: skip
def test_aliases_that_stand_for_billions_of_values_are_refused_at_once(tmp_path, first, more):
    lines = [f"a0: &a0 {first.format()}"]
    lines += [f"a{n}: &a{n} {more.format(f'*a{n - 1}', n)}" for n in range(1, 40)]
    path = tmp_path / "c.yaml"
    path.write_text("\n".join(lines))
    error = _error(path)
    assert "more than 100,000 values" in error.message


def test_a_mapping_with_merged_keys_may_be_given_twice(tmp_path, lookup):
    path = tmp_path / "c.yaml"
    path.write_text(
        "model: {path: x}\nactor: {optim: &a {lr: 1e-5, <<: {lr: 1e-4, eps: 1e-7}}}\ncritic: {optim: *a}\n"
    )
    config = load_config(path, resolver=lookup).config
    assert config.critic.optim == config.actor.optim
    assert (config.actor.optim.lr, config.actor.optim.eps) == (1e-5, 1e-7)
