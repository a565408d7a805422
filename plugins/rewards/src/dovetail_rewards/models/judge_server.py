"""Where a judge answers: an endpoint that is there, or a server that is started for the run."""

from __future__ import annotations

from abc import ABC, abstractmethod

import attrs


@attrs.frozen
class Mended:
    """What became of a server that had not answered."""

    there: bool
    """Whether it may be asked again."""
    words: str = ""
    """What had happened to it; empty where nothing is known."""


class JudgeServer(ABC):
    """Where a judge answers."""

    key: str | None = None
    """What it wants as a bearer token, where that is not the user's own."""

    @abstractmethod
    def start(self) -> str:
        """The endpoint's base, once it answers: `http://…/v1`.

        Raises:
            RewardError: it can't be started.
        """

    async def mend(self) -> Mended:
        """See to a server that could not be reached; returns when it is there again, or gone for good."""
        return Mended(there=True)

    def close(self) -> None:
        """End what `start` began; safe to call twice."""


class GivenServer(JudgeServer):
    """One that runs already."""

    def __init__(self, url: str) -> None:
        self._url = url

    def start(self) -> str:
        return self._url
