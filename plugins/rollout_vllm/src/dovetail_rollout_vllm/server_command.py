"""The commands that start a vLLM server for a rollout, by a replica or by hand."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from dovetail.interfaces import PluginContext
from dovetail_rollout_vllm.config import VllmRolloutConfig
from dovetail_rollout_vllm.engine_args import engine_arguments, own_arguments

ROUTES = "dovetail_rollout_vllm.server_app.VllmRoutes"
"""Value of vLLM's argument `--middleware`."""

# Not `vllm serve`, which looks up a distribution named vllm: CPU builds have another name.
_MODULE = "vllm.entrypoints.openai.api_server"


def server_command(
    config: VllmRolloutConfig, context: PluginContext, *, host: str, port: int
) -> list[str]:
    """Return program and arguments of the server that a replica starts.

    Raises:
        ModelError: no model is configured, or its directory does not exist.
    """
    arguments = engine_arguments(config, context)
    quiet = ("--disable-uvicorn-access-log",)
    return [sys.executable, "-m", _MODULE, *_flags(arguments), *_served(host, port), *quiet]


def command_by_hand(config: VllmRolloutConfig, context: PluginContext, *, port: int) -> str:
    """Return the shell command with which a user can start a server that fits this rollout."""
    arguments = {**config.engine_args, **own_arguments(config, context)}
    return shlex.join(
        ["python", "-m", _MODULE, *_flags(arguments), *_served("127.0.0.1", port)],
    )


def _served(host: str, port: int) -> list[str]:
    return ["--host", host, "--port", str(port), "--middleware", ROUTES]


def _flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return engine arguments as flags of vLLM's command line."""
    flags: list[str] = []
    for name, value in arguments.items():
        # The run's metrics are read from the server's statistics, which must stay on.
        if value is None or name == "disable_log_stats":
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, Mapping):
            flags += [f"--{flag}", json.dumps(value)]
        elif isinstance(value, (list, tuple)):
            flags += [f"--{flag}", *map(str, value)]
        else:
            # One argument, so that a value that begins with a dash is not taken for a flag.
            flags.append(f"--{flag}={value}")
    return flags
