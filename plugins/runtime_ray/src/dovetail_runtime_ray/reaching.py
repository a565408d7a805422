"""Existing clusters: where one is, and whether anyone answers there."""

from __future__ import annotations

import socket
from typing import Any

from dovetail.errors import PlacementError

REACH_SECONDS = 5.0
"""How long an existing cluster's head may take to accept a connection."""


def check_reachable(address: str) -> None:
    """Check whether a cluster's head answers at `host:port`; addresses without a colon are left to Ray.

    Ray itself waits for minutes; a plain connection says within seconds whether someone is there.

    Raises:
        PlacementError: the head does not answer, or this is not an address.
    """
    host, colon, port = address.rpartition(":")
    if not colon:
        return
    if not port.isdigit():
        raise PlacementError(
            f"runtime.address={address!r} is not an address of a cluster",
            hint="give host:port, such as 10.0.0.1:6379, or auto",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise unreachable(address, f"{type(error).__name__}: {error}") from error


def found_here() -> str:
    """Return the address of the cluster that runs on this machine, as Ray's own `auto` finds it.

    Raises:
        PlacementError: no cluster runs here.
    """
    from ray._private import services

    find: Any = services.canonicalize_bootstrap_address
    try:
        found = find("auto")
    except (ConnectionError, ValueError) as error:
        raise unreachable("auto", str(error).splitlines()[0]) from error
    if found is None:
        raise unreachable("auto", "no cluster runs on this machine")
    return str(found)


def unreachable(address: str, why: str) -> PlacementError:
    """Return the error for a cluster that does not answer."""
    return PlacementError(
        f"no Ray cluster answers at {address!r} (runtime.address or RAY_ADDRESS): {why}",
        hint="start one with `ray start --head`, correct the address, or leave it out: "
        "then the run starts a cluster of its own on this machine",
    )
