"""Attacks on resources outside the sandbox: the environment, files, sockets, other processes and the kernel."""

from __future__ import annotations

import ast
import os
import platform
import socket
import sys
import time
from pathlib import Path
from uuid import uuid4

import pytest

from dovetail_rewards.sandbox.helper_process import CLEAN_ENVIRONMENT


def test_the_environment_holds_nothing_of_ours(box, monkeypatch) -> None:
    monkeypatch.setenv("DOVETAIL_SECRET_TOKEN", "s3cr3t")
    source = """
import os, json, glob
texts = [repr(dict(os.environ))]
for path in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/self/environ'):
    try:
        texts.append(open(path, errors='replace').read())
    except OSError:
        pass
print(json.dumps({'secret': 's3cr3t' in str(texts), 'names': sorted(os.environ)}))
"""
    found = box.told(source)
    assert found["secret"] is False
    assert set(found["names"]) - {"PWD"} == {*CLEAN_ENVIRONMENT, "HOME", "TMPDIR"}


def test_no_descriptor_is_inherited(box) -> None:
    with socket.socket() as held:
        os.set_inheritable(held.fileno(), True)
        source = """
import os, json
def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
print(json.dumps({'open': [fd for fd in range(1024) if is_open(fd)]}))
"""
        assert box.told(source) == {"open": [0, 1, 2]}


def test_files_of_the_run_and_of_the_user_are_out_of_reach(box, open_folder) -> None:
    checkout = str(Path(__file__).parents[4])
    attacks = [f"open({str(open_folder / 'secret')!r}).read()"]
    attacks += [
        f"os.listdir({path!r})"
        for path in (checkout, str(open_folder), "/root", "/home", "/proc", "/etc")
    ]
    attacks += [
        "open('/etc/shadow').read()",
        "open('/etc/passwd').read()",
        f"open({__file__!r}).read()",
    ]
    found = box.attempt(*attacks)
    shown = set(found) - {"os.listdir('/etc')", "os.listdir('/root')"}
    assert not shown
    assert set(ast.literal_eval(str(found.get("os.listdir('/etc')", "[]")))) <= {
        "ld.so.cache",
        "localtime",
    }
    assert set(ast.literal_eval(str(found.get("os.listdir('/root')", "[]")))) <= {".pyenv"}


