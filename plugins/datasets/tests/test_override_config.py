"""Overrides of a model's config: the resulting config, and refused overrides."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from dovetail.errors import ConfigError
from dovetail.sections import ModelSection, RunConfig
from dovetail_datasets import overrides_for_engine, read_config
from dovetail_sdk.testing import tiny_model_and_tokenizer
from dovetail_sdk.testing.tiny_vision import tiny_vision_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp(request.param)
    return tiny_model_and_tokenizer(directory, vocab_size=300, architecture=request.param)


def edited(model: Path, directory: Path, values: Mapping[str, Any]) -> Path:
    """Return a copy of a model with edited values in config.json."""
    shutil.copytree(model, directory)
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return directory


@pytest.mark.parametrize(
    ("overrides", "in_file"),
    [
        ({"max_position_embeddings": 32768}, {"max_position_embeddings": 32768}),
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ({"rope_scaling": YARN}, {"rope_parameters": {"rope_theta": 10000.0, **YARN}}),
        (
            {"rms_norm_eps": 0.1, "eos_token_id": [1, 2]},
            {"rms_norm_eps": 0.1, "eos_token_id": [1, 2]},
        ),
    ],
    ids=["positions", "theta", "yarn", "two"],
)
def test_a_config_is_the_one_whose_file_was_edited(
    model: Path, tmp_path: Path, overrides: Mapping[str, Any], in_file: Mapping[str, Any]
) -> None:
    by_hand = AutoConfig.from_pretrained(edited(model, tmp_path / "edited", in_file)).to_dict()
    section = ModelSection(path=str(model), override_config=overrides)
    found = read_config(section).to_dict()
    assert found | {"_name_or_path": None} == by_hand | {"_name_or_path": None}
    # An engine sets these overrides on the config that it reads itself.
    theirs = AutoConfig.from_pretrained(model)
    for key, value in overrides_for_engine(section).items():
        setattr(theirs, key, value)
    assert theirs.to_dict() == found


def test_a_key_of_a_part_is_overridden_there_alone(tmp_path: Path) -> None:
    directory = tiny_vision_model(tmp_path / "vision")
    section = ModelSection(
        path=str(directory), override_config={"text_config": {"max_position_embeddings": 77}}
    )
    assert overrides_for_engine(section) == section.override_config
    assert read_config(section).get_text_config().max_position_embeddings == 77


@pytest.mark.parametrize(
    ("overrides", "named", "hint"),
    [
        ({"max_positions_embeddings": 9}, "max_positions_embeddings", "max_position_embeddings"),
        ({"attn_implementation": "eager"}, "attn_implementation", "model.attn_implementation"),
        ({"model_type": "gpt2"}, "model_type='gpt2'", "leave this key out"),
    ],
)
def test_what_the_architecture_does_not_have_is_refused_by_name(
    model: Path, overrides: Mapping[str, Any], named: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as error:
        read_config(ModelSection(path=str(model), override_config=overrides))
    assert named in error.value.message
    assert hint in str(error.value.hint)


def test_the_key_of_a_part_is_named_with_the_part(tmp_path: Path) -> None:
    directory = tiny_vision_model(tmp_path / "vision")
    with pytest.raises(ConfigError) as error:
        read_config(
            ModelSection(path=str(directory), override_config={"max_position_embeddings": 9})
        )
    assert "text_config.max_position_embeddings" in str(error.value.hint)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, {"rope_theta": 7.0}),
        ({"path": "a"}, {"rope_theta": 7.0}),
        ({"path": "b"}, {}),
        ({"override_config": {}}, {}),
        ({"path": "b", "override_config": {"rope_theta": 8.0}}, {"rope_theta": 8.0}),
    ],
)
@pytest.mark.parametrize("role", ["critic", "ref", "teacher"])
def test_a_role_has_the_overrides_of_the_files_that_it_reads(
    role: str, section: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    from dovetail.config import config_from_mapping

    of_role = {"roles": {role: section}} if role == "teacher" else {role: section}
    model = {"path": "a", "override_config": {"rope_theta": 7.0}}
    config: RunConfig = config_from_mapping({"model": model, **of_role}).config
    assert config.model_section(role).override_config == expected
    assert config.model_section("actor").override_config == {"rope_theta": 7.0}
