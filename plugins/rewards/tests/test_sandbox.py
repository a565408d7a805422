"""The sandbox for its caller: results, limits, failures; and the tables of its seccomp filter."""

from __future__ import annotations

import itertools
import os
import pickle
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from dovetail.interfaces import FailureKind
from dovetail_rewards.sandbox import (
    Program,
    ProgramLimits,
    ProgramVerdict,
    Result,
    Sandbox,
    SandboxError,
    SandboxUnreachableError,
    available_levels,
    levels,
)
from dovetail_rewards.sandbox.helper import seccomp
from dovetail_rewards.sandbox.levels import LEVELS, chosen_level
from dovetail_rollouts import RewardCall, failure_from


@pytest.fixture(scope="module", params=LEVELS)
def box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    report = next(report for report in available_levels() if report.level == request.param)
    if not report.available:
        pytest.skip(f"{report.level}: {report.detail}")
    with Sandbox(level=report.level) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def any_box() -> Iterator[Sandbox]:
    if not any(report.available for report in available_levels()):
        pytest.skip("no level is to be had here")
    with Sandbox(level=next(r.level for r in available_levels() if r.available)) as sandbox:
        yield sandbox


def run(box: Sandbox, source: str, stdin: bytes = b"", **files: bytes) -> Result:
    return box.run(Program(source=source, stdin=stdin, files=files), ProgramLimits(cpu_s=2))


def test_a_program_has_its_input_and_gives_its_output(box) -> None:
    result = run(
        box, "import sys\nprint(input()[::-1])\nprint('a word', file=sys.stderr)", b"abc\n"
    )
    assert (result.verdict, result.exit_status, result.signal) == (ProgramVerdict.OK, 0, None)
    assert (result.stdout, result.stderr) == (b"cba\n", b"a word\n")
    assert 0 < result.cpu_s < 2
    assert 0 < result.wall_s < 60
    assert 1 << 20 < result.peak_memory < 1 << 28


