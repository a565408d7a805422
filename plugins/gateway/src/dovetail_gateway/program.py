"""A user's program: its folder, its environment, its run, and its output."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

import attrs

from dovetail.errors import ConfigError
from dovetail.interfaces import EpisodeError, FailureKind, Session
from dovetail_gateway import supervise
from dovetail_gateway.config import ProgramConfig

ROW, OUTPUT, LOG = "row.json", "output.json", "program.log"
"""The files in a program's folder: the row, the program's output file, and the printed output."""
_FOREIGN = ("ANTHROPIC_AUTH_TOKEN", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID")
"""Variables that are removed from the program's environment, since they would direct its client to another account."""
_LONGEST_VARIABLE = 64 << 10
"""Maximum bytes of the row in an environment variable (Linux allows 128 KiB); a longer row is only in the file."""
_END_SECONDS = 10.0
"""Seconds within which the supervisor must end a program; after that, the supervisor itself is killed."""
_SHOWN = 300
"""Maximum characters of a program's last line in a message."""


@attrs.frozen
class ProgramRun:
    """A program to run, with its environment and limits."""

    command: list[str]
    folder: str
    variables: dict[str, str | None]
    """Environment variables in addition to those of the starting process; a value of None removes the variable."""
    max_bytes: int
    """Maximum bytes of output."""
    max_processes: int


@attrs.frozen
class ProgramEnd:
    """The end of a program: exit status, or the reason for killing the program."""

    status: int | None
    """The program's exit status; None if the program was killed or could not start."""
    reason: str | None
    """Why the program was killed: `closed` (the episode ended first), `output` or `processes` (a limit was exceeded), or an
    error of the system or the supervisor; None if the program ended by itself.
    """


def command_of(config: ProgramConfig) -> list[str]:
    """Return the command's words, with files as absolute paths.

    Raises:
        ConfigError: the program does not exist.
    """
    words = shlex.split(config.command)
    program = shutil.which(words[0])
    if program is None:
        raise ConfigError(
            f"rollout.agent_loop.command: the program {words[0]!r} was not found",
            hint="name a program that is on the PATH, or a program's file, such as .venv-agent/bin/python",
        )
    # Links are not resolved, since an interpreter finds its environment by the link that started it.
    files = [os.path.abspath(w) if Path(w).is_file() else w for w in words[1:]]  # noqa: PTH100
    return [os.path.abspath(program), *files]  # noqa: PTH100


class ProgramFolder:
    """The working directory of a program.

    Args:
        base: the parent of all programs' folders.
        session: the first session (token sequence) of the episode, with the prompt.
        config: the config of the agent loop.
    """

    def __init__(self, base: Path, session: Session, config: ProgramConfig) -> None:
        base = base.absolute()  # the program runs in another folder
        base.mkdir(parents=True, exist_ok=True)
        self.path = Path(
            tempfile.mkdtemp(prefix=f"{session.sample_id}-".replace("/", "_"), dir=base)
        )
        prompt = session.prompt
        raw = (
            [{"role": "user", "content": prompt.raw}] if isinstance(prompt.raw, str) else prompt.raw
        )
        row = {name: raw if name == "prompt" else getattr(prompt, name) for name in config.row}
        self._row = json.dumps({**row, "index": prompt.index}, ensure_ascii=False, default=str)
        self._config = config
        (self.path / ROW).write_text(self._row, encoding="utf-8")

    def run(self, url: str, key: str) -> ProgramRun:
        """Return the program to run in this folder, with environment and limits.

        Args:
            url: the url of the gateway, without a path.
            key: the key of the episode.
        """
        host = url.partition("://")[2].rpartition(":")[0]
        # Otherwise a proxy of this machine would be used for the gateway.
        direct = ",".join(filter(None, (os.environ.get("NO_PROXY"), host)))
        variables = {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": key,
            "DOVETAIL_MODEL": self._config.models[0],
            "DOVETAIL_ROW": self._row if len(self._row.encode()) <= _LONGEST_VARIABLE else None,
            "DOVETAIL_ROW_FILE": str(self.path / ROW),
            "DOVETAIL_OUTPUT_FILE": str(self.path / OUTPUT),
            **dict.fromkeys(("NO_PROXY", "no_proxy"), direct),
            **dict.fromkeys(_FOREIGN),
            **self._config.environment,
        }
        limits = self._config.max_output_bytes, self._config.max_processes
        return ProgramRun(command_of(self._config), str(self.path), variables, *limits)

    def output(self) -> Any:
        """Return the content of the program's output file, a JSON value or text; None without a file.

        Raises:
            EpisodeError: the output is not a readable file, or too long.
        """
        most = self._config.max_output_bytes
        try:
            file = os.open(self.path / OUTPUT, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise EpisodeError(
                FailureKind.ENVIRONMENT,
                f"the program's output file can't be read: {error.strerror}",
            ) from error
        with os.fdopen(file, "rb") as opened:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise EpisodeError(
                    FailureKind.ENVIRONMENT,
                    "the path of the program's output file is not a regular file",
                )
            data = opened.read(most + 1)
        if len(data) > most:
            raise EpisodeError(
                FailureKind.LIMIT,
                f"the program's output file exceeds its limit of {most} bytes (max_output_bytes)",
            )
        text = data.decode("utf-8", "replace")
        try:
            return json.loads(text, parse_constant=_no_number)
        except (ValueError, RecursionError):
            return text

    def last_line(self) -> str:
        """Return the last line that the program printed, shortened."""
        with contextlib.suppress(OSError), (self.path / LOG).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
            lines = [
                line for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()
            ]
            return lines[-1][:_SHOWN] if lines else ""
        return ""

    def remove(self, *, keep: bool) -> None:
        """Remove the folder; with `keep`, remove all but the row, the output and the log."""
        for path in self.path.iterdir():
            own = path.name in (ROW, LOG) or (
                path.name == OUTPUT and path.stat().st_size <= self._config.max_output_bytes
            )
            if keep and own and path.is_file() and not path.is_symlink():
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if not keep:
            with contextlib.suppress(OSError):
                self.path.rmdir()


async def run_program(run: ProgramRun, until: asyncio.Event) -> ProgramEnd:
    """Run a program until it exits, exceeds a limit, or `until` is set; return after its child processes have ended too."""
    variables = {**os.environ, **run.variables}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", supervise.__file__,
        json.dumps([run.command, str(Path(run.folder) / LOG), run.max_bytes, run.max_processes]),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        cwd=run.folder, env={name: value for name, value in variables.items() if value is not None},
        start_new_session=True,  # Ctrl-C must reach only the run
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    report, stopped = (
        asyncio.ensure_future(process.stdout.read()),
        asyncio.ensure_future(until.wait()),
    )
    try:
        await asyncio.wait({report, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        process.stdin.close()
        # Shielded, so that no process of the program remains even if this is cancelled again.
        await asyncio.shield(_ended(process, report))
    text = report.result().decode("utf-8", "replace").strip()
    if text.startswith("{"):
        return ProgramEnd(**json.loads(text))
    return ProgramEnd(None, f"the program's supervisor failed: {text[-_SHOWN:] or 'it was killed'}")


async def _ended(process: asyncio.subprocess.Process, report: asyncio.Future[bytes]) -> None:
    try:
        await asyncio.wait_for(asyncio.shield(report), _END_SECONDS)
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        await report
    await process.wait()


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
