"""Rules about rollout engines: too short for a sample, more ranks than divide the model, sleep that frees nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dovetail.errors import ConfigError, DovetailError
from dovetail.interfaces.preflight import Finding, PreflightRule
from dovetail.sections import RunConfig

if TYPE_CHECKING:
    from dovetail.planning.plan import Plan


class RolloutTooShort(PreflightRule):
    """The engine's longest prompt and response together are shorter than what the data's limits allow.

    The longest prompts would be refused in the middle of the run, or their responses cut off.
    """

    name = "rollout_too_short"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        length: int | None = getattr(config.rollout, "max_model_len", None)
        prompt, response = config.data.max_prompt_length, config.data.max_response_length
        if length is not None and length < prompt + response:
            yield self.error(
                f"rollout.max_model_len = {length} is too short for one sample: data.max_prompt_length + "
                f"data.max_response_length = {prompt} + {response} = {prompt + response}",
                hint=f"set rollout.max_model_len={prompt + response} or more, or leave it out",
            )


class RolloutLayout(PreflightRule):
    """A replica of a serving engine is to have more ranks than divide the model's heads, or its experts.

    The model's config in its directory tells; the engine would say so minutes later, on its accelerators.
    """

    name = "rollout_layout"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        from dovetail.serving.division import refuse_indivisible
        from dovetail.serving.section import ServingSection

        rollout = config.rollout
        if not isinstance(rollout, ServingSection) or rollout.joined:
            return
        spread = getattr(rollout, "expert_parallel_size", None) or 1
        try:
            refuse_indivisible(config.model, ranks=rollout.attention_ranks(), spread=spread)
        except ConfigError as error:
            yield self.error(error.message, hint=error.hint)


class OffloadFreesNothing(PreflightRule):
    """The rollout is to sleep between rollouts, and computes on CPUs, where engines free nothing in sleep."""

    name = "offload_frees_nothing"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        if plan is None or not config.rollout.offload or config.rollout.joined:
            return
        if not _on_accelerators(config, plan):
            yield self.warning(
                "rollout.offload = true, and the rollout computes on the CPU here: its sleep frees no memory, and takes time",
                hint="set rollout.offload=false: it is for accelerators that trainer and rollout share",
            )


def _on_accelerators(config: RunConfig, plan: Plan) -> bool:
    """Whether the rollout's replicas have accelerators; of this process, where they are in it."""
    from dovetail.interfaces.plugin import PluginContext
    from dovetail.plugins.load import make_plugin

    if not plan.placement.in_process:
        return plan.placement.pool("rollout").accelerators
    try:
        runtime: Any = make_plugin(plan.refs["runtime"], PluginContext(seed=config.seed))
        return not str(runtime.device()).startswith("cpu")
    except DovetailError:
        return True  # why it can't run is for the runtime to say
