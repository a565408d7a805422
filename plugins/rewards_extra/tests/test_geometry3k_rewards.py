"""`geometry3k`: the weights of format and answer."""

from __future__ import annotations

import pytest

from dovetail.interfaces import PluginContext
from dovetail_rewards_extra.config import Geometry3kConfig
from dovetail_rewards_extra.geometry3k import Geometry3k


@pytest.mark.parametrize(
    ("text", "config", "expected"),
    [
        ("<think>a</think> \\boxed{4}", {}, (1.0, 1, 1)),
        ("<think>a</think> \\boxed{5}", {}, (0.1, 1, 0)),
        ("\\boxed{4}", {}, (0.9, 0, 1)),
        ("<think>\\boxed{4}</think> four", {}, (0.9, 0, 1)),
        ("<think>a \\boxed{4}", {}, (0.9, 0, 1)),
        ("so <think>a</think> \\boxed{5}", {}, (0.0, 0, 0)),
        ("4", {}, (0.0, 0, 0)),
        ("\\boxed{4}", {"require_think": False}, (1.0, 1, 1)),
        ("<think></think>\\boxed{5}", {"format_weight": 0.5}, (0.5, 1, 0)),
    ],
)
def test_geometry3k_weighs_form_and_answer(text, config, expected) -> None:
    function = Geometry3k(Geometry3kConfig(processes=1, **config), PluginContext())
    parts = function.compute_score(None, text, "4")
    assert parts["score"] == pytest.approx(expected[0])
    assert (parts["format"], parts["correct"]) == expected[1:]


@pytest.mark.parametrize("truth", [None, {}, [], "", " ", ["1", None], [[1]]])
def test_a_ground_truth_that_is_no_answer_is_refused(truth) -> None:
    assert repr(truth) in (Geometry3k.check_row(Geometry3kConfig(), truth) or "")
    assert Geometry3k.check_row(Geometry3kConfig(), r"\frac{1}{2}") is None
