"""The command that starts a server for a rollout: by a replica, or by hand."""

from __future__ import annotations

import json
import shlex
import sys

from dovetail.interfaces import PluginContext
from dovetail_rollout_trtllm.config import TrtllmRolloutConfig
from dovetail_rollout_trtllm.engine_args import engine_arguments, own_arguments

_MODULE = "dovetail_rollout_trtllm.server"


def server_command(
    config: TrtllmRolloutConfig, context: PluginContext, *, host: str, port: int
) -> list[str]:
    """Program and arguments of a replica's own server.

    Raises:
        ModelError: there is no model, or no directory where the config says.
        ConfigError: a layout that can't be had.
    """
    arguments = json.dumps(engine_arguments(config, context))
    words = ["--arguments", arguments, "--host", host, "--port", str(port)]
    openai = ["--openai"] if config.mode == "server" else []
    return [sys.executable, "-m", _MODULE, *words, *openai]


def command_by_hand(config: TrtllmRolloutConfig, context: PluginContext, *, port: int) -> str:
    """A line for a shell that starts a server which this rollout can join."""
    arguments = json.dumps({**config.engine_args, **own_arguments(config, context)})
    words = ["--arguments", arguments, "--port", str(port), "--openai"]
    return shlex.join(["python", "-m", _MODULE, *words])
