"""Starting a replica's vLLM server, or joining a running server."""

from __future__ import annotations

from dovetail.errors import RolloutError
from dovetail.interfaces import PluginContext
from dovetail_rollout_vllm.config import VllmRolloutConfig
from dovetail_rollout_vllm.environment import TOKEN_VARIABLE, turn_of, variables
from dovetail_rollout_vllm.failures import FAILURES
from dovetail_rollout_vllm.server_checks import fitting, refuse_unfit
from dovetail_rollout_vllm.server_command import ROUTES, server_command
from dovetail_rollout_vllm.versions import require
from dovetail_serving import (
    DESCRIBE,
    LOOPBACK,
    OwnServer,
    ServerConnection,
    answers_of,
    log_path,
    port_for,
)


def start_server(config: VllmRolloutConfig, context: PluginContext, token: str) -> OwnServer:
    """Start a vLLM server for one replica, on the loopback interface.

    Args:
        config: the rollout's config.
        context: the rollout's context.
        token: the bearer token that the server will require.

    Raises:
        RolloutError: the port is in use.
        PluginNeedsError: vLLM is missing, or this plugin does not support its version.
        ModelError: no model is configured.
    """
    require(context.logger)
    port = port_for(config.port, context.rank, FAILURES.engine)
    command = server_command(config, context, host=LOOPBACK, port=port)
    log = log_path("vllm", context)
    server = OwnServer(
        command,
        port=port,
        log=log,
        environment={**variables(config, context, log), TOKEN_VARIABLE: token},
        failures=FAILURES,
        config=config,
        turn=turn_of(context),
    )
    context.logger.info("vLLM server %s starts; it prints to %s", server.url, log)
    return server


async def join(
    connection: ServerConnection, config: VllmRolloutConfig, context: PluginContext
) -> None:
    """Check that a server that the user started answers requests and fits the rollout.

    Raises:
        RolloutError: the server does not answer or does not fit; the error says how to start a suitable server.
    """
    import httpx2

    url, hint = connection.url, fitting(config, context, connection.url)
    version, routes = await answers_of(
        connection, "/version", DESCRIBE, token_variable=TOKEN_VARIABLE, hint=hint
    )
    try:
        number = version.json()["version"]
    except (ValueError, KeyError, TypeError):
        raise RolloutError(
            f"the program at {url} (rollout.urls) is not a vLLM server: /version gave status {version.status_code}",
            hint=hint,
        ) from None
    if routes.status_code == httpx2.codes.NOT_FOUND:
        raise RolloutError(
            f"the server at {url} (vLLM {number}) was started without --middleware {ROUTES}: it can neither receive "
            "weights nor serve requests of token ids",
            hint=hint,
        )
    found = await connection.ask("describe")
    refuse_unfit(found.header, config, context, url)
