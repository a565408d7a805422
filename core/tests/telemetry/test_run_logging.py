"""Events go to the run directory as JSON, warnings to stderr as text, and libraries' logs join them."""

from __future__ import annotations

import logging
import math
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from structlog.contextvars import bound_contextvars

from dovetail.telemetry.jsonl import read_rows
from dovetail.telemetry.logging import bind_process, close_logging, setup_logging


@pytest.fixture
def logger(run):
    yield setup_logging(run)
    close_logging()


def test_an_event_is_one_line_of_json(run, logger, capsys):
    logger.info("checkpoint_saved", step=4, path=run.path / "checkpoints")
    (event,) = read_rows(run.events)
    assert event["event"] == "checkpoint_saved"
    assert event["level"] == "info"
    assert event["step"] == 4
    assert event["path"] == str(run.path / "checkpoints")
    assert event["timestamp"].endswith("Z")
    assert capsys.readouterr().err == ""


def test_a_warning_is_shown_to_the_person_too(run, logger, capsys):
    bind_process(step=7)
    logger.warning("tracker_failed", tracker="wandb", error="no network")
    shown = capsys.readouterr().err
    assert shown == "warning: tracker_failed  step=7  tracker=wandb\n  no network\n"
    assert read_rows(run.events)[0]["step"] == 7


def test_what_python_says_of_the_code_of_libraries_is_left_out(run, logger, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        compile("x = 1 is 1", "library.py", "exec")
        warnings.warn("a weight is missing", UserWarning, stacklevel=1)
    shown = capsys.readouterr().err
    assert "weight is missing" in shown
    assert "SyntaxWarning" not in shown


def test_markup_in_a_message_is_left_alone(run, logger, capsys):
    logger.warning("the path [red]/tmp/[x][/red] is odd")
    assert "[red]/tmp/[x][/red]" in capsys.readouterr().err


def test_controls_in_a_message_are_shown_and_not_carried_out(run, logger, capsys):
    logger.warning("reward_failed \x1b[2J", sample="\x1b[1m", error="\x9b31m")
    shown = capsys.readouterr().err
    assert r"reward_failed \x1b[2J  sample=\x1b[1m" in shown
    assert r"\x9b31m" in shown
    assert not {"\x1b", "\x9b"} & set(shown)
    assert read_rows(run.events)[0]["error"] == "\x9b31m"


def test_an_exception_keeps_its_traceback_in_the_file_alone(run, logger, capsys):
    try:
        raise ValueError("no such column")
    except ValueError:
        logger.exception("step_failed")
    (event,) = read_rows(run.events)
    assert event["exception"].startswith("Traceback")
    assert event["exception"].endswith("ValueError: no such column")
    shown = capsys.readouterr().err
    assert "step_failed" in shown
    assert "no such column" in shown
    assert "Traceback" not in shown


def test_standard_loggers_join(run, logger, capsys):
    logging.getLogger("dovetail.data").info("filtered %d prompts", 3)
    logging.getLogger("somelibrary").info("chatter")
    logging.getLogger("somelibrary").warning("trouble in %s", "here")
    events = [(row["logger"], row["level"], row["event"]) for row in read_rows(run.events)]
    assert events == [
        ("dovetail.data", "info", "filtered 3 prompts"),
        ("somelibrary", "warning", "trouble in here"),
    ]
    assert capsys.readouterr().err == "warning: trouble in here\n"


def test_python_warnings_are_logged(run, logger, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        close_logging()
        setup_logging(run)
        warnings.warn("deprecated thing", UserWarning, stacklevel=1)
    (event,) = read_rows(run.events)
    assert event["logger"] == "py.warnings"
    assert "deprecated thing" in event["event"]


def test_setting_up_again_replaces_the_first(run, logger, capsys):
    setup_logging(run).warning("once")
    assert capsys.readouterr().err == "warning: once\n"
    assert len(read_rows(run.events)) == 1


def test_closing_puts_everything_back(run):
    root = list(logging.getLogger().handlers)
    level = logging.getLogger("dovetail").level
    logger = setup_logging(run)
    close_logging()
    close_logging()
    assert logging.getLogger().handlers == root
    assert logging.getLogger("dovetail").level == level
    logger.info("after the end")
    assert read_rows(run.events) == []


def test_a_directory_given_back_early_does_not_return(run, logger, capsys):
    import shutil

    shutil.rmtree(run.path)
    logger.warning("too late")
    assert not run.path.exists()
    assert capsys.readouterr().err == "warning: too late\n"


def test_a_librarys_warning_carries_run_step_role_and_rank_also_from_its_own_thread(
    run, logger, capsys
):
    bind_process(step=3)

    def work() -> None:
        logging.getLogger("somelibrary").warning("trouble")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    with bound_contextvars(role="actor", rank=1):
        work()
    first, second = read_rows(run.events)
    bound = {"run": "arithmetic/first", "step": 3, "logger": "somelibrary", "level": "warning"}
    assert first.items() >= bound.items()
    assert "role" not in first
    assert second.items() >= {**bound, "role": "actor", "rank": 1}.items()
    assert capsys.readouterr().err.splitlines() == [
        "warning: trouble  step=3",
        "warning: trouble  step=3  role=actor  rank=1",
    ]


def test_a_line_that_a_killed_run_left_unfinished_spoils_no_other(run):
    run.events.write_text('{"event": "torn')
    setup_logging(run).warning("again")
    close_logging()
    assert [row["event"] for row in read_rows(run.events)] == ["again"]


def test_numbers_that_json_lacks_are_null(run, logger):
    logger.info("measured", loss=math.nan, sizes=np.array([1, 2]))
    (event,) = read_rows(run.events)
    assert (event["loss"], event["sizes"]) == (None, [1, 2])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_behind_the_event_log_is_said_once_and_raises_nothing(tmp_path, capsys):
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    logger = setup_logging(tmp_path)
    for step in range(3):
        logger.info("event", step=step)
    close_logging()
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: ")
    assert "events.jsonl can't be written:" in line
