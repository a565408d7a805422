"""A rule about profiles that would stay empty."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.dispatch.profiling import RECORDERS
from dovetail.errors import ConfigError
from dovetail.interfaces.preflight import Finding, PreflightRule
from dovetail.planning.plan import Plan
from dovetail.sections import RunConfig


class ProfileMissesTheRun(PreflightRule):
    """A profile of steps, roles or ranks that the run does not have: nothing would be written for them. Or by a tool that can't record on
    the device of a role.
    """

    name = "profile_misses_the_run"
    api = ">=1.0,<2"

    def check(self, config: RunConfig, plan: Plan | None) -> Iterator[Finding]:
        profile = config.profile
        if profile.tool is None or plan is None:
            return
        (first, last), steps = profile.steps, plan.counts.steps
        if steps is not None and last > steps:
            lost = f"only steps {first} to {steps} are"
            if first >= steps:
                lost = "nothing is" if first > steps else f"only step {steps} is"
            yield self.warning(
                f"profile.steps = [{first}, {last}] go beyond the run's {steps} "
                f"{'step' if steps == 1 else 'steps'}: {lost} recorded",
                hint=f"set profile.steps=[{min(first, steps)},{steps}]",
            )
        meshes = {model.role: model.mesh for model in plan.models}
        for role in profile.roles:
            if role not in meshes:
                yield self.warning(
                    f"profile.roles names {role!r}, which this run does not have: its models are {', '.join(meshes)}",
                    hint=f"set profile.roles={next(iter(meshes), 'actor')}",
                )
                continue
            if (device := plan.device_of(role)) is not None:
                try:
                    RECORDERS[profile.tool](device).check()
                except ConfigError as error:
                    yield self.error(error.message, hint=error.hint)
            beyond = [rank for rank in profile.ranks if rank >= meshes[role].size]
            if beyond:
                yield self.warning(
                    f"profile.ranks = {list(profile.ranks)}, but {role} has {meshes[role].size} "
                    f"{'rank' if meshes[role].size == 1 else 'ranks'}: nothing is recorded for {beyond}",
                    hint="set profile.ranks=[0]",
                )
