"""Hydra's overrides: the meaning of each word."""

import pytest

from dovetail.errors import ConfigError
from dovetail_migrate.verl.overrides import read_override, read_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("16_000", 16000),
        ("True", True),
        ("null", None),
        ("", ""),
        ("~/data/a.parquet", "~/data/a.parquet"),
        ("['console','wandb']", ["console", "wandb"]),
        ('["console", "mlflow"]', ["console", "mlflow"]),
        ("[a.parquet,/b/c.parquet]", ["a.parquet", "/b/c.parquet"]),
        ("'[0.9, 0.95]'", "[0.9, 0.95]"),
        ("{a:1,b:{c:[2,x]}}", {"a": 1, "b": {"c": [2, "x"]}}),
        ("${data.max_length}", "${data.max_length}"),
        (r"a\,b", "a,b"),
        ("0.6_1.6,2.5", "0.6_1.6,2.5"),
    ],
)
def test_values_are_read_in_hydras_grammar(text, value):
    assert read_value(text) == value
    assert type(read_value(text)) is type(value)


@pytest.mark.parametrize("text", ["[1,2", "{a:1", "'open", "[1] and more"])
def test_a_value_that_is_not_whole_is_refused_with_the_word(text):
    with pytest.raises(ConfigError, match="key="):
        read_override(f"key={text}")


@pytest.mark.parametrize(("word", "sign"), [("a.b=1", ""), ("+a.b=1", "+"), ("++a.b=1", "++"), ("~a.b", "~"), ("--a.b=1", "")])  # fmt: skip
def test_signs_are_told_from_keys(word, sign):
    override = read_override(word)
    assert (override.sign, override.key) == (sign, "a.b")
