"""Files and trackers that are named twice, and missing models of roles."""

from __future__ import annotations

from typing import Any

import pytest

GAE = {"algorithm": {"advantage": "gae"}}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            {"train_files": ["a.jsonl", "b.jsonl", "./a.jsonl"]},
            "data.train_files names a.jsonl more",
        ),
        ({"train_files": ["t"], "val_files": ["v", "v"]}, "data.val_files names"),
        ({"train_files": ["t", "u"], "val_files": ["x/../t"]}, "both name x/../t"),
    ],
)
def test_a_file_that_is_read_twice_is_named(judge: Any, data: dict[str, Any], words: str) -> None:
    (finding,) = judge("file_twice", {"data": data})
    assert finding.severity == "warning"
    assert words in finding.message


def test_files_that_are_read_once_are_not_spoken_of(judge: Any) -> None:
    assert judge("file_twice", {"data": {"train_files": ["a", "b"], "val_files": ["c"]}}) == []


def test_the_same_tracker_twice_is_an_error(judge: Any) -> None:
    (finding,) = judge("tracker_twice", {"tracking": ["console", "jsonl", "console"]})
    assert finding.severity == "error"
    assert finding.message.startswith("tracking[2] repeats the tracker console")
    different = ["console", {"name": "console", "live": False}]
    assert judge("tracker_twice", {"tracking": different}) == []


@pytest.mark.parametrize(("runtime", "severity"), [("inline", "error"), ("ray", "warning")])
def test_a_critic_that_is_not_there_is_named_by_its_key(
    judge: Any, runtime: str, severity: str
) -> None:
    sections = {**GAE, "critic": {"path": "/nowhere"}, "runtime": runtime}
    (finding,) = judge("model_missing", sections)
    assert finding.severity == severity
    assert finding.message.startswith("critic.path = /nowhere holds no model")
    assert judge("model_missing", GAE) == []
