"""Runs a launch script in a sandbox, with stand-ins for the programs that it would start, and records their commands."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from dovetail.errors import ConfigError
from dovetail_rewards.sandbox import Program, ProgramLimits, ProgramVerdict, Sandbox, SandboxError

STAND_INS = [
    "python",
    "python2",
    "python3",
    "python3.9",
    "python3.10",
    "python3.11",
    "python3.12",
    "python3.13",
    "torchrun",
    "ray",
    "uv",
    "pip",
    "pip3",
    "conda",
    "mamba",
    "accelerate",
    "deepspeed",
    "vllm",
    "huggingface-cli",
    "hf",
    "modelscope",
    "wandb",
    "swanlab",
    "wget",
    "curl",
    "git",
    "ssh",
    "scp",
    "rsync",
    "docker",
    "sbatch",
    "srun",
    "scontrol",
    "squeue",
    "nvidia-smi",
    "npu-smi",
    "rocm-smi",
    "lsof",
    "fuser",
    "kill",
    "pkill",
    "killall",
    "reboot",
    "shutdown",
    "sudo",
    "tee",
    "sleep",
    "apt",
    "apt-get",
    "yum",
    "npm",
    "node",
    "make",
    "cmake",
    "ip",
    "ifconfig",
    "ping",
    "nc",
    "module",
    "hdfs",
    "aws",
    "gsutil",
]
"""Programs that are not started; their names and arguments are recorded."""
SECONDS = 20.0
"""CPU seconds that a script may use; the limit of wall-clock time is three times as long."""
_RECORDER = """#!/bin/sh
name=${0##*/}
printf '%s\\000' "$#" "$name" "$@" > /box/tmp/call.$$
/bin/cat /box/tmp/call.$$ >> /box/tmp/record
case "$name" in
  tee) cat ;;
  nvidia-smi) for i in $(seq 0 $((GPUS - 1))); do echo "GPU $i: stand-in"; done ;;
