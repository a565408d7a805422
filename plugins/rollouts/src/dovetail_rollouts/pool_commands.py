"""PoolCommands: the commands to the pool of an active run: show its status, add a replica, drain a replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import attrs

from dovetail.errors import ConfigError, PluginError, RolloutError, nearest
from dovetail.interfaces import BaseRollout, WorkerSpec
from dovetail.plugins import load_plugin_class, make_plugin
from dovetail_rollouts.replica_states import Replica, describe
from dovetail_rollouts.rollout_pool import RolloutPool
from dovetail_rollouts.rollout_service import RolloutService

Answer = dict[str, Any]
_WATCH_SECONDS = 1.0


class PoolCommands:
    """Carries out commands on a rollout pool, on the event loop of the rollout service.

    Args:
        pool: the pool of replicas.
        service: the service that generates on the replicas.
        start: a function that starts a replica, given the address of the server to join and the number of the replica.
    """

    def __init__(
        self,
        pool: RolloutPool,
        service: RolloutService,
        start: Callable[[str, int], BaseRollout],
    ) -> None:
        self._pool, self._service, self._start = pool, service, start
        self._adding = asyncio.Lock()

    async def run(self, request: Mapping[str, Any]) -> AsyncIterator[Answer]:
        """Run one command, and yield its answers as JSON values; the last answer is the command's result.

        Args:
            request: `{"command": "status"}`, `{"command": "add", "address": URL}` or
                `{"command": "drain", "member": NAME, "force": bool}`; NAME is a replica's number or its server's address.

        Raises:
            DovetailError: the command can't be carried out.
        """
        command = request.get("command")
        if command == "status":
            yield self.status()
        elif command == "add":
            async for answer in self._add(str(request["address"])):
                yield answer
        elif command == "drain":
            async for answer in self._drain(str(request["member"]), bool(request.get("force"))):
                yield answer
        else:
            raise RolloutError(
                f"{command!r} is not a command of a pool; expected add, drain or status"
            )

    async def watch(self) -> None:
        """Drain each replica whose engine reports that it will end soon (`BaseRollout.draining`), until the task is cancelled."""
        drains: set[asyncio.Task[None]] = set()
        while True:
            for member in self._pool.replicas.all:
                if member.engine.draining and not member.draining:
                    drains.add(task := asyncio.create_task(self._service.drain(member)))
                    task.add_done_callback(drains.discard)
            await asyncio.sleep(_WATCH_SECONDS)

    def status(self) -> Answer:
        """Return the state of every replica (`members`), and the counts of unfinished (`groups`) and finished groups (`ready`)."""
        members = [
            {
                "replica": member.number,
                "address": member.address,
                "state": "draining" if member.draining else str(member.state),
                "weight_version": member.version,
                "requests": len(member.requests),
                "tokens": member.outstanding,
                "failure": None if (error := member.fault or member.last_error) is None else describe(error),
            }
            for member in self._pool.replicas.all
        ]  # fmt: skip
        queued, ready = self._service.outstanding, self._service.ready
        return {"members": members, "groups": queued - ready, "ready": ready}

    async def _add(self, address: str) -> AsyncIterator[Answer]:
        address = address.rstrip("/")
        # A replica is listed only once it has started, so two concurrent commands could add the same server twice.
        async with self._adding:
            known = next((m for m in self._pool.replicas.all if m.address == address), None)
            if known is not None:
                raise RolloutError(
                    f"the server at {address} is replica {known.number} of the pool already",
                    hint=f"drain replica {known.number} first, or give another server",
                )
            start = self._start
            member = await asyncio.to_thread(
                self._pool.replicas.add, lambda number: start(address, number), address
            )
        yield {"replica": member.number, "state": str(member.state)}
        assert member.joined is not None
        version = await asyncio.wrap_future(member.joined)
        yield {"replica": member.number, "state": str(member.state), "weight_version": version}

    async def _drain(self, name: str, force: bool) -> AsyncIterator[Answer]:
        member = self._named(name)
        others = [
            m for m in self._pool.replicas.all if not (m is member or m.draining or m.joining)
        ]
        if not others and not force:
            raise RolloutError(
                f"replica {member.number} can't be drained: it is the last of the pool, and without it nothing is generated",
                hint="add another replica first and wait until it has joined; or give --force: the run then ends when it needs samples",
            )
        yield {"replica": member.number, "state": "draining", "requests": len(member.requests)}
        await self._service.drain(member)
        yield {"replica": member.number, "state": "drained"}

    def _named(self, name: str) -> Replica:
        """Return the replica with this number or address."""
        names = {
            key: member
            for member in self._pool.replicas.all
            for key in (str(member.number), member.address)
            if key is not None and not member.joining
        }
        found = names.get(name.rstrip("/"))
        if found is None:
            near = nearest(name, names)
            hint = (
                f"did you mean {near!r}?"
                if near
                else f"the pool has the replicas {', '.join(names)}"
            )
            raise RolloutError(f"the pool has no replica {name!r}", hint=hint)
        return found


def adding_to(
    spec: WorkerSpec, device: str, machines: int = 1
) -> Callable[[str, int], BaseRollout]:
    """Return a function that starts a replica in this process, given a server's address to join and the replica's number.

    The function may be called from any thread. It raises ConfigError if the engine can't join servers or the weight transport does not
    reach the server, and any error of the replica's start.

    Args:
        spec: the spec of the run's other replicas.
        device: the torch device, or its type, that the new replica's plugin gets as `PluginContext.device`.
        machines: the number of machines of the run's rollout.
    """

    def start(address: str, number: int) -> BaseRollout:
        section: Any = spec.plugin.config
        ref = attrs.evolve(spec.plugin, config=section.joining(address))
        context = attrs.evolve(spec.context, rank=number, device=device)
        if spec.transport is not None:
            transport = spec.transport
            able = load_plugin_class(transport).capabilities
            if "in_process" in able or (machines > 1 and "across_machines" not in able):
                within = "process" if "in_process" in able else "machine"
                raise ConfigError(
                    f"the server at {address} can't be added: rollout.weight_transport {transport.name!r} carries weights within one "
                    f"{within}, and the server {'runs in another' if within == 'process' else 'may be on another'}",
                    hint="resume the run with a transport that reaches the server, such as rollout.weight_transport=disk",
                )
            context = attrs.evolve(context, transport=make_plugin(transport, context))
        replica = make_plugin(ref, context)
        if not isinstance(replica, BaseRollout):
            raise PluginError(f"plugin {ref.name!r} is not a rollout (a BaseRollout)")
        try:
            replica.start()
        except BaseException:
            replica.close()
            raise
        return replica

    return start
