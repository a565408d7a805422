"""ProgramLoop: a user's program makes the sample by calls to an API, which the policy answers."""

from __future__ import annotations

import asyncio
import math
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from dovetail.interfaces import (
    AgentLoop,
    EpisodeEndedError,
    EpisodeError,
    FailureKind,
    PluginConfig,
    PluginContext,
    Session,
    Transition,
)
from dovetail.sections import PluginSection
from dovetail_gateway.config import ProgramConfig
from dovetail_gateway.endpoint import EpisodeEndpoint
from dovetail_gateway.placement import PlacedPrograms
from dovetail_gateway.program import ProgramEnd, ProgramFolder, command_of, run_program
from dovetail_gateway.server import Gateway
from dovetail_gateway.turn_reader import HERMES, TurnReader

_KEPT = 100
"""Number of failed programs of a run whose folders are kept."""


class ProgramLoop(AgentLoop):
    """Agent loop that runs a program once per episode; the policy answers the program's calls to OpenAI's or Anthropic's API.

    A call whose messages continue an existing sequence is a further turn of this sequence. Any other call begins a new sequence.

    Metrics are means over episodes: `episode/model_calls`; `episode/further_sequences/WHY`, sequences after the first, by reason;
    `episode/prompt_tokens` of all sequences, and `episode/unique_prompt_tokens`, prompt tokens in no earlier sequence;
    `episode/refused_calls/CODE`; `episode/abandoned_calls`, for which the program did not wait; `episode/unapplied/FIELD`, calls with a
    field that the run's config overrides.

    The reason WHY is `parallel` if the sequence was answering another call, `n` for the further answers of a call that asks for several,
    `unknown_turn` if the call has an assistant turn that neither the policy nor the dataset row wrote, and `other_history` otherwise.

    In a config:

        rollout:
          agent_loop: {name: program, command: .venv-agent/bin/python agent.py, models: [gpt-4o-mini]}
    """

    name = "program"
    api = ">=1.4,<2"
    Config = ProgramConfig
    capabilities = frozenset({"forks"})
    transitions: ClassVar[frozenset[Transition]] = frozenset({"user"})

    @classmethod
    def selects(cls, config: PluginConfig) -> Mapping[str, tuple[str, PluginSection]]:
        return {"parser": ("tool_parser", config.parser or HERMES)}

    def __init__(self, config: PluginConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        where = config.placement
        cpus = int(where.workers * where.cpus) if where else len(os.sched_getaffinity(0))
        self._places = asyncio.Semaphore(config.concurrency or 4 * max(1, cpus))
        self._placed: PlacedPrograms | None = None
        self._gateway: Gateway | None = None
        self._kept = 0
        self._reader: TurnReader
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> None:
        """Start the parser, the processes of `placement`, and, if its port is configured, the gateway (the HTTP server for calls).

        Errors thus appear before step 1.

        Raises:
            ConfigError: the command names no program.
            PluginError: the parser can't be loaded.
            DovetailError: the processes can't be started, or the gateway can't listen on the port.
        """
        command_of(self.config)
        self._reader = TurnReader.started(self.config.parser, self.context)
        if self.config.placement and self.context.runtime is not None:  # None in planning
            self._placed = PlacedPrograms(self.context.runtime, self.config.placement)
        if self.config.port:
            self._opened()

    def close(self) -> None:
        if self._gateway is not None:
            self._gateway.close()
            self._gateway = None
        if self._placed is not None:
            self._placed.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    async def run(self, session: Session) -> None:
        async with self._places:
            gateway = self._opened()
            runs = self._placed.run if self._placed else run_program
            endpoint = EpisodeEndpoint(session, self.config, self._reader)
            folder = ProgramFolder(self._folders(), session, self.config)
            key = gateway.open(endpoint)
            failed = True
            try:
                started, seconds = folder.run(gateway.url, key), self.config.program_seconds
                async with endpoint.within(seconds, "the program", "program_seconds"):
                    end = await runs(started, endpoint.closing)
                self._judge(endpoint, folder, end)
                failed = False
            except EpisodeEndedError:
                failed = False
                raise
            finally:
                gateway.close_key(key)
                await endpoint.close()
                keep = failed and self._kept < _KEPT
                self._kept += keep
                with suppress(OSError):
                    folder.remove(keep=keep)

    def _opened(self) -> Gateway:
        """Return the gateway. Without a configured port, it starts with the first episode, so that planning starts none."""
        if self._gateway is None:
            near = self.context.runtime.address() if self._placed else "127.0.0.1"
            self._gateway = Gateway(self.config, self.config.host or near)
        return self._gateway

    def _folders(self) -> Path:
        if self.context.run_directory is not None:
            return self.context.run_directory / "programs"
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="dovetail-programs-")
        return Path(self._temporary.name)

    def _judge(self, endpoint: EpisodeEndpoint, folder: ProgramFolder, end: ProgramEnd) -> None:
        """Pass the program's results and reward to the session.

        Raises:
            EpisodeEndedError: the episode reached a limit, and is scored as it is.
            EpisodeError: the program failed.
        """
        if endpoint.fault is not None:
            raise endpoint.fault
        limits = {
            "output": "bytes of output (max_output_bytes)",
            "processes": "processes (max_processes)",
        }
        if end.reason in limits:
            raise EpisodeError(
                FailureKind.LIMIT,
                f"the program was ended: it exceeded its limit of {limits[end.reason]}",
            )
        if end.reason not in (None, "closed"):
            raise EpisodeError(FailureKind.ENVIRONMENT, f"the program can't be run: {end.reason}")
        by_status, status = self.config.score == "exit_status", end.status
        if status and endpoint.ended is None and (not by_status or status < 0):
            how = f"by signal {-status}" if status < 0 else f"with status {status}"
            raise EpisodeError(
                FailureKind.ENVIRONMENT, f"the program ended {how}: {folder.last_line()}"
            )
        endpoint.session.output = output = folder.output()
        if by_status:
            endpoint.reward(float(status == 0))
        elif self.config.score == "output":
            endpoint.reward(_reward_in(output))
        if endpoint.ended is not None:
            raise EpisodeEndedError(endpoint.ended)


def _reward_in(output: Any) -> float:
    value = output.get("reward") if isinstance(output, Mapping) else output
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        message = f'the reward in the program\'s output file is {value!r:.80}; expected a number: {{"reward": 0.5}}'
        raise EpisodeError(FailureKind.ENVIRONMENT, message)
    return float(value)
