"""The console shows a run: plain lines in a log, and a live display on a terminal, which is always restored."""

from __future__ import annotations

import io
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from dovetail.checkpoint import CheckpointStore
from dovetail.interfaces import PluginContext
from dovetail.telemetry import RunDirectory
from dovetail_console.config import ConsoleConfig
from dovetail_console.next_commands import next_commands
from dovetail_console.tracker import ConsoleTracker
from dovetail_diagnosis.figures import PLUS_MINUS

CLEARS = "\x1b[2J\x1b[31m"
METRICS = {
    "reward/mean": 0.4125,
    "actor/kl": 0.0012,
    "actor/entropy": 1.25,
    "response_length/mean": 31.5,
    "actor/grad_norm": 0.8,
    "time/step": 1.42,
}


def tracker_on(stream, *, terminal=False, **options):
    console = Console(file=stream, force_terminal=terminal, width=100, highlight=False)
    return ConsoleTracker(ConsoleConfig(name="console", **options), PluginContext(), console)


def test_a_log_gets_one_plain_line_a_step_and_nothing_else(tmp_path):
    stream = io.StringIO()
    tracker = tracker_on(stream)
    tracker.run_started(None, None, tmp_path, 0, 20)
    tracker.metrics_logged(0, {"val/mean@1": 0.35, "val/acc@1": 0.31})
    for step in (1, 2):
        tracker.phase_started(step, "rollout")
        tracker.metrics_logged(step, METRICS)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0] == "step 0/20  accuracy 31.0%"
    assert lines[1].startswith(
        "step 1/20  reward 0.412  kl 0.0012  entropy 1.250  length 31.5  grad_norm 0.800  step_time 1.42 s  left "
    )
    assert "\x1b" not in stream.getvalue()


def test_figures_that_are_missing_or_not_finite_are_no_trouble():
    stream = io.StringIO()
    tracker = tracker_on(stream)
    tracker.run_started(None, None, None, 0, 0)
    tracker.metrics_logged(1, {})
    tracker.metrics_logged(2, {"reward/mean": float("nan"), "actor/grad_norm": float("inf")})
    assert stream.getvalue().splitlines() == ["step 1", "step 2  reward nan  grad_norm inf"]


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        ({"reward/kl_penalty": 0.25}, "step 1  kl 0.250"),
        ({"reward/kl_penalty": 0.25, "actor/kl": 0.5}, "step 1  kl 0.500"),
        (
            {"critic/value_loss": 0.5, "critic/explained_variance": -0.25},
            "step 1  value_loss 0.500  expl_var -0.250",
        ),
        ({"filter/kept_groups": 8.0, "filter/rounds": 2.0}, "step 1  kept 8  rounds 2"),
    ],
)
def test_the_line_tells_what_the_algorithm_of_the_run_measures(metrics, shown):
    stream = io.StringIO()
    tracker = tracker_on(stream)
    tracker.run_started(None, None, None, 0, 0)
    tracker.metrics_logged(1, metrics)
    assert stream.getvalue().strip() == shown


def test_the_summary_names_the_best_checkpoint_and_what_was_averaged(tmp_path):
    stream = io.StringIO()
    tracker = tracker_on(stream)
    tracker.run_started(None, None, tmp_path, 0, 5)
    path = str(tmp_path / "checkpoints" / "step_3")
    tracker.run_finished(
        {
            "accuracy_metric": "val/mean@4",
            "accuracy_before": 0.5,
            "accuracy_after": 0.6,
            "best": {"step": 3, "metric": "val/mean@4", "value": 0.648, "path": path},
        }
    )
    lines = [line.strip() for line in stream.getvalue().splitlines()]
    assert f"Best           step 3, val/mean@4 0.648  {path}" in lines
    assert any(re.fullmatch(r"mean@4 before +0\.500", line) for line in lines)
    assert "ccuracy" not in stream.getvalue()


def test_further_metrics_can_be_asked_for():
    stream = io.StringIO()
    tracker = tracker_on(stream, metrics=("actor/clip_frac",))
    tracker.run_started(None, None, None, 0, 5)
    tracker.metrics_logged(1, {"actor/clip_frac": 0.25})
    assert "actor/clip_frac 0.250" in stream.getvalue()


def plan_double(*, generates=False):
    """The parts of a plan that the console reads."""
    config = SimpleNamespace(seed=1, data=SimpleNamespace(val_files=["val.jsonl"]))
    return SimpleNamespace(
        generates=generates,
        key_figures={},
        models=[SimpleNamespace(head="lm")],
        facts=SimpleNamespace(config=config),
    )


@pytest.mark.parametrize("saved", [0, 1, 2])
@pytest.mark.parametrize("status", ["completed", "failed"])
def test_the_commands_to_type_next_fit_how_the_run_ended(tmp_path, status, saved):
    run = RunDirectory(tmp_path / "first_seed_1")
    store = CheckpointStore(run.checkpoints)
    for step in range(1, saved + 1):
        store.save(step, lambda folder: (folder / "x").write_text("x"))
    (tmp_path / "first_seed_2").mkdir()
    found = next_commands(plan_double(generates=True), run, {"status": status, "model": None})
    path, which = run.path, {0: None, 1: "", 2: "@all"}[saved]
    expected = [f"config show {path}/config.yaml"]
    if status == "completed":
        expected = [f"train {path}/config.yaml experiment=first_seed_3 seed=3"]
        expected = ([] if which is None else [f"eval {path}{which}"]) + expected
    elif saved:
        expected = [f"resume {path}", *expected]
    assert [command.partition(" ")[2] for command in found] == expected


