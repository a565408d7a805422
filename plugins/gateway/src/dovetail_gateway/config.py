"""Config classes of the agent loop `program`, and the base class of similar configs. This module imports nothing but config sections."""
# ruff: noqa: RUF009 - plugin_field makes an attrs field, as attrs.field does

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from dovetail.sections import (
    ABOVE_ZERO,
    ONE_OR_MANY,
    VERBATIM,
    EpisodeSection,
    PluginSection,
    plugin_field,
)

RowField = Literal["prompt", "data_source", "ground_truth", "extra_info"]
_COUNT = attrs.validators.ge(1)


def is_command(_config: Any, _attribute: Any, value: str) -> None:
    """Refuse a value that can't be split into a shell command's words."""
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise ValueError(f"{value!r} is not a valid shell command: {error}") from None
    if not words:
        raise ValueError("the command is empty; expected one such as 'python agent.py'")


@attrs.frozen(kw_only=True)
class ProgramPlacement:
    """Settings of the processes in which the episodes' programs run. The run's runtime, such as Ray, starts these processes."""

    workers: int = attrs.field(validator=_COUNT)
    """The number of processes. They are spread over the machines and start before step 1; programs are distributed evenly."""
    cpus: float = attrs.field(default=1.0, validator=attrs.validators.ge(0))
    """CPUs that each process reserves for its programs; machines with fewer free CPUs get no process."""


@attrs.frozen(kw_only=True)
class GatewaySection(EpisodeSection):
    """Base of the configs of agent loops whose policy is called through an API."""

    models: tuple[str, ...] = attrs.field(
        default=("policy",),
        metadata={ONE_OR_MANY: True},
        validator=attrs.validators.min_len(1),
    )
    """Model names by which the program may request the policy, such as the name in its code; `*` allows any."""
    parser: PluginSection | None = plugin_field("tool_parser", "hermes")
    """Parser of the model's tool calls and reasoning. null: `hermes`."""
    max_seconds: float | None = attrs.field(default=None, validator=ABOVE_ZERO)
    """Seconds that an episode may take, all waiting included; a longer episode fails and has no score. Absent: no limit."""
    max_turns: int = attrs.field(default=100, validator=_COUNT)
    """Maximum turns of the policy; further calls are refused, and the episode is scored with the turns so far."""
    max_observation_tokens: int = attrs.field(default=2**24, validator=_COUNT)
    """Maximum tokens of one message that continues a conversation; a longer message is cut for the policy."""
    unknown_turns: Literal["fork", "fail"] = "fork"
    """Effect of a call whose history has an assistant turn that neither the policy produced in the episode nor the dataset row
    contains, such as a summary. `fork`: the call begins another token sequence of the episode, in which that turn is not trained on.
    `fail`: the episode fails."""
    max_pending_calls: int = attrs.field(default=64, validator=_COUNT)
    """Maximum concurrent calls of an episode; a program with more concurrent calls fails."""
    max_request_bytes: int = attrs.field(default=32 << 20, validator=_COUNT)
    """Maximum bytes of a call's body; a longer body is refused."""
    host: str | None = None
    """Interface on which the gateway listens. Absent: the loopback interface, or this machine's address in the cluster if `placement` runs
    programs on other machines. Any other interface opens the gateway to the network; calls without a valid key are refused."""
    port: int = attrs.field(
        default=0, validator=[attrs.validators.ge(0), attrs.validators.le(65535)]
    )
    """Port on which the gateway listens; 0 takes a free one."""


@attrs.frozen(kw_only=True)
class ProgramConfig(GatewaySection):
    """Settings of the agent loop `program`, whose episodes are runs of a program that calls the policy through an API."""

    command: str = attrs.field(validator=is_command, metadata={VERBATIM: True})
    """Command that runs once per episode, split into words as by a shell, but run without a shell. It runs in a separate folder; words
    that name a file are resolved against the directory in which the run was started."""
    score: Literal["reward", "output", "exit_status"] = "reward"
    """Source of the episode's score. reward: the reward function, which finds the content of the program's output file in the trajectory.
    output: the number `reward` in the output file. exit_status: 1 for exit status 0, else 0. output and exit_status need
    reward.function=episode."""
    row: tuple[RowField, ...] = ("prompt", "data_source", "extra_info")
    """Fields of the episode's dataset row that are passed to the program. Add `ground_truth` only if needed: a policy that runs
    commands can read it."""
    environment: Mapping[str, str | None] = attrs.field(factory=dict, metadata={VERBATIM: True})
    """Environment variables of the program in addition to the run's; null removes a variable, such as a token that is not needed."""
    concurrency: int | None = attrs.field(default=None, validator=attrs.validators.optional(_COUNT))
    """Maximum concurrent programs; further episodes wait. Absent: four for each processor that this process may use or that
    `placement` reserves, since programs wait for the policy most of the time."""
    placement: ProgramPlacement | None = None
    """Placement of programs in processes that runtime.name=ray starts on machines with free CPUs. Absent: programs run on
    the machine of the run's main process.
    """
    program_seconds: float | None = attrs.field(default=600.0, validator=ABOVE_ZERO)
    """Seconds that the program may take, not counting the time in which the policy answers its calls. An episode that takes longer fails
    and has no score. null: no limit."""
    max_output_bytes: int = attrs.field(default=10 << 20, validator=_COUNT)
    """Maximum bytes of standard output and error together, and of the output file; a program that writes more fails."""
    max_processes: int = attrs.field(default=256, validator=_COUNT)
    """Maximum concurrent processes of the program, descendants included; a program that has more fails."""
