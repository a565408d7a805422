"""A preflight rule: `dovetail check` reports configs that the engine would refuse at its start, without a GPU or Megatron."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dovetail.errors import ConfigError, ModelError
from dovetail.interfaces import Finding
from dovetail_train_megatron.config import MegatronConfig
from dovetail_train_megatron.layouts import check_architecture, check_layout, read_config

_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
)


def megatron_layout(config: Any, plan: Any) -> Iterator[Finding]:
    """Report models, parallel sizes and devices that the engine `megatron` does not support.

    The rule reads only configs. It checks the architecture, the numbers that the parallel sizes must divide, that models of one
    pool have one layout, and that devices are CUDA devices.
    """
    if plan is None:
        return
    models = [m for m in plan.models if isinstance(m.engine.config, MegatronConfig)]
    judged: list[Any] = []
    for model in models:
        # A reference is most often the actor's model in the actor's layout: one finding is enough for both.
        if (what := (model.path, model.engine.config)) not in judged:
            judged.append(what)
            yield from _model(config, model)
    yield from _layouts(plan, models)
    # An engine class from a file may run on other devices, as the tests' own class does.
    yield from _devices(plan, [m for m in models if m.engine.path is None])


def _model(config: Any, model: Any) -> Iterator[Finding]:
    section = config.model_section(model.role)
    try:
        hf = read_config(section)
    except ModelError:
        return  # reading the tokenizer reports it
    try:
        check_architecture(hf, section)
        check_layout(hf, model.engine.config)
    except (ConfigError, ModelError) as error:
        yield Finding.error(f"{model.role}.engine: {error.message}", hint=error.hint)


def _layouts(plan: Any, models: list[Any]) -> Iterator[Finding]:
    first: dict[str, Any] = {}
    for model in models:
        pool = plan.placement.pool(model.role).name
        other = first.setdefault(pool, model)
        for size in _SIZES:
            theirs, own = (getattr(m.engine.config, size) for m in (other, model))
            if theirs != own:
                yield Finding.error(
                    f"{model.role}.engine.{size} = {own}, but {other.role}.engine.{size} = {theirs} in the same processes "
                    f"(pool {pool!r}); Megatron supports only one layout in a process",
                    hint=f"set the two to the same value, or give {model.role} a pool of its own (runtime.pools)",
                )


def _devices(plan: Any, models: list[Any]) -> Iterator[Finding]:
    told: set[str] = set()
    for model in models:
        role, pool = model.role, plan.placement.pool(model.role)
        if pool.accelerators or pool.name in told:
            continue
        told.add(pool.name)
        hint = f"use {role}.engine.name=fsdp2 on a CPU"
        if not plan.placement.in_process:
            yield Finding.error(
                f"{role}.engine = megatron needs CUDA devices, but its pool {pool.name!r} has {pool.described()}",
                hint=f"set runtime.gpus_per_node, or {hint}",
            )
        elif plan.device_of(role) == "cpu":
            yield Finding.warning(
                f"{role}.engine = megatron needs CUDA devices, but this machine has none that is free",
                hint=f"train on a machine with a free CUDA device, or {hint}",
            )
