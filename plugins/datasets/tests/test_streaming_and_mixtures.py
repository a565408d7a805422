"""Mixtures and streamed files: shares, orders, resuming with the same examples, and bad rows that are found during the run."""

from __future__ import annotations

import json
import threading
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import dataset_rows
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_rows import content, files_source, learn, sequential, turns
from hypothesis import given, strategies as st

from dovetail.config import config_from_mapping
from dovetail.data.epoch_order import EpochOrder
from dovetail.data.ledger import Ledger
from dovetail.data.loader import PromptLoader
from dovetail.errors import ConfigError, DataError
from dovetail.interfaces import DatasetShape, PluginContext, Prompt, Sampler
from dovetail.run.data import load_data
from dovetail_datasets.config import ShuffledConfig
from dovetail_datasets.mixtures import mixed, share_metrics
from dovetail_datasets.prompts import PromptSet
from dovetail_datasets.samplers import ShuffledSampler


def shuffled(seed: int = 0) -> Sampler:
    return ShuffledSampler(ShuffledConfig(), PluginContext(seed=seed))


def groups_of(size: int, width: int) -> tuple[int, ...]:
    return tuple(min(width, size - start) for start in range(0, size, width))


# Orders

sizes_and_weights = st.lists(
    st.tuples(st.integers(1, 30), st.floats(0.01, 10)), min_size=1, max_size=4
)


@given(sizes_and_weights, st.booleans(), st.integers(1, 40), st.integers(0, 99))
def test_a_mixture_has_its_shares_and_uses_all_rows_of_a_dataset_equally_often(
    datasets, streamed, window, seed
) -> None:
    shapes = [
        DatasetShape(name=f"d{i}", size=n, weight=w, groups=groups_of(n, 7) if streamed else None)
        for i, (n, w) in enumerate(datasets)
    ]
    order = EpochOrder(shuffled(seed), shapes, window=window)
    total, weights = sum(n for n, _ in datasets), sum(w for _, w in datasets)
    starts = np.cumsum([0, *(n for n, _ in datasets)])
    seen: Counter[int] = Counter()
    for epoch in range(4):
        rows = order.rows(epoch)
        assert sorted(order.names(epoch, rows).tolist()) == list(range(total))
        of = Counter(np.searchsorted(starts, rows, side="right").tolist())
        for number, (_, weight) in enumerate(datasets):
            share = weight / weights * total
            # Every dataset has at least one prompt, at the expense of another dataset.
            below_one = sum(w / weights * total < 1 for _, w in datasets)
            assert of[number + 1] >= 1
            assert abs(of[number + 1] - share) < 1 + below_one
        seen.update(rows.tolist())
    for a, b in pairwise(starts.tolist()):
        assert max(seen[row] for row in range(a, b)) - min(seen[row] for row in range(a, b)) <= 1


@pytest.mark.parametrize("streamed", [False, True])
def test_without_weights_every_row_of_a_mixture_comes_once_an_epoch(streamed) -> None:
    shapes = [
        DatasetShape(name=f"d{n}", size=n, groups=groups_of(n, 4) if streamed else None)
        for n in (3, 11, 6)
    ]
    order = EpochOrder(shuffled(), shapes, window=5)
    for epoch in range(3):
        assert sorted(order.rows(epoch).tolist()) == list(range(20))
    assert order.rows(0).tolist() != order.rows(1).tolist()


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 70), st.integers(0, 5))
def test_a_streamed_order_is_a_permutation_of_groups_and_within_windows(
    size, width, window, epoch
) -> None:
    groups = groups_of(size, width)
    order = EpochOrder(shuffled(), [DatasetShape(size=size, groups=groups)], window=window)
    rows = order.rows(epoch)
    assert sorted(rows.tolist()) == list(range(size))
    starts = np.cumsum(groups) - groups
    read = np.concatenate(
        [np.arange(starts[g], starts[g] + groups[g]) for g in shuffled().order(len(groups), epoch)]
    )
    for start in range(0, size, window):
        assert sorted(rows[start : start + window]) == sorted(read[start : start + window])
    in_order = EpochOrder(sequential(), [DatasetShape(size=size, groups=groups)], window=window)
    assert in_order.rows(epoch).tolist() == list(range(size))


