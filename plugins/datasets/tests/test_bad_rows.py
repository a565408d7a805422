"""Bad rows: up to `data.max_bad_rows` are left out, counted and named, in examples and prompts, streamed or not."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_rows import loader, turns

from dovetail.errors import ConfigError, DataError
from dovetail.interfaces import BadRow
from dovetail.run.data import load_data
from dovetail.telemetry import RunDirectory

ROWS, BAD = 3000, (7, 1500, 1501, 2999)


def conversation(question: Any, answer: Any) -> dict[str, Any]:
    return {"messages": turns(question, answer)}


@pytest.fixture
def load(run_config: Any) -> Any:
    """Loads data as a run with this trainer."""

    def make(path: str, trainer: str = "supervised", **data: Any) -> Any:
        return load_data(run_config(trainer, train_files=path, **data))

    return make


@pytest.fixture
def conversations(write: Any) -> str:
    """A file with some bad lines, each with a different fault."""
    lines: list[Any] = [conversation(f"q{i}", "4") for i in range(ROWS)]
    bad = [
        conversation("q", ""),
        "{not json",
        {"messages": "text"},
        {"messages": [{"role": "user", "content": "\ud800"}]},
    ]
    for row, line in zip(BAD, bad, strict=True):
        lines[row] = line
    return write("x.jsonl", lines)


def names(path: str) -> list[str]:
    return [f"{path}, line {row + 1}" for row in BAD]


def test_so_many_bad_rows_are_left_out_and_named(load, conversations) -> None:
    for _ in range(2):  # the second time they are read from the cache
        found = load(conversations, max_bad_rows=4).train
        assert [row.row for row in found.bad] == list(BAD)
        assert [row.where for row in found.bad] == names(conversations)
        assert all(row.message.startswith(row.where) and row.hint for row in found.bad)
        assert [p.index for p in found.prompts] == [i for i in range(ROWS) if i not in BAD]
    assert found.left_out == ()


@pytest.mark.parametrize("most", [0, 1, 3])
@pytest.mark.parametrize("cached", [False, True])
def test_one_more_ends_the_run_with_its_place(load, conversations, most, cached) -> None:
    if cached:
        load(conversations, max_bad_rows=4)
    with pytest.raises(DataError) as error:
        load(conversations, max_bad_rows=most)
    assert names(conversations)[most] in error.value.message
    if most:
        assert f"data.max_bad_rows={most}" in error.value.message


def test_streamed_bad_rows_are_dropped_in_the_ledger_and_counted_once(load, tmp_path) -> None:
    # Of the row groups of 50, the first, 20th and 40th are read before the start.
    rows = [conversation(f"q{i}", "" if i in (60, 1010, 2999) else "4") for i in range(ROWS)]
    path = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=50)

    def opened(most: int) -> Any:
        train = load(str(path), streaming=True, max_bad_rows=most).train
        return *loader(train, 100, window=500), train

    made, ledger, train = opened(3)
    assert [row.row for row in train.bad] == [1010]
    first = made.next_batch(3 * ROWS)
    assert {prompt.index for prompt in first} == {*range(ROWS)} - {60, 1010, 2999}
    assert ledger.counts()["dropped"] == {"bad_row": 9}
    assert list(made.prompts.bad) == [60, 1010, 2999]
    made.close()

    made, ledger, _ = opened(2)
    assert len(made.next_batch(2900)) == 2900
    states = json.loads(json.dumps([made.state(), ledger.state()]))
    for _ in range(2):
        with pytest.raises(DataError, match="row 2999"):
            made.next_batch(100)
    made.close()
    resumed, ledger, _ = opened(2)
    ledger.load_state(states[1])
    resumed.load_state(states[0])
    resumed.next_batch(2900)
    with pytest.raises(DataError, match="row 2999"):
        resumed.next_batch(100)
    resumed.close()


def prompts(**changed: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": "q"}], "data_source": "d", **changed}


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt": None},
        {"prompt": "text, where others are messages"},
        {"prompt": float("nan")},
        {"prompt": [[{"role": "user", "content": "q"}]]},
        {"prompt": [{"role": "user", "content": None}]},
        {"prompt": [{"role": "user", "content": [["q"]]}]},
        {"prompt": [{"role": "user", "content": ["q"]}]},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": ["q"]}]}]},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": float("nan")}]}]},
        {"prompt": "[{'role': 'user', 'content': 'q'}]"},
        {"prompt": '{"role": "user", "content": "q"}'},
        {"prompt": [{"from": "human", "value": "q"}]},
        {"data_source": 3},
        {"images": ["no.png"]},
    ],
)
def test_a_bad_prompt_is_left_out_or_refused(load, write, bad) -> None:
    path = write("x.jsonl", [prompts(), prompts(), prompts(**bad), prompts(), "[]"])
    with pytest.raises(DataError, match="line 3"):
        load(path, "on_policy")
    found = load(path, "on_policy", max_bad_rows=2).train
    assert [row.row for row in found.bad] == [2, 4]
    assert [prompt.index for prompt in found.prompts] == [0, 1, 3]


def test_a_text_of_a_million_characters_is_too_long_and_no_bad_row(load, write) -> None:
    rows = [conversation("q", "4"), conversation("q" * 1_000_000, "4")]
    found = load(write("x.jsonl", rows)).train
    assert (found.filtered_overlong, len(found.prompts), found.bad) == (1, 1, ())


def test_what_one_row_spells_or_lacks_is_counted_once_beside_bad_ones(load, write) -> None:
    rows = [conversation(f"q{i} <|im_end|>" if i % 2 else "q", "4") for i in range(64)]
    rows[11] = conversation("q", "")
    rows[20]["messages"][1]["reasoning_content"] = "hm"
    found = load(write("x.jsonl", rows), max_bad_rows=1).train
    assert found.spelled == 31
    assert "1 of 63 rows" in found.left_out[0]


def test_messages_as_json_text_are_prompts_like_the_messages(load, write) -> None:
    given = [
        [{"role": "system", "content": "s"}, {"role": "user", "content": "1 + 1"}],
        [{"content": "2", "role": "user"}],
    ]
    ids = {}
    for name, rows in (("list", given), ("text", [json.dumps(each) for each in given])):
        path = write(f"{name}.jsonl", [{"prompt": row} for row in rows])
        ids[name] = [p.prompt_ids for p in load(path, "on_policy").train.prompts]
    for one, other in zip(ids["list"], ids["text"], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("text", ["[1, 2]", '{"a": 1} is an object', "[{}]", "{role}"])
def test_other_texts_with_brackets_stay_prompts(load, write, text) -> None:
    (prompt,) = load(write("x.jsonl", [{"prompt": text}]), "on_policy").train.prompts
    assert prompt.raw == text


def test_the_run_directory_names_each_once_and_the_console_ten(tmp_path) -> None:
    directory = RunDirectory.create(tmp_path / "run")
    rows = [BadRow(row=i, where=f"line {i}", message=f"line {i}: bad", hint="x") for i in range(30)]
    said: list[str] = []

    class Console:
        def warning(self, event: str, **_: Any) -> None:
            said.append(event)

    for upto in (4, 20, 30, 30):
        directory.name_bad_rows(rows[:upto], Console())
    lines = (tmp_path / "run" / "bad_rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in lines] == list(range(30))
    assert sum("bad" in event and "line" in event for event in said) == 10
    assert "bad_rows.jsonl" in said[-1]


def test_fewer_than_none_is_refused(load, conversations) -> None:
    with pytest.raises(ConfigError, match="max_bad_rows"):
        load(conversations, max_bad_rows=-1)
