"""Joins a server that was started by hand: checks that it answers and fits the run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dovetail.errors import RolloutError
from dovetail_serving.connection import ServerConnection

if TYPE_CHECKING:
    import httpx2

DESCRIBE = "/dovetail/v1/describe"
"""The path under which a server describes itself."""


async def answers_of(
    connection: ServerConnection, *paths: str, token_variable: str, hint: str
) -> list[httpx2.Response]:
    """Return a server's answers to GET requests for these paths, in order, whatever their status.

    Args:
        connection: the connection to the server.
        paths: the path of the server's description (`DESCRIBE`), and any other paths that identify the engine.
        token_variable: the environment variable with the token that is sent.
        hint: the error's hint: how to start a suitable server.

    Raises:
        RolloutError: the server does not answer, or requires another token.
    """
    import httpx2

    url = connection.url
    try:
        found = [await connection.get(path) for path in paths]
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise RolloutError(
            f"no server answers at {url} (rollout.urls): {type(error).__name__}: {error}", hint=hint
        ) from error
    if any(one.status_code == httpx2.codes.UNAUTHORIZED for one in found):
        raise RolloutError(
            f"the server at {url} requires another access token than the one in {token_variable}",
            hint=f"set {token_variable} here to the value with which the server was started",
        )
    return found


def refuse_problems(problems: Sequence[str], *, engine: str, url: str, hint: str) -> None:
    """Raise an error that lists all problems of a server, if there are any.

    Raises:
        RolloutError: `problems` is not empty.
    """
    if problems:
        raise RolloutError(
            f"the {engine} server at {url} does not fit this run: " + "; ".join(problems), hint=hint
        )


def port_of(url: str, otherwise: int) -> int:
    """Return the port in a server's address, or `otherwise` if the address names no port."""
    found = re.search(r":(\d+)/?$", url)
    return int(found[1]) if found else otherwise
