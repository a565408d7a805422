"""The report shows every episode turn by turn, with calls, observations, and the kind of each token."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dovetail.interfaces import EpisodeEnd, FinishReason, Trajectory, Turn
from dovetail.telemetry import RunDirectory
from dovetail.telemetry.jsonl import append_rows
from dovetail_report import write_report

TEXTS = ["<call>", "add", "</call>", "<|im_end|>", "<tool>", "5", "</tool>", "It", " is 5"]
MASK = [1, 1, 1, 1, 0, 0, 0, 1, 1]
LOG_PROBS = [-0.01, -0.3, -1.0, -3.0, None, None, None, -6.0, 0.0]
CALL = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "<b>"}}}  # fmt: skip


def row(**changes: Any) -> dict[str, Any]:
    turns = (
        Turn(
            start=0,
            stop=4,
            text="<call>add</call>",
            finish_reason=FinishReason.STOP,
            calls=(CALL,),
            observed=({"role": "tool", "name": "add", "content": "5"},),
            reward=0.25,
        ),
        Turn(
            start=7,
            stop=9,
            text="It is 5",
            finish_reason=FinishReason.LENGTH,
            observed=({"role": "user", "content": [{"type": "text", "text": "go on"}]},),
        ),
    )
    trajectory = Trajectory(
        turns=turns, end=EpisodeEnd.TURNS, seconds=1.5, counts={"tool_seconds/add": 0.25}
    )
    whole = {
        "sample_id": "train.e0.p1.a0.s0",
        "prompt": "2 + 3?",
        "response": "It is 5",
        "score": 1.0,
        "trajectory": trajectory.as_json(),
        "tokens": {"text": TEXTS, "mask": MASK, "log_probs": LOG_PROBS},
    }
    return {name: value for name, value in (whole | changes).items() if value is not None}


@pytest.fixture
def sample_of(run: RunDirectory, samples_of: Any) -> Any:
    """A function that returns a sample's entry in the report."""

    def read(written: dict[str, Any]) -> Any:
        run.write_samples(1, [written])
        (sample,) = samples_of(run)
        return sample

    return read


def test_an_episode_is_told_turn_by_turn(sample_of: Any) -> None:
    episode = sample_of(row())["episode"]
    assert episode["summary"] == "2 turns, 1 call, 9 tokens"
    assert dict(episode["figures"]) == {
        "Ended by": "its limit on turns",
        "Turns": "2",
        "Calls": "1",
        "Seconds": "1.50 s",
        "Tokens produced": "6",
        "Tokens shown": "3",
        "tool seconds/add": "0.25 s",
    }
    first, second = episode["turns"]
    assert first["facts"] == ["4 tokens", "stop", "mean log-probability -1.077", "reward 0.25"]
    assert first["calls"] == ['add(a=2, b="<b>")']
    assert (first["tokens"], second["tokens"]) == ([0, 4, 7], [7, 9, 9])
    assert first["observed"] == [{"role": "tool add", "content": "5"}]
    assert (first["shown"], first["shown_count"]) == ("<tool>5</tool>", "3 tokens")
    assert (first["seen"], second["seen"]) == (True, False)
    assert second["observed"] == [{"role": "user", "content": "go on"}]


def test_a_browser_shows_turns_calls_and_the_colour_of_tokens(run: RunDirectory, look: Any) -> None:
    run.write_samples(1, [row()])
    text = look(
        run,
        """
        await pause(() => browser.querySelector(".call"));
        const tokens = [...browser.querySelectorAll(".token")];
        return browser.querySelector(".detail").textContent + tokens.map((t) => `[${t.title}]`).join("") + tokens.filter((t) => t.style.background).length;
        """,
    )
    for expected in (
        "Turn 1",
        '→ add(a=2, b="<b>")',
        "shown, not trained on",
        "<tool>5</tool>",
        "after the last turn: the policy did not see it",
        "[log_probs -0.01][log_probs -0.3][log_probs -1][log_probs -3]",
    ):
        assert expected in text
    assert text.endswith("6")


