"""The configs on docs pages: each loads, and has the effect that its page states."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dovetail.config import config_from_mapping
from dovetail.config.plain_yaml import parse
from dovetail.plugins.index import default_index
from dovetail_console.plugin_page import IN_A_CONFIG, doc_and_example, page_of, places_of

ROOT = Path(__file__).resolve().parents[2]
USABLE = [e for e in default_index().entries() if e.usable and e.manifest]
SELECTED = [e for e in USABLE if places_of(e.kind)]

PLACEHOLDER = re.compile(r"^\s*(?:- )?(\w+): <[^<>\d]*>$", re.MULTILINE)
"""A required setting that nothing gives a value: `model: <str>`. A token such as `<extra_0>` has a digit, and a type has none."""


@pytest.mark.parametrize("entry", SELECTED, ids=[f"{e.kind}/{e.name}" for e in SELECTED])
def test_the_config_to_copy_is_a_valid_one(entry):
    page = page_of(entry.manifest)
    absent = PLACEHOLDER.findall(page.example)
    assert not absent, f"give {absent} a value below `{IN_A_CONFIG}` in the plugin's docstring"
    config, _ = parse(page.example)
    config_from_mapping({"model": {"path": "tiny"}, **config})


def shown(kind, name):
    (entry,) = [e for e in SELECTED if (e.kind, e.name) == (kind, name)]
    return parse(page_of(entry.manifest).example)[0]


@pytest.mark.parametrize("loss", ["gspo", "gmpo", "sapo"])
def test_a_losss_config_has_the_aggregation_of_its_paper(loss):
    assert shown("policy_loss", loss)["algorithm"]["loss_aggregation"] == "seq_mean_token_mean"
    assert shown("policy_loss", "ppo_clip")["algorithm"].keys() == {"policy_loss"}


def test_an_estimators_config_has_the_aggregation_of_its_paper():
    aggregation = shown("advantage", "dr_grpo")["algorithm"]["loss_aggregation"]
    assert aggregation["name"] == "seq_mean_token_sum_norm"
    assert aggregation["length"] == "${data.max_response_length}"


def test_the_config_of_a_filter_that_drops_refills():
    assert shown("sample_filter", "equal_rewards")["algorithm"]["max_generation_rounds"] == 10
    assert "max_generation_rounds" not in shown("sample_filter", "overlong")["algorithm"]
    algorithm = shown("sample_filter", "score_range")["algorithm"]
    assert algorithm["sample_filters"] == [{"name": "score_range", "lower": 0.2, "upper": 0.8, "unit": "group"}]  # fmt: skip
    assert algorithm["max_generation_rounds"] == 10


def test_the_config_of_a_correction_has_the_loss_that_it_is_for_and_no_key_without_effect():
    names = [e.name for e in SELECTED if e.kind == "rollout_correction"]
    for name in names:
        algorithm = shown("rollout_correction", name)["algorithm"]
        loss = "reinforce" if name.startswith("bypass_pg") else None
        assert algorithm.get("policy_loss") == loss, name
        section = algorithm["rollout_correction"]
        section = section if isinstance(section, dict) else {"name": section}
        assert section["name"] == name
        assert "mode" not in section
        assert None not in section.values()
        assert ("weight_upper" in section) == ("weights" in section), name
    assert shown("rollout_correction", "disabled")["algorithm"]["rollout_correction"] == "disabled"


def test_gdpos_config_has_a_reward_with_the_components_that_it_names():
    config = shown("advantage", "gdpo")
    scorers = config["reward"]["manager"]["scorers"]
    assert set(config["algorithm"]["advantage"]["components"]) == set(scorers)


def test_a_docstrings_config_is_no_part_of_the_text():
    (entry,) = [e for e in SELECTED if e.name == "gdpo"]
    assert "In a config:" in entry.manifest.doc
    page = page_of(entry.manifest)
    assert "In a config:" not in page.doc
    assert "scorers:" not in page.doc


@pytest.mark.parametrize("below", ["    a: [", "    just words", "not indented"])
def test_what_is_no_config_below_the_words_is_refused(below):
    with pytest.raises(ValueError, match="In a config:"):
        doc_and_example(f"y = x\n\nIn a config:\n\n{below}")


def test_the_text_after_a_docstrings_config_stays():
    doc, config = doc_and_example("A.\n\nIn a config:\n\n    seed: 1\n\n    project: p\n\nB.")
    assert (doc, config) == ("A.\n\nB.", {"seed": 1, "project": "p"})


PAGE = ROOT / "docs" / "algorithms.md"


@pytest.mark.skipif(not PAGE.is_file(), reason="needs the checkout")
def test_the_configs_on_the_page_of_algorithms_are_valid():
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        config, _ = parse(block)
        config_from_mapping({"model": {"path": "tiny"}, **config})
