"""The samples of a step that rules keep: the choice, the recorded rules, the columns, and the limit of bytes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

from dovetail.batch import Ragged
from dovetail.hooks import Observers
from dovetail.telemetry.jsonl import read_rows
from dovetail_rollouts.columns import to_batch
from dovetail_rollouts.sample_files import KeptSamples, chosen


class Words:
    """A tokenizer whose token i is `ti`."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [0]}

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(f"t{i}" for i in ids)


@pytest.fixture
def group(make_sample):
    """Four samples of one prompt; the last could not be scored."""
    rows = ((0.5, 3), (1.0, 4), (0.0, 9), (None, 2))
    return [make_sample(0, n, score, length=length) for n, (score, length) in enumerate(rows)]


@pytest.fixture
def observe(tmp_path):
    (tmp_path / "samples").mkdir()

    def begin(size: int = 1 << 20, shown: int = 2) -> Observers:
        observers = Observers()
        observers.add(KeptSamples(Words(), size))
        config = SimpleNamespace(trainer=SimpleNamespace(samples_per_step=shown))
        observers.hook.run_started(
            config=config, plan=None, directory=tmp_path, start_step=0, total_steps=9
        )
        return observers

    return begin


def take(observers: Observers, step: int, samples: Any, **columns: Any) -> None:
    batch = to_batch(samples, temperature=1.0)
    rows = len(batch)
    given = {name: batch["response_ids"].with_values(np.resize(np.float32(values), batch["response_ids"].total)) if name != "advantages" else np.float32(values) for name, values in columns.items()}  # fmt: skip
    assert all(len(values) == rows for values in given.values())
    observers.hook.rollout_finished(step=step, samples=samples)
    observers.hook.stage_finished(
        step=step, stage="advantage", before=batch, after=batch.with_columns(given)
    )
    observers.hook.update_finished(step=step, metrics={})
    assert not observers.failures


def test_a_row_says_why_it_was_kept(observe, group, tmp_path):
    take(observe(), 3, group, advantages=[0.1, 0.7, -0.9])
    rows = read_rows(tmp_path / "samples" / "kept_3.jsonl")
    assert {row["sample_id"][-1]: row["kept"] for row in rows} == {
        "1": ["best"],
        "2": ["worst", "longest", "advantage"],
        "3": ["failed"],
        "0": [],
    }
    by_id = {row["sample_id"][-1]: row for row in rows}
    assert by_id["2"]["advantage"] == pytest.approx(-0.9)
    assert [by_id[name]["trained"] for name in "123"] == [True, True, False]
    assert by_id["3"]["failure"]["kind"] == "timeout"
    assert by_id["0"].keys() == {"sample_id", "kept", "advantage"}
    assert by_id["1"]["response"] == group[1].text


def test_a_kept_sample_has_its_tokens_with_what_stages_computed(observe, group, tmp_path):
    observers = observe()
    batch = to_batch(group, temperature=1.0)
    per_token = Ragged.from_list([[0.5] * 3, [0.0, 1.0, 2.0, 3.0], [-1.0] * 9], dtype=np.float32)
    values = {"advantages": per_token, "old_log_probs": per_token}
    observers.hook.rollout_finished(step=1, samples=group)
    observers.hook.stage_finished(
        step=1, stage="advantage", before=batch, after=batch.with_columns(values)
    )
    observers.hook.update_finished(step=1, metrics={})
    best = read_rows(tmp_path / "samples" / "kept_1.jsonl")[0]
    assert best["tokens"]["text"] == ["t0", "t1", "t2", "t3"]
    assert best["tokens"]["old_log_probs"] == best["tokens"]["advantages"] == [0.0, 1.0, 2.0, 3.0]
    assert best["advantage"] == pytest.approx(1.5)


