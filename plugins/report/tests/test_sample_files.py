"""The samples of a run in files beside its report: the choice of samples, updates by a later report, and the limit of bytes."""

from __future__ import annotations

import random

import pytest

from dovetail_report import samples, write_report
from dovetail_report.samples import write_samples


def rows(step, count=2, words=5):
    rng = random.Random(step)
    return [
        {"sample_id": f"train.e0.p{step}.a0.s{number}", "prompt": f"prompt {step}", "response": " ".join(f"{rng.random()}" for _ in range(words)), "score": 0.5}
        for number in range(count)
    ]  # fmt: skip


def names(run):
    return {file.name for file in (run.path / "report").iterdir()}


def times(run):
    return {f.stem: f.stat().st_mtime_ns for f in (run.path / "report").glob("step_*.js")}


def test_a_later_report_writes_what_is_new_or_has_changed(run):
    for step in (1, 2):
        run.write_samples(step, rows(step))
    write_report(run.path)
    before = times(run)
    run.write_samples(3, rows(3))
    run.write_samples(2, [rows(2)[1] | {"kept": ["worst"]}], name="kept")
    write_report(run.path)
    after = times(run)
    assert {name for name in after if before.get(name) != after[name]} == {"step_2", "step_3"}


def test_what_a_run_forgets_when_it_is_resumed_leaves_the_report(run):
    for step in (1, 2, 3):
        run.write_samples(step, rows(step))
    write_report(run.path)
    run.rewind(1)
    write_report(run.path)
    assert names(run) == {"index.js", "step_1.js"}


def test_rows_of_one_sample_are_one_sample(run, samples_of):
    first, second = rows(1)
    run.write_samples(1, [first, second])
    kept = first | {"kept": ["best"], "advantage": 0.5, "trained": True}
    alone = {"sample_id": second["sample_id"], "kept": [], "advantage": -0.5}
    lost = {"sample_id": "elsewhere", "kept": [], "advantage": 1.0}
    other = rows(9)[0] | {"kept": ["failed"], "trained": False, "failure": {"kind": "x"}}
    run.write_samples(1, [kept, alone, lost, other], name="kept")
    found = samples_of(run)
    assert [(s["kept"], s["advantage"]) for s in found] == [
        (["best"], 0.5),
        ([], -0.5),
        (["failed"], None),
    ]
    assert len({s["group"] for s in found}) == 2


def test_many_steps_and_bytes_are_bounded_and_the_ends_stay(run, monkeypatch):
    monkeypatch.setattr(samples, "_MOST_FILES", 40)
    for step in range(1, 102):
        run.write_samples(step, rows(step))
    assert write_samples(run.path).every == 4
    assert {"step_1.js", "step_4.js", "step_101.js"} < names(run)
    assert len(names(run)) == 28
    monkeypatch.setattr(samples, "_MOST_BYTES", 9000)
    write_samples(run.path)
    size = sum(f.stat().st_size for f in (run.path / "report").glob("step_*.js"))
    assert 4000 < size <= 9000
    assert {"step_1.js", "step_101.js"} < names(run)


def test_long_texts_are_cut_before_steps_are_left_out(run, samples_of, monkeypatch):
    for step in range(1, 11):
        run.write_samples(step, rows(step, words=90))
    monkeypatch.setattr(samples, "_MOST_BYTES", 17_000)
    assert write_samples(run.path).every == 1
    shown = samples_of(run)[0]["response"]
    written = rows(1, words=90)[0]["response"]
    assert "more characters" in shown
    assert (shown[:100], shown[-100:]) == (written[:100], written[-100:])


@pytest.mark.parametrize("content", ["", "dovetail(", 'dovetail("index", "AAAA");\n', "\ud800"])
@pytest.mark.parametrize("name", ["index", "step_1"])
def test_a_damaged_file_of_an_earlier_report_is_written_anew(run, samples_of, name, content):
    run.write_samples(1, rows(1))
    write_report(run.path)
    file = run.path / "report" / f"{name}.js"
    file.write_bytes(content.encode(errors="surrogatepass"))
    assert len(samples_of(run)) == 2


@pytest.mark.parametrize(
    "lines",
    [
        b"",
        b"\xff\xfe\n",
        b'{"prompt": "cut off',
        b"[1]\n3\n",
        b'{"prompt": {"a": [1]}, "response": [3], "score": "high", "tokens": [1], "kept": 3}\n',
        b'{"prompt": "p", "response": "r", "score": NaN, "response_length": 1e999, "kept": ["worst", 3]}\n',
        b'{"prompt": "p", "response": "r", "score": 1e30, "tokens": {"text": ["a"], "mask": [1], "log_probs": [null]}}\n',
        b'{"prompt": "p", "response": "r", "tokens": {"text": "ab"}, "components": {"a": "b"}, "trajectory": {}}\n',
    ],
)
def test_whatever_a_file_of_samples_holds_there_is_a_report(run, samples_of, lines):
    run.write_samples(2, rows(2))
    (run.path / "samples" / "step_1.jsonl").write_bytes(lines)
    (run.path / "samples" / "kept_1.jsonl").write_bytes(lines)
    (run.path / "samples" / "step_x.jsonl").write_bytes(lines)
    assert len(samples_of(run)) <= 2
    assert len(samples_of(run, "step_2")) == 2


def test_a_report_of_many_samples_is_written_in_seconds_and_again_in_less(run):
    for step in range(1, 201):
        run.write_samples(step, rows(step, 16, 20))
    found = write_samples(run.path)
    assert (found.count, found.every) == (3200, 1)
    before = times(run)
    write_samples(run.path)
    assert times(run) == before