@pytest.mark.parametrize(
    ("source", "status", "stderr"),
    [
        ("", 0, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('bye')", 1, "bye\n"),
        ("import os; os._exit(7)", 7, ""),
        ("x = (", 1, "SyntaxError: '(' was never closed\n"),
        ("def f():\n    1 / 0\nf()", 1, "ZeroDivisionError: division by zero\n"),
        ("import sys; sys.stdout.close(); sys.exit(0)", 0, ""),
        ("from __future__ import annotations", 0, ""),
    ],
)
def test_the_exit_status_is_that_of_the_interpreter(any_box, source, status, stderr) -> None:
    result = run(any_box, source)
    assert result.exit_status == status
    assert result.stderr.decode().endswith(stderr)
    assert result.ok == (status == 0)


def test_a_traceback_shows_the_programs_lines_and_no_others(any_box) -> None:
    lines = run(any_box, "def f():\n    1 / 0\nf()").stderr.decode().splitlines()
    assert [line for line in lines if line.startswith("  File")] == [
        '  File "solution.py", line 3, in <module>',
        '  File "solution.py", line 2, in f',
    ]
    assert "    1 / 0" in lines


def test_a_program_is_the_main_module(any_box) -> None:
    source = """
import atexit, dataclasses, pickle, sys, threading, time
@dataclasses.dataclass
class Point:
    x: int
atexit.register(lambda: print('left'))
threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()
if __name__ == '__main__':
    print(pickle.loads(pickle.dumps(Point(1))), sys.argv, __file__)
"""
    assert run(any_box, source).stdout == b"Point(x=1) ['solution.py'] solution.py\nthread\nleft\n"


def test_files_lie_in_the_working_directory(box) -> None:
    files = {"data.bin": bytes(range(256)), "below/module.py": b"value = 7"}
    source = "import sys; sys.path.append('below'); import module; print(len(open('data.bin', 'rb').read()), module.value)"
    result = box.run(Program(source=source, files=files), ProgramLimits())
    assert result.stdout == b"256 7\n"


@pytest.mark.parametrize("level", LEVELS)
def test_folders_at_the_root_stand_for_those_of_the_working_directory(level) -> None:
    if not next(report for report in available_levels() if report.level == level).available:
        pytest.skip(f"{level} is not available here")
    if level == "subprocess":
        with pytest.raises(SandboxError, match=r"subprocess.*/tests, /app"):
            Sandbox(level=level, folders=["/tests", "/app"])
        return
    source = (
        "import os; os.mkdir('app'); open('/app/new', 'w').write('x'); "
        "print(open('/tests/a').read(), os.listdir('app'), sorted(os.listdir('.')))"
    )
    with Sandbox(level=level, folders=["/tests", "/app"]) as sandbox:
        result = sandbox.run(Program(source=source, files={"tests/a": b"1"}), ProgramLimits())
        again = sandbox.run(Program(source="print(open('/tests/a').read())"), ProgramLimits())
    assert result.stdout == b"1 ['new'] ['app', 'tests']\n", result.stderr
    assert b"FileNotFoundError" in again.stderr


def test_a_command_runs_as_well(box) -> None:
    program = Program(argv=("/bin/sh", "-c", "read x; echo got $x; exit 5"), stdin=b"it\n")
    result = box.run(program, ProgramLimits())
    assert (result.verdict, result.exit_status, result.stdout) == (
        ProgramVerdict.FAILED,
        5,
        b"got it\n",
    )
    missing = box.run(Program(argv=("no-such-program",)), ProgramLimits())
    assert missing.exit_status == 127
    assert b"No such file" in missing.stderr


def test_the_same_program_gives_the_same_output(box) -> None:
    source = "print({str(n) for n in range(20)}, hash('a'))"
    outputs = {run(box, source).stdout for _ in range(2)}
    with Sandbox(level=box.level, tried=True) as another:
        outputs.add(run(another, source).stdout)
    assert len(outputs) == 1


def test_much_input_and_output_pass(any_box) -> None:
    data = b"x" * (3 << 20)
    result = any_box.run(
        Program(source="import sys; sys.stdout.write(sys.stdin.read())", stdin=data),
        ProgramLimits(output=4 << 20),
    )
    assert result.ok
    assert result.stdout == data


def test_exactly_as_much_output_as_is_allowed_is_no_fault(any_box) -> None:
    source = "import sys; sys.stdout.write('x' * 1000)"
    assert any_box.run(Program(source=source), ProgramLimits(output=1000)).ok
    result = any_box.run(Program(source=source), ProgramLimits(output=999))
    assert (result.verdict, len(result.stdout)) == (ProgramVerdict.OUTPUT_LIMIT, 999)


def test_of_errors_the_end_is_kept(any_box) -> None:
    source = "import sys; sys.stderr.write('a' * 50_000 + 'the end'); sys.exit(1)"
    result = run(any_box, source)
    assert len(result.stderr) == 1 << 14
    assert result.stderr.endswith(b"the end")


def test_many_threads_run_programs_side_by_side(box) -> None:
    def one(number: int) -> bytes:
        return run(
            box, f"import os\nopen('f', 'w').write('{number}')\nprint(open('f').read())"
        ).stdout

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(16))) == [f"{n}\n".encode() for n in range(16)]


def test_packages_are_seen_only_where_they_are_given(box, tmp_path_factory) -> None:
    folder = Path("/tmp") / f"packages-{os.getpid()}-{box.level}"
    folder.mkdir()
    try:
        (folder / "a_package.py").write_text("value = 3")
        source = "import a_package; print(a_package.value)"
        assert b"ModuleNotFoundError" in run(box, source).stderr
        with Sandbox(level=box.level, packages=[str(folder)], tried=True) as with_packages:
            assert run(with_packages, source).stdout == b"3\n"
        with Sandbox(
            level=box.level, packages=[str(folder)], preload=["a_package"], tried=True
        ) as warm:
            assert run(warm, source).stdout == b"3\n"
    finally:
        (folder / "a_package.py").unlink()
        folder.rmdir()


