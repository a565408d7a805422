"""Checks whether a rollout can use an SGLang server that was started by hand."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from dovetail.errors import RolloutError
from dovetail.interfaces import PluginContext
from dovetail_rollout_sglang.config import SglangRolloutConfig
from dovetail_rollout_sglang.engine_args import MODULE, command_by_hand, own_arguments
from dovetail_rollout_sglang.environment import TOKEN_VARIABLE
from dovetail_rollout_sglang.versions import SGLANG
from dovetail_serving import (
    DESCRIBE,
    MEDIA_TYPE,
    PROTOCOL,
    ServerConnection,
    answers_of,
    model_problems,
    number_of,
    port_of,
    refuse_problems,
)


async def join(
    connection: ServerConnection, config: SglangRolloutConfig, context: PluginContext
) -> None:
    """Check that a server that the user started answers requests and fits the rollout.

    Raises:
        RolloutError: the server does not answer or does not fit; the error says how to start a suitable server.
    """
    import httpx2

    url = connection.url
    hint = f"start it with: {command_by_hand(config, context, port=port_of(url, 30000))}"
    about, described = await answers_of(
        connection, "/model_info", DESCRIBE, token_variable=TOKEN_VARIABLE, hint=hint
    )
    if "model_path" not in about.text:
        raise RolloutError(
            f"the program at {url} (rollout.urls) is not an SGLang server: its /model_info is not SGLang's (status "
            f"{about.status_code})",
            hint=hint,
        )
    # If a server with Dovetail's routes fails, the next request returns its own error.
    failing = described.status_code >= httpx2.codes.INTERNAL_SERVER_ERROR
    if not failing and described.headers.get("content-type") != MEDIA_TYPE:
        raise RolloutError(
            f"the SGLang server at {url} was not started with {MODULE}: it can neither receive weights from Dovetail nor "
            "verify them",
            hint=hint,
        )
    problems = problems_of((await connection.ask("describe")).header, config, context)
    refuse_problems(problems, engine="SGLang", url=url, hint=hint)


def problems_of(
    found: Mapping[str, Any], config: SglangRolloutConfig, context: PluginContext
) -> list[str]:
    """Return one message for each setting in which a server does not fit the rollout; empty if the server fits.

    Args:
        found: the server's answer to the request `describe`.
        config: the rollout's config.
        context: the rollout's context, with the model whose shape the server must have.
    """
    if found.get("protocol") != PROTOCOL:
        spoken = f"it uses version {found.get('protocol')!r} of Dovetail's protocol, but this process uses {PROTOCOL}"
        return [f"{spoken}: install the same release of dovetail-core on both sides"]
    return [
        *_replaced(found.get("replaced"), context),
        *_engine_problems(found, config, context),
        *model_problems(found, context),
    ]


def _replaced(held: Mapping[str, Any] | None, context: PluginContext) -> list[str]:
    """Return a message, in a list, if another run has replaced the server's weights and this run would generate with them; else no message.

    Args:
        held: the server's record of its replaced weights; None if it has the weights with which it was started.
        context: the rollout's context. If the rollout receives complete weights before it generates, replaced weights do no harm.
    """
    if held is None or context.weights_follow:
        return []
    since = datetime.fromtimestamp(held["since"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    what = f"update {held['version']} of another run" if held["whole"] else "incomplete weights"
    message = f"since {since} it holds {what} instead of the weights that it was started with"
    return [f"{message}, and this run does not replace all weights: start the server again"]


def _engine_problems(
    found: Mapping[str, Any], config: SglangRolloutConfig, context: PluginContext
) -> list[str]:
    problems = []
    if number_of(found["sglang"] or "") < SGLANG.oldest:
        problems.append(f"it is SGLang {found['sglang']}; {SGLANG.oldest} or newer is needed")
    for key, argument, value in (
        ("dtype", "dtype", own_arguments(config, context)["dtype"]),
        ("quantization", "quantization", config.quantization),
        ("ranks", "tp_size", config.tensor_parallel_size),
        ("stages", "pp_size", 1),
        ("copies", "dp_size", 1),
    ):
        if found[key] != value:
            problems.append(f"its {argument} is {found[key]!r}, not {value!r}")
    if config.offload and not found["sleep"] and context.device != "cpu":
        problems.append(
            "rollout.offload is set, but the server was started without enable_memory_saver"
        )
    if config.seeding == "per_sample" and not found["seeds"]:
        problems.append(
            "rollout.seeding is per_sample, but the server was started without enable_deterministic_inference"
        )
    rank = config.max_adapter_rank
    if rank is not None and (found.get("adapter_rank") or 0) < rank:
        problems.append(f"it reserves no memory for adapters of rank {rank}")
    if config.stop and not found["tokenizer"]:
        problems.append(
            "rollout.stop needs a tokenizer, but the server was started with skip_tokenizer_init"
        )
    if config.max_model_len is not None and found["max_model_len"] < config.max_model_len:
        problems.append(
            f"its context_length is {found['max_model_len']}, below {config.max_model_len}"
        )
    return problems
