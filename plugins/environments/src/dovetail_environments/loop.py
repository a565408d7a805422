"""EnvironmentsLoop: an agent loop that has each row's environment run and score the episode."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import attrs
import numpy as np

from dovetail.errors import nearest
from dovetail.interfaces import (
    AgentLoop,
    EpisodeEndedError,
    EpisodeError,
    FailureKind,
    PluginConfig,
    PluginContext,
    Prompt,
    Session,
    Transition,
)
from dovetail.plugins import make_plugin, ref_for
from dovetail.sections import PluginSection
from dovetail_environments.config import EnvironmentsConfig, EnvironmentSection
from dovetail_environments.environment import Environment, EnvironmentEpisode, EpisodeScore
from dovetail_environments.served import ServedModel
from dovetail_gateway import HERMES, EpisodeEndpoint, Gateway, TurnReader


def made(name: str, section: EnvironmentSection, context: PluginContext) -> Environment:
    """Construct and start the environment that a config section selects.

    Args:
        name: the environment's name in the config.
        section: the config section that selects the environment.
        context: the context of the plugin that uses the environment.

    Raises:
        DovetailError: the environment can't be loaded, or a package that it needs is missing.
    """
    environment: Any = make_plugin(
        ref_for("environment", section), attrs.evolve(context, role=name)
    )
    environment.start()
    return environment


class EnvironmentsLoop(AgentLoop):
    """Agent loop whose episodes run in environments, which also provide the tasks and the scores.

    Unless the config sets them, the data source, `data.mixture` and the reward function follow from the environments.

    A row names its environment and its task: `extra_info: {environment: NAME, task: …}`.

    Metrics over all episodes of a step: `episode/environments/NAME/episodes` is the environment's share of the episodes, and
    `episode/environments/NAME/failures` the share that failed in the environment. `reward/components/NAME/reward` and
    `reward/components/NAME/PART` are means over the environment's own episodes.

    In a config:

        rollout:
          agent_loop:
            name: environments
            environments:
              counting: {name: program, file: counting.py, weight: 1}
              games: {name: program, file: games.py, python: .venv-games/bin/python, weight: 3}
    """

    name = "environments"
    api = ">=1.4,<2"
    Config = EnvironmentsConfig
    capabilities = frozenset({"forks"})
    transitions: ClassVar[frozenset[Transition]] = frozenset({"user"})

    @classmethod
    def selects(cls, config: PluginConfig) -> Mapping[str, tuple[str, PluginSection]]:
        chosen = {f"environments.{n}": ("environment", s) for n, s in config.environments.items()}
        return {"parser": ("tool_parser", config.parser or HERMES), **chosen}

    def __init__(self, config: PluginConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._environments: dict[str, Environment] = {}
        self._gateway: Gateway | None = None
        self._reader: TurnReader

    def start(self) -> None:
        """Start the environments and, if the config sets its port, the gateway (the HTTP server for calls of the policy).

        Raises:
            DovetailError: the parser or an environment can't be loaded or lacks a package, or the port is taken.
        """
        self._reader = TurnReader.started(self.config.parser, self.context)
        for name, section in self.config.environments.items():
            self._environments[name] = self.environment(name, section)
        if self.config.port:
            self.gateway()

    def close(self) -> None:
        for environment in self._environments.values():
            environment.close()
        if self._gateway is not None:
            self._gateway.close()
            self._gateway = None

    async def run(self, session: Session) -> None:
        name, environment, task = self._chosen(session.prompt)
        session.count(f"environments/{name}/episodes")
        episode = _Episode(session, self)
        try:
            try:
                score = _checked(name, await environment.run(task, episode))
            except EpisodeEndedError as ended:
                score = EpisodeScore(reward=environment.config.at_limit)
                episode.ended = ended
            except EpisodeError:
                raise
            except Exception as error:
                message = f"environment {name!r} raised {type(error).__name__}: {error}"
                raise EpisodeError(FailureKind.ENVIRONMENT, message) from error
        except EpisodeError:
            session.count(f"environments/{name}/failures")
            raise
        session.output = {
            "environment": name,
            "reward": score.reward,
            "parts": {**score.parts},
        }
        if episode.ended is not None:
            raise episode.ended

    def environment(self, name: str, section: EnvironmentSection) -> Environment:
        """Construct and start an environment; for errors see `made`."""
        return made(name, section, self.context)

    def gateway(self) -> Gateway:
        """Return the gateway, the HTTP server for calls of the policy; start it if it is not running."""
        if self._gateway is None:
            self._gateway = Gateway(self.config, self.config.host or "127.0.0.1")
        return self._gateway

    def endpoint(self, session: Session) -> EpisodeEndpoint:
        """Return the endpoint that answers an episode's model calls."""
        return EpisodeEndpoint(session, self.config, self._reader)

    def _chosen(self, prompt: Prompt) -> tuple[str, Environment, Mapping[str, Any]]:
        """Return the name of a row's environment, the environment, and the task.

        Raises:
            EpisodeError: the row names no environment of the config.
        """
        row = prompt.extra_info or {}
        name = str(row.get("environment"))
        if name not in self._environments:
            near = nearest(name, self._environments)
            raise EpisodeError(
                FailureKind.HARNESS,
                f"{prompt}: extra_info.environment is {row.get('environment')!r}; expected {' or '.join(self._environments)}",
                hint=f"did you mean {near!r}?" if near else None,
            )
        return name, self._environments[name], row.get("task") or {}


class _Episode(EnvironmentEpisode):
    def __init__(self, session: Session, loop: EnvironmentsLoop) -> None:
        self.session, self._loop = session, loop
        self.ended: EpisodeEndedError | None = None

    @asynccontextmanager
    async def served(self) -> AsyncIterator[ServedModel]:
        endpoint, gateway = self._loop.endpoint(self.session), self._loop.gateway()
        key = gateway.open(endpoint)
        try:
            yield ServedModel(gateway.url, key, self._loop.config.models[0], endpoint)
        finally:
            gateway.close_key(key)
            await endpoint.close()
            if endpoint.ended is not None:
                self.ended = EpisodeEndedError(endpoint.ended)


def _checked(name: str, score: Any) -> EpisodeScore:
    """Check an environment's score, and return it with plain floats.

    Raises:
        EpisodeError: the value is not an EpisodeScore, or has a number that is not finite in float32.
    """
    if not isinstance(score, EpisodeScore):
        message = f"environment {name!r} returned {score!r:.80}; expected an EpisodeScore"
        raise EpisodeError(FailureKind.ENVIRONMENT, message)
    for what, value in {"reward": score.reward, **score.parts}.items():
        number = isinstance(value, bool | int | float | np.number)
        with np.errstate(over="ignore"):
            if not number or not np.isfinite(np.float32(value)):
                message = f"environment {name!r} has {what} = {value!r:.80}; expected a number that is finite in float32"
                raise EpisodeError(FailureKind.ENVIRONMENT, message)
    parts = {part: float(value) for part, value in score.parts.items()}
    return EpisodeScore(reward=float(score.reward), parts=parts)
