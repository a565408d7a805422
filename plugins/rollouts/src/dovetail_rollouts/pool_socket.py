"""The connection of `dovetail pool` to an active run: a Unix socket that carries JSON lines.

The socket is in a temporary folder that only the run's user may enter: its path may have at most about 100 bytes, and a shared file
system may not support sockets. The run directory holds a symbolic link to the socket.
"""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from dovetail.errors import DovetailError, RunDirectoryError
from dovetail.interfaces import Logger
from dovetail.telemetry import RunDirectory
from dovetail_rollouts.pool_commands import PoolCommands
from dovetail_rollouts.rollout_service import RolloutService

LINK = "pool.socket"
_NAME = "socket"


@contextmanager
def served(
    commands: PoolCommands, service: RolloutService, directory: RunDirectory, logger: Logger
) -> Iterator[None]:
    """Answer the commands that `ask` sends within the block, on the service's event loop, and drain replicas whose engines end soon.

    If no socket can be created, the run continues without one, and a warning is logged.
    """
    link = directory.path / LINK
    _remove(link)
    with ExitStack() as opened:
        watch = service.start(commands.watch())
        opened.callback(watch.cancel)
        try:
            folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="dovetail-"))
            place = Path(folder) / _NAME
            server = service.start(_open(commands, place)).result()
            opened.callback(_close, service, server)
            link.symlink_to(place)
            opened.callback(link.unlink, missing_ok=True)
        except OSError as error:
            logger.warning(
                f"`dovetail pool` can't reach this run: {error}", hint="set TMPDIR to a directory with a shorter path"
            )  # fmt: skip
        yield


def ask(directory: RunDirectory, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Send a command to the run in a directory, and yield its answers; see `PoolCommands.run`.

    Raises:
        RunDirectoryError: no run is active in the directory, or the run can't be reached.
        DovetailError: the run can't carry out the command.
    """
    path = directory.path
    if not directory.under_way:
        raise RunDirectoryError(
            f"no run is under way in {str(path)!r}",
            hint=f"continue it with `dovetail resume {path}`; `dovetail runs list` shows which runs are under way",
        )
    link = path / LINK
    if not link.is_symlink():
        raise RunDirectoryError(
            f"the run in {str(path)!r} has no pool of replicas yet: it is still starting, or its trainer generates nothing",
            hint="try again once its first step has begun",
        )
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(link.readlink()))
            connection.sendall(json.dumps(dict(request)).encode() + b"\n")
        except OSError as error:
            raise RunDirectoryError(
                f"the run in {str(path)!r} does not answer: {error.strerror or error}",
                hint="give the command on the host that run.json names, as the user who started the run",
            ) from error
        with connection.makefile(encoding="utf-8") as lines:
            for line in lines:
                answer: dict[str, Any] = json.loads(line)
                if "error" in answer:
                    raise DovetailError(answer["error"], hint=answer["hint"])
                if "end" in answer:
                    return
                yield answer
    raise RunDirectoryError(
        f"the run in {str(path)!r} ended before it answered",
        hint=f"`dovetail pool status {path}` shows its state",
    )


async def _open(commands: PoolCommands, place: Path) -> asyncio.Server:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def say(value: Mapping[str, Any]) -> None:
            writer.write(json.dumps(dict(value)).encode() + b"\n")

        try:
            try:
                async for found in commands.run(json.loads(await reader.readline())):
                    say(found)
                    await writer.drain()
                say({"end": True})
            except DovetailError as error:
                say({"error": error.message, "hint": error.hint})
            except (ValueError, KeyError) as error:
                say({"error": f"the request can't be read: {error!r}", "hint": None})
            await writer.drain()
        except ConnectionError:
            pass  # the client has disconnected; a replica that it added still joins
        finally:
            writer.close()

    server = await asyncio.start_unix_server(answer, place)
    place.chmod(0o600)
    return server


def _close(service: RolloutService, server: asyncio.Server) -> None:
    async def close() -> None:
        server.close()

    with suppress(RuntimeError):  # the event loop has ended
        service.start(close()).result(timeout=10)


def _remove(link: Path) -> None:
    """Remove the socket and the link that a killed run left behind."""
    with suppress(OSError):
        place = link.readlink()
        link.unlink()
        if place.name == _NAME:
            place.unlink()
            place.parent.rmdir()