esac
exit 0
"""
_LENIENT = """#!/bin/sh
/bin/${0##*/} "$@" 2>/dev/null
exit 0
"""
_PRELUDE = """ulimit() { :; }
cd() { builtin cd "$@" 2>/dev/null || builtin cd /box/work; }
"""
"""Commands that bash reads before the script, so that actions that the sandbox forbids do not end the script."""
_RUN = """
chmod -R +x .stand_ins; export BASH_ENV=/box/tmp/stand_ins/.prelude; cp -r .stand_ins /box/tmp/stand_ins; rm -r .stand_ins
: > /box/tmp/record
export PATH=/box/tmp/stand_ins:$PATH HOME=/box/work/.home
mkdir -p "$HOME"
{assignments}
cd {folder}
bash {script} </dev/null >/box/tmp/out 2>/box/tmp/err
echo $?
cat /box/tmp/record
"""
_BESIDE = frozenset({".sh", ".env", ".yaml", ".yml", ".json", ".jsonl", ".txt", ".conf", ".cfg", ".toml", ".bash"})  # fmt: skip
_MOST_BYTES = 1 << 18
WHAT_IT_MAY_DO = """The script {script} runs in a sandbox, to find the commands that it would start:
  it can read the system's programs, itself and the small text files in its folder; it has no network and no other files of yours
  it can write only to a temporary folder in memory, and runs for at most {seconds:.0f} s of CPU time
  python, torchrun, ray, uv, pip, wget and {more} other programs are stand-ins, which record their arguments and start nothing"""


@attrs.frozen
class ScriptRun:
    """The recorded commands, exit status and errors of a script that ran in the sandbox."""

    commands: tuple[tuple[str, ...], ...]
    """The words of every recorded command, in order."""
    status: int | None
    """The script's exit status; None if the script was ended at its time limit."""
    errors: str
    """The end of the script's standard error, or the limit that ended the script."""


def may_do(script: Path) -> str:
    """Return a description of what the script may do, to print before the script runs; for errors see `run_script`."""
    if not script.is_file():
        raise ConfigError(f"the script {script} does not exist")
    return WHAT_IT_MAY_DO.format(script=script, seconds=SECONDS, more=len(STAND_INS) - 6)


def run_script(
    script: Path,
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    *,
    seconds: float = SECONDS,
    gpus: int = 8,
) -> ScriptRun:
    """Run a bash script in a sandbox and return the commands that the script would have started.

    Args:
        script: the script file; small text files in the same folder are in the sandbox too.
        arguments: positional arguments of the script.
        variables: environment variables of the script; of the caller's other variables, it gets only USER.
        seconds: the limit of CPU seconds; the limit of wall-clock seconds is three times as long.
        gpus: the number of GPUs that `nvidia-smi` reports.

    Raises:
        ConfigError: the file is missing, or this machine can't sandbox the script.
    """
    may_do(script)
    home, here = Path.home(), Path.cwd()
    inside = script.resolve().relative_to(here) if script.resolve().is_relative_to(here) else Path(script.name)  # fmt: skip
    files = {f".stand_ins/{name}": _RECORDER.encode() for name in STAND_INS}
    files |= {f".stand_ins/{name}": _LENIENT.encode() for name in ("mkdir", "cp", "mv", "ln", "chmod", "touch")}  # fmt: skip
    # Debian's awk is a link to /etc/alternatives, which the sandbox does not have.
    files[".stand_ins/awk"] = b'#!/bin/sh\nexec "$(command -v mawk gawk | head -n 1)" "$@"\n'
    files[".stand_ins/.prelude"] = _PRELUDE.encode()
    for path in [*_beside(script), script]:
        files[str(inside.parent / path.name)] = path.read_bytes()
    set_by_caller = {"GPUS": str(gpus), "USER": os.environ.get("USER", "user"), **(variables or {})}
    assignments = "\n".join(f"export {key}={shlex.quote(value)}" for key, value in set_by_caller.items())  # fmt: skip
    words = shlex.join([str(inside), *arguments])
    shell = _RUN.format(assignments=assignments, folder="/box/work", script=words)
    shell += "tail -c 2000 /box/tmp/err >&2\n"
    try:
        with Sandbox(level="auto") as sandbox:
            result = sandbox.run(
                Program(argv=("/bin/bash", "-c", shell), files=files),
                ProgramLimits(cpu_s=seconds, processes=128, open_files=128),
            )
    except SandboxError as error:
        raise ConfigError(
            f"{script} can't be run, since this machine can't sandbox it: {error.message}",
            hint="let the script print its verl command (put echo before python3), and import that: dovetail import verl --arguments-only -- COMMAND",
        ) from error
    if result.verdict is ProgramVerdict.TIMEOUT:
        return ScriptRun((), None, f"it ran longer than {seconds:.0f} s")
    status, _, record = result.stdout.partition(b"\n")
    if result.verdict is not ProgramVerdict.OK or not status.isdigit():
        return ScriptRun((), result.exit_status, f"{result.verdict}: {_text(result.stderr)}")
    commands = (tuple(_outside(word, home, here) for word in words) for words in _commands(record))
    return ScriptRun(tuple(commands), int(status), _outside(_text(result.stderr), home, here))


def _beside(script: Path) -> list[Path]:
    """Return the small text files in the script's folder, up to 1 MiB together."""
    found, left = [], 1 << 20
    for path in sorted(script.parent.iterdir()):
        if path.suffix in _BESIDE and path.is_file() and path != script:
            size = path.stat().st_size
            if size <= _MOST_BYTES and size <= left:
                found.append(path)
                left -= size
    return found


def _commands(record: bytes) -> list[list[str]]:
    """Return the recorded calls. A call is recorded as number of arguments, name and arguments, each ended by a NUL."""
    parts = [part.decode("utf-8", "backslashreplace") for part in record.split(b"\0")]
    found, at = [], 0
    while at + 1 < len(parts):
        count = int(parts[at])
        found.append(parts[at + 1 : at + 2 + count])
        at += 2 + count
    return found


def _outside(text: str, home: Path, here: Path) -> str:
    """Replace the sandbox's home folder and working directory in a text by `home` and `here`, those of the caller."""
    return text.replace("/box/work/.home", str(home)).replace("/box/work", str(here))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace").strip()
