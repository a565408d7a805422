"""The `dovetail` group: lazy commands, commands of plugins, and how errors end."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import dovetail as package
from dovetail.cli import render
from dovetail.cli.further import about
from dovetail.cli.main import COMMANDS, main
from dovetail.errors import (
    CheckpointError,
    ConfigError,
    DiskFullError,
    DovetailError,
    NumericsError,
    RequestRefusedError,
    RewardError,
    RolloutError,
    StopRequested,
    WeightSyncError,
    WorkerError,
)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch):
    """Make `dovetail train` raise an error, and run it."""

    def run(error: BaseException, *, color: bool = False, **variables: str):
        @click.command()
        def command() -> None:
            raise error

        module = type(sys)("failing_command")
        module.command = command
        monkeypatch.setitem(sys.modules, "failing_command", module)
        monkeypatch.setitem(COMMANDS, "train", ("failing_command:command", ""))
        return CliRunner().invoke(main, ["train"], env=variables, color=color)

    return run


def test_help_lists_every_command_and_imports_none(python) -> None:
    code = (
        "import sys\nfrom dovetail.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted(name for name in sys.modules if name.startswith(('dovetail.cli.', 'dovetail.config'))))"
    )
    done = python("-c", code)
    for name in ("train", "resume", "check", "plan", "config", "plugins"):
        assert f"\n  {name} " in done.stdout
    assert "From acme-extras 1.0.0." in done.stdout
    found = "['dovetail.cli.further', 'dovetail.cli.main', 'dovetail.cli.render']"
    assert done.stdout.splitlines()[-1] == found


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            '@click.command()\ndef go(a: int) -> None:\n    """Go there.\n\n    Further on."""\n',
            "Go there.",
        ),
        ('def go():\n    """Go where\n    nobody is. Or not."""\n', "Go where nobody is."),
        ("def go(): ...\n", ""),
        ("go = make_command()\n", ""),
        ("def go(:\n", ""),
        (None, ""),
    ],
)
def test_a_commands_text_is_read_from_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, text: str
) -> None:
    (tmp_path / "gokit").mkdir()
    (tmp_path / "gokit" / "__init__.py").write_text("raise ImportError('it is not to be imported')")
    if source is not None:
        (tmp_path / "gokit" / "command.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert about(EntryPoint("go", "gokit.command:go", "dovetail.cli")) == text


def test_version() -> None:
    done = CliRunner().invoke(main, ["--version"])
    assert done.output == f"dovetail, version {package.__version__}\n"


def test_the_package_runs_as_a_module(python) -> None:
    assert python("-m", "dovetail", "--version").stdout.endswith(f"version {package.__version__}\n")


def test_an_error_is_one_message_without_a_traceback(failing) -> None:
    done = failing(
        ConfigError("seed is 'x'", hint="give a number", problems=["seed is 'x'", "more"])
    )
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr == "error: seed is 'x'\n  - more\n  → give a number\n"


def test_problems_that_a_message_of_several_lines_leaves_out_follow_it(failing) -> None:
    done = failing(ConfigError("one\ntwo\n… and 1 more", problems=["one", "two", "three"]))
    assert done.stderr == "error: one\ntwo\n… and 1 more\n  - three\n"


def test_the_traceback_is_one_variable_away(failing) -> None:
    done = failing(ConfigError("seed is 'x'"), DOVETAIL_TRACEBACK="1")
    assert isinstance(done.exception, ConfigError)


def test_a_requested_stop_exits_with_130(failing) -> None:
    done = failing(StopRequested("stopped after step 3"))
    assert done.exit_code == 130
    assert "stopped after step 3" in done.stderr


def test_ctrl_c_exits_with_130(failing) -> None:
    done = failing(KeyboardInterrupt())
    assert done.exit_code == 130
    assert done.stderr == "interrupted\n"


def test_an_unknown_command_gets_the_nearest(dovetail) -> None:
    done = dovetail("plugin")
    assert done.returncode == 2
    assert "no command 'plugin'; did you mean 'plugins'?" in done.stderr


def test_plugins_bring_commands(dovetail) -> None:
    assert dovetail("greet").stdout == "hello from acme\n"


def test_a_broken_command_is_reported_and_breaks_nothing(dovetail) -> None:
    done = dovetail("shatter")
    assert done.returncode == 2
    assert "error: the command 'shatter' of acme-extras 1.0.0 can't be imported" in done.stderr
    assert "Traceback" not in done.stderr
    assert dovetail("--help").returncode == 0


def test_controls_in_an_error_are_shown_and_not_carried_out(failing) -> None:
    error = ConfigError("it said \x1b[2J", hint="not \x1b[1m", problems=["nor \x9b1m"])
    error.add_note("in \x07")
    error.worker_traceback = "ValueError: \x1b]0;title\x07"
    shown = failing(error).stderr
    for expected in (r"it said \x1b[2J", r"\x1b[1m", r"\x9b1m", r"in \x07", r"\x1b]0;title\x07"):
        assert expected in shown
    assert not {"\x1b", "\x9b", "\x07"} & set(shown)


@pytest.mark.parametrize(("value", "coloured"), [("1", False), ("", True)])
def test_no_color_is_honoured(failing, value, coloured) -> None:
    shown = failing(ConfigError("wrong"), color=True, NO_COLOR=value).stderr
    assert ("\x1b[" in shown) == coloured
    assert "error: " in click.unstyle(shown)


@pytest.mark.parametrize(
    "show",
    [
        render.line,
        render.dump_json,
        lambda text: render.table((text,), [(text,)]),
        lambda text: render.fields([(text, text)]),
    ],
)
def test_controls_in_what_a_command_prints_are_shown_and_not_carried_out(show, capsys) -> None:
    show("\x1b[2J\x9b1m\u202e\x07 é")
    shown = capsys.readouterr().out
    assert "é" in shown
    assert r"\u202e" in shown
    assert not {"\x1b", "\x9b", "\x07", "\u202e"} & set(shown)


def test_a_traceback_shows_controls_and_does_not_carry_them_out(tmp_path) -> None:
    code = (
        "import click\nfrom dovetail.cli.main import main\n"
        "@main.command()\ndef fail(): raise ValueError('\\x1b[2J')\n"
        "import dovetail.cli.main as m\nm.COMMANDS['fail'] = ('__main__:fail', '')\nmain(['fail'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == r"ValueError: \x1b[2J"


@pytest.mark.parametrize("number", [errno.ENAMETOOLONG, errno.EACCES, errno.EISDIR, errno.EIO])
def test_a_path_that_the_system_refuses_is_one_error_that_names_it(failing, number) -> None:
    shown = failing(OSError(number, os.strerror(number), "some/path")).stderr
    first, hint = shown.splitlines()
    assert os.strerror(number) in first
    assert "some/path" in first
    assert hint.strip().startswith("→")


@pytest.mark.parametrize("arguments", [["{}"], ["--{}"], ["plugins", "{}"], ["plugins", "--{}"]])
def test_controls_in_what_is_typed_are_shown_and_not_carried_out(arguments) -> None:
    typed = [argument.format("\x1b[2J\x9b1m") for argument in arguments]
    done = CliRunner().invoke(main, typed)
    assert done.exit_code == 2
    assert r"\x1b[2J\x9b1m" in done.stderr
    assert not {"\x1b", "\x9b"} & set(done.stderr)


def test_a_terminal_that_lacks_a_character_gets_its_escape() -> None:
    code = (
        "import click\nfrom dovetail.telemetry import Terminal\nimport dovetail.cli.main as m\n"
        "@m.main.command()\ndef show(): Terminal().print('漢')\n"
        "m.COMMANDS['show'] = ('__main__:show', '')\nm.main(['show'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=True,
    )
    assert done.stdout == b"\\u6f22\n"


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["plugins", "list"], ["plugins", "list", "--json"], ["plugins", "show", "naive"]],
)
def test_a_full_disk_behind_stdout_is_one_line(arguments) -> None:
    command = [sys.executable, "-m", "dovetail", *arguments]
    with FULL.open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 75
    first, hint = done.stderr.splitlines()
    assert first == "error: the disk is full: [Errno 28] No space left on device"
    assert "DOVETAIL_TRACEBACK=1" in hint


def test_a_closed_pipe_ends_a_command_quietly() -> None:
    command = [sys.executable, "-m", "dovetail", "plugins", "list", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None
        assert it.stderr is not None
        it.stdout.close()
        assert it.stderr.read() == ""
        assert it.wait() == 1


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DovetailError("a bug"), 1),
        (WorkerError("a rank raised"), 1),
        (RequestRefusedError("too long"), 1),
        (ConfigError("seed is 'x'"), 2),
        (caused(ConfigError("no file"), OSError(errno.EIO, "I/O error")), 2),
        (NumericsError("the loss is nan"), 3),
        (WorkerError("rank 1 died", lost=True), 75),
        (caused(WorkerError("given up"), WorkerError("rank 1 died", lost=True)), 75),
        (caused(WorkerError("failed"), type("DistBackendError", (RuntimeError,), {})()), 75),
        (RolloutError("the engine has died"), 75),
        (caused(WeightSyncError("no replica took it"), RolloutError("died")), 75),
        (WeightSyncError("a digest differs"), 1),
        (caused(CheckpointError("can't save"), OSError(errno.ESTALE, "stale")), 75),
        (caused(CheckpointError("can't save"), OSError(errno.EACCES, "denied")), 1),
        (DiskFullError("no room"), 75),
        (caused(RewardError("no scores"), ConnectionRefusedError()), 75),
    ],
)
def test_an_exit_code_says_what_kind_of_failure_it_was(failing, error, code) -> None:
    assert failing(error).exit_code == code


def test_a_lost_rank_stays_lost_on_its_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(WorkerError("rank 1 died", lost=True)))
    assert error.exit_code == 75
