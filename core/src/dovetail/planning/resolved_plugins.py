"""The plugins that a config selects, resolved and imported: what the planner reasons about."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import get_args

from dovetail.errors import PlanError
from dovetail.interfaces.runtime import PluginRef
from dovetail.interfaces.stage import SelectedPlugin
from dovetail.interfaces.trainer import Examples
from dovetail.plugins.index import default_index
from dovetail.plugins.titles import called
from dovetail.sections import PluginSection, RunConfig
from dovetail.sections.placement import (
    TRANSPORT_BETWEEN_ACCELERATORS,
    TRANSPORT_BETWEEN_PROCESSES,
)


def choose(config: RunConfig) -> dict[str, SelectedPlugin]:
    """Resolve and import every plugin that the config selects, by key path; without those of rollout and rewards where the trainer
    trains on a dataset's examples.

    Raises:
        PluginError: a plugin can't be found or loaded.
    """
    from dovetail.plugins.load import load_plugin_class, ref_for

    chosen = {}
    unused = () if examples_of_config(config) == "prompts" else ("rollout", "reward.")
    waiting = deque(section for section in _sections(config) if not section[0].startswith(unused))
    while waiting:
        path, kind, section = waiting.popleft()
        if section is None:
            continue
        ref = ref_for(kind, section)
        chosen[path] = SelectedPlugin(path, ref, load_plugin_class(ref), section)
        if (selects := getattr(chosen[path].cls, "selects", None)) is not None:
            waiting += [(f"{path}.{key}", *inner) for key, inner in selects(section).items()]
    return chosen


def examples_of_config(config: RunConfig) -> Examples:
    """What a step of the run is made of, by its trainer.

    Raises:
        PluginError: the trainer can't be found or loaded.
        PlanError: it names no kind of example.
    """
    from dovetail.plugins.load import load_plugin_class, ref_for

    section = config.trainer
    ref = ref_for("trainer", section)
    trainer = SelectedPlugin("trainer", ref, load_plugin_class(ref), section)
    kind: Examples = called(lambda: f"`examples` of {trainer.title}", trainer.cls.examples, section)
    if kind not in get_args(Examples):
        raise PlanError(
            f"`examples` of {trainer.title} returned {kind!r}; expected one of {', '.join(map(repr, get_args(Examples)))}"
        )
    return kind


def refs_of(chosen: Mapping[str, SelectedPlugin]) -> dict[str, PluginRef]:
    """The reference of each, by key path."""
    return {path: plugin.ref for path, plugin in chosen.items()}


def default_transport(config: RunConfig) -> str:
    """The weight transport that a config without one stands for: where trainer and engine live decides."""
    runtime, rollout = config.runtime, config.rollout
    if not runtime.in_process or (rollout.in_process and not rollout.joined):
        return runtime.default_transport(joined=bool(rollout.joined))
    kind = _accelerator(getattr(runtime, "device", "auto"))
    if kind is None:
        return TRANSPORT_BETWEEN_PROCESSES
    if rollout.joined:
        return TRANSPORT_BETWEEN_ACCELERATORS
    # The engine's processes compute on this one's accelerator; few kinds can hand memory from process to process.
    installed = {entry.name for entry in default_index().entries("weight_transport")}
    return f"{kind}_ipc" if f"{kind}_ipc" in installed else TRANSPORT_BETWEEN_PROCESSES


def _accelerator(device: str) -> str | None:
    """The kind of accelerator that this process computes on; None on the CPU."""
    import torch

    if device != "auto":
        kind = device.partition(":")[0]
        return None if kind == "cpu" else kind
    here = torch.accelerator.current_accelerator(check_available=True)
    return None if here is None else here.type


def _sections(config: RunConfig) -> Iterator[tuple[str, str, PluginSection | None]]:
    algorithm = config.algorithm
    yield "rollout", "rollout", config.rollout
    loop = config.rollout.agent_loop or PluginSection(name="single_turn")
    yield "rollout.agent_loop", "agent_loop", loop
    transport = config.rollout.weight_transport
    if transport is None:
        transport = PluginSection(name=default_transport(config))
    yield "rollout.weight_transport", "weight_transport", transport
    yield "actor.engine", "engine", config.actor.engine
    yield "actor.objective", "objective", config.actor.objective or PluginSection(name="policy")
    yield "critic.engine", "engine", config.critic.engine
    value = config.critic.objective or PluginSection(name="value")
    yield "critic.objective", "objective", value
    yield "critic.loss_aggregation", "loss_aggregation", config.critic.loss_aggregation
    yield "ref.engine", "engine", config.ref.engine
    trained = {"actor": config.actor, "critic": config.critic}
    trained |= {f"roles.{name}": role for name, role in config.roles.items()}
    for key, section in trained.items():
        yield f"{key}.optim", "optimizer", section.optim
        yield f"{key}.optim.schedule", "schedule", section.optim.schedule
    for name, role in config.roles.items():
        yield f"roles.{name}.engine", "engine", role.engine
        yield f"roles.{name}.objective", "objective", role.objective
    yield "algorithm.preset", "preset", algorithm.preset
    yield "algorithm.advantage", "advantage", algorithm.advantage
    yield "algorithm.policy_loss", "policy_loss", algorithm.policy_loss
    yield "algorithm.loss_aggregation", "loss_aggregation", algorithm.loss_aggregation
    yield "algorithm.rollout_correction", "rollout_correction", algorithm.rollout_correction
    for i, sample_filter in enumerate(algorithm.sample_filters):
        yield f"algorithm.sample_filters[{i}]", "sample_filter", sample_filter
    for i, stage in enumerate(algorithm.stages):
        yield f"algorithm.stages[{i}]", "stage", stage
    for place in ("in_loss", "in_reward"):
        kl = getattr(algorithm.kl, place)
        if kl is not None:
            yield f"algorithm.kl.{place}.controller", "kl_controller", kl.controller
    yield "reward.manager", "reward_manager", config.reward.manager
    yield "reward.function", "reward_function", config.reward.function
    for source, function in config.reward.functions.items():
        yield f"reward.functions[{source}]", "reward_function", function
    yield "trainer", "trainer", config.trainer
    yield "runtime", "runtime", config.runtime
    yield "data.source", "dataset", config.data.source
    yield "data.sampler", "sampler", config.data.sampler
    for i, tracker in enumerate(config.tracking):
        yield f"tracking[{i}]", "tracker", tracker