# Loaders over files


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Parquet files with row groups of 8 rows and with one of 30, and a JSONL file with blank lines."""
    many = [{"messages": turns(f"m{i}", f"{i}")} for i in range(37)]
    pq.write_table(pa.Table.from_pylist(many), tmp_path / "many.parquet", row_group_size=8)
    one = [{"question": f"o{i}", "response": f"{i}"} for i in range(30)]
    pq.write_table(pa.Table.from_pylist(one), tmp_path / "one.parquet")
    lines = [json.dumps({"messages": turns(f"l{i}", f"{i}")}) for i in range(23)]
    (tmp_path / "lines.jsonl").write_text("\n\n" + "\n\n".join(lines))
    return {name: str(tmp_path / name) for name in ("many.parquet", "one.parquet", "lines.jsonl")}


@pytest.fixture
def config(run_config: Any) -> Any:
    """Makes the config of a supervised run with this `data` section."""
    return partial(run_config, train_batch_size=5, shuffle_window=11)


def loader(config: Any, states: Any = None) -> tuple[PromptLoader, Ledger]:
    """Return a shuffled loader over a config's rows, which continues from the given states."""
    size, window = config.data.train_batch_size, config.data.shuffle_window
    made, ledger = dataset_rows.loader(load_data(config).train, size, window, shuffled())
    if states is not None:
        states = json.loads(json.dumps(states))
        ledger.load_state(states[1])
        made.load_state(states[0])
    return made, ledger


def sections(files: dict[str, str]) -> dict[str, dict[str, Any]]:
    mixture = {
        "many": {"files": [files["many.parquet"], files["lines.jsonl"]], "weight": 1},
        "one": {"files": files["one.parquet"], "weight": 2, "prompt_key": "question"},
    }
    return {
        "streamed": {
            "train_files": [files["many.parquet"], files["lines.jsonl"]],
            "streaming": True,
        },
        "mixed": {"mixture": mixture},
        "mixed and streamed": {"mixture": mixture, "streaming": True},
    }


@pytest.mark.parametrize("name", ["streamed", "mixed", "mixed and streamed"])
def test_a_loader_resumed_at_any_step_gives_what_it_would_have_given(config, files, name) -> None:
    made = config(**sections(files)[name])
    whole, ledger = loader(made)
    batches, states = [], []
    for step in range(28):  # more than two epochs of 60 or of 90
        states.append(json.loads(json.dumps([whole.state(), ledger.state()])))
        batches.append(whole.next_batch())
        learn(ledger, batches[-1], step)
    whole.close()
    for start in (0, 1, 2, 11, 12, 13, 25):
        resumed, ledger = loader(made, states=states[start])
        for step in range(start, min(start + 4, 28)):
            batch = resumed.next_batch()
            assert content(batch) == content(batches[step])
            learn(ledger, batch, step)
        resumed.close()


@given(st.lists(st.sets(st.integers(0, 9)), min_size=1, max_size=4))
def test_prompts_of_a_mixture_have_numbers_of_their_own(kept: list[set[int]]) -> None:
    sets = {
        f"d{number}": PromptSet(
            prompts=tuple(Prompt(index=row, raw=f"{number} {row}") for row in sorted(rows)),
            filtered_overlong=10 - len(rows),
        )
        for number, rows in enumerate(kept)
    }
    weights = {name: {"files": "x", "weight": 1} for name in sets}
    section = config_from_mapping({"model": {"path": "m"}, "data": {"mixture": weights}}).config
    prompts = mixed(sets, section.data).prompts
    expected = [(f"d{n}", f"{n} {row}") for n, rows in enumerate(kept) for row in sorted(rows)]
    assert [(prompt.dataset, prompt.raw) for prompt in prompts] == expected
    numbers = [prompt.index for prompt in prompts]
    assert numbers == sorted(set(numbers))
    # The first dataset's rows are found by their numbers, as `dovetail data look` does.
    assert numbers[: len(kept[0])] == sorted(kept[0])


