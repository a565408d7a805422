"""Attacks on the end of a run: killing its supervisors, outliving it, and leaving files that can't be removed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dovetail_rewards.sandbox import ProgramVerdict, SandboxUnreachableError


def test_killing_all_that_can_be_killed_harms_the_program_alone(box) -> None:
    source = """
import os, signal
for target in (-1, os.getppid(), 1):
    try:
        os.kill(target, signal.SIGKILL)
    except OSError:
        pass
print('still here')
os.kill(os.getpid(), signal.SIGKILL)
"""
    result = box.run(source)
    assert (result.verdict, result.signal) == (ProgramVerdict.CRASHED, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGSTOP])
def test_the_first_process_cannot_be_stopped_by_a_signal(box, number) -> None:
    source = f"""
import os
try:
    os.kill(os.getppid(), {int(number)})
except OSError:
    pass
print('done')
"""
    result = box.run(source, cpu_s=2, wall_s=30)
    assert result.ok
    assert result.stdout == b"done\n"


def test_daemons_do_not_outlive_the_program(box) -> None:
    source = """
import os, sys, time, signal
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
try:
    if os.fork() == 0:
        os.setsid()
        for _ in range(3):
            if os.fork() == 0:
                while True:
                    time.sleep(1)
        os._exit(0)
except OSError:
    pass
print('started')
"""
    result = box.run(source)
    assert result.ok
    assert result.stdout == b"started\n"


def test_directories_of_any_depth_and_mode_are_removed(box) -> None:
    source = """
import os
for tower in 'ab':
    top = os.open('.', os.O_RDONLY)
    for level in range(1500):
        os.mkdir(tower)
        open('file', 'w').close()
        os.chdir(tower)
    os.fchdir(top)
os.mkdir('without rights', 0)
os.mkdir('closed')
open('closed/file', 'w').close()
os.mkdir('closed/inner')
for path in ('closed/inner', 'closed', '.'):
    try:
        os.chmod(path, 0)
    except PermissionError:
        pass
print('built')
"""
    assert box.run(source).stdout == b"built\n"


def test_a_program_cannot_keep_its_directory_from_being_removed(box, open_folder) -> None:
    (open_folder / "closed").mkdir(0o711)
    source = f"""
import os
for back in range(6):
    for n in range(1, 40):
        os.makedirs(f'.moved-{{n}}-{{os.getppid() - back}}/x')
for n in range(20):
    os.makedirs(f'n{{n}}/q/r')
    os.symlink({str(open_folder / "closed")!r}, f'n{{n}}/q/link')
print('wrong')
"""
    assert box.run(source).stdout == b"wrong\n"
    assert (open_folder / "closed").stat().st_mode & 0o777 == 0o711


def test_a_helper_that_is_killed_is_replaced_and_its_runs_fail_or_keep_their_limits(box) -> None:
    another = box.another()
    with another.sandbox, ThreadPoolExecutor(1) as threads:
        assert another.run("print(1)").ok
        under_way = threads.submit(another.run, "import time; time.sleep(60)", wall_s=1)
        while not another.processes() and not under_way.done():
            time.sleep(0.01)
        helper = another.sandbox._helper._process
        os.kill(helper.pid, signal.SIGKILL)
        with contextlib.suppress(SandboxUnreachableError):  # raised if the supervisor is killed too
            assert under_way.result().verdict is ProgramVerdict.TIMEOUT
        helper.wait()
        assert another.run("print(1)").ok


def test_when_the_caller_is_killed_its_runs_end(box) -> None:
    marker = f"dovetail-orphan-{time.monotonic_ns()}"
    source = f"""
import threading, time
from dovetail_rewards.sandbox import Sandbox, Program, ProgramLimits
box = Sandbox(level={box.level!r}, python={box.python!r}, user={box.user!r}, tried=True)
box.run(Program(source=""), ProgramLimits())
threading.Thread(target=lambda: box.run(
    Program(argv=({box.python!r}, "-I", "-S", "-c", "import time; time.sleep(60)", {marker!r})), ProgramLimits(wall_s=60)
), daemon=True).start()
time.sleep(0.3)
print("running", flush=True)
time.sleep(60)
"""
    caller = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    assert caller.stdout.readline() == b"running\n"
    caller.kill()
    caller.wait()
    caller.stdout.close()
    for _ in range(600):
        alive = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if marker.encode() in path.read_bytes():
                    alive.append(path)
        if not alive:
            return
        time.sleep(0.05)
    pytest.fail(f"still there: {alive}")
