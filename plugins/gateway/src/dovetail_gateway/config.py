"""Config class of the agent loop `program`. Nothing here imports more than the config sections."""
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
    """Refuse what is no command of a shell."""
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise ValueError(f"is {value!r}, which a shell can't read: {error}") from None
    if not words:
        raise ValueError("is empty; expected a command, such as 'python agent.py'")


@attrs.frozen(kw_only=True)
class ProgramPlacement:
    """Processes of the runtime that run programs."""

    workers: int = attrs.field(validator=_COUNT)
    """How many there are. They are spread over the machines, and start before step 1; programs are shared out evenly."""
    cpus: float = attrs.field(default=1.0, validator=attrs.validators.ge(0))
    """CPUs that each reserves for its programs; machines where fewer are free get none."""


@attrs.frozen(kw_only=True)
class GatewaySection(EpisodeSection):
    """Base of the configs of agent loops whose policy is called through an API."""

    models: tuple[str, ...] = attrs.field(
        default=("policy",),
        metadata={ONE_OR_MANY: True},
        validator=attrs.validators.min_len(1),
    )
    """Names by which the program may ask for the policy, such as the one that stands in its code; `*` is any."""
    parser: PluginSection | None = plugin_field("tool_parser", "hermes")
    """How the model writes its calls and its reasoning."""
    max_seconds: float | None = attrs.field(default=None, validator=ABOVE_ZERO)
    """How long an episode may take with all its waiting, that for a place too; one that takes longer fails and has no score."""
    max_turns: int = attrs.field(default=100, validator=_COUNT)
    """Turns of the policy at most; further calls are refused, and the episode is scored as it is."""
    max_observation_tokens: int = attrs.field(default=2**24, validator=_COUNT)
    """Tokens of the content of one message that continues a conversation; a longer one is cut for the policy."""
    unknown_turns: Literal["fork", "fail"] = "fork"
    """What a call does whose history has an assistant's turn that the policy did not produce in the episode, such as an example or
    a summary: begin a further sequence, in which it is not trained on; or fail the episode."""
    max_pending_calls: int = attrs.field(default=64, validator=_COUNT)
    """Calls of an episode that may be under way at once; a program with more fails."""
    max_request_bytes: int = attrs.field(default=32 << 20, validator=_COUNT)
    """Bytes of the body of a call; a longer one is refused."""
    host: str | None = None
    """Interface on which the gateway listens. Absent: the loopback, or this machine's address in the cluster where `placement` has programs
    on other machines. Others than the loopback open it to the network, to those who have a key."""
    port: int = attrs.field(
        default=0, validator=[attrs.validators.ge(0), attrs.validators.le(65535)]
    )
    """Port on which it listens; a free one where 0."""


@attrs.frozen(kw_only=True)
class ProgramConfig(GatewaySection):
    """A program that talks to an API makes the sample."""

    command: str = attrs.field(validator=is_command, metadata={VERBATIM: True})
    """What runs once an episode: words as a shell reads them, without a shell. It runs in a folder of its own; a word that names a
    file is taken from where the run was started."""
    score: Literal["reward", "output", "exit_status"] = "reward"
    """What scores the episode: the reward function, which finds what the program left in its output file in the trajectory; the
    number `reward` in that file; or 1 for the exit status 0 and 0 for others. The latter two need reward.function=episode."""
    row: tuple[RowField, ...] = ("prompt", "data_source", "extra_info")
    """What the program gets of the row. `ground_truth` only where it has to: a policy that runs commands can read it."""
    environment: Mapping[str, str | None] = attrs.field(factory=dict, metadata={VERBATIM: True})
    """Variables of the program besides those of the run; null takes one away, such as a token that it has no use for."""
    concurrency: int | None = attrs.field(default=None, validator=attrs.validators.optional(_COUNT))
    """Programs that run at once; episodes beyond wait for a place. Absent: four for each processor that this process may use or that
    `placement` reserves, since programs wait for the policy most of the time."""
    placement: ProgramPlacement | None = None
    """Where programs run: in processes that runtime.name=ray starts on machines with free CPUs. Absent: beside the run's own process."""
    program_seconds: float | None = attrs.field(default=600.0, validator=ABOVE_ZERO)
    """How long the program may take while none of its calls is being answered; one that takes longer fails and has no score."""
    max_output_bytes: int = attrs.field(default=10 << 20, validator=_COUNT)
    """Bytes that the program may write to its standard output and error together, and to its output file; one that writes more fails."""
    max_processes: int = attrs.field(default=256, validator=_COUNT)
    """Processes that the program may have at once, its children's included; one that has more fails."""
