"""The token cache: reading from it, when it is made again, and files that change while they are read."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import dataset_rows
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_rows import content, learn, turns

from dovetail.data.loader import PromptLoader
from dovetail.errors import ConfigError, DataError
from dovetail.run.checkpoints import with_streaming_of
from dovetail.run.data import load_data
from dovetail.sections import DataSection, ModelSection
from dovetail_datasets import cached_examples, load_examples
from dovetail_datasets.examples import ExampleMaker
from dovetail_datasets.rows import FileRows, NumberedRow, numbered
from dovetail_datasets.tokenizer import load_tokenizer

ROWS = 1300
"""Number of rows, more than one shard of 1,024."""


def write(path: Path, rows: int = ROWS, answer: str = "4") -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in numbered_rows(rows, answer)))
    return str(path)


def numbered_rows(count: int, answer: str = "4") -> list[dict[str, Any]]:
    return [{"messages": turns(f"q{i}", answer)} for i in range(count)]


def write_parquet(path: Path, rows: list[dict[str, Any]], **how: Any) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path, **how)
    return str(path)


@pytest.fixture
def load(run_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads the training rows of a supervised run with this `data` section, through a separate cache."""
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "cache"))

    def config(
        path: str, template: str | None = None, trainer: Any = "supervised", **data: Any
    ) -> Any:
        data = {"train_files": path, "max_response_length": 20, "cache_dir": None, **data}
        return run_config(trainer, {"chat_template": template}, **data)

    def make(path: str, *given: Any, **data: Any) -> Any:
        return load_data(config(path, *given, **data)).train

    make.config = config  # type: ignore[attr-defined]
    return make


def shards(tmp_path: Path) -> dict[str, list[Path]]:
    """Return the files of each folder of the cache."""
    folders = sorted((tmp_path / "cache" / "tokens").iterdir())
    return {each.name: sorted(each.iterdir()) for each in folders}


def loader(train: Any) -> PromptLoader:
    return dataset_rows.loader(train, 100)[0]


def test_a_second_start_reads_what_the_first_has_written(load, tmp_path) -> None:
    path = write(tmp_path / "x.jsonl")
    first = load(path)
    ((_, files),) = shards(tmp_path).items()
    assert [file.name.partition("-")[0] for file in files] == ["0", "1"]
    again = load(path)
    assert content(again.prompts) == content(first.prompts)
    assert again.prompts.digest == first.prompts.digest
    # Replacing the shard by another dataset's shows that the file is read.
    load(write(tmp_path / "y.jsonl", answer="5"))
    (theirs,) = (found for found in shards(tmp_path).values() if found != files)
    files[1].unlink()
    shutil.copy(theirs[1], files[1].parent)
    mixed = load(path).prompts
    assert content(mixed)[:1024] == content(first.prompts)[:1024]
    assert mixed[1024].where == f"{tmp_path / 'y.jsonl'}, line 1025"


def test_what_tokens_follow_from_names_the_folder(load, tmp_path) -> None:
    path = write(tmp_path / "x.jsonl")
    load(path)
    load(path, val_files=path, train_batch_size=7)
    assert len(shards(tmp_path)) == 1
    load(path, max_response_length=21)
    load(path, template="{% for m in messages %}<{{ m['content'] }}>{% endfor %}")
    write(tmp_path / "x.jsonl", answer="6")
    load(path)
    assert len(shards(tmp_path)) == 4


@pytest.mark.parametrize("damage", ["cut", "changed", "emptied"])
def test_a_damaged_shard_is_made_again(load, tmp_path, damage) -> None:
    path = write(tmp_path / "x.jsonl")
    first = content(load(path).prompts)
    before = shards(tmp_path)
    ((_, files),) = before.items()
    whole = files[1].read_bytes()
    middle = len(whole) // 2
    changed = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    files[1].write_bytes({"cut": whole[:middle], "changed": changed, "emptied": b""}[damage])
    assert content(load(path).prompts) == first
    assert shards(tmp_path) == before
    assert files[1].read_bytes() == whole


