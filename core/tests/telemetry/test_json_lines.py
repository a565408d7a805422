"""Lines of JSON survive killed writers, and hold only what JSON can hold."""

from __future__ import annotations

import json
import logging
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dovetail.interfaces import PluginContext
from dovetail.sections import PluginSection
from dovetail.telemetry.jsonl import JsonlTracker, append_rows, plain, read_rows

_ROWS = st.lists(
    st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=8)), max_size=6
)


@given(rows=_ROWS, data=st.data())
def test_a_kill_at_any_byte_loses_at_most_the_line_being_written(tmp_path_factory, rows, data):
    path = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    append_rows(path, rows)
    whole = path.read_bytes()
    ends = [0] + [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    survivors = rows[: sum(end <= cut for end in ends) - 1]

    append_rows(path, [{"after": 1}])
    assert read_rows(path) == [*survivors, {"after": 1}]


def test_text_with_any_end_of_line_stays_one_line_for_every_reader(tmp_path):
    row = {"response": "".join(map(chr, [*range(0x3000), 0xDFFF, 0xD800])), "half\udc80": 1}
    append_rows(tmp_path / "rows.jsonl", [row])
    (line,) = (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == row


def test_a_torn_last_line_is_passed_over(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rewa')
    assert read_rows(path) == [{"step": 1}]


def test_a_broken_line_in_the_middle_is_reported(tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1}\n???\n{"step": 3}\n')
    with caplog.at_level(logging.WARNING, "dovetail.telemetry"):
        assert [row["step"] for row in read_rows(path)] == [1, 3]
    assert "line 2 is not JSON" in caplog.text


def test_a_missing_file_has_no_rows(tmp_path):
    assert read_rows(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_what_is_not_finite_becomes_null(bad):
    assert plain({"a": [bad, 1.5]}) == {"a": [None, 1.5]}


def test_numpy_values_become_plain_ones():
    row = {"a": np.float32(0.5), "b": np.arange(3), "c": {"d": (1, np.int64(2))}}
    assert plain(row) == {"a": 0.5, "b": [0, 1, 2], "c": {"d": [1, 2]}}


class Silent:
    def __str__(self):
        raise RuntimeError("no text")


def test_what_json_can_not_hold_is_written_as_far_as_it_goes(tmp_path):
    looped: list[object] = [1]
    looped.append(looped)
    append_rows(tmp_path / "rows.jsonl", [{"big": 2**60_000, "looped": looped, "x": Silent()}])
    [row] = read_rows(tmp_path / "rows.jsonl")
    assert int(row["big"], 16) == 2**60_000
    assert row["looped"][1][1][0] == 1
    assert "RuntimeError" in row["x"]


def test_the_tracker_writes_each_step_at_once(tmp_path):
    tracker = JsonlTracker(PluginSection(name="jsonl"), PluginContext(run_directory=tmp_path))
    tracker.metrics_logged(1, {"reward/mean": 0.5, "actor/grad_norm": math.inf})
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert row["step"] == 1
    assert row["reward/mean"] == 0.5
    assert row["actor/grad_norm"] is None
    assert row["time"] > 1.7e9
    tracker.metrics_logged(2, {"reward/mean": 0.75})
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]
