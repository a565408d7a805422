"""Attacks on limits: processes, memory, output, time, disk and files are bounded at every isolation level."""

from __future__ import annotations

import platform
import threading

import pytest

from dovetail_rewards.sandbox import ProgramLimits, ProgramVerdict


def test_a_fork_bomb_stays_within_the_limit_and_ends(box) -> None:
    most = []
    done = threading.Event()

    def count() -> None:
        while not done.is_set():
            most.append(len(box.processes()))

    counter = threading.Thread(target=count)
    counter.start()
    source = (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    )
    result = box.run(source, cpu_s=0.2, processes=10)
    done.set()
    counter.join()
    assert result.verdict is ProgramVerdict.TIMEOUT
    assert max(most) <= 10 + 8  # the helper's own processes count too
    assert result.wall_s < 60  # it ends; when depends on other users of the cores


def test_a_memory_bomb_ends_for_want_of_memory(box) -> None:
    result = box.run("x = bytearray(10**10)", memory=128 << 20)
    assert result.verdict is ProgramVerdict.MEMORY
    assert result.peak_memory < 128 << 20


def test_memory_is_counted_over_all_processes(box) -> None:
    source = """
import os, time
for _ in range(6):
    try:
        child = os.fork()
    except OSError:
        raise SystemExit('no processes here')
    if child == 0:
        x = bytearray(60 << 20)
        time.sleep(30)
os.wait()
"""
    result = box.run(source, memory=160 << 20)
    forbidden = b"no processes here" in result.stderr
    assert forbidden or result.verdict is ProgramVerdict.MEMORY
    assert forbidden == (not box.own_processes)


IGNORE = {
    "ignored": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "without zombies": """
import ctypes
action = (ctypes.c_char * 152)()
for at in (8, 136):
    action[at] = 2  # SA_NOCLDWAIT, where the flags are in glibc's structure
if ctypes.CDLL(None, use_errno=True).sigaction(signal.SIGCHLD, action, None):
    raise OSError(ctypes.get_errno(), 'refused')
""",
    "at an address that ends in zeros": """
import ctypes, mmap
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
place = libc.mmap(ctypes.c_void_p(1 << 33), ctypes.c_size_t(4096), 3, 0x32, -1, ctypes.c_long(0))
assert place == 1 << 33, place
(ctypes.c_ulong * 4).from_address(place)[0] = 1  # SIG_IGN
number = 13 if os.uname().machine == 'x86_64' else 134
if libc.syscall(ctypes.c_long(number), signal.SIGCHLD, ctypes.c_void_p(place), None, ctypes.c_long(8)):
    raise OSError(ctypes.get_errno(), 'refused')
""",
}


@pytest.mark.parametrize("how", IGNORE)
def test_children_of_a_program_that_ignores_their_end_hide_no_time(box, how) -> None:
    result = box.run(f"import os, signal\n{IGNORE[how]}\nos.fork()")
    assert b"PermissionError" in result.stderr


@pytest.mark.parametrize("parent", ["", "if os.fork(): os._exit(0)"])
def test_time_of_many_short_children_counts(box, parent) -> None:
    source = f"""
import os, time
if not {box.own_processes}:
    raise SystemExit('no processes here')
end = time.monotonic() + 60
while time.monotonic() < end:
    if os.fork() == 0:
        {parent or "pass"}
        began = time.process_time()
        while time.process_time() < began + 0.02:
            pass
        os._exit(0)
    os.wait()
"""
    result = box.run(source, cpu_s=0.5, wall_s=60)
    if not box.own_processes:
        assert b"no processes here" in result.stderr
    else:
        assert result.verdict is ProgramVerdict.TIMEOUT
        assert 0.5 < result.cpu_s < 3


@pytest.mark.parametrize("fd", [1, 2])
def test_endless_output_is_cut_and_ends_the_program(box, fd) -> None:
    result = box.run(f"import os\nwhile True: os.write({fd}, b'x' * 65536)", output=100_000)
    assert result.verdict is ProgramVerdict.OUTPUT_LIMIT
    assert (len(result.stdout), len(result.stderr)) == ((100_000, 0) if fd == 1 else (0, 1 << 14))


def test_a_sleeper_that_ignores_signals_ends_by_the_clock(box) -> None:
    source = "import signal, time\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\ntime.sleep(60)"
    result = box.run(source, wall_s=0.3)
    assert result.verdict is ProgramVerdict.TIMEOUT
    assert 0.3 <= result.wall_s < 60
    assert result.cpu_s < ProgramLimits().cpu_s


def test_time_of_all_threads_counts(box) -> None:
    result = box.run("while True: pass", cpu_s=0.3, wall_s=60)
    assert result.verdict is ProgramVerdict.TIMEOUT
    assert 0.25 < result.cpu_s < 10


def test_the_disk_cannot_be_filled(box) -> None:
    source = """
import os, time
for n in range(10_000):
    with open(f'f{n}', 'wb') as file:
        file.write(bytes(1 << 20))
    if n > 16: time.sleep(0.05)
"""
    result = box.run(source, disk=8 << 20, cpu_s=10, wall_s=60)
    if box.own_processes:
        assert b"No space left on device" in result.stderr
    else:
        assert result.verdict is ProgramVerdict.DISK_LIMIT


def test_the_disk_cannot_be_filled_with_files_that_have_no_name(box) -> None:
    unseen = box.user is not None and not box.own_processes
    source = f"""
import os, time
held = []
for n in range(40):
    held.append(open('f', 'wb', buffering=0))
    os.unlink('f')
    held[-1].write(bytes(1 << 20))
time.sleep({0.2 if unseen else 30})
print('filled')
"""
    result = box.run(source, disk=8 << 20, cpu_s=10, wall_s=60)
    if unseen:
        assert result.ok  # invisible for a plain user, but bounded by open_files times file_size
    else:
        assert (
            b"No space left on device" in result.stderr
            or result.verdict is ProgramVerdict.DISK_LIMIT
        )


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are those of x86_64")
def test_memory_cannot_be_hidden_in_files_of_the_kernel(box) -> None:
    attacks = ["os.memfd_create('x')", "call(447, 0)", "call(319, 0, 0)"]
    assert box.attempt(*attacks) == {}


def test_a_file_cannot_grow_beyond_its_limit(box) -> None:
    source = "import os\nwith open('f', 'wb', buffering=0) as f:\n    while True: f.write(bytes(1 << 16))"
    result = box.run(source, file_size=1 << 20)
    assert b"File too large" in result.stderr


def test_a_million_files_are_too_many(box) -> None:
    result = box.run("n = 0\nwhile True:\n    open(f'f{n}', 'w').close()\n    n += 1", cpu_s=60)
    if box.level == "namespaces":
        assert b"No space left on device" in result.stderr
    else:
        assert result.verdict is ProgramVerdict.DISK_LIMIT


def test_many_files_cannot_be_opened(box) -> None:
    result = box.run("files = [open('/dev/null') for _ in range(100)]", open_files=32)
    assert b"Too many open files" in result.stderr
