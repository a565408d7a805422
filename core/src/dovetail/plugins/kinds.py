"""The kinds of plugin, each with entry-point group, interface, version and base class of configs. Packages declare further kinds."""

from __future__ import annotations

from dataclasses import dataclass

GROUP_PREFIX = "dovetail."


@dataclass(frozen=True)
class Kind:
    """A kind of plugin. All fields are strings, so that the table of kinds imports nothing."""

    name: str
    interface: str
    """`module:Class` of the interface."""
    api: str
    """Version of the interface in this core."""
    section: str = "dovetail.sections:PluginSection"
    """`module:Class` that a plugin's Config extends."""

    @property
    def group(self) -> str:
        """Entry-point group of the plugins of this kind."""
        return GROUP_PREFIX + self.name


def _kind(name: str, interface: str, section: str = "PluginSection", api: str = "1.0") -> Kind:
    return Kind(name, f"dovetail.interfaces.{interface}", api, f"dovetail.sections:{section}")


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        _kind("source", "source:ExperienceSource", api="2.2"),
        _kind("rollout", "rollout:BaseRollout", "RolloutSection", api="1.8"),
        _kind("agent_loop", "agent_loop:AgentLoop", api="1.4"),
        _kind("engine", "engine:TrainEngine", "EngineSection", api="3.5"),
        _kind("advantage", "advantage:AdvantageEstimator", api="1.1"),
        _kind("objective", "objective:Objective", api="1.3"),
        _kind("optimizer", "optimizer:Optimizer", "OptimSection"),
        _kind("schedule", "schedule:Schedule"),
        _kind("policy_loss", "policy_loss:PolicyLoss", api="1.1"),
        _kind("loss_aggregation", "policy_loss:LossAggregation"),
        _kind("rollout_correction", "rollout_correction:RolloutCorrection"),
        _kind("sample_filter", "sample_filter:SampleFilter", api="1.1"),
        _kind("preset", "preset:Preset", "PresetSection"),
        _kind("kl_controller", "kl_controller:KlController"),
        _kind("reward_manager", "reward:RewardManager", api="1.5"),
        _kind("reward_function", "reward:RewardFunction", api="1.5"),
        _kind("tool", "tool:Tool", api="2.0"),
        _kind("tool_parser", "tool_parser:ToolParser", api="1.1"),
        _kind("stage", "stage:Stage", api="1.3"),
        _kind("stage_set", "stage_set:StageSet", api="1.1"),
        _kind("trainer", "trainer:Trainer", "TrainerSection", api="2.5"),
        _kind("runtime", "runtime:Runtime", "RuntimeSection", api="1.4"),
        _kind("weight_transport", "transport:WeightTransport", api="1.5"),
        _kind("tracker", "tracker:Tracker", api="1.2"),
        _kind("dataset", "data:DatasetSource", api="1.5"),
        _kind("sampler", "data:Sampler", api="1.4"),
        _kind("dispatch_mode", "dispatch_mode:DispatchMode", api="1.1"),
    )
}

KINDS_GROUP = "dovetail.kinds"
"""Entry-point group of a package's own kinds: `name = "module:Interface"`. The interface is a subclass of Plugin. Its
attribute `interface_api` is the version of the interface; its `Config` is the base class of its plugins' Configs. The package's manifest
records the version and the base class."""
FUNCTIONS_GROUP = "dovetail.functions"
"""Entry-point group: `kind = "module:function"`. The function makes a plugin class from a Python function and a name for the class."""
SUPERVISOR_GROUP = "dovetail.supervisor"
"""Entry-point group of supervisors: `name = "module:function"`. A supervisor trains in a child process, and starts a new
one if the infrastructure fails. The function's arguments are the config, the run directory, the command's arguments, environment
variables for the child processes, and the file to which a child process writes the cause of its failure."""
EXTENSION_GROUPS = {
    KINDS_GROUP: "kinds of plugin",
    FUNCTIONS_GROUP: "makers of plugins from functions",
    "dovetail.hooks": "observers of a run (pluggy)",
    "dovetail.cli": "further commands",
    "dovetail.cli.plugins": "further commands below `dovetail plugins`",
    SUPERVISOR_GROUP: "supervisors that restart a run after a failure (`trainer.run_restarts`)",
    "dovetail.profiler": "profilers of workers (`profile.tool`)",
    "dovetail.doctor": "further checks of `dovetail doctor`",
    "dovetail.preflight": "rules that judge a config before step 1",
    "dovetail.key_advice": "advice on config keys of other systems",
    "dovetail.value_advice": "advice on values of other systems",
}
"""Entry-point groups that hold something other than plugins for a config to select, each with a description of what they hold."""
