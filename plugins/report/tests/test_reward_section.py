"""The report's section about the reward: components with their distribution, and signs of reward hacking."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.telemetry.jsonl import append_rows
from dovetail_report import write_report
from dovetail_report.reward_section import component_cards, components_left_out, sign_cards
from dovetail_report.summary import History


def history(**series: list[float]) -> History:
    """Metrics by name (`__` for a slash), one value a step."""
    length = max(map(len, series.values()))
    return History(
        [
            {"step": step + 1} | {k.replace("__", "/"): v[step] for k, v in series.items()}
            for step in range(length)
        ]
    )


def test_each_component_has_a_card_with_its_band() -> None:
    found = history(
        reward__components__form=[0.1, 0.5, 0.9],
        reward__component_p10__form=[0.0, 0.2, 0.8],
        reward__component_p90__form=[0.3, 0.7, 1.0],
        reward__components__answer=[1.0, 1.0, 1.0],
        reward__mean=[1.0, 1.0, 1.0],
    )
    form, answer = component_cards(found)
    assert (form["title"], form["first"], form["latest"]) == ("form", "0.100", "0.900")
    assert answer["title"] == "answer"
    assert form["chart"]["lines"][0]["high"] == [0.3, 0.7, 1.0]
    assert "high" not in answer["chart"]["lines"][0]
    assert components_left_out(found) == 0


def test_many_components_do_not_fill_the_page() -> None:
    found = history(**{f"reward__components__c{i}": [0.0] for i in range(20)})
    assert len(component_cards(found)) == 12
    assert components_left_out(found) == 8


@pytest.mark.parametrize(
    ("name", "values", "note"),
    [
        ("length_correlation", [0.0, 0.1, 0.7, 0.8], "longer answers to the same prompt"),
        ("length_correlation", [0.0, -0.1, -0.7, -0.8], "shorter answers to the same prompt"),
        ("length_correlation", [0.9, 0.1, 0.0, 0.3], ""),
        ("repeated_text", [0.1, 0.1, 0.3, 0.5], "repeat themselves more and more"),
        ("repeated_text", [0.5, 0.5, 0.5, 0.5], ""),
        ("identical_responses", [0.1, 0.2, 0.5, 0.6], "most answers of a group are the same"),
        ("identical_responses", [0.0, 0.0, 0.0, 0.4], ""),
    ],
)
def test_a_sign_says_what_is_worrying(name: str, values: list[float], note: str) -> None:
    [card] = sign_cards(history(**{f"reward__{name}": values}))
    assert card["meaning"]
    assert (note in card["note"]) if note else not card["note"]


def test_a_run_without_them_has_no_such_part(finished: Any) -> None:
    page = write_report(finished.path).read_text()
    assert "Components of the reward" not in page
    assert "Signs of a gamed reward" not in page


def test_the_page_escapes_a_components_name(run: Any) -> None:
    append_rows(
        run.metrics,
        [
            {
                "step": 1,
                "reward/mean": 1.0,
                "reward/components/<b>x</b>": 0.5,
                "reward/repeated_text": 0.1,
            }
        ],
    )
    page = write_report(run.path).read_text()
    assert "<b>x</b>" not in page
    assert "&lt;b&gt;x&lt;/b&gt;" in page
    assert "gamed reward" in page
