"""Every episode that the report shows has a page of its own: turns, calls, observations, and what each token was."""

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


def pages(run: RunDirectory, *rows: dict[str, Any]) -> list[str]:
    """The report of a run of one step with these samples: the report's own part, and one for each episode."""
    run.write_samples(1, rows)
    return write_report(run.path).read_text().split('<main class="')[1:]


def visible(page: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())


def test_a_sample_links_to_the_page_of_its_episode(run: RunDirectory) -> None:
    report, first, second = pages(run, row(), row(prompt="3 + 3?", sample_id="other"))
    links = re.findall(r'href="#(episode[^"]*)">2 turns, 1 call, 9 tokens<', report)
    assert [re.search(r'id="([^"]*)"', page)[1] for page in (first, second)] == links  # type: ignore[index]
    assert f'href="#{links[1]}">next' in first
    assert f'href="#{links[0]}">previous' in second


def test_a_page_shows_what_happened_turn_by_turn(run: RunDirectory) -> None:
    text = visible(pages(run, row())[1])
    for expected in (
        "Ended by its limit on turns",
        "Tokens produced 6",
        "Tokens shown 3",
        "tool seconds/add 0.25 s",
        "4 tokens · stop · mean log-probability -1.077 · reward 0.25",
        "→ add(a=2, b=&#34;&lt;b&gt;&#34;)",
        "shown, not trained on tool add 5",
        "3 tokens as the policy saw them &lt;tool&gt;5&lt;/tool&gt;",
        "after the last turn: the policy did not see it user go on",
    ):
        assert expected in text


def test_each_token_that_the_policy_produced_has_its_log_probability(run: RunDirectory) -> None:
    page = pages(run, row())[1]
    drawn = re.findall(r'<span class="p(\d)" title="log-probability ([-.0-9]+), p [^"]*">([^<]*)<', page)  # fmt: skip
    known = [(log, text) for log, text in zip(LOG_PROBS, TEXTS, strict=True) if log is not None]
    assert [float(log) for _, log, _ in drawn] == [log for log, _ in known]
    assert [rank for rank, _, _ in drawn] == ["0", "1", "2", "3", "4", "0"]
    assert drawn[-1][2] == " is 5"


@pytest.mark.parametrize("tokens", [None, {"text": TEXTS, "mask": MASK}])
def test_a_page_without_log_probabilities_has_the_text(
    run: RunDirectory, tokens: dict[str, Any] | None
) -> None:
    page = pages(run, row(tokens=tokens))[1]
    assert "&lt;call&gt;add&lt;/call&gt;" in page
    assert "log-probability" not in page
    assert "Probability of a token" not in page


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"score": None, "failure": {"kind": "tool", "message": "tool 'add' hung"}}, "failed"),
        ({"filtered": "no_answer"}, "dropped by filter no_answer"),
        ({"masked": "overlong"}, "masked by filter overlong"),
    ],
)
def test_an_episode_that_is_not_trained_on_says_so(
    run: RunDirectory, changes: dict[str, Any], says: str
) -> None:
    text = visible(pages(run, row(**changes))[1])
    assert "Nothing of this episode is trained on" in text
    assert says in text
    assert "produced, trained on" not in text


def test_an_episode_without_a_turn_has_a_page(run: RunDirectory) -> None:
    failed = row(
        score=None,
        failure={"kind": "environment", "message": "the game is broken"},
        trajectory=Trajectory(turns=()).as_json(),
        tokens={"text": [], "mask": []},
    )
    assert "the game is broken" in visible(pages(run, failed)[1])


def test_figures_of_episodes_are_drawn_where_they_were_ever_other_than_zero(run: RunDirectory) -> None:  # fmt: skip
    figures = {"episode/turns/mean": 2.0, "episode/tool_seconds/add": 0.5, "episode/end/done": 0.75, "episode/end/turns": 0.0}  # fmt: skip
    append_rows(run.metrics, [{"step": step, **figures} for step in (1, 2)])
    report = visible(pages(run, row())[0])
    assert "tool seconds/add 0.50 s → 0.50 s" in report
    assert "end/done 75.0% → 75.0%" in report
    assert "end/turns" not in report


def test_a_run_without_episodes_has_neither(finished: RunDirectory) -> None:
    page = write_report(finished.path).read_text()
    assert page.count("<main") == 1
    assert "<h2>Episodes" not in page


def test_a_page_of_several_sequences_says_where_each_begins(run: RunDirectory) -> None:
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
    report, page = pages(
        run, row(trajectory=Trajectory(turns=turns, seconds=1.5).as_json(), tokens=tokens)
    )
    assert "2 turns, 0 calls, 2 sequences, 6 tokens" in report
    text = visible(page)
    before, after = text.split("Sequence 2")
    assert "2 tokens · stop · mean log-probability -3.000" in after
    assert "It is 5" in after
    assert "4 tokens · stop" in before
    assert "&lt;|im_start|&gt;user: in short" in after
