"""ServedModel: an API through which an environment calls the policy during one episode."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from dovetail.interfaces import EpisodeEndedError
from dovetail_gateway import EpisodeEndpoint

Found = TypeVar("Found")


class ServedModel:
    """The URL, API key and model name by which a program of an environment, such as an agent, calls the policy during one episode.

    Args:
        url: the gateway's URL without a path, which is the base URL for Anthropic's clients.
        api_key: the API key of calls, which tells the gateway which episode a call belongs to.
        name: the name of the model in calls.
        endpoint: the part of the gateway that answers this episode's calls with the policy.

    Attributes:
        base_url: the base URL for OpenAI's clients.
    """

    def __init__(self, url: str, api_key: str, name: str, endpoint: EpisodeEndpoint) -> None:
        self.url, self.api_key, self.name = url, api_key, name
        self.base_url = f"{url}/v1"
        self._endpoint = endpoint

    async def asked_by(self, work: Coroutine[Any, Any, Found], seconds: float | None) -> Found:
        """Run a coroutine whose calls the policy answers, and return its result; the end of the episode cancels the coroutine.

        Args:
            work: the coroutine, such as an exchange with a process that calls the policy.
            seconds: the time limit, not counting the time in which calls are answered; None for no limit.

        Raises:
            EpisodeEndedError: the episode reached a limit, and the coroutine failed or did not end within 5 seconds.
            EpisodeError: the time limit passed, the coroutine raised this error, or one of its calls made the episode fail.
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
