"""Joining a server that was started by hand: whether it is there, and one that fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packaging.version import Version

from dovetail.errors import RolloutError
from dovetail.interfaces import PluginContext
from dovetail.serving import (
    DESCRIBE,
    MEDIA_TYPE,
    PROTOCOL,
    ServerConnection,
    answers_of,
    model_problems,
    port_of,
    refuse_problems,
)
from dovetail_rollout_trtllm.config import TrtllmRolloutConfig
from dovetail_rollout_trtllm.engine_args import WORKER, own_arguments
from dovetail_rollout_trtllm.server_command import command_by_hand
from dovetail_rollout_trtllm.surroundings import TOKEN_VARIABLE
from dovetail_rollout_trtllm.versions import OLDEST


async def join(
    connection: ServerConnection, config: TrtllmRolloutConfig, context: PluginContext
) -> None:
    """See that a server is there, and fits.

    Raises:
        RolloutError: it is not, or does not; says how to start one that does.
    """
    url, hint = connection.url, _fitting(config, context, connection.url)
    [answer] = await answers_of(connection, DESCRIBE, token_variable=TOKEN_VARIABLE, hint=hint)
    # One of ours that fails says in its own words why, when it is asked again.
    kind = answer.headers.get("content-type")
    failing = answer.status_code >= 500 and kind == "application/json"
    if not failing and kind != MEDIA_TYPE:
        raise RolloutError(
            f"what answers at {url} (rollout.urls) has no paths for Dovetail (status {answer.status_code}): it is another "
            "program, or trtllm-serve alone, which takes weights as pickled handles only, and those are not sent",
            hint=hint,
        )
    found = (await connection.ask("describe")).header
    if found.get("protocol") != PROTOCOL or "trtllm" not in found:
        raise RolloutError(
            f"the server at {url} speaks version {found.get('protocol')!r} of Dovetail's protocol, and this process "
            f"{PROTOCOL}, or it is no TensorRT-LLM",
            hint="install the same release of dovetail-rollout-trtllm on both sides",
        )
    problems = [*_engine_problems(found, config, context), *model_problems(found, context)]
    refuse_problems(problems, engine="TensorRT-LLM", url=url, hint=hint)


def _fitting(config: TrtllmRolloutConfig, context: PluginContext, url: str) -> str:
    return f"start it with: {command_by_hand(config, context, port=port_of(url, 8000))}"


def _engine_problems(
    found: Mapping[str, Any], config: TrtllmRolloutConfig, context: PluginContext
) -> list[str]:
    wanted = own_arguments(config, context)
    problems = []
    if found["trtllm"] is None or Version(found["trtllm"]) < OLDEST:
        problems.append(f"it is TensorRT-LLM {found['trtllm']}, and {OLDEST} or newer is needed")
    for key, value in (
        ("dtype", wanted["dtype"]),
        ("ranks", config.ranks_per_replica()),
        ("worker_extension", WORKER),
    ):
        if found[key] != value:
            problems.append(f"its {key} is {found[key]!r}, not {value!r}")
    if config.offload and not found["sleep"]:
        problems.append("rollout.offload is set, and it was started without a sleep_config")
    if config.stop and not found["tokenizer"]:
        problems.append("rollout.stop needs a tokenizer, and it was started without one")
    longest = wanted.get("max_seq_len")
    if longest is not None and (found["max_model_len"] or longest) < longest:
        problems.append(f"its longest sequence is {found['max_model_len']} tokens, below {longest}")
    return problems