@pytest.fixture
def three_groups(make_sample):
    """Four samples of each of three prompts; the rules choose samples of the first and the last prompt."""
    scores = ((0.5, 0.5, 0.5, 1.0), (0.5,) * 4, (0.5, 0.0, 0.5, 0.5))
    return [
        make_sample(g, n, s, length=4) for g, row in enumerate(scores) for n, s in enumerate(row)
    ]


def test_a_kept_sample_has_all_other_responses_to_its_prompt_beside_it(
    observe, three_groups, tmp_path
):
    take(observe(shown=2), 1, three_groups, advantages=[0.1] * 3 + [0.7] + [0.0] * 4 + [0.1, -0.2, 0.1, 0.1])  # fmt: skip
    rows = {row["sample_id"]: row for row in read_rows(tmp_path / "samples" / "kept_1.jsonl")}
    kept = {name for name, row in rows.items() if row["kept"]}
    assert kept == {three_groups[3].sample_id, three_groups[9].sample_id}
    light = {s.sample_id for s in three_groups[:2]}
    beside = {three_groups[place].sample_id for place in (2, 8, 10, 11)}
    assert rows.keys() == kept | light | beside
    assert all("response" not in rows[name] for name in light)
    for sample in three_groups:
        if sample.sample_id in beside:
            row = rows[sample.sample_id]
            assert (row["response"], row["trained"]) == (sample.text, True)
            assert row["advantage"] == pytest.approx(0.1)
            assert "tokens" not in row


def test_where_room_is_short_the_kept_samples_stay_and_the_others_of_their_groups_go(
    observe, three_groups, tmp_path
):
    advantages = [0.1] * 3 + [0.7] + [0.0] * 4 + [0.1, -0.2, 0.1, 0.1]
    take(observe(shown=0), 1, three_groups, advantages=advantages)
    path = tmp_path / "samples" / "kept_1.jsonl"
    whole = path.stat().st_size
    ids = [row["sample_id"] for row in read_rows(path)]
    assert len(ids) == 8
    take(observe(32 * (whole - 1), shown=0), 1, three_groups, advantages=advantages)
    assert [row["sample_id"] for row in read_rows(path)] == ids[:-1]


def test_samples_that_are_alike_are_told_apart_by_no_rule(group):
    alike = [attrs.evolve(sample, outcome=group[0].outcome) for sample in [group[0]] * 3]
    assert list(chosen(alike, {})) == []


def test_the_bytes_of_a_run_are_bounded_and_later_steps_still_have_theirs(observe, group, tmp_path):
    size = 40_000
    observers = observe(size)
    for step in range(1, 201):
        take(observers, step, group, advantages=[0.1, 0.7, -0.9])
        files = {int(f.stem[5:]): f.stat().st_size for f in (tmp_path / "samples").iterdir()}
        assert sum(files.values()) <= size
    assert len(files) > 10
    assert max(files) > 180
    (gap,) = set(np.diff(sorted(files)))
    resumed = observe(size)
    for step in range(201, 201 + int(gap)):
        take(resumed, step, group, advantages=[0.1, 0.7, -0.9])
    after = {int(f.stem[5:]) for f in (tmp_path / "samples").iterdir()}
    assert len(after - files.keys()) == 1


def test_a_sample_that_is_too_large_for_a_step_is_left_out(observe, group, tmp_path):
    huge = [attrs.evolve(group[1], text="x" * 9000), *group[2:]]
    take(observe(64_000), 1, huge, advantages=[0.7, -0.9])
    rows = read_rows(tmp_path / "samples" / "kept_1.jsonl")
    assert {row["sample_id"] for row in rows} == {s.sample_id for s in group[2:]}


def test_a_step_of_which_nothing_is_trained_on_keeps_its_failures(observe, group, tmp_path):
    observers = observe()
    observers.hook.rollout_finished(step=1, samples=group[3:])
    observers.hook.update_finished(step=1, metrics={})
    (row,) = read_rows(tmp_path / "samples" / "kept_1.jsonl")
    assert (row["kept"], row["trained"]) == (["failed"], False)
    assert json.dumps(row)
