"""`dovetail serve MODEL`: runs only the gateway, to try a policy with the program that will use it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import click

from dovetail.interfaces import AgentLoop, Message, PluginContext, Sample, Session
from dovetail.sections import RunConfig
from dovetail.telemetry import visible
from dovetail_gateway.config import ProgramConfig
from dovetail_gateway.dialects.call import ApiError, ModelAnswer, ModelCall
from dovetail_gateway.endpoint import EpisodeEndpoint
from dovetail_gateway.server import Gateway
from dovetail_gateway.turn_reader import TurnReader
from dovetail_inference import open_model

_IDLE_SECONDS = 600.0
"""Seconds without a call after which a conversation is forgotten; a later call begins a new one with all its messages."""
_BEGINNING = ({"role": "user", "content": ""},)
"""Placeholder for the messages of a dataset row, which the agent loop needs to start an episode; calls bring their own messages."""


class ServedLoop(AgentLoop):
    """Agent loop that treats each conversation of a client as an episode with its own limits.

    Args:
        config: the agent loop's config, whose command is not run.
        context: a context with the tokenizer.
    """

    name = "served"
    api = ">=1.4,<2"
    Config = ProgramConfig
    capabilities = frozenset({"forks"})

    def __init__(self, config: ProgramConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self.loop: asyncio.AbstractEventLoop
        self.episode: Callable[[Sequence[Message]], Awaitable[Sample]]
        self._open: list[EpisodeEndpoint] = []
        self._begun: deque[asyncio.Future[EpisodeEndpoint]] = deque()
        self._tasks: set[asyncio.Future[Any]] = set()
        self._reader: TurnReader

    def start(self) -> None:
        self._reader = TurnReader.started(self.config.parser, self.context)

    async def run(self, session: Session) -> None:
        endpoint = EpisodeEndpoint(session, self.config, self._reader)
        self._open.append(endpoint)
        self._begun.popleft().set_result(endpoint)
        idle = asyncio.timeout(_IDLE_SECONDS)

        def awake(busy: bool) -> None:
            idle.reschedule(None if busy else self.loop.time() + _IDLE_SECONDS)

        try:
            endpoint.on_busy = awake
            with suppress(TimeoutError):
                async with idle:
                    await endpoint.closing.wait()
        finally:
            endpoint.on_busy = lambda _: None
            self._open.remove(endpoint)
            await endpoint.close()

    async def answer(self, call: ModelCall, name: str) -> list[ModelAnswer]:
        """Answer a call in the conversation that it continues, or in a new conversation; for errors see `EpisodeEndpoint.answer`."""
        found = next((e for e in self._open if e.continues(call)), None)
        if found is None:
            begun = self.loop.create_future()
            self._begun.append(begun)
            task = asyncio.ensure_future(self.episode(_BEGINNING))
            self._tasks.add(task)
            task.add_done_callback(self._ended)
            await asyncio.wait({begun, task}, return_when=asyncio.FIRST_COMPLETED)
            if not begun.done():
                raise ApiError(500, "engine_failed", "a chat can't start; see the server's stderr")
            found = begun.result()
        return await found.answer(call, name)

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            click.echo(visible(f"error: {error}"), err=True)

    def refused(self, code: str) -> None:
        """Do nothing: the client gets the error, and nothing is counted."""


@click.command()
@click.argument("model", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--config", type=click.Path(path_type=Path), help="Instead of the run's own config.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Interface to listen on.")
@click.option("--port", default=0, show_default="a free one", help="Port to listen on.")
@click.option("--key", help="API key that clients must send; by default a random one.")
@click.option(
    "--as",
    "names",
    multiple=True,
    help="A model name that clients may request; `*` allows any. [default: policy]",
)
def serve(
    model: str,
    overrides: tuple[str, ...],
    config: Path | None,
    host: str,
    port: int,
    key: str | None,
    names: tuple[str, ...],
) -> None:
    """Serve MODEL over the APIs of OpenAI and Anthropic, as the gateway does during training. Ctrl-C ends the server.

    MODEL and overrides are as for `dovetail generate`, such as rollout.temperature=0.7 or data.max_response_length=4096, which limits a
    conversation. If the run's agent loop is `program`, its parser and model names are used.
    """
    made: list[ServedLoop] = []

    def loop(settings: RunConfig, context: PluginContext) -> ServedLoop:
        own = settings.rollout.agent_loop
        section = own if isinstance(own, ProgramConfig) else ProgramConfig(command="-")
        given: dict[str, Any] = {"models": names} if names else {}
        given |= {"port": port, "max_turns": 1 << 20, "max_seconds": None}
        section = attrs.evolve(section, **given)
        made.append(ServedLoop(section, context))
        return made[-1]

    with (
        open_model(model, overrides, config=config, loop=loop) as episode,
        suppress(KeyboardInterrupt),
    ):
        asyncio.run(_serve(made[0], episode, model, key, host))


async def _serve(
    loop: ServedLoop,
    episode: Callable[[Sequence[Message]], Awaitable[Sample]],
    model: str,
    key: str | None,
    host: str,
) -> None:
    loop.loop, loop.episode = asyncio.get_running_loop(), episode
    gateway = Gateway(loop.config, host)
    try:
        key = gateway.open(loop, key)
        names = " or ".join(loop.config.models)
        click.echo(visible(f"{model} is served as {names}; Ctrl-C ends it"))
        for name, value in (
            ("OPENAI_BASE_URL", f"{gateway.url}/v1"),
            ("OPENAI_API_KEY", key),
            ("ANTHROPIC_BASE_URL", gateway.url),
            ("ANTHROPIC_API_KEY", key),
        ):
            click.echo(f"export {name}={value}")
        await asyncio.Event().wait()
    finally:
        gateway.close()
