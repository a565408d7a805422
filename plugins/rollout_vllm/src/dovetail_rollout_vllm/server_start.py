"""How a replica comes by its server: starts one and waits until it is ready, or joins one that is there."""

from __future__ import annotations

import asyncio
import time

from dovetail.errors import DovetailError, RolloutError
from dovetail.interfaces.plugin import PluginContext
from dovetail_rollout_vllm.config import VllmRolloutConfig
from dovetail_rollout_vllm.failures import death, start_failure, tail_of
from dovetail_rollout_vllm.server_checks import fitting, refuse_unfit
from dovetail_rollout_vllm.server_command import ROUTES, server_command
from dovetail_rollout_vllm.server_connection import ServerConnection
from dovetail_rollout_vllm.server_messages import TOKEN_VARIABLE
from dovetail_rollout_vllm.server_process import LOOPBACK, ServerProcess, free_port, refuse_used
from dovetail_rollout_vllm.surroundings import log_path, variables
from dovetail_rollout_vllm.versions import require

_LOOK_SECONDS = 0.2


class OwnServer:
    """A server of one replica, on the loopback interface.

    Args:
        config: the rollout's.
        context: the rollout's.
        token: what the server wants to be shown.

    Attributes:
        url: where it will answer.
        log: the file that it prints to.

    Raises:
        RolloutError: the port is in use.
        PluginNeedsError: vLLM is missing, or of a version that this plugin does not drive.
        ModelError: there is no model.
    """

    def __init__(self, config: VllmRolloutConfig, context: PluginContext, token: str) -> None:
        release = require()
        if release.untried:
            context.logger.warning(
                "%s %s is newer than any that this plugin was tried with",
                release.distribution,
                release.version,
            )
        self._config = config
        if config.port is None:
            port = free_port()
        else:
            port = config.port + context.rank
            refuse_used(port)
        command = server_command(config, context, host=LOOPBACK, port=port)
        self.url = f"http://{LOOPBACK}:{port}"
        self.log = log_path(context)
        environment = {**variables(config, context, self.log), TOKEN_VARIABLE: token}
        self._process = ServerProcess(command, log=self.log, environment=environment)
        context.logger.info("vLLM server %s starts; it prints to %s", self.url, self.log)

    async def ready(self, connection: ServerConnection) -> None:
        """Wait until it answers.

        Raises:
            RolloutError: it ended, or took longer than `start_timeout`.
            DovetailError: what vLLM's start failed of, where that is known.
        """
        import httpx2

        deadline = time.monotonic() + self._config.start_timeout
        while time.monotonic() < deadline:
            if (how := self.ended()) is not None:
                raise self._failure(RuntimeError(f"the server {how}"))
            try:
                if await connection.health() == httpx2.codes.OK:
                    await connection.ask("describe")
                    return
            except httpx2.HTTPError:
                pass  # it does not listen yet
            await asyncio.sleep(_LOOK_SECONDS)
        raise self._failure(
            TimeoutError(
                f"the server at {self.url} was not healthy within rollout.start_timeout={self._config.start_timeout:g} s"
            )
        )

    def ended(self) -> str | None:
        """How its process ended; None while it runs."""
        status = self._process.exit_status
        return None if status is None else f"ended with status {status}"

    def death(self, how: str) -> RolloutError:
        """The error for a server that ran and is dead."""
        return death(how, self.log)

    def close(self) -> None:
        """End it; safe to call twice."""
        self._process.close()

    def _failure(self, error: Exception) -> DovetailError:
        printed = tail_of(self.log)
        if "address already in use" in printed.lower():
            return RolloutError(
                f"vLLM can't be served at {self.url}: another process has taken the port since it was looked at",
                hint="start again; or set rollout.port to one that is kept free",
            )
        return start_failure(error, self.log, self._config)


async def join(
    connection: ServerConnection, config: VllmRolloutConfig, context: PluginContext
) -> None:
    """See that a server which was started by hand is there, and fits.

    Raises:
        RolloutError: it is not, or does not; says how to start one that does.
    """
    import httpx2

    url, hint = connection.url, fitting(config, context, connection.url)
    try:
        version = await connection.get("/version")
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise RolloutError(
            f"no server answers at {url} (rollout.urls): {type(error).__name__}: {error}", hint=hint
        ) from error
    try:
        number = version.json()["version"]
    except (ValueError, KeyError, TypeError):
        raise RolloutError(
            f"what answers at {url} (rollout.urls) is no vLLM server: /version gave status {version.status_code}",
            hint=hint,
        ) from None
    routes = await connection.get("/dovetail/v1/describe")
    if routes.status_code == httpx2.codes.NOT_FOUND:
        raise RolloutError(
            f"the server at {url} (vLLM {number}) was started without --middleware {ROUTES}: it can neither receive "
            "weights nor be asked by token ids",
            hint=hint,
        )
    if routes.status_code == httpx2.codes.UNAUTHORIZED:
        raise RolloutError(
            f"the server at {url} wants another token",
            hint=f"set {TOKEN_VARIABLE} here to what it was when the server was started",
        )
    found = await connection.ask("describe")
    refuse_unfit(found.header, config, context, url)