def test_private_files_of_this_user_are_out_of_reach_at_every_level(box, tmp_path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the expected output")
    secret.chmod(0o600)
    assert box.attempt(f"open({str(secret)!r}).read()") == {}


def test_no_socket_can_be_opened(box) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        attacks = [
            f"socket.create_connection(('127.0.0.1', {port}), 1)",
            *(
                f"socket.socket(getattr(socket, {family!r}), getattr(socket, {kind!r}))"
                for family in (
                    "AF_INET",
                    "AF_INET6",
                    "AF_UNIX",
                    "AF_NETLINK",
                    "AF_PACKET",
                    "AF_VSOCK",
                    "AF_ALG",
                )
                for kind in ("SOCK_STREAM", "SOCK_DGRAM", "SOCK_RAW")
            ),
            "call(425, 8, 0)",  # io_uring, which can open sockets
            "call(41 + 0x40000000, 2, 1, 0)",  # socket, by its x32 number
        ]
        assert box.attempt(*attacks) == {}
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_pair_of_datagram_sockets_reaches_no_socket_of_the_machine(box, open_folder) -> None:
    path = str(open_folder / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listens:
        listens.bind(path)
        Path(path).chmod(0o777)
        pair = "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)"
        assert box.attempt(f"{pair}[0].sendto(b'out', {path!r})") == {}
        listens.setblocking(False)
        with pytest.raises(BlockingIOError):
            listens.recv(1)
    # asyncio needs a pair of stream sockets, which are allowed.
    assert box.run("import asyncio; asyncio.run(asyncio.sleep(0))").ok


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are those of x86_64")
def test_no_other_process_can_be_signalled_traced_or_bent(box) -> None:
    ours, helper = os.getpid(), box.helper
    attacks = ["os.setpgid(0, os.getppid())"]
    for pid in (ours, helper, 1):
        attacks += [
            f"os.kill({pid}, signal.SIGKILL)"
            if pid != 1 or not box.own_processes
            else "os.kill(0x3fffff, 9)",
            f"call(234, {pid}, {pid}, 9)" if pid != 1 or not box.own_processes else "1 / 0",
            f"call(129, {pid}, 9, 0)",
            f"call(434, {pid}, 0)",
            f"__import__('resource').prlimit({pid}, 0, (1, 1))",
            f"os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
            f"os.sched_setaffinity({pid}, [0])",
            f"__import__('fcntl').fcntl(0, 8, {pid})",
            f"call(101, 16, {pid}, 0, 0)",
            f"call(310, {pid}, 0, 0, 0, 0, 0)",
            f"open('/proc/{pid}/mem', 'rb')",
            f"open('/proc/{pid}/maps').read()",
            f"os.listdir('/proc/{pid}/fd')",
            f"os.listdir('/proc/{pid}/root/')",
        ]
    found = box.attempt(*attacks)
    assert found == {}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are those of x86_64")
def test_no_doors_of_the_kernel_are_open(box) -> None:
    attacks = {
        "unshare": "call(272, 0x10000000)",
        "clone into a user namespace": "call(56, 0x10000000 | 17, 0, 0, 0, 0)",
        "mount": "libc.mount(b'none', b'/', b'tmpfs', 0, None) == 0 or 1 / 0",
        "chroot": "os.chroot('.')",
        "keyctl": "call(250, 0, -3, 0)",
        "bpf": "call(321, 0, 0, 0)",
        "perf_event_open": "call(298, 0, 0, -1, -1, 0)",
        "userfaultfd": "call(323, 0)",
        "open_by_handle_at": "call(304, -100, 0, 0)",
        "System V shared memory": "call(29, 0, 4096, 0o1600)",
        "POSIX message queue": "call(240, 0, 0o100, 0o600, 0)",
        "personality": "call(135, 0x0040000)",
        "prctl of the parent's death": "libc.prctl(1, 0, 0, 0, 0) == 0 or 1 / 0",
        "root again": "os.setuid(0)",
        "group of root": "os.setgid(0)",
        "groups": "os.setgroups([0])",
        "a device": "os.mknod('device', 0o020666, os.makedev(1, 1))",
    }
    assert box.attempt(*attacks.values()) == {}


def test_nothing_is_written_outside(box, open_folder) -> None:
    secret = open_folder / "secret"
    for path in (open_folder, secret):  # owned by the user as whom the program runs
        os.chown(path, box.user or os.geteuid(), -1)
    before = [(path.stat().st_mode, path.stat().st_mtime_ns) for path in (open_folder, secret)]
    name = f"written-{time.monotonic_ns()}"
    folders = [
        "/tmp",
        "/var/tmp",
        "/dev/shm",
        "/etc",
        "/usr/lib",
        "/run",
        str(open_folder),
        "/",
        sys.base_prefix,
    ]
    attacks = [f"open({f'{folder}/{name}'!r}, 'w').write('x')" for folder in folders]
    attacks += [f"os.unlink({str(open_folder / 'secret')!r})", f"os.chmod({str(open_folder)!r}, 0)"]
    attacks += [
        f"open({str(open_folder / 'secret')!r}, 'w')",
        f"os.truncate({str(open_folder / 'secret')!r}, 0)",
    ]
    attacks += [f"os.utime({str(secret)!r}, (1, 1))", f"os.chown({str(secret)!r}, -1, -1)"]
    attacks += [f"os.setxattr({str(secret)!r}, 'user.x', b'1')", f"os.rename({str(secret)!r}, 'x')"]
    found = box.attempt(*attacks)
    there = [folder for folder in folders if Path(f"{folder}/{name}").exists()]
    for folder in there:
        Path(f"{folder}/{name}").unlink()
    assert there == []
    assert (open_folder / "secret").read_text() == "the expected output"
    after = [(path.stat().st_mode, path.stat().st_mtime_ns) for path in (open_folder, secret)]
    assert after == before
    assert set(found) <= {
        f"open({f'{folder}/{name}'!r}, 'w').write('x')" for folder in ("/tmp", "/dev/shm")
    }


def test_symbolic_links_lead_nowhere(box, open_folder) -> None:
    source = f"""
import os, json
outside = {str(open_folder)!r}
os.symlink(outside, 'folder')
os.symlink(outside + '/secret', 'file')
os.makedirs('deep/er')
os.symlink(outside, 'deep/er/link')
os.symlink('loop', 'loop')
read = []
for path in ('file', 'folder/secret', 'deep/er/link/secret', '../../' * 20 + outside + '/secret'):
    try:
        read.append(open(path).read())
    except OSError:
        pass
print(json.dumps({{'read': read}}))
"""
    found = box.told(source)
    assert found == {"read": []}
    assert (open_folder / "secret").read_text() == "the expected output"


def test_two_runs_do_not_see_each_other(box) -> None:
    note = f"note-{uuid4().hex}"
    box.run(f"import os; open('{note}', 'w'); open(os.environ['TMPDIR'] + '/{note}', 'w')")
    source = f"import os; print(os.listdir('.'), os.path.exists('/tmp/{note}'))"
    assert box.run(source).stdout == b"[] False\n"
