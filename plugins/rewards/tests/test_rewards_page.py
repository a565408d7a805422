"""docs/rewards.md is complete: its table has every alias, its configs load, and it lists every instruction."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from dovetail.config import config_from_mapping
from dovetail.plugins import load_plugin_class
from dovetail.plugins.files import load_file_attribute
from dovetail.plugins.load import ref_for

PAGE = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")
NAMES = (
    "gsm8k", "math", "dapo_math", "geometry3k", "multiple_choice", "exact_match", "fuzzy_match", "json_schema",
    "regex_format", "instruction_following", "length_penalty", "repetition_penalty",
)  # fmt: skip


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def functions() -> dict[str, object]:
    """The functions of the page's config, by data source."""
    mapping = {
        "model": {"path": "m"},
        "data": {"train_files": ["d"]},
        **yaml.safe_load(blocks("yaml")[0]),
    }
    return config_from_mapping(mapping).config.reward.functions


def test_there_is_a_config_for_each_function(functions) -> None:
    assert sorted(section.name for section in functions.values()) == sorted(NAMES)
    for section in functions.values():
        cls = load_plugin_class(ref_for("reward_function", section))
        assert type(section) is cls.Config


@pytest.mark.parametrize("name", NAMES)
def test_the_table_names_every_source(name, functions) -> None:
    section = next(section for section in functions.values() if section.name == name)
    (line,) = re.findall(rf"^\| `{name}` \|.*$", PAGE, re.MULTILINE)
    for alias in load_plugin_class(ref_for("reward_function", section)).aliases:
        assert f"`{alias}`" in line


def test_the_configs_of_the_models_are_whole() -> None:
    names = set()
    for block in blocks("yaml")[1:]:
        mapping = {"model": {"path": "m"}, **yaml.safe_load(block)}
        names.add(config_from_mapping(mapping).config.reward.manager.name)
    assert names == {"reward_model", "judge", "remote"}


def test_every_link_of_the_page_leads_to_a_heading() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    docs = Path(__file__).parents[3] / "docs"
    others = {file: (docs / file).read_text("utf-8") for file in ("preferences.md", "report.md")}
    texts = {"": PAGE, "../plugins/rewards/README.md": readme, **others}
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", PAGE)
    assert links
    for file, anchor in links:
        headings = re.findall(r"^#+ (.*)$", texts[file], re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


def test_the_function_that_the_page_begins_with_runs(tmp_path: Path) -> None:
    file = tmp_path / "my_reward.py"
    file.write_text(blocks("python")[0])
    score = load_file_attribute(str(file), "compute_score")
    assert score("so it is 4", 4) == {"score": 1.0, "acc": 1.0}
    assert score("so it is 5", 4) == {"score": -0.1, "acc": 0.0}
