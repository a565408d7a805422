"""Commands on the pool of a service that generates: show its status, add replicas, and drain replicas without loss."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from dovetail.cli.main import main
from dovetail.errors import DovetailError, RolloutError, RunDirectoryError
from dovetail.telemetry.run_directory import RunDirectory
from dovetail_rollouts.pool_commands import PoolCommands
from dovetail_rollouts.pool_socket import LINK, ask, served as reachable

URL = "http://127.0.0.1:8000"
LOGGER: Any = logging.getLogger("dovetail.test")


@pytest.fixture
def command() -> Callable[..., Future[list[dict[str, Any]]]]:
    """A function that runs a command on a service's event loop, and returns a future of all its answers."""
    made: dict[int, PoolCommands] = {}

    def begin(
        served: Any, name: str, start: Any = None, **request: Any
    ) -> Future[list[dict[str, Any]]]:
        commands = made.setdefault(id(served), PoolCommands(served.pool, served.service, start))

        async def all_of() -> list[dict[str, Any]]:
            return [answer async for answer in commands.run({"command": name, **request})]

        return served.service.start(all_of())

    return begin


def test_the_status_names_every_replica_and_the_queue(serve, command) -> None:
    served = serve(held=[0])
    served.service.admit(served.groups_of(0, 1))
    served.until(lambda: served.engine.active == 1 and served.service.ready == 1)
    (found,) = command(served, "status").result(60)
    assert (found["groups"], found["ready"]) == (1, 1)
    (member,) = found["members"]
    assert member == {
        "replica": 0,
        "address": None,
        "state": "current",
        "weight_version": None,
        "requests": 1,
        "tokens": member["tokens"],
        "failure": None,
    }
    assert member["tokens"] > 0


def test_a_drained_replica_ends_its_requests_and_gets_no_more(serve, command) -> None:
    served = serve(held=[0])
    other = type(served.engine)()
    served.pool.replicas.join(other)
    served.service.admit(served.groups_of(0))
    served.until(lambda: served.engine.active == 1)
    drained = command(served, "drain", member="0")
    served.until(lambda: served.pool.replicas.members[0].draining)
    served.service.admit(served.groups_of(1, 2))
    served.until(lambda: served.service.ready == 2)
    assert not drained.done()
    assert len(other.requests) == 2
    served.engine.held.clear()
    states = [answer["state"] for answer in drained.result(60)]
    assert states == ["draining", "drained"]
    assert served.complete(*served.service.take(3))
    assert len(served.engine.requests) == 1


def test_the_last_replica_is_drained_by_force_alone(serve, command) -> None:
    served = serve()
    with pytest.raises(RolloutError, match=r"replica 0 can't be drained.*the pool"):
        command(served, "drain", member="0").result(60)
    assert not served.pool.replicas.changing
    command(served, "drain", member="0", force=True).result(60)
    assert served.pool.replicas.changing


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("7", "the pool has the replicas 0, http://127.0.0.1:8000"),
        ("http://127.0.0.1:8001", "did you mean 'http"),
    ],
)
def test_an_unknown_replica_is_refused_with_the_nearest_name(
    name: str, hint: str, serve, command
) -> None:
    served = serve()
    served.pool.replicas.members[0].address = URL
    with pytest.raises(RolloutError, match=f"no replica '{name}'") as refused:
        command(served, "drain", member=name).result(60)
    assert hint in str(refused.value.hint)


def test_a_server_is_added_once_and_its_number_is_a_new_one(serve, command) -> None:
    served = serve()
    late, asked = type(served.engine)(), []

    def start(address: str, number: int) -> Any:
        asked.append((address, number, threading.current_thread().name))
        return late

    adding = command(served, "add", start, address=URL + "/")
    served.until(lambda: len(served.pool.replicas.all) == 2)
    with pytest.raises(RolloutError, match=f"the server at {URL} is replica 1 of the pool already"):
        command(served, "add", address=URL).result(60)
    served.pool.replicas.settle()
    served.pool.replicas.receive_weights(4, None)
    served.pool.replicas.welcome(4)
    assert [answer["state"] for answer in adding.result(60)] == ["starting", "current"]
    assert adding.result()[-1]["weight_version"] == 4
    ((address, number, thread),) = asked
    assert (address, number) == (URL, 1)
    assert thread != "dovetail-rollout"  # a slow server must not delay requests
    assert late in served.pool.replicas.usable