@pytest.mark.parametrize("tokens", [None, {"text": TEXTS, "mask": MASK}])
def test_an_episode_without_log_probabilities_has_the_text(
    sample_of: Any, tokens: dict[str, Any] | None
) -> None:
    sample = sample_of(row(tokens=tokens))
    assert sample["episode"]["turns"][0]["text"] == "<call>add</call>"
    assert "log_probs" not in (sample["tokens"] or {})


@pytest.mark.parametrize(
    "trajectory", [3, {}, {"turns": 3}, {"turns": [{}], "end": "x", "seconds": 1, "counts": {}}]
)
def test_a_damaged_episode_is_shown_as_a_response(sample_of: Any, trajectory: Any) -> None:
    sample = sample_of(row(trajectory=trajectory, components=[1], failure=3))
    assert (sample["episode"], sample["response"]) == (None, "It is 5")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"score": None, "failure": {"kind": "tool", "message": "tool 'add' hung"}}, "failed"),
        ({"filtered": "no_answer"}, "dropped by filter no_answer"),
        ({"masked": "overlong"}, "filter overlong"),
    ],
)
def test_an_episode_that_is_not_trained_on_says_so(
    sample_of: Any, changes: dict[str, Any], says: str
) -> None:
    assert says in sample_of(row(**changes))["episode"]["untrained"]


def test_an_episode_without_a_turn_has_its_failure(sample_of: Any) -> None:
    failed = row(
        score=None,
        failure={"kind": "environment", "message": "the game is broken"},
        trajectory=Trajectory(turns=()).as_json(),
        tokens={"text": [], "mask": []},
    )
    sample = sample_of(failed)
    assert (sample["failure"], sample["episode"]["turns"]) == (
        "environment: the game is broken",
        [],
    )


def test_figures_of_episodes_are_drawn_where_they_were_ever_other_than_zero(run: RunDirectory) -> None:  # fmt: skip
    figures = {"episode/turns/mean": 2.0, "episode/tool_seconds/add": 0.5, "episode/end/done": 0.75, "episode/end/turns": 0.0}  # fmt: skip
    append_rows(run.metrics, [{"step": step, **figures} for step in (1, 2)])
    report = " ".join(re.sub(r"<[^>]*>", " ", write_report(run.path).read_text()).split())
    assert "tool seconds/add 0.50 s → 0.50 s" in report
    assert "end/done 75.0% → 75.0%" in report
    assert "end/turns" not in report


def test_a_run_without_episodes_has_no_such_part(finished: RunDirectory) -> None:
    assert "<h2>Episodes" not in write_report(finished.path).read_text()


def test_an_episode_of_several_sequences_says_where_each_begins(sample_of: Any) -> None:
    def turn(start: int, stop: int, text: str, sequence: int) -> Turn:
        reason = FinishReason.STOP
        return Turn(start=start, stop=stop, text=text, finish_reason=reason, sequence=sequence)

    turns = (turn(0, 4, "<call>add</call>", 0), turn(0, 2, "It is 5", 1))
    tokens = {
        "text": TEXTS[:4] + TEXTS[7:],
        "mask": [1] * 6,
        "log_probs": LOG_PROBS[:4] + LOG_PROBS[7:],
        "sequences": [
            {"length": 4, "prompt": ""},
            {"length": 2, "prompt": "<|im_start|>user: in short"},
        ],
    }
    episode = sample_of(
        row(trajectory=Trajectory(turns=turns, seconds=1.5).as_json(), tokens=tokens)
    )["episode"]
    assert episode["summary"] == "2 turns, 0 calls, 2 sequences, 6 tokens"
    before, after = episode["turns"]
    assert (before["sequence"], after["sequence"]) == (None, 2)
    assert after["facts"] == ["2 tokens", "stop", "mean log-probability -3.000"]
    assert after["tokens"] == [4, 6, 6]
    assert after["prompt"] == "<|im_start|>user: in short"
