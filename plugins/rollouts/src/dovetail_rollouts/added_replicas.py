"""Replicas that are added to the pool of a run that is under way: each joins a server that its user started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from dovetail.errors import ConfigError, PluginError
from dovetail.interfaces import BaseRollout, WorkerSpec
from dovetail.plugins import load_plugin_class, make_plugin


def adding_to(
    spec: WorkerSpec, device: str, machines: int = 1
) -> Callable[[str, int], BaseRollout]:
    """Return a function that takes a replica's number and a server's address, and starts a replica in this process that joins the server.

    It may be called from any thread. It raises ConfigError where such servers, or weights of this run, can't be joined, and
    what the replica's own start raises.

    Args:
        spec: the spec of the run's other replicas.
        device: the device that its plugin's context names.
        machines: the machines of the run's rollout.
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
                    f"rollout.weight_transport {transport.name!r} hands weights over within one {within}, and the server at "
                    f"{address} is {'not in it' if within == 'process' else 'not known to be on it'}",
                    hint="resume the run with a transport that reaches it, such as rollout.weight_transport=disk",
                )
            context = attrs.evolve(context, transport=make_plugin(transport, context))
        replica = make_plugin(ref, context)
        if not isinstance(replica, BaseRollout):
            raise PluginError(f"{ref.name!r} is not a rollout")
        try:
            replica.start()
        except BaseException:
            replica.close()
            raise
        return replica

    return start
