"""What check says of programs that score themselves where nothing reads it."""

from __future__ import annotations

from dovetail_gateway.program_unfit import ProgramUnfit
from dovetail_sdk.testing.conformance import PreflightConformance

SCORED = "rollout.agent_loop={name: program, command: 'true', score: output}"


class TestProgramUnfit(PreflightConformance):
    plugin = ProgramUnfit
    sound = (
        (),
        ("rollout.agent_loop={name: program, command: 'true'}",),
        (SCORED, "reward.function=episode"),
    )
    wrong = ((SCORED,), (SCORED, "reward.function=exact_match"))