def test_a_run_needs_no_descriptor_of_ours_after(any_box) -> None:
    run(any_box, "")
    before = {path.name for path in Path("/proc/self/fd").iterdir()}
    for _ in range(5):
        run(any_box, "print(1)")
    assert {path.name for path in Path("/proc/self/fd").iterdir()} == before


def test_a_sandbox_can_be_closed_and_used_again(any_box) -> None:
    with Sandbox(level=any_box.level) as sandbox:
        assert run(sandbox, "print(1)").ok
        sandbox.close()
        sandbox.close()
        assert run(sandbox, "print(1)").ok


def test_a_process_forked_from_the_caller_may_use_the_sandbox(any_box) -> None:
    run(any_box, "")
    pid = os.fork()
    if pid == 0:
        os._exit(0 if run(any_box, "print(2)").stdout == b"2\n" else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert run(any_box, "print(3)").stdout == b"3\n"


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel does not tell the time waited"
)
def test_time_spent_waiting_for_a_core_is_not_held_against_a_program(any_box) -> None:
    """Eight busy programs on few cores each take far longer than alone, and none exceeds its wall-clock limit."""
    count = 4 * (os.cpu_count() or 1)
    source = "import time\nwhile time.process_time() < 1.2: pass\nprint(1)"
    limits = ProgramLimits(cpu_s=3.0, wall_s=4.2)
    with ThreadPoolExecutor(count) as pool:
        results = list(
            pool.map(lambda _: any_box.run(Program(source=source), limits), range(count))
        )
    assert [result.verdict for result in results] == [ProgramVerdict.OK] * count


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", "a\0b"])
def test_files_outside_the_working_directory_are_refused(name) -> None:
    with pytest.raises(SandboxError, match="outside the program's working directory"):
        Program(source="", files={name: b""})


def test_a_program_is_source_or_a_command() -> None:
    for wrong in ({}, {"source": "", "argv": ("ls",)}):
        with pytest.raises(SandboxError, match="exactly one"):
            Program(**wrong)


@pytest.mark.parametrize("wrong", [{"cpu_s": 0}, {"memory": 10}, {"processes": 0}, {"wall_s": -1}])
def test_limits_are_checked(wrong) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ProgramLimits(**wrong)


def test_the_clock_allows_three_times_the_cpu_and_two_seconds() -> None:
    assert (ProgramLimits(cpu_s=4).wall, ProgramLimits(cpu_s=4, wall_s=1).wall) == (14, 1)


def test_a_level_that_is_not_to_be_had_says_why() -> None:
    with pytest.raises(SandboxError, match="namespaces") as raised:
        chosen_level("namespaces", python="/bin/false")
    assert raised.value.hint == "set `service` to the address of a sandbox service"


def test_a_weaker_level_is_taken_by_name_alone(monkeypatch) -> None:
    reports = tuple(
        levels.LevelReport(level=level, available=level == "subprocess", detail="forbidden here")
        for level in LEVELS
    )
    monkeypatch.setattr(levels, "_available_levels", lambda python: reports)
    with pytest.raises(SandboxError, match="namespaces: forbidden here") as raised:
        Sandbox()
    assert "level=subprocess" in (raised.value.hint or "")
    assert "sandbox service" in (raised.value.hint or "")
    assert chosen_level("subprocess") == "subprocess"


def test_faults_become_failures_that_say_whether_to_try_again() -> None:
    call = RewardCall(lambda: 0.0, "code")
    gone = failure_from(SandboxUnreachableError("gone"), call)
    assert (gone.kind, gone.retryable) == (FailureKind.UNREACHABLE, True)
    broken = failure_from(SandboxError("broken"), call)
    assert (broken.kind, broken.retryable) == (FailureKind.EXCEPTION, False)
    again = pickle.loads(pickle.dumps(SandboxError("broken", hint="fix it")))
    assert (again.message, again.hint) == ("broken", "fix it")


def test_a_helper_that_hangs_is_a_fault_and_no_result(any_box, monkeypatch) -> None:
    from dovetail_rewards.sandbox import collect

    monkeypatch.setattr(collect, "_GRACE_S", 0.0)
    monkeypatch.setattr(collect, "_STARVED", 0.0)
    with pytest.raises(SandboxUnreachableError, match="no report"):
        run(any_box, "import time; time.sleep(1)")


