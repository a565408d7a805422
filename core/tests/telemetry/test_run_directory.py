"""A run directory is claimed once, reopened by resume, and rewound to the step resumed from."""

from __future__ import annotations

import json
import math
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.errors import RunDirectoryError
from dovetail.telemetry import RunDirectory
from dovetail.telemetry.jsonl import append_rows, read_rows
from dovetail.telemetry.logging import bound_logs


def test_a_new_directory_is_made_with_its_folders(tmp_path):
    run = RunDirectory.create(tmp_path / "runs" / "p" / "e")
    assert run.checkpoints.is_dir()
    assert Path(run) == tmp_path / "runs" / "p" / "e"
    assert RunDirectory.open(run.path).path == run.path


def test_an_empty_folder_that_is_there_already_is_taken(tmp_path):
    assert RunDirectory.create(tmp_path).path == tmp_path


def test_a_directory_of_another_run_is_refused_with_what_is_there(finished):
    (finished.checkpoints / "step_6").mkdir()
    with pytest.raises(RunDirectoryError) as caught:
        RunDirectory.create(finished.path)
    message = str(caught.value)
    assert f"{str(finished.path)!r} already holds a run" in message
    assert "6 steps logged" in message
    assert "last checkpoint step_6" in message
    assert f"dovetail resume {finished.path}" in message
    assert "experiment=NAME" in message
    assert isinstance(caught.value, FileExistsError)


def test_foreign_files_are_not_written_among(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RunDirectoryError, match=r"belong to a run: thesis\.tex"):
        RunDirectory.create(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thesis.tex"]


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "e").write_text("")
    with pytest.raises(RunDirectoryError, match="a file has this path"):
        RunDirectory.create(tmp_path / "e")


def test_a_parent_that_is_a_file_is_an_error_with_a_remedy(tmp_path):
    (tmp_path / "p").write_text("")
    with pytest.raises(RunDirectoryError, match="output_dir=PATH"):
        RunDirectory.create(tmp_path / "p" / "e")


def test_of_processes_that_claim_at_once_one_succeeds(tmp_path):
    script = (
        "import sys\n"
        "from dovetail.errors import RunDirectoryError\n"
        "from dovetail.telemetry import RunDirectory\n"
        "sys.stdin.readline()\n"
        "try:\n"
        "    RunDirectory.create(sys.argv[1])\n"
        "except RunDirectoryError as error:\n"
        "    sys.exit(7 if 'already holds a run' in str(error) else 1)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "contested")]
    contenders = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(4)]
    for contender in contenders:
        contender.stdin.write(b"\n")
        contender.stdin.flush()
    assert sorted(contender.wait() for contender in contenders) == [0, 7, 7, 7]
    for contender in contenders:
        contender.stdin.close()


def test_opening_what_is_not_there_names_the_runs_that_are(finished):
    missing = finished.path.parent / "frist"
    with pytest.raises(RunDirectoryError) as caught:
        RunDirectory.open(missing)
    assert f"there is no run directory {str(missing)!r}" in str(caught.value)
    assert f"run directories near this path: {finished.path}" in str(caught.value)


def test_opening_an_ordinary_folder_says_what_it_holds(tmp_path):
    (tmp_path / "notes.md").write_text("")
    with pytest.raises(RunDirectoryError, match=r"not a run directory.*it holds notes\.md"):
        RunDirectory.open(tmp_path)


def test_json_is_replaced_whole_and_holds_no_nan(run):
    run.write_json("summary.json", {"accuracy": math.nan, "steps": 3})
    assert json.loads(run.summary.read_text()) == {"accuracy": None, "steps": 3}
    assert run.read_json("summary.json")["steps"] == 3

    with pytest.raises(TypeError):
        run.write_text("summary.json", None)
    assert run.read_json("summary.json")["steps"] == 3
    assert [path.name for path in run.path.iterdir() if path.suffix == ".tmp"] == []


def test_text_that_utf_8_can_not_hold_is_replaced_in_text_and_kept_in_json(run):
    run.write_text("page.html", "\ud800 \ud83d\ude00")
    assert (run.path / "page.html").read_text(encoding="utf-8") == "\ufffd 😀"
    run.write_json("summary.json", {"\udc80": "\ud800"})
    assert run.read_json("summary.json") == {"\udc80": "\ud800"}


