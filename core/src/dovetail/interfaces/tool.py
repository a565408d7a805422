"""Tool: one or several functions that a policy can call during an episode."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from dovetail.interfaces.plugin import Plugin, PluginConfig

ToolSchema: TypeAlias = Mapping[str, Any]
"""A function as chat templates and OpenAI's API describe it: `{"type": "function", "function": {"name", "description",
"parameters"}}`, where `parameters` is the JSON schema of an object."""
Content: TypeAlias = "str | Sequence[Mapping[str, Any]]"
"""Content of a message: text, or parts such as `{"type": "text", "text": …}` and `{"type": "image", "image": …}`."""


@attrs.frozen(kw_only=True)
class EpisodeInfo:
    """The episode that a tool is opened for."""

    sample_id: str
    """Id of the episode's sample; unique in the step."""
    extra_info: Mapping[str, Any] = attrs.field(factory=dict)
    """`extra_info` of the row of data; empty if the row has none."""


def _check_content(_: object, __: object, content: Any) -> None:
    parts = isinstance(content, (list, tuple)) and all(isinstance(one, Mapping) for one in content)
    if not (parts or isinstance(content, str)):
        raise TypeError(
            f"content of a ToolResult is {content!r:.200}; expected text or a list of content parts"
        )


def _check_reward(_: object, __: object, reward: float | None) -> None:
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"reward of a ToolResult is {reward}; expected a finite number")


@attrs.frozen(kw_only=True)
class ToolResult:
    """The result of a tool call.

    Raises:
        TypeError: the content is neither text nor a list of parts.
        ValueError: the reward is not finite.
    """

    content: Content = attrs.field(validator=_check_content)
    """The observation in full length; the caller cuts it to the configured limit."""
    reward: float | None = attrs.field(default=None, validator=_check_reward)
    """A reward for the call; None if the tool gives none."""
    done: bool = False
    """Whether the episode ends after the call."""


class Tool(Plugin):
    """Functions that a policy can call. In a user's file a plain function works too: its signature and docstring give the schema.

    One object serves all episodes concurrently on one event loop, so keep data of an episode in the state that `open` returns.
    """

    @classmethod
    def longest_call(cls, config: PluginConfig) -> float | None:
        """Return the seconds after which the tool itself ends a call, with an error that the policy sees; None without such a limit."""
        return None

    @abstractmethod
    def schemas(self) -> Sequence[ToolSchema]:
        """Return a schema for each function. Called after `start`; every call returns the same schemas."""

    async def open(self, episode: EpisodeInfo) -> Any:
        """Return the state of one episode, created before the first call; None if calls share no state.

        Raises:
            ToolError: the episode can't have the tool, and fails with the kind `tool`.
        """
        return None

    @abstractmethod
    async def call(self, state: Any, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Run one call. Calls of a turn may run at the same time.

        The caller limits the time, and repeats failed calls. A cancelled call must end everything that it started before it
        re-raises CancelledError.

        Args:
            state: the object that `open` returned.
            name: the name of the function.
            arguments: the arguments, already checked against the function's schema.

        Raises:
            ToolError: the call failed; the message becomes an observation. Any other exception fails the episode, which gets no score.
        """

    async def release(self, state: Any) -> None:
        """Release the state of an episode, however it ended."""
