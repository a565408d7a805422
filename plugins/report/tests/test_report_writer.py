"""The report is written during a run, at the end of the run, and by `dovetail report` at any time."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from dovetail.cli.main import main
from dovetail.hooks import Observers
from dovetail.telemetry.jsonl import append_rows
from dovetail_report import observer
from dovetail_report.observer import ReportWriter


@pytest.fixture
def observers(finished):
    told = Observers()
    told.add(ReportWriter())
    told.hook.run_started(
        config=None, plan=None, directory=finished.path, start_step=0, total_steps=6
    )
    return told


@pytest.fixture
def clock(monkeypatch):
    """A clock in seconds that the test advances."""
    now = [0.0]
    monkeypatch.setattr(observer, "monotonic", lambda: now[0])
    return now


def test_a_run_under_way_has_a_report_that_is_at_most_half_a_minute_old(clock, observers, finished):
    observers.hook.step_finished(step=1, metrics={})
    assert not finished.report.exists()
    clock[0] = 31.0
    observers.hook.step_finished(step=2, metrics={})
    assert "arithmetic/first" in finished.report.read_text()
    finished.report.unlink()
    clock[0] = 60.0
    observers.hook.step_finished(step=3, metrics={})
    assert not finished.report.exists()
    assert not observers.failures


def test_reports_that_take_long_are_written_less_often(clock, observers, finished, monkeypatch):
    written = []

    def slow(directory):
        written.append(clock[0])
        clock[0] += 3.0

    monkeypatch.setattr(observer, "write_report", slow)
    for _ in range(400):
        clock[0] += 1.0
        observers.hook.step_finished(step=1, metrics={})
    assert written == [30.0, 183.0, 336.0]


def test_the_end_of_a_run_is_reported_at_once(observers, finished):
    observers.hook.run_finished(summary={})
    assert "completed" in finished.report.read_text()
    assert not observers.failures


def test_a_run_that_was_killed_is_reported_by_the_command(run):
    append_rows(run.metrics, [{"step": 1, "reward/mean": 0.25}])
    done = CliRunner().invoke(main, ["report", str(run.path)])
    assert (done.exit_code, done.stdout) == (0, f"{run.report}\n")
    assert 'class="pill killed"' in run.report.read_text()


def test_a_resumed_run_does_not_have_the_status_of_before(finished):
    finished.write_json("summary.json", {"status": "stopped", "steps": 5, "total_steps": 9})
    CliRunner().invoke(main, ["report", str(finished.path)])
    page = finished.report.read_text().partition("</style>")[2]
    assert 'class="pill killed"' in page
    assert "pill stopped" not in page
    assert "6 of 9" in page


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl", "events.jsonl"])
@pytest.mark.parametrize("content", [b"\xff", b"[]", b'{"steps": "x", "step": []}', b"[" * 99_999])
def test_a_damaged_file_does_not_stop_a_report(finished, name, content):
    (finished.path / name).write_bytes(content)
    done = CliRunner().invoke(main, ["report", str(finished.path)])
    assert done.exit_code == 0, done.output
    assert "data-chart=" in finished.report.read_text() or name == "metrics.jsonl"


def test_controls_of_the_path_are_shown_and_not_carried_out(finished, tmp_path):
    path = finished.path.rename(tmp_path / "\x1b]0;x\x07")
    done = CliRunner().invoke(main, ["report", str(path)])
    assert done.stdout.strip().endswith(r"\x1b]0;x\x07/report.html")
    assert not {"\x1b", "\x07"} & set(done.output)


def test_text_that_utf_8_can_not_hold_is_kept(finished, samples_of):
    finished.write_samples(7, [{"sample_id": "a", "prompt": "p", "response": "half \ud800"}])
    (sample,) = samples_of(finished, "step_7")
    assert sample["response"] == "half \ud800"


def test_a_run_under_way_says_so(run):
    append_rows(run.metrics, [{"step": 1, "reward/mean": 0.25}])
    with run.held():
        CliRunner().invoke(main, ["report", str(run.path)])
    assert 'class="pill running"' in run.report.read_text()


@pytest.mark.parametrize("place", ["missing", "."])
def test_what_is_no_run_directory_is_refused(tmp_path, place):
    done = CliRunner().invoke(main, ["report", str(tmp_path / place)])
    assert done.exit_code == 2
    assert "run directory" in done.stderr
    assert not (tmp_path / "report.html").exists()


def test_a_directory_that_cant_be_written_to_is_named(finished):
    finished.report.mkdir()
    done = CliRunner().invoke(main, ["report", str(finished.path)])
    assert done.exit_code == 2
    assert str(finished.report) in done.stderr
