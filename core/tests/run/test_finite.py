"""Numbers that are not finite stop the step, and the run directory says which samples and where."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from dovetail.batch import Batch, Ragged
from dovetail.errors import NumericsError
from dovetail.interfaces import PlanFacts, StepContext
from dovetail.run.finite import HINTS, PLACES, ROWS, check_finite, with_fault_file
from dovetail.sections import ModelSection, RunConfig
from dovetail.telemetry import RunDirectory
from dovetail.telemetry.timers import Timers

RAGGED = sorted(set(HINTS) - {"scores", "baseline_scores"})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return RunDirectory.create(tmp_path_factory.mktemp("runs") / "run")


def make_batch(masks: list[list[bool]], **columns: Any) -> Batch:
    mask = Ragged.from_list(masks, dtype=np.bool_)
    plain = {name: mask.with_values(np.zeros(len(mask.values), np.float32)) for name in RAGGED}
    return Batch(
        {
            "sample_id": [f"train.e0.p{i}.a0.s0" for i in range(len(masks))],
            "response_mask": mask,
            "scores": np.zeros(len(masks), np.float32),
            **plain,
            **columns,
        }
    )


def column(rows: list[list[float]]) -> Ragged:
    return Ragged.from_list(rows, dtype=np.float32)


def step_of(number: int, samples: Any = ()) -> StepContext:
    """A step whose rollout gave these samples."""
    config = RunConfig(model=ModelSection(path="nowhere"))
    experience: Any = SimpleNamespace(samples=samples)
    return StepContext(
        number=number,
        facts=PlanFacts(config=config, plugins={}, updates_per_step=1),
        roles={},
        plugins={},
        logger=logging.getLogger(__name__),
        timer=Timers(),
        collected=experience,
    )


def check(batch: Batch, directory: RunDirectory, step: int = 1, samples: Any = ()) -> None:
    """Check every column of a batch."""
    check_finite(batch, batch.names, step=step_of(step, samples), directory=directory)


def caught(batch: Batch, directory: RunDirectory, step: int = 4, samples: Any = ()):
    """The error, and the file that it names."""
    with pytest.raises(NumericsError) as error:
        check(batch, directory, step, samples)
    path = Path(directory.path) / "faults" / f"step_{step}.json"
    assert str(path) in str(error.value)
    return error.value, json.loads(path.read_text())


def test_what_is_finite_passes_and_writes_nothing(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    check(make_batch([[True, True], []]), run)
    check(Batch({}, length=2), run)
    assert not (tmp_path / "run" / "faults").exists()


def test_masked_out_tokens_do_not_matter(tmp_path):
    rows = column([[np.nan, 1.0], [np.inf]])
    masks = [[False, True], [False]]
    run = RunDirectory.create(tmp_path / "run")
    check(make_batch(masks, **dict.fromkeys(RAGGED, rows)), run)


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_every_token_column_is_looked_at(directory, name, bad):
    batch = make_batch([[True, False, True], [True]], **{name: column([[0, 0, 0], [bad]])})
    error, file = caught(batch, directory)
    assert name in error.message
    assert "1 of 2 samples of step 4" in error.message
    assert error.sample_ids == ("train.e0.p1.a0.s0",)
    assert error.hint
    [fault] = file["samples"][0]["faults"]
    assert fault == {"column": name, "positions": [0], "values": [str(np.float32(bad))]}


@pytest.mark.parametrize("name", ["scores", "baseline_scores", "advantages", "returns"])
def test_so_are_columns_of_one_number_a_sample(directory, name):
    batch = make_batch([[True], []], **{name: np.array([0.0, np.nan], np.float32)})
    error, file = caught(batch, directory)
    assert error.sample_ids == ("train.e0.p1.a0.s0",)
    assert file["samples"][0]["faults"] == [{"column": name, "positions": [], "values": ["nan"]}]


def test_the_cause_is_named_before_what_follows_from_it(directory):
    bad = column([[np.nan], [0.0]])
    batch = make_batch(
        [[True], [True]],
        values=bad,
        advantages=column([[np.nan], [np.nan]]),
        old_log_probs=bad,
    )
    error, file = caught(batch, directory)
    assert error.message.startswith("old_log_probs is not finite in 1 of 2 samples")
    assert "also not finite: values" in error.message
    assert "actor.optim.lr" in error.hint
    assert error.sample_ids == ("train.e0.p0.a0.s0", "train.e0.p1.a0.s0")
    assert [fault["column"] for fault in file["samples"][0]["faults"]] == [
        "old_log_probs",
        "values",
        "advantages",
    ]


def test_columns_of_plugins_are_looked_at_after_those_of_core(directory):
    bad = column([[np.nan]])
    error, file = caught(make_batch([[True]], bonus=bad, advantages=bad), directory)
    assert error.message.startswith("advantages is not finite")
    assert "also not finite: bonus" in error.message
    error, file = caught(make_batch([[True]], bonus=bad), directory)
    assert error.message.startswith("bonus is not finite")
    assert "dovetail plan" in error.hint
    assert [fault["column"] for fault in file["samples"][0]["faults"]] == ["bonus"]


def test_of_values_with_a_shape_the_file_gives_all_numbers(directory):
    heads = Ragged.from_list([[[0, 1], [np.nan, 2], [3, np.nan]], [[4, 5]]], np.float32)
    pair = np.array([[0, 1], [np.inf, 2]], np.float32)
    batch = make_batch([[True, True, False], [True]], **{"mine.heads": heads, "mine.pair": pair})
    error, file = caught(batch, directory)
    assert error.sample_ids == ("train.e0.p0.a0.s0", "train.e0.p1.a0.s0")
    first, second = (sample["faults"] for sample in file["samples"])
    assert first == [{"column": "mine.heads", "positions": [1], "values": [["nan", "2.0"]]}]
    assert second == [{"column": "mine.pair", "positions": [], "values": [["inf", "2.0"]]}]


def test_what_lies_along_other_tokens_than_the_response_counts_everywhere(directory):
    """Also in a row that has as many of either."""
    prompts = column([[1, np.nan], [0], [np.inf]])
    batch = make_batch([[False], [True, True], [False]], **{"mine.prompt": prompts})
    error, file = caught(batch, directory)
    assert error.sample_ids == ("train.e0.p0.a0.s0", "train.e0.p2.a0.s0")
    assert [sample["faults"][0]["positions"] for sample in file["samples"]] == [[1], [0]]


def test_other_columns_than_those_named_are_not_looked_at(directory):
    batch = make_batch([[True]], values=column([[np.nan]]))
    check_finite(batch, ["advantages"], step=step_of(1), directory=directory)
    with pytest.raises(NumericsError):
        check_finite(batch, ["values"], step=step_of(1), directory=directory)


def test_the_file_holds_prompt_and_response_where_they_are_at_hand(directory, make_sample):
    batch = make_batch([[True], [True]], scores=np.array([np.inf, np.nan], np.float32))
    _, file = caught(batch, directory, samples=[make_sample(1)])
    assert "prompt" not in file["samples"][0]
    assert file["samples"][1]["prompt"] == "prompt 1"
    assert file["samples"][1]["response"] == "response 0"
    assert file["step"] == 4


def test_a_file_of_thousands_of_faults_stays_readable(directory):
    count, length = ROWS + 20, PLACES + 30
    masks = [[True] * length] * count
    nan = column([[np.nan] * length] * count)
    error, file = caught(make_batch(masks, values=nan), directory, step=9)
    assert len(error.sample_ids) == len(file["sample_ids"]) == count
    assert len(file["samples"]) == ROWS
    assert len(file["samples"][0]["faults"][0]["positions"]) == PLACES
    assert "and 2" in error.message


@given(
    st.lists(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=4), min_size=1, max_size=6)
)
def test_it_finds_exactly_the_samples_of_a_plain_loop(directory, rows):
    """(masked in, finite) for each token."""
    masks = [[kept for kept, _ in row] for row in rows]
    values = column([[1.0 if fine else np.nan for _, fine in row] for row in rows])
    expected = tuple(
        f"train.e0.p{i}.a0.s0"
        for i, row in enumerate(rows)
        if any(kept and not fine for kept, fine in row)
    )
    batch = make_batch(masks, ref_log_probs=values)
    if not expected:
        check(batch, directory)
        return
    assert caught(batch, directory)[0].sample_ids == expected


def test_an_engines_error_gets_the_same_file(directory, make_sample):
    name = make_sample(3).sample_id
    told = with_fault_file(
        NumericsError("the loss is nan", hint="lower it", sample_ids=[name]),
        step=step_of(6, [make_sample(3)]),
        directory=directory,
    )
    file = json.loads((Path(directory.path) / "faults" / "step_6.json").read_text())
    assert file["sample_ids"] == [name]
    assert file["samples"][0]["response"] == "response 0"
    assert told.sample_ids == (name,)
    assert told.hint == "lower it"
    assert "step_6.json" in told.message


@pytest.mark.parametrize("updates", [0, 1])
def test_unchanged_weights_are_claimed_before_the_first_update_alone(tmp_path, updates):
    run, step = RunDirectory.create(tmp_path / "run"), step_of(2)
    step.updates["actor"] = updates
    batch = make_batch([[True]], scores=np.array([np.nan], np.float32))
    with pytest.raises(NumericsError) as error:
        check_finite(batch, ("scores",), step=step, directory=run)
    assert ("No weight was changed" in str(error.value)) == (updates == 0)
