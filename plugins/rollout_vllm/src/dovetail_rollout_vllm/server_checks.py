"""Checks whether a rollout can use a vLLM server that was started by hand."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from dovetail.errors import RolloutError
from dovetail.interfaces import PluginContext
from dovetail_rollout_vllm.config import VllmRolloutConfig
from dovetail_rollout_vllm.engine_args import own_arguments
from dovetail_rollout_vllm.environment import TOKEN_VARIABLE
from dovetail_rollout_vllm.server_command import command_by_hand
from dovetail_rollout_vllm.versions import LABELS_TOKENS, VLLM
from dovetail_rollout_vllm.worker import TRANSFER_ENGINE, WORKER_EXTENSION
from dovetail_serving import PROTOCOL, model_problems, number_of, port_of, refuse_problems


def refuse_unfit(
    found: Mapping[str, Any], config: VllmRolloutConfig, context: PluginContext, url: str
) -> None:
    """Raise an error if a server's model or settings do not fit the rollout.

    Args:
        found: the server's answer to the request `describe`.
        config: the rollout's config.
        context: the rollout's context, with the model whose shape the server must have.
        url: the URL of the server, for error messages.

    Raises:
        RolloutError: the server does not fit; the error names every difference, and a command that starts a suitable server.
    """
    if found.get("protocol") != PROTOCOL:
        raise RolloutError(
            f"the server at {url} uses version {found.get('protocol')!r} of Dovetail's protocol, but this process uses {PROTOCOL}",
            hint="install the same release of dovetail-rollout-vllm on both sides",
        )
    _refuse_replaced(found["base"], config, context, url)
    problems = [*_engine_problems(found, config, context), *model_problems(found, context)]
    refuse_problems(problems, engine="vLLM", url=url, hint=fitting(config, context, url))


def fitting(config: VllmRolloutConfig, context: PluginContext, url: str) -> str:
    """Return the hint of an error: the command with which a user can start a suitable server."""
    return f"start it with: {TOKEN_VARIABLE}=… {command_by_hand(config, context, port=port_of(url, 8000))}"


def _refuse_replaced(
    base: Mapping[str, Any], config: VllmRolloutConfig, context: PluginContext, url: str
) -> None:
    """Raise an error if another run has replaced the server's base weights, and this run would generate with them.

    A run that sends complete weights before it generates is not affected.

    Raises:
        RolloutError: the server has another run's weights.
    """
    if not base["replaced"] or context.weights_follow:
        return
    since = datetime.fromtimestamp(base["since"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    what = f"update {base['version']} of another run" if base["whole"] else "incomplete weights"
    raise RolloutError(
        f"the vLLM server at {url} no longer has the weights that it was started with: since {since} it holds {what}, "
        "and this run does not replace all weights",
        hint=f"end the server, and {fitting(config, context, url)}",
    )


def _engine_problems(
    found: Mapping[str, Any], config: VllmRolloutConfig, context: PluginContext
) -> list[str]:
    wanted = own_arguments(config, context)
    problems = _version_problems(found["vllm"], config)
    for key, argument, value in (
        ("dtype", "dtype", wanted["dtype"]),
        ("logprobs_mode", "logprobs-mode", wanted["logprobs_mode"]),
        ("weight_transfer", "weight-transfer-config", TRANSFER_ENGINE),
        ("worker_extension", "worker-extension-cls", WORKER_EXTENSION),
        ("quantization", "quantization", config.quantization),
    ):
        if found[key] != value:
            problems.append(f"--{argument} is {found[key]!r}, not {value!r}")
    for key, needed, setting in (
        ("ranks", config.ranks_per_replica(), "the product of its parallel sizes is"),
        ("data_parallel", 1, "--data-parallel-size is"),
        ("api_servers", 1, "--api-server-count is"),
    ):
        if found[key] != needed:
            problems.append(f"{setting} {found[key]}, not {needed}")
    if wanted.get("enable_sleep_mode") and not found["sleep"]:
        problems.append(
            "rollout.offload is set, but the server was started without --enable-sleep-mode"
        )
    rank = wanted.get("max_lora_rank")
    if rank is not None and (found["adapter_rank"] or 0) < rank:
        problems.append(f"it reserves no memory for adapters of rank {config.max_adapter_rank}")
    if config.stop and not found["tokenizer"]:
        problems.append(
            "rollout.stop needs a tokenizer, but the server was started with --skip-tokenizer-init"
        )
    if config.max_model_len is not None and found["max_model_len"] < config.max_model_len:
        problems.append(
            f"--max-model-len is {found['max_model_len']}, below {config.max_model_len}"
        )
    return problems


def _version_problems(version: str | None, config: VllmRolloutConfig) -> list[str]:
    oldest, use = VLLM.oldest, ""
    if config.keep_cache:
        oldest, use = LABELS_TOKENS, " for rollout.keep_cache (trainer.on_sync=keep)"
    if number_of(version or "") >= oldest:
        return []
    return [f"it is vLLM {version}; {oldest} or newer is needed{use}"]
