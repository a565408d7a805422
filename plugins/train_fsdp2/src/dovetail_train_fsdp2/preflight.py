"""Preflight rules: configs that the engine would refuse at its start, and shards on more machines than necessary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import torch

from dovetail.errors import ConfigError, DovetailError, ModelError
from dovetail.interfaces import Finding, PluginContext
from dovetail_datasets import read_shape
from dovetail_train_fsdp2.config import Fsdp2Config
from dovetail_train_fsdp2.liger import apply_liger
from dovetail_train_fsdp2.model import described_model
from dovetail_train_fsdp2.quantised import BLOCK, quantised
from dovetail_train_fsdp2.sharding import blocks_of
from dovetail_train_fsdp2.start import empty_runner
from dovetail_train_fsdp2.ulysses import check_heads
from dovetail_train_fsdp2.vision import freeze_vision

_ROOM_GB = 40.0
"""Largest training state, in GB on each accelerator, that `shards_span_machines` takes to fit: half of an 80 GB accelerator. The
rest is for activations and the rollout's engine."""


def fsdp2_model(config: Any, plan: Any) -> Iterator[Finding]:
    """Report a model that the engine `fsdp2` can't build as configured.

    Possible causes: the configured attention, adapter, 4-bit layers or kernels are not installed or do not fit the model; there is no
    vision tower to freeze; or `sequence_parallel_size` does not divide the attention heads.

    The rule builds the model from its config, without weights. If the model is not in a local directory, only the engine checks it,
    at its start.
    """
    judged: list[Any] = []
    for model in plan.models if plan is not None else ():
        what = (model.path, model.engine.config, model.head, model.moves)
        ours = isinstance(model.engine.config, Fsdp2Config) and model.engine.path is None
        apart = model.role in config.runtime.roles_apart
        if not ours or apart or what in judged or not Path(model.path).expanduser().is_dir():
            continue
        judged.append(what)
        try:
            _build(config, plan, model)
        except DovetailError as error:
            # The run's machines may have packages that this machine lacks.
            package = isinstance(error.__cause__, ImportError)
            find = Finding.warning if package and not config.runtime.in_process else Finding.error
            yield find(f"{model.key}.engine: {error.message}", hint=error.hint)


def shards_span_machines(config: Any, plan: Any) -> Iterator[Finding]:
    """Warn if parameters are sharded over several machines, although the accelerators of one machine can hold the model's states.

    Every layer is gathered over the network in each pass and in each update of the rollout's weights. States take 16 bytes a
    parameter (weights, gradients and two moments in float32). A machine holds them if they fit into half the memory of accelerators
    of 80 GB. Setting `shard_size`, even to the number of all ranks, turns the rule off.
    """
    for model in plan.models if plan is not None else ():
        pool, engine = plan.placement.pool(model.role), model.engine.config
        ours = isinstance(engine, Fsdp2Config) and engine.shard_size is None
        if not ours or not model.trained or engine.lora or pool.nodes == 1 or not pool.accelerators:
            continue
        with suppress(DovetailError):  # the rule model_missing reports the error
            size = 16 * read_shape(config.model_section(model.role)).parameters
            each = size / pool.ranks_per_node / 1e9
            if each <= _ROOM_GB:
                yield Finding.warning(
                    f"{model.key}.engine shards {model.role} over the {pool.ranks} ranks of {pool.nodes} machines, although the "
                    f"{pool.ranks_per_node} accelerators of one machine can hold its training state ({each:.3g} GB on each)",
                    hint=f"set {model.key}.engine.shard_size={pool.ranks_per_node} to gather weights within a machine only, or "
                    f"{model.key}.engine.shard_size={pool.ranks} to keep the shards on all machines",
                )


def _build(config: Any, plan: Any, model: Any) -> None:
    """Build a role's model as its engine does, without weights.

    Raises:
        DovetailError: the engine would fail with this error at its start.
    """
    engine: Fsdp2Config = model.engine.config
    section = config.model_section(model.role)
    context = PluginContext(
        seed=config.seed, model=section, head=model.head, trained=model.moves, mesh=model.mesh
    )
    try:
        described = described_model(section)
    except ConfigError:
        return  # the rule `model_missing` reports keys of override_config
    except ModelError:
        try:
            described_model(attrs.evolve(section, attn_implementation="eager"))
        except ModelError:
            return  # the rule `model_missing` reports a missing model
        raise
    try:
        runner = empty_runner(described, engine, context, torch.float32)
    except ConfigError:
        return  # the rule `adapter_targets` reports layers without adapters
    if engine.freeze_vision:
        freeze_vision(runner.trunk)
    if runner.adapter is not None and runner.adapter.section.base is not None:
        quantised(torch.zeros(1, BLOCK))
    check_heads(runner.trunk, model.mesh.axis_size("cp"))
    if model.mesh.size > 1:
        blocks_of(runner.trunk)
    if engine.liger:
        apply_liger(runner.trunk, plan.device_of(model.role) or "cuda")