def test_examples_too_long_and_what_is_left_out_are_counted_from_the_cache(load, tmp_path) -> None:
    thought = turns("q", "4", reasoning_content="hm")
    rows = [turns("q", "b" * 50 * (i % 5 == 0) or "a") for i in range(ROWS)]
    rows[7] = thought
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    first, second = load(str(path)), load(str(path))
    assert first.filtered_overlong == second.filtered_overlong == 260
    assert [p.index for p in second.prompts] == [i for i in range(ROWS) if i % 5]
    assert first.left_out == second.left_out
    assert f"1 of 1,040 rows (the first: {path}, line 8)" in second.left_out[0]


def test_without_space_for_a_cache_examples_are_held_in_memory(load, tmp_path) -> None:
    path = write(tmp_path / "x.jsonl")
    (tmp_path / "cache").write_text("no directory")
    assert len(load(path).prompts) == ROWS


def test_pairs_and_ratings_come_back_from_the_cache(load, tmp_path) -> None:
    rows = [
        {"prompt": f"q{i}", "chosen": "a b", "rejected": "c", "margin": i / 2} for i in range(ROWS)
    ]
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    trainer = {"name": "supervised", "examples": "preferences"}
    first, second = (load(str(path), trainer=trainer).prompts for _ in range(2))
    assert content(first) == content(second)
    assert second[9].labels == {"margin": 4.5}
    assert len(second[9].answers) == 2


def test_several_processes_make_what_one_makes(load, tmp_path, monkeypatch) -> None:
    path = write(tmp_path / "x.jsonl")
    one = load(path, cache_dir=str(tmp_path / "one")).prompts
    monkeypatch.setattr(load_examples, "PROCESSES_FROM", 1)
    two = load(path, processes=2).prompts
    assert content(two) == content(one)
    names = [file.name for file in (tmp_path / "one").rglob("*.arrow")]
    ((_, files),) = shards(tmp_path).items()
    assert sorted(names) == [file.name for file in files]


def test_an_error_of_another_process_names_the_row(load, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(load_examples, "PROCESSES_FROM", 1)
    path = Path(write(tmp_path / "x.jsonl"))
    lines = path.read_text().splitlines()
    lines[1200] = json.dumps({"messages": turns("q", "")})
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match="line 1201") as caught:
        load(str(path), processes=2)
    assert caught.value.hint


def test_two_runs_may_write_at_the_same_time(tokenizer_directory, tmp_path) -> None:
    path = write(tmp_path / "x.jsonl")
    program = (
        "import sys\n"
        "from dovetail.config import config_from_mapping\n"
        "from dovetail.run.data import load_data\n"
        "data = {'train_files': sys.argv[2], 'cache_dir': sys.argv[3]}\n"
        "document = {'model': {'path': sys.argv[1]}, 'trainer': {'name': 'supervised'}, 'data': data}\n"
        "print(load_data(config_from_mapping(document).config).train.prompts.digest)\n"
    )
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", program, str(tokenizer_directory), path, str(cache)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    digests = {process.communicate()[0] for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert len(digests) == 1
    ((_, files),) = shards(tmp_path).items()
    assert [file.suffix for file in files] == [".arrow"] * 2