@pytest.mark.skipif(sys.platform != "linux", reason="headers of Linux")
@pytest.mark.parametrize(
    ("machine", "header"),
    [
        (0, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        (1, "/usr/include/asm-generic/unistd.h"),
    ],
)
def test_the_filters_numbers_are_the_kernels(machine, header) -> None:
    if not Path(header).exists():
        pytest.skip(f"{header} is not installed")
    text = Path(header).read_text()
    known = {
        name: int(number)
        for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)
    }
    ours = {**seccomp.DENIED, **seccomp.ATTRIBUTES, **seccomp.JUDGED}
    wrong = {
        name: (numbers[machine], known.get(name))
        for name, numbers in ours.items()
        if known.get(name, numbers[machine]) != numbers[machine]
    }
    assert wrong == {}
    assert len(known.keys() & ours.keys()) > 70


def test_the_filter_jumps_within_itself() -> None:
    if seccomp.supported():
        pytest.skip(seccomp.supported() or "")
    for only_itself, may_fork, shared_files in itertools.product(
        (None, 77), (True, False), (True, False)
    ):
        program = seccomp.build(
            only_itself=only_itself, may_fork=may_fork, shared_files=shared_files
        )
        assert program[-1][0] == 6
        for step, (code, true, false, _) in enumerate(program):
            if code & 7 == 5:
                assert max(true, false) < 256
                assert step + 1 + max(true, false) < len(program)


def test_closing_while_programs_run_ends_them(any_box) -> None:
    sandbox = Sandbox(level=any_box.level)
    run(sandbox, "")
    found: list[object] = []

    def one() -> None:
        try:
            found.append(
                sandbox.run(
                    Program(source="import time; time.sleep(600)"), ProgramLimits(wall_s=600)
                )
            )
        except SandboxError as error:
            found.append(error)

    thread = threading.Thread(target=one)
    thread.start()
    while not sandbox._under_way:
        time.sleep(0.01)
    time.sleep(0.1)
    sandbox.close()
    thread.join()
    (end,) = found
    assert isinstance(end, SandboxError) or end.verdict is not ProgramVerdict.TIMEOUT


def test_the_directory_of_a_killed_supervisor_is_removed_at_the_next_start_and_no_living_one() -> (
    None
):
    report = next(report for report in available_levels() if report.level == "subprocess")
    if not report.available:
        pytest.skip(report.detail)
    sleeps = Program(source="import time; time.sleep(60)")
    with (
        Sandbox(level="subprocess") as killed,
        Sandbox(level="subprocess") as living,
        ThreadPoolExecutor(2) as threads,
    ):
        lost, kept = (threads.submit(box.run, sleeps, ProgramLimits()) for box in (killed, living))
        [left] = directories_of(killed)
        [used] = directories_of(living)
        [supervisor] = children(killed._helper.pid)
        os.kill(supervisor, signal.SIGKILL)
        with pytest.raises(SandboxUnreachableError):
            lost.result()
        assert left.exists()
        (foreign := left.with_name("dovetail-sandbox-results")).mkdir()
        with Sandbox(level="subprocess") as next_one:
            assert run(next_one, "print(1)").stdout == b"1\n"
        assert not left.exists()
        assert used.exists()
        foreign.rmdir()
        living.close()
        assert kept.exception() or kept.result()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def directories_of(box: Sandbox) -> list[Path]:
    """Return the working directories of a sandbox's running programs, after waiting for the first."""
    for _ in range(500):
        time.sleep(0.02)
        helper = box._helper
        runs = [
            program
            for supervisor in (children(helper.pid) if helper else ())
            for first in children(supervisor)
            for program in children(first)
        ]
        with suppress(FileNotFoundError):
            found = {Path(f"/proc/{program}/cwd").readlink() for program in runs}
            if found and all("dovetail-sandbox-" in path.name for path in found):
                return [*found]
    raise AssertionError("no program has started")
