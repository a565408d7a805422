"""A run's directory lies below `output_dir`: project and experiment are names of folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.config import config_from_mapping
from dovetail.errors import ConfigError
from dovetail.run.run import train
from dovetail.sections import RunConfig
from dovetail.telemetry import RunDirectory


def config(**names: str) -> RunConfig:
    sections = {"model": {"path": "m"}, "data": {"train_files": ["d.jsonl"]}, **names}
    return config_from_mapping(sections, []).config


def test_names_of_one_folder_are_taken_as_they_are():
    for name in ("grpo", "lr=1e-6, β 0.95", "..x", "漢字", "x" * 255):
        found = RunDirectory.path_for(config(project=name, experiment=name, output_dir="out"))
        assert found == Path("out", name, name)


@pytest.mark.parametrize("key", ["project", "experiment"])
@pytest.mark.parametrize(
    "name",
    ["../../../x", "/etc", "a/b", ".", "..", "", "a\nb", "a\x1b[2J", "\u202ea", "ä" * 128],
)
def test_what_is_no_name_of_one_folder_is_refused_and_says_what_a_name_is(key, name):
    with pytest.raises(ConfigError, match="of one folder: 1 to 255 bytes") as caught:
        RunDirectory.path_for(config(**{key: name}))
    assert f"{key} is {name!r}" in caught.value.message


def test_an_output_dir_with_a_name_that_is_too_long_is_refused():
    assert RunDirectory.path_for(config(output_dir="a/" + "x" * 255)).parts[1] == "x" * 255
    with pytest.raises(ConfigError, match=r"output_dir .* of 256 bytes"):
        RunDirectory.path_for(config(output_dir="a/" + "ä" * 128))


def test_a_run_whose_name_leads_elsewhere_makes_no_directory(tmp_path):
    file = tmp_path / "config.yaml"
    output = tmp_path / "deep" / "runs"
    file.write_text(f"model: {{path: m}}\ndata: {{train_files: [d.jsonl]}}\noutput_dir: {output}\n")
    with pytest.raises(ConfigError, match=r"experiment is '\.\./\.\./\.\./x'"):
        train(file, ["experiment=../../../x"])
    assert list(tmp_path.iterdir()) == [file]
