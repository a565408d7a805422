"""Runs that can't learn are said to be so: six made sick on purpose, and one that is well."""

from __future__ import annotations

import json
from html import unescape

import pytest

from dovetail.run.run import train

STEPS = 8
LETTERS = """
def compute_score(solution_str):
    return sum(c.isalpha() for c in solution_str) / 50
"""
ZERO = """
def compute_score(solution_str):
    return 0.0
"""
FAILING = """
import itertools
calls = itertools.count(1)
def compute_score(solution_str):
    if next(calls) % 5 == 0:
        raise ConnectionError("the judge is away")
    return sum(c.isalpha() for c in solution_str) / 50
"""
ENDS = f"rollout.stop_token_ids={list(range(200, 300))}"
"""A third of the vocabulary: random weights end a response so within the limit, as a trained model does."""


@pytest.mark.parametrize(
    ("reward", "overrides", "expected"),
    [
        pytest.param(LETTERS, [], set(), id="well"),
        pytest.param(ZERO, [], {"no_signal"}, id="reward-0"),
        pytest.param(
            LETTERS,
            ["data.max_response_length=3", "rollout.stop_token_ids=[]"],
            {"cut"},
            id="too-few-tokens",
            marks=pytest.mark.nightly,
        ),
        pytest.param(FAILING, [], {"failures"}, id="failing-reward"),
        pytest.param(
            LETTERS,
            ["actor.optim.lr=1.0", "algorithm.kl.in_loss.coef=0.001"],
            {"kl"},
            id="learning-rate",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            LETTERS,
            ["rollout.temperature=1.0e-5"],
            {"no_signal", "alike", "entropy_collapsed"},
            id="temperature",
        ),
        pytest.param(
            LETTERS,
            ["rollout.temperature=0.1", "algorithm.entropy.coef=1"],
            {"entropy_exploded"},
            id="entropy-bonus",
            marks=pytest.mark.nightly,
        ),
    ],
)
@pytest.mark.usefixtures("report")
def test_what_keeps_a_run_from_learning_is_said(config, capfd, reward, overrides, expected):
    (config.parent / "my_reward.py").write_text(reward)
    short = [f"trainer.total_steps={STEPS}", "trainer.total_epochs=3", "trainer.save_every=0"]
    train(config, [ENDS, "data.val_files=[]", *short, *overrides])
    run = config.parent / "runs" / "tests" / "run"
    lines = (run / "events.jsonl").read_text().splitlines()
    found = [event for event in map(json.loads, lines) if "warning" in event]
    # A policy that has moved too far may collapse as well.
    assert {event["warning"] for event in found} >= expected
    assert bool(found) == bool(expected)
    printed, page = capfd.readouterr().err, unescape((run / "report.html").read_text())
    for event in found:
        assert f"{event['event']}  step={event['step']}" in printed
        assert event["hint"] in printed
        assert event["event"] in page
        assert event["hint"] in page
    assert ("What may keep this run from learning" in page) == bool(expected)
