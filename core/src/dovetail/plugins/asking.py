"""Runs Python code in a separate process, so that a crash or a hang of the code does not affect this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PRELUDE = """
import sys
del sys.path[0]
import json, os
asked = json.load(sys.stdin)
answers = os.fdopen(int(sys.argv[1]), "w")
def answer(value):
    answers.write(json.dumps(value) + "\\n")
    answers.flush()
"""
"""Code that runs before the given code, under any Python 3: removes the working directory from the path, defines `asked` and `answer`."""


def ask(
    code: str,
    asked: Mapping[str, Any],
    *,
    timeout: float,
    interpreter: str | Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> tuple[list[Any], str]:
    """Run Python code in another process, and return the answers and how the process ended.

    Args:
        code: Python code that reads the variable `asked` and calls `answer(value)` with a JSON value for each answer.
        asked: the value of the variable `asked`: a mapping of JSON values.
        timeout: seconds until the process is ended.
        interpreter: the Python to run; by default this one, with this process's module path.
        variables: environment variables, added to this process's.

    Returns:
        The answers given before the end, and how the process ended: `exit code 1: LAST PRINTED LINE`, `signal 11` or
        `took longer than 60 s`.

    Raises:
        OSError: the interpreter can't be started.
    """
    if interpreter is None:
        code = f"sys.path[:] = {sys.path!r}\n{code}"
    with tempfile.TemporaryFile("w+") as answers, tempfile.TemporaryFile("w+") as printed:
        try:
            number = subprocess.run(  # noqa: S603 - this interpreter, or one that the config names
                [str(interpreter or sys.executable), "-c", _PRELUDE + code, str(answers.fileno())],
                input=json.dumps(asked),
                stdout=printed,
                stderr=printed,
                text=True,
                timeout=timeout,
                pass_fds=(answers.fileno(),),
                env=os.environ | (variables or {}),
                check=False,
            ).returncode
            ended = f"exit code {number}" if number >= 0 else f"signal {-number}"
        except subprocess.TimeoutExpired:
            ended = f"took longer than {timeout:g} s"
        answers.seek(0)
        printed.seek(0)
        lines = [json.loads(line) for line in answers if line.endswith("\n")]
        last = printed.read().strip().splitlines()[-1:]
    return lines, ": ".join([ended, *last])