def test_a_streamed_epoch_has_the_examples_of_one_that_is_read_whole(config, files) -> None:
    section = sections(files)["streamed"]
    of_file = {}
    for streaming in (False, True):
        made, _ = loader(config(**{**section, "streaming": streaming}))
        of_file[streaming] = made.next_batch(60)
        made.close()
    assert content(of_file[True]) != content(of_file[False])  # the order differs
    by_row = [sorted(content(of_file[streaming]), key=str) for streaming in (True, False)]
    assert by_row[0] == by_row[1]


def test_what_is_in_flight_is_read_again_after_a_resume(config, files) -> None:
    made = config(**sections(files)["mixed and streamed"])
    first, ledger = loader(made)
    learn(ledger, first.next_batch(), 1)
    batch = first.next_batch()
    states = [first.state(), ledger.state()]
    after = first.next_batch()
    first.close()
    resumed, ledger = loader(made, states=states)
    assert content(resumed.next_batch()) == content(batch)
    assert content(resumed.next_batch()) == content(after)
    resumed.close()


def test_another_file_tokenizer_or_template_is_not_resumed(config, files, tmp_path) -> None:
    section = sections(files)["streamed"]
    state = [each.state() for each in loader(config(**section))]
    changed = Path(files["lines.jsonl"]).read_text().replace('"l22"', '"L22"')
    (tmp_path / "other.jsonl").write_text(changed)
    files = [files["many.parquet"], str(tmp_path / "other.jsonl")]
    with pytest.raises(DataError, match="checkpoint"):
        loader(config(train_files=files, streaming=True), states=state)
    templated = config(**section)
    loader(templated, states=state)


def test_streamed_rows_that_are_too_long_are_left_out_and_accounted_for(config, tmp_path) -> None:
    rows = [{"messages": turns("q", "b" * (1 + 40 * (i % 3 == 0)))} for i in range(300)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    section = {"train_files": str(tmp_path / "x.parquet"), "streaming": True}
    made, ledger = loader(config(**section, max_response_length=20))
    for step in range(40):
        batch = made.next_batch()
        assert all(prompt.index % 3 for prompt in batch)
        learn(ledger, batch, step)
    counts = ledger.counts()
    assert (counts["used"], counts["dropped"]) == (200, {"overlong": 100})
    assert made.epoch == pytest.approx(1)
    made.close()
    made, _ = loader(config(**section, max_response_length=1))
    with pytest.raises(DataError, match=r"each of the 300 is too long"):
        made.next_batch()
    made.close()
    with pytest.raises(DataError, match=r"x.parquet, row 0: the response has .* tokens"):
        loader(config(**section, max_response_length=20, overlong_prompts="error"))


def test_a_bad_row_ends_a_streamed_run_with_its_place_each_time_it_is_asked_for(
    config, tmp_path
) -> None:
    # Of the groups of 1,024 lines, the first, second and fourth are read before the start.
    rows = [json.dumps({"messages": turns(f"q{i}", "a")}) for i in range(5 * 1024)]
    path = tmp_path / "x.jsonl"
    empty = json.dumps({"messages": turns("q", " ")})
    for bad, says in (
        (empty, "line 2501: message 1 .* empty answer"),
        ("{", "line 2501 is not JSON"),
    ):
        path.write_text("\n".join([*rows[:2500], bad, *rows[2501:]]))
        made, _ = loader(config(train_files=str(path), streaming=True))
        for _ in range(2):
            with pytest.raises(DataError, match=says):
                made.next_batch(5 * 1024)
        made.close()


def test_the_first_rows_are_checked_before_anything_starts(config, tmp_path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"text": "a"}))
    with pytest.raises(DataError, match=r"x.jsonl .*'messages'.*: text"):
        loader(config(train_files=str(path), streaming=True))
    path.write_text("\n\n")
    with pytest.raises(DataError, match="no rows"):
        loader(config(train_files=str(path), streaming=True))


def test_the_thread_ends_with_the_loader(config, files) -> None:
    before = threading.active_count()
    made, _ = loader(config(**sections(files)["streamed"]))
    made.next_batch(60)
    assert threading.active_count() == before + 1
    made.close()
    assert threading.active_count() == before


