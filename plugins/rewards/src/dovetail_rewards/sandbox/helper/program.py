"""Runs one program in an already confined process: Python source in this interpreter, or a command."""
# The helper imports little to start fast, and works with descriptors: no pathlib.
# ruff: noqa: PTH103, PTH109, PTH120, PTH123

from __future__ import annotations

import atexit
import base64
import io
import json
import linecache
import os
import signal
import sys
import threading
import traceback
import types
from typing import NoReturn, cast

from . import evaluation  # noqa: F401 - loaded once, for the programs that import it
from .wire import Payload

NAME = "solution.py"
_NO_FLUSH = 120  # Python's own exit status for output that could not be written


def read(fd: int) -> Payload:
    """Read the payload (the program and its files) from a descriptor, and close the descriptor."""
    with open(fd, "rb") as file:
        return cast("Payload", json.loads(file.read()))


def write_files(payload: Payload) -> None:
    """Write the program's files below the working directory."""
    for name, content in payload.get("files", {}).items():
        folder = os.path.dirname(name)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(name, "wb") as file:
            file.write(base64.b64decode(content))


def run(payload: Payload, packages: list[str]) -> NoReturn:
    """Run the program in this process, and exit with its status."""
    work = os.getcwd()
    os.environ.update(HOME=work, TMPDIR=work)
    if "argv" in payload:
        _execute(payload["argv"])
    own = [path for path in sys.path if path.startswith(sys.base_prefix)]
    sys.path[:] = [work, *own, *packages]
    _leave(_interpret(payload["source"]))


def _execute(argv: list[str]) -> NoReturn:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, dict(os.environ))  # noqa: S606 - what the sandbox is for
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _interpret(source: str) -> int:
    """Run a Python program as `python solution.py` would, and return its exit status."""
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        handling = {"r": "strict", "w": "backslashreplace"}[mode]
        stream = open(fd, mode, encoding="utf-8", errors=handling, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, __file__=NAME)
    sys.modules["__main__"] = main
    sys.argv = [NAME]
    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    try:
        exec(compile(source, NAME, "exec", dont_inherit=True), main.__dict__)  # noqa: S102 - what the sandbox is for
    except SystemExit as leaving:
        return _status(leaving.code)
    except BaseException as error:  # noqa: BLE001 - reported as the interpreter would
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(error.with_traceback(frames))
        return 1
    return 0


def _status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _leave(status: int) -> NoReturn:
    """Exit as the interpreter does: join threads, run exit functions and flush output."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - what the interpreter itself calls
        atexit._run_exitfuncs()  # noqa: SLF001
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOBase) and not stream.closed:
                stream.flush()
    except BaseException:  # noqa: BLE001 - a program may do anything here
        status = status or _NO_FLUSH
    os._exit(status)
