"""ServedModel: the policy behind an API, for one episode."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from dovetail.interfaces import EpisodeEndedError
from dovetail_gateway import EpisodeEndpoint

Found = TypeVar("Found")


class ServedModel:
    """The address of an episode's policy for a program.

    Args:
        url: the url of the gateway, without a path; Anthropic's clients take it as it is.
        api_key: the episode's key.
        name: the name of the model in calls.
        endpoint: the endpoint that answers the calls.

    Attributes:
        base_url: the base URL for OpenAI's clients.
    """

    def __init__(self, url: str, api_key: str, name: str, endpoint: EpisodeEndpoint) -> None:
        self.url, self.api_key, self.name = url, api_key, name
        self.base_url = f"{url}/v1"
        self._endpoint = endpoint

    async def asked_by(self, work: Coroutine[Any, Any, Found], seconds: float | None) -> Found:
        """Run a coroutine whose calls the policy answers meanwhile, and return its result; it is cancelled where the episode can't
        continue.

        Args:
            work: the coroutine, such as an exchange with a process that makes the calls.
            seconds: the limit of the time in which no call is being answered; None for none.

        Raises:
            EpisodeEndedError: the episode reached a limit, and the work has failed or did not end within 5 seconds after that.
            EpisodeError: the work took too long or raised it; or a call failed the episode.
        """
        endpoint = self._endpoint
        running = asyncio.ensure_future(work)
        closing = asyncio.ensure_future(endpoint.closing.wait())
        try:
            async with endpoint.within(seconds, "the episode", "episode_seconds"):
                await asyncio.wait({running, closing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended = running.done()
            for each in (running, closing):
                each.cancel()
            await asyncio.gather(running, closing, return_exceptions=True)
        if endpoint.fault is not None:
            raise endpoint.fault
        if endpoint.ended is not None and (not ended or running.exception() is not None):
            raise EpisodeEndedError(endpoint.ended)
        return running.result()