@pytest.mark.parametrize("how", ["replaced", "grown", "removed"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_that_changes_while_it_is_streamed_ends_the_run(load, tmp_path, kind, how) -> None:
    path = tmp_path / f"x.{kind}"

    def rows(answer: str, count: int = 6000) -> None:
        if kind == "jsonl":
            write(path, count, answer)
        else:
            other = tmp_path / "other"
            write_parquet(other, numbered_rows(count, answer), row_group_size=1024)
            other.replace(path)

    rows("4")
    made = loader(load(str(path), streaming=True, processes=1))
    assert len(made.next_batch()) == 100
    if how == "removed":
        path.unlink()
    else:
        rows("5", 6000 + (how == "grown"))
    with pytest.raises(DataError, match=str(path)):
        made.next_batch(5900)
    made.close()


def test_streamed_examples_are_those_of_the_cache_and_resume_in_it(load, tmp_path) -> None:
    path = write(tmp_path / "x.jsonl")
    whole = content(load(path).prompts)
    first = loader(load(path, streaming=True))
    batches, states = [], []
    for _ in range(20):  # more than an epoch
        states.append(json.loads(json.dumps([first.state(), first._ledger.state()])))
        batches.append(first.next_batch())
        learn(first._ledger, batches[-1])
    first.close()
    assert [row[3] for row in content(chain.from_iterable(batches[:13]))] == [
        row[3] for row in whole
    ]
    shutil.rmtree(tmp_path / "cache")
    resumed = loader(load(path, streaming=True))
    resumed._ledger.load_state(states[15][1])
    resumed.load_state(states[15][0])
    assert content(resumed.next_batch()) == content(batches[15])
    resumed.close()


def test_rows_are_streamed_where_there_are_many(load, tmp_path, monkeypatch) -> None:
    path = write(tmp_path / "x.jsonl")
    assert load(path).streamed == ""
    monkeypatch.setattr(load_examples, "STREAMED_FROM", 10_000)
    found = load(path)
    assert "1,300 of 1,300 were read" in found.streamed
    assert isinstance(found.prompts, cached_examples.StreamedExamples)
    assert load(path, streaming=False).streamed == ""


def test_a_checkpoint_of_other_data_is_refused(load, tmp_path) -> None:
    train = load(write(tmp_path / "x.jsonl", 100))
    state = loader(train).state()
    loader(train).load_state(state)
    with pytest.raises(DataError, match="checkpoint"):
        loader(train).load_state({**state, "data": "0" * 16})


@pytest.mark.parametrize("streamed", [False, True])
def test_what_was_streamed_is_resumed_streamed_alone(load, tmp_path, streamed) -> None:
    path = write(tmp_path / "x.jsonl", 100)
    state = loader(load(path, streaming=streamed)).state()
    with pytest.raises(DataError, match="streaming") as error:
        loader(load(path, streaming=not streamed)).load_state(state)
    assert f"data.streaming={str(streamed).lower()}" in str(error.value)


def test_tokens_are_the_models_integers(load, tmp_path) -> None:
    path = write(tmp_path / "x.jsonl")
    load(path)
    (first, *_) = load(path).prompts
    assert (first.prompt_ids.dtype, first.answers[0].mask.dtype) == (np.int64, np.bool_)


@pytest.mark.parametrize("kind", ["arrow", "parquet", "json", "jsonl"])
def test_other_content_under_the_same_name_is_made_anew(load, tmp_path, kind) -> None:
    path = tmp_path / f"x.{kind}"

    def rows(answer: str) -> None:
        found = numbered_rows(ROWS, answer)
        table = pa.Table.from_pylist(found)
        if kind == "parquet":
            write_parquet(path, found)
        elif kind == "arrow":
            with pa.ipc.new_file(path, table.schema) as file:
                file.write_table(table)
        elif kind == "json":
            path.write_text(json.dumps(found))
        else:
            write(path, answer=answer)

    rows("4")
    first = load(str(path)).prompts
    rows("5")
    second = load(str(path)).prompts
    assert first.digest != second.digest
    assert content(second) != content(first)


def test_rows_that_can_not_be_read_are_not_kept_as_none(load, tmp_path) -> None:
    path = write_parquet(tmp_path / "x.parquet", numbered_rows(6000))  # one row group
    made = loader(load(path, streaming=True, processes=1))
    os.utime(path, (1, 1))
    for _ in range(2):
        with pytest.raises(DataError, match="has changed"):
            made.next_batch(5900)
    made.close()
    ((_, files),) = shards(tmp_path).items()
    for file in files:
        assert pa.ipc.open_file(file.read_bytes()).read_all().num_rows


def test_a_row_that_is_gone_makes_other_examples_of_the_rows_behind_it(load, tmp_path) -> None:
    path = Path(write(tmp_path / "x.jsonl", 3))
    lines = path.read_text()
    path.write_text("no JSON\n" + lines)
    with_bad = load(str(path), max_bad_rows=1).prompts.digest
    path.write_text(lines)
    assert load(str(path), max_bad_rows=1).prompts.digest != with_bad


@pytest.mark.parametrize("trainer", ["supervised", "on_policy"])
def test_where_every_row_is_bad_the_first_is_named(load, tmp_path, trainer) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"messages": [], "prompt": []}\n' * 3)
    with pytest.raises(DataError, match="line 1"):
        load(str(path), trainer=trainer, max_bad_rows=5)


def test_what_becomes_of_rows_with_images_is_not_kept(load, tmp_path) -> None:
    path = Path(write(tmp_path / "x.jsonl"))
    first, *others = path.read_text().splitlines()
    row = json.loads(first) | {"images": ["absent.png"]}
    row["messages"][0]["content"] = "<image>q"
    path.write_text("\n".join([json.dumps(row), *others]))
    assert load(str(path), max_bad_rows=1).bad
    ((_, files),) = shards(tmp_path).items()
    assert [file.name.partition("-")[0] for file in files] == ["1"]


class InThisProcess:
    """A stand-in for ExampleProcess that runs the calls in the calling thread."""

    def __init__(self, make: bytes) -> None:
        self._make = pickle.loads(make)

    def __call__(self, *given: Any) -> Any:
        return self._make(*given)

    def close(self) -> None:
        """Do nothing: there is no process."""


@pytest.fixture
def many_threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make shards of 32 rows by up to 8 threads, with slow reading so that threads overlap. Returns the rows at which reads began."""
    began: list[int] = []

    def slowly(rows: Any, group: int, start: int, first: int) -> Iterator[NumberedRow]:
        began.append(first)
        for row in numbered(rows, group, start, first):
            time.sleep(1e-4)
            yield row

    monkeypatch.setattr(load_examples, "PROCESSES_FROM", 1)
    monkeypatch.setattr(load_examples, "SHARD_ROWS", 32)
    monkeypatch.setattr(cached_examples, "SHARD_ROWS", 32)
    monkeypatch.setattr(cached_examples, "ExampleProcess", InThisProcess)
    monkeypatch.setattr(cached_examples, "numbered", slowly)
    return began


@pytest.mark.parametrize("streaming", [False, True])
def test_threads_that_read_one_group_give_each_shard_its_own_rows(
    load, tmp_path, many_threads, streaming
) -> None:
    rows = [{"messages": turns(f"q{i}", f"{i}")} for i in range(400)]
    path = write_parquet(tmp_path / "x.parquet", rows)  # one row group
    for _ in range(2):  # made, then read
        train = load(path, processes=8, streaming=streaming)
        found = loader(train).next_batch(400) if streaming else train.prompts
        assert [(p.index, p.raw[0]["content"]) for p in found] == [(i, f"q{i}") for i in range(400)]
        train.prompts.shards.close()
    # Threads read shards in order, so a group is read in one pass, unless another thread overtakes.
    assert streaming or len(many_threads) <= 6
    ((_, files),) = shards(tmp_path).items()
    numbers = sorted(int(file.name.partition("-")[0]) for file in files)
    assert numbers == list(range(13))


@pytest.mark.usefixtures("many_threads")
def test_an_error_of_one_thread_leaves_the_others_shards_as_they_are(load, tmp_path) -> None:
    path = Path(write(tmp_path / "x.jsonl", 400))
    lines = path.read_text().splitlines()
    lines[200] = "no JSON"
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match="line 201"):
        load(str(path), processes=8)
    found = load(str(path), processes=8, max_bad_rows=1)
    assert [p.index for p in found.prompts] == [i for i in range(400) if i != 200]


def test_that_no_process_takes_the_work_is_said_once(
    load, tmp_path, many_threads, monkeypatch, caplog
) -> None:
    together = threading.Barrier(4)

    class Refused(InThisProcess):
        def __init__(self, make: bytes) -> None:
            together.wait(60)
            raise DataError("it can't be sent")

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            time.sleep(0.2)

    monkeypatch.setattr(cached_examples, "ExampleProcess", Refused)
    slow = Slow()
    logging.getLogger("dovetail").addHandler(slow)
    try:
        assert len(load(write(tmp_path / "x.jsonl", 400), processes=4).prompts) == 400
    finally:
        logging.getLogger("dovetail").removeHandler(slow)
    said = [record for record in caplog.records if "one process" in record.message]
    assert len(said) == 1


def test_a_process_that_makes_examples_does_without_torch(tokenizer_directory, tmp_path) -> None:
    tokenizer = load_tokenizer(ModelSection(path=str(tokenizer_directory)))
    row = NumberedRow(0, {"messages": turns("q", "4")}, "row 0", None)
    files = [FileRows(path="x", rows=[row.columns])]
    model = ModelSection(path=str(tokenizer_directory))
    make = ExampleMaker(files, tokenizer, DataSection(), model, "conversations")
    expected = make.shard([row])[1]
    program = (
        "import pickle, sys\n"
        "make, rows = pickle.load(sys.stdin.buffer)\n"
        "pickle.dump([make.shard(rows)[1], 'torch' in sys.modules], sys.stdout.buffer)\n"
    )
    sent = pickle.dumps((make, [row]))
    done = subprocess.run(
        [sys.executable, "-c", program], input=sent, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found, loaded_torch = pickle.loads(done.stdout)
    assert content(found) == content(expected)
    assert not loaded_torch


def test_to_continue_an_answer_is_refused_where_none_is_generated(load, tmp_path) -> None:
    path = tmp_path / "x.jsonl"
    begun = turns("q", "4", "p", "so")
    path.write_text(json.dumps({"prompt": begun, "messages": turns("q", "4")}))
    with pytest.raises(ConfigError, match=r"data.continue_answer.*supervised"):
        load(str(path), continue_answer=True)
    assert len(load(str(path)).prompts) == 1
    assert len(load(str(path), trainer="on_policy", continue_answer=True).prompts) == 1


CLOCK = "{{ strftime_now('%Y') if strftime_now is defined }}"
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)


def test_what_a_template_writes_of_the_date_is_not_kept(load, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(load_examples, "SHARD_ROWS", 4)
    path = write(tmp_path / "x.jsonl", 9)
    for template in (CLOCK + TURNS, "{% set now = strftime_now %}" + TURNS):
        assert len(load(path, template=template).prompts) == 9
        assert not (tmp_path / "cache").exists()
    load(path, template=TURNS)
    assert len(shards(tmp_path)) == 1


def test_a_run_is_resumed_streamed_or_not_as_it_was(load, tmp_path, monkeypatch) -> None:
    path = write(tmp_path / "x.jsonl", 300)
    monkeypatch.setattr(load_examples, "STREAMED_FROM", 1)
    whole = loader(load(path))
    issued = [whole.next_batch() for _ in range(2)]
    whole.close()
    first = loader(load(path))
    assert content(first.next_batch()) == content(issued[0])
    learn(first._ledger, issued[0])
    state = json.loads(json.dumps(first.state()))
    first.close()
    # Another version may have a higher threshold, so that the same rows are not streamed.
    monkeypatch.setattr(load_examples, "STREAMED_FROM", 10**12)
    config = load.config(path)
    (tmp_path / "state.json").write_text(json.dumps({"loader": state}))
    again = with_streaming_of(tmp_path, config)
    resumed = loader(load_data(again).train)
    resumed._ledger.load_state(first._ledger.state())
    resumed.load_state(state)
    assert content(resumed.next_batch()) == content(issued[1])
    resumed.close()
    with pytest.raises(DataError, match="streaming"):
        loader(load_data(config).train).load_state(state)
    for given, checkpoint in (
        (load.config(path, streaming=False), tmp_path),
        (config, tmp_path / "gone"),
        (config, None),
    ):
        assert with_streaming_of(checkpoint, given) == given


def test_where_no_process_takes_the_work_it_is_done_here(load, tmp_path, monkeypatch) -> None:
    path = write(tmp_path / "x.jsonl")
    expected = content(load(path, cache_dir=str(tmp_path / "one")).prompts)

    class Refused(cached_examples.ExampleProcess):
        def __init__(self, make: bytes) -> None:
            super().__init__(b"cabsent_module\nTokenizer\n.")

    monkeypatch.setattr(load_examples, "PROCESSES_FROM", 1)
    monkeypatch.setattr(cached_examples, "ExampleProcess", Refused)
    assert content(load(path, processes=2).prompts) == expected
