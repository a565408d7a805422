"""SGLang arguments that Dovetail does not support, refused when the config is read. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.errors import ConfigError
from dovetail_serving import divisors

_DOORS = ("grpc_mode", "smg_grpc_mode", "grpc_port")
"""Arguments that make SGLang serve by another protocol than HTTP."""


def refuse_undrivable(arguments: Mapping[str, Any], *, ranks: int, adapters: bool) -> None:
    """Check that arguments give a replica one server on one machine, so that weight updates reach all processes.

    Args:
        arguments: `rollout.engine_args`, with SGLang's names.
        ranks: the number of tensor-parallel ranks, `rollout.tensor_parallel_size`.
        adapters: whether adapters may arrive (`rollout.max_adapter_rank`).

    Raises:
        ConfigError: an argument requests pipeline stages, several machines, copies of the model that updates do not reach,
            or gRPC; the error names the argument.
    """
    _refuse_copies(arguments, ranks, adapters=adapters)
    _refuse_unreached(arguments)
    _refuse_doors(arguments)


def _refuse_copies(arguments: Mapping[str, Any], ranks: int, *, adapters: bool) -> None:
    copies = arguments.get("dp_size", 1)
    if not isinstance(copies, int) or copies < 1:
        raise ConfigError(
            f"rollout.engine_args.dp_size={copies!r} is not allowed; expected an integer ≥ 1. Leave it out, and set "
            "rollout.replicas for several copies of the model"
        )
    if copies == 1:
        return
    if not arguments.get("enable_dp_attention"):
        raise ConfigError(
            f"rollout.engine_args.dp_size={copies} starts several copies of the model behind one server, which can't "
            "receive weight updates: set rollout.replicas instead, or also set enable_dp_attention=true"
        )
    if ranks % copies:
        raise ConfigError(
            f"rollout.engine_args.dp_size={copies} does not divide rollout.tensor_parallel_size={ranks}, over whose "
            f"ranks attention is divided: set dp_size to one of {divisors(ranks)}"
        )
    if adapters:
        raise ConfigError(
            f"rollout.max_adapter_rank does not work with enable_dp_attention and dp_size={copies}: SGLang's schedulers do not load an "
            "adapter at the same time. Send merged weights (actor.engine.lora.sync: merged), or leave enable_dp_attention out"
        )


def _refuse_unreached(arguments: Mapping[str, Any]) -> None:
    for name, why, instead in (
        (
            "pp_size",
            "weight updates do not reach the stages of a pipeline",
            "divide the model with rollout.tensor_parallel_size",
        ),
        (
            "nnodes",
            "a replica's server runs on one machine",
            "set rollout.tensor_parallel_size to the accelerators of one machine, and rollout.replicas to use more machines",
        ),
    ):
        if arguments.get(name, 1) != 1:
            raise ConfigError(
                f"rollout.engine_args.{name}={arguments[name]} is not supported: {why}; {instead}"
            )


def _refuse_doors(arguments: Mapping[str, Any]) -> None:
    for name in _DOORS:
        if arguments.get(name):
            raise ConfigError(
                f"rollout.engine_args.{name}={arguments[name]} makes SGLang serve over gRPC, which checks no access token "
                "and can't receive Dovetail's weight updates: leave it out; requests and updates then use HTTP"
            )