def test_groups_are_read_from_any_row_on(files) -> None:
    source = files_source()
    for name, first in (("many.parquet", "row"), ("one.parquet", "row"), ("lines.jsonl", "line")):
        rows, whole = source.stream([files[name]]), source.read([files[name]])
        assert sum(rows.sizes) == len(whole)
        number = 0
        for group, size in enumerate(rows.sizes):
            for start in (0, 1, size - 1):
                found = list(rows.read(group, start))
                wanted = range(number + start, number + size)
                assert [row for _, row in found] == [whole[i] for i in wanted]
                # Every second line of the JSONL file is blank.
                counted = [i if first == "row" else 3 + 2 * i for i in wanted]
                assert [where for where, _ in found] == [
                    f"{files[name]}, {first} {i}" for i in counted
                ]
            number += size


def test_one_of_each_dataset_is_known_before_the_first_step(config, files) -> None:
    for name, datasets in (
        ("streamed", [""]),
        ("mixed", ["many", "one"]),
        ("mixed and streamed", ["many", "one"]),
    ):
        found = load_data(config(**sections(files)[name])).train.one_of_each()
        assert sorted(prompt.dataset for prompt in found) == datasets


@pytest.mark.parametrize("name", ["streamed", "mixed", "mixed and streamed"])
def test_what_the_template_leaves_out_is_named_with_its_dataset(config, files, name) -> None:
    data = sections(files)[name]
    assert load_data(config(**data)).left_out == ()
    thought = {"role": "assistant", "content": "1", "reasoning_content": "hm"}
    rows = [{"messages": [*turns("m", "1")[:1], thought]}, {"messages": turns("m", "1")}]
    Path(files["lines.jsonl"]).write_text("\n".join(map(json.dumps, rows)))
    data["val_files"] = files["lines.jsonl"]
    if "mixture" in data:
        data["mixture"]["many"]["files"] = files["lines.jsonl"]
    else:
        data["train_files"] = files["lines.jsonl"]
    train, val = load_data(config(**data)).left_out
    dataset = "many: " if "mixture" in data else ""
    assert train.startswith(
        f"{dataset}the chat template leaves out thoughts in 'reasoning_content'"
    )
    assert f"1 of 2 rows (the first: {files['lines.jsonl']}, line 1)" in train
    assert val.startswith("held-out rows: the chat template")


# Configs and metrics


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            {"mixture": {"a": {"files": "x"}, "b": {"files": "y", "weight": 1}}},
            "mixture.a has no weight",
        ),
        ({"mixture": {"a": {"files": "x", "weight": 0}}}, "weight"),
        ({"mixture": {"a/b": {"files": "x"}}}, "expected a name"),
        ({"mixture": {"a": {"weight": 1}}}, "files"),
    ],
)
def test_a_bad_mixture_is_refused_by_the_config(config, data, says) -> None:
    with pytest.raises(ConfigError, match=says):
        config(**data)


def test_what_does_not_go_together_is_refused(config, files) -> None:
    one = {"train_files": files["many.parquet"]}
    with pytest.raises(ConfigError, match=r"train_files and data.mixture both name"):
        load_data(config(**one, mixture={"a": {"files": files["many.parquet"]}}))
    model = {"path": config(**one).model.path}
    generates = {"model": model, "data": {**one, "streaming": True}}
    with pytest.raises(ConfigError, match=r"data.streaming"):
        load_data(config_from_mapping(generates).config)


def test_shares_are_of_prompts_and_of_tokens() -> None:
    def prompt(name: str) -> Prompt:
        return Prompt(index=0, raw="", dataset=name)

    counted = [(prompt("a"), 10), (prompt("a"), 20), (prompt("b"), 70)]
    assert share_metrics(counted, ["a", "b", "c"]) == {
        "data/a/prompt_share": 2 / 3,
        "data/a/token_share": 0.3,
        "data/b/prompt_share": 1 / 3,
        "data/b/token_share": 0.7,
        "data/c/prompt_share": 0,
        "data/c/token_share": 0,
    }
    assert share_metrics(counted, []) == {}
