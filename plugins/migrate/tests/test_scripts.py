"""Scripts run in a sandbox, which records the commands that they would have started."""

import time
from pathlib import Path

import pytest

from dovetail.errors import ConfigError
from dovetail_migrate.verl.script import run_script
from dovetail_rewards.sandbox import available_levels

pytestmark = pytest.mark.skipif(
    not any(report.available for report in available_levels() if report.level != "subprocess"),
    reason="no level of the sandbox that runs scripts holds here",
)


def write(folder: Path, text: str) -> Path:
    script = folder / "run.sh"
    script.write_text(text)
    return script


def test_arrays_arithmetic_and_defaults_come_out_as_the_shell_makes_them(tmp_path):
    script = write(
        tmp_path, 'a=("x y" b=$((2 * 3)))\npython3 -m m "${a[@]}" c="${D:-fallback}" "$@"\n'
    )
    run = run_script(script, ["last"], {"E": "1"})
    assert run.commands == (("python3", "-m", "m", "x y", "b=6", "c=fallback", "last"),)
    assert run.status == 0


def test_nothing_outside_the_throw_away_folder_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept.txt").write_text("kept")
    outside = tmp_path / "outside"
    outside.mkdir()
    script = write(tmp_path, f"rm -rf {tmp_path}/* ~/* ./*; echo x > {outside}/new; touch /etc/new\npython3 done.py k=v\n")  # fmt: skip
    run = run_script(script)
    assert run.commands[-1] == ("python3", "done.py", "k=v")
    assert (tmp_path / "kept.txt").read_text() == "kept"
    assert not list(outside.iterdir())
    assert script.exists()


def test_calls_at_the_same_time_are_taken_down_whole(tmp_path):
    long = "v" * 5000
    script = write(
        tmp_path, f"for i in $(seq 20); do python3 m k=$i {long} | tee log & done\nwait\n"
    )
    found = sorted(run_script(script).commands)
    each = [("python3", "m", f"k={i}", long) for i in range(1, 21)]
    assert found == sorted([*each, *[("tee", "log")] * 20])


def test_a_script_that_loops_for_ever_is_ended(tmp_path):
    begun = time.monotonic()
    run = run_script(write(tmp_path, "while true; do :; done\n"), seconds=1.0)
    assert run.status is None
    assert time.monotonic() - begun < 30


def test_a_missing_variable_is_named(tmp_path):
    run = run_script(write(tmp_path, "set -u\npython3 x.py model=$MODEL_PATH\n"))
    assert not run.commands
    assert "MODEL_PATH" in run.errors
    run = run_script(tmp_path / "run.sh", variables={"MODEL_PATH": "/m"})
    assert run.commands == (("python3", "x.py", "model=/m"),)


def test_no_network_and_no_secret_of_the_caller_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    script = write(tmp_path, "exec 3<>/dev/tcp/127.0.0.1/22 && net=yes\npython3 x.py net=${net:-no} key=${SECRET_KEY:-none}\n")  # fmt: skip
    assert run_script(script).commands == (("python3", "x.py", "net=no", "key=none"),)


def test_paths_of_the_throw_away_folder_read_as_the_callers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = run_script(write(tmp_path, "python3 x.py here=$(pwd) home=$HOME/data\n"))
    assert run.commands == (("python3", "x.py", f"here={tmp_path}", f"home={Path.home()}/data"),)


def test_files_beside_the_script_can_be_sourced(tmp_path):
    (tmp_path / "common.sh").write_text("LR=3e-6\n")
    run = run_script(write(tmp_path, 'source "$(dirname "$0")/common.sh"\npython3 x.py lr=$LR\n'))
    assert run.commands == (("python3", "x.py", "lr=3e-6"),)


def test_a_script_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        run_script(tmp_path / "none.sh")