def test_a_server_that_does_not_fit_is_refused_and_the_pool_is_as_it_was(serve, command) -> None:
    served = serve()

    def start(address: str, number: int) -> Any:
        raise RolloutError(f"no server answers at {address}")

    with pytest.raises(RolloutError, match="no server answers"):
        command(served, "add", start, address=URL).result(60)
    assert len(served.pool.replicas.all) == 1
    assert not served.pool.replicas.changing


def test_a_command_that_there_is_not_is_refused(serve, command) -> None:
    with pytest.raises(DovetailError, match="'grow' is not a command"):
        command(serve(), "grow").result(60)


def test_requests_of_a_drained_replica_that_is_killed_are_asked_of_another(serve, command) -> None:
    served = serve(held=[0])
    other = type(served.engine)()
    served.pool.replicas.join(other)
    served.service.admit(served.groups_of(0))
    served.until(lambda: served.engine.active == 1)
    drained = command(served, "drain", member="0")
    served.until(lambda: served.pool.replicas.changing)
    served.engine.dead = True
    assert drained.result(60)[-1]["state"] == "drained"
    assert served.complete(*served.service.take(1))
    assert len(other.requests) == 1
    assert served.pool.replicas.lost() == ()


def test_a_replica_that_says_that_it_will_be_ended_is_drained(
    serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail_rollouts.pool_commands._WATCH_SECONDS", 0.01)
    served = serve(held=[0])

    class Leaving(type(served.engine)):
        draining = False

    leaving = Leaving()
    served.pool.replicas.join(leaving)
    commands = PoolCommands(served.pool, served.service, lambda *_: leaving)
    watch = served.service.start(commands.watch())
    served.service.admit(served.groups_of(0, 1))
    served.until(lambda: len(leaving.requests) == 1)
    Leaving.draining = True
    served.until(lambda: served.pool.replicas.usable == (served.engine,))
    served.service.admit(served.groups_of(2))
    served.engine.held.clear()
    assert served.complete(*served.service.take(3))
    assert len(leaving.requests) == 1
    assert watch.cancel()


# -- from another process -----------------------------------------------------------------------


def dovetail(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["pool", *arguments])


def test_the_command_shows_drains_and_explains(serve, tmp_path: Path) -> None:
    served = serve()
    served.pool.replicas.join(type(served.engine)())
    directory = RunDirectory.create(tmp_path / "run")
    commands = PoolCommands(served.pool, served.service, lambda *_: served.engine)
    with directory.held(), reachable(commands, served.service, directory, LOGGER):
        run = str(directory.path)
        place = (directory.path / LINK).readlink()
        assert (place.stat().st_mode & 0o777, place.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        shown = dovetail("status", run)
        assert shown.exit_code == 0, shown.output
        assert [line.split()[:2] for line in shown.stdout.splitlines()[1:3]] == [
            ["0", "current"],
            ["1", "current"],
        ]
        assert '"state": "running"' in dovetail("status", run, "--json").stdout
        drained = dovetail("drain", run, "1")
        assert "replica 1 is drained" in drained.stdout
        last = dovetail("drain", run, "0")
        assert last.exit_code == 1
        assert "replica 0 can't be drained: it is the last" in last.output
        assert "--force" in last.output
        with pytest.raises(DovetailError, match="can't be read"):
            list(ask(directory, {"command": "add"}))
    assert not (directory.path / LINK).is_symlink()
    assert not place.parent.exists()


def test_a_run_that_can_not_be_reached_says_why(serve, tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run")
    run = str(directory.path)
    with pytest.raises(RunDirectoryError, match="under way"):
        list(ask(directory, {"command": "status"}))
    assert "its state is killed" in dovetail("status", run).stdout
    served = serve()
    commands = PoolCommands(served.pool, served.service, lambda *_: served.engine)
    with directory.held():
        starting = dovetail("add", run, URL)
        assert "replicas yet" in starting.output
        (directory.path / LINK).symlink_to(tmp_path / "gone" / "socket")  # left by a killed run
        assert "does not answer" in dovetail("status", run).output
        with reachable(commands, served.service, directory, LOGGER):
            assert dovetail("status", run).exit_code == 0
    assert "run directory" in dovetail("status", str(tmp_path / "other")).output


def test_a_run_without_room_for_a_socket_goes_on_and_says_so(
    serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    served, told = serve(), []
    logger: Any = SimpleNamespace(warning=lambda message, **_: told.append(message))
    directory = RunDirectory.create(tmp_path / "run")
    commands = PoolCommands(served.pool, served.service, lambda *_: served.engine)
    with directory.held(), reachable(commands, served.service, directory, logger):
        assert "replicas yet" in dovetail("status", str(directory.path)).output
    (message,) = told
    assert "path too long" in message
    assert list(deep.iterdir()) == []