def test_a_torn_json_file_is_an_error_that_names_it(run):
    (run.path / "plugins.lock.json").write_text('{"plugins": [')
    with pytest.raises(RunDirectoryError, match=r"can't read '.*plugins\.lock\.json'"):
        run.read_json("plugins.lock.json")


def test_rewinding_forgets_what_came_after_the_step(finished):
    finished.write_samples(4, [{"response": "held out"}], name="validation")
    finished.write_samples(5, [{"response": "held out"}], name="validation")
    finished.rewind(4)
    assert [row["step"] for row in read_rows(finished.metrics)] == [0, 1, 2, 3, 4]
    assert sorted(file.stem for file in (finished.path / "samples").iterdir()) == [
        *(f"step_{step}" for step in range(1, 5)),
        "validation_4",
    ]


def test_rewinding_drops_the_line_that_a_kill_tore(finished):
    with finished.metrics.open("a") as file:
        file.write('{"step": 2, "rew')
    finished.rewind(2)
    append_rows(finished.metrics, [{"step": 3}])
    lines = finished.metrics.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]


def test_rewinding_to_the_end_changes_nothing(finished):
    before = finished.metrics.read_bytes()
    finished.rewind(6)
    assert finished.metrics.read_bytes() == before


def test_rewinding_a_run_that_logged_nothing_is_fine(run):
    run.rewind(0)
    assert read_rows(run.metrics) == []


def test_samples_of_a_step_are_replaced_not_doubled(run):
    run.write_samples(1, [{"response": "a"}, {"response": "b"}])
    run.write_samples(1, [{"response": "c"}])
    assert read_rows(run.path / "samples" / "step_1.jsonl") == [{"response": "c"}]


def test_a_file_that_can_not_be_written_is_named_and_the_old_one_stays(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    run.write_text("samples/step_1.jsonl", "old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(RunDirectoryError, match=r"step_1\.jsonl can't.*large"):
            run.write_text("samples/step_1.jsonl", "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [file.name for file in (run.path / "samples").iterdir()] == ["step_1.jsonl"]
    assert (run.path / "samples" / "step_1.jsonl").read_text() == "old"


def test_a_second_start_in_a_living_run_names_its_process_and_advises_to_delete_nothing(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    held = "import sys\nfrom dovetail.telemetry import RunDirectory\nwith RunDirectory.open(sys.argv[1]).held():\n    print(flush=True); input()"
    command = [sys.executable, "-c", held, str(run.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as living:
        living.stdout.readline()
        for start in (RunDirectory.check_free, RunDirectory.create, enter):
            with pytest.raises(RunDirectoryError) as caught:
                start(run.path)
            message = str(caught.value)
            assert f"process {living.pid} on host {socket.gethostname()}" in message
            assert "rm -r" not in message
        living.communicate(b"\n")
    with pytest.raises(RunDirectoryError, match="started 20"):
        RunDirectory.create(run.path)
    enter(run.path)


def enter(path: Path) -> None:
    with RunDirectory.open(path).held():
        pass


def test_what_processes_print_is_bounded_while_they_write(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    small, large = (tmp_path / "logs" / name for name in ("actor-0.jsonl", "rollout-0.out"))
    small.write_text("short\n")
    with large.open("ab", buffering=0) as process:
        for number in range(100):
            process.write(b"line %03d\n" % number)
        bound_logs(tmp_path, 0)
        assert large.stat().st_size == 900
        bound_logs(tmp_path, 90)
        process.write(b"after\n")
        bound_logs(tmp_path, 90)
    assert large.read_text() == "after\n"
    assert (tmp_path / "logs" / "rollout-0.out.1").read_text().splitlines() == [
        f"line {number:03}" for number in range(90, 100)
    ]
    assert small.read_text() == "short\n"
    bound_logs(tmp_path / "without logs", 90)


@pytest.mark.parametrize(
    ("summary", "state"),
    [
        ('{"status": "completed"}', "completed"),
        ('{"status": "stopped"}', "stopped"),
        ('{"status": "running"}', "killed"),
        ('{"steps": 3}', "killed"),
        ("[]", "killed"),
        ("{", "killed"),
        (None, "killed"),
    ],
)
def test_a_run_that_no_process_holds_is_in_the_state_of_its_summary(run, summary, state):
    if summary is not None:
        run.summary.write_text(summary)
    assert run.state == state
    with run.held():
        assert RunDirectory(run.path).state == "running"