def test_the_summary_says_where_everything_is_and_what_to_do_next(tmp_path):
    stream = io.StringIO()
    tracker = tracker_on(stream)
    directory = tmp_path / ("a-long-name-" * 12) / "[first]"
    directory.mkdir(parents=True)
    (directory / "report.html").touch()
    plan = plan_double()
    tracker.run_started(plan.facts.config, plan, directory, 0, 20)
    tracker.run_finished(
        {
            "status": "completed",
            "model": "final",
            "steps": 20,
            "total_steps": 20,
            "seed": 1,
            "accuracy_metric": "val/acc@1",
            "accuracy_before": 0.31,
            "accuracy_after": 0.875,
            "train_seconds": 125.0,
        }
    )
    lines = [line.strip() for line in stream.getvalue().splitlines()]
    assert f"Run directory  {directory}" in lines
    assert f"Report         {directory / 'report.html'}" in lines
    assert "Next stage     docs/sft.md#grpo-from-there" in lines
    *_, chat, train = lines
    assert chat.endswith("dovetail chat final")
    config = shlex.quote(f"{directory}/config.yaml")
    assert train.endswith(f"dovetail train {config} 'experiment=[first]_seed_2' seed=2")
    table = "\n".join(lines)
    assert re.search(r"Accuracy before +31\.0%", table)
    assert re.search(r"Accuracy after +87\.5%", table)
    assert re.search(r"Training time +2 min 05 s", table)
    assert re.search(r"Steps +20 of 20", table)
    assert re.search(r"Seed +1\n", table)


def test_the_live_display_shows_progress_figures_and_their_course():
    stream = io.StringIO()
    tracker = tracker_on(stream, terminal=True)
    tracker.run_started(None, None, Path("runs/arithmetic/first"), 0, 4)
    for step, reward in ((1, 0.1), (2, 0.5), (3, 0.9)):
        tracker.phase_started(step - 1, "rollout")
        tracker.metrics_logged(step, {**METRICS, "reward/mean": reward})
    tracker.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    last = shown[shown.rindex("arithmetic/first") :]
    assert "step 3/4" in last
    assert "rollout" in last
    assert re.search(r"Reward +0\.900 +\+0\.8 +▁▅█", last)


@pytest.mark.parametrize("terminal", [True, False])
def test_closing_twice_and_without_a_beginning_is_fine(terminal):
    stream = io.StringIO()
    tracker = tracker_on(stream, terminal=terminal)
    tracker.close()
    tracker.run_started(None, None, None, 0, 1)
    tracker.close()
    tracker.close()
    tracker.metrics_logged(1, METRICS)
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h")


@pytest.mark.parametrize(
    "ending", ["raise ValueError('boom')", "os.kill(os.getpid(), signal.SIGINT)"]
)
def test_the_terminal_is_restored_although_a_run_dies(ending):
    script = (
        "import os, signal, time\n"
        # Background jobs of a shell may inherit an ignored SIGINT.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from dovetail_console.config import ConsoleConfig\n"
        "from dovetail.interfaces.plugin import PluginContext\n"
        "from dovetail_console.tracker import ConsoleTracker\n"
        "tracker = ConsoleTracker(ConsoleConfig(name='console'), PluginContext())\n"
        "tracker.run_started(None, None, None, 0, 3)\n"
        "tracker.metrics_logged(1, {'reward/mean': 0.5})\n"
        f"{ending}\n"
        "time.sleep(30)\n"
    )
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # raised on Linux if the pseudo-terminal is closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    assert process.wait() in (1, 128 + signal.SIGINT, -signal.SIGINT)
    assert b"Reward" in shown
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")


def test_the_console_tracker_shows_controls(capsys):
    tracker = ConsoleTracker(ConsoleConfig(name="console", metrics=[CLEARS]), PluginContext())
    tracker.run_started(None, None, None, 0, 0)
    tracker.metrics_logged(1, {CLEARS: 1.0})
    tracker.run_finished({"note": CLEARS})
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert shown.count(r"\x1b[2J\x1b[31m") == 2


def with_ends(name, value, half):
    return {name: value, f"{name}/low": value - half, f"{name}/high": value + half}


VALIDATION = {
    **with_ends("val/mean@4", 0.5, 0.0213),
    **with_ends("val/pass@4", 0.75, 0.03),
    **with_ends("val/openai/gsm8k/mean@4", 0.4, 0.1),
    "val/failures": 3.0,
}


def test_a_line_of_the_log_holds_the_mean_and_its_interval_which_the_first_one_explains():
    stream = io.StringIO()
    console = Console(file=stream, width=100, highlight=False)
    tracker = ConsoleTracker(ConsoleConfig(name="console"), PluginContext(), console)
    tracker.run_started(None, None, None, 0, 20)
    tracker.metrics_logged(0, VALIDATION)
    tracker.metrics_logged(4, VALIDATION)
    first, second = stream.getvalue().splitlines()
    assert first == f"step 0/20  mean@4 0.500 ± 0.021  ({PLUS_MINUS})"
    assert second.startswith("step 4/20  mean@4 0.500 ± 0.021  left ")
    assert "95% bootstrap" not in second


def test_the_live_table_shows_the_interval_too():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, highlight=False)
    tracker = ConsoleTracker(ConsoleConfig(name="console"), PluginContext(), console)
    tracker.run_started(None, None, None, 0, 20)
    tracker.metrics_logged(0, VALIDATION)
    tracker.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert re.search(r"Validation mean@4 +0\.500 ± 0\.021", shown)
    assert PLUS_MINUS in shown
