"""Config class of the environment `openenv`."""

from __future__ import annotations

from typing import Literal

import attrs

from dovetail.sections import VERBATIM
from dovetail_environments import WorkerSection


@attrs.frozen(kw_only=True)
class OpenEnvConfig(WorkerSection):
    """Settings of `openenv`, which runs an environment of OpenEnv."""

    project: str | None = None
    """The environment's folder, with its pyproject.toml, or `git+URL`. Each worker starts the environment's server with `uv run`, on
    127.0.0.1.
    """
    app: str = "server.app:app"
    """The server's application in `project`, as named in `openenv.yaml`."""
    url: str | None = None
    """Address of a running server, such as a container's, instead of `project`. The server must accept `workers` concurrent sessions."""
    action: str | None = None
    """The action's field that receives the policy's text, such as `message`. Absent: the only required field of an action; if several are
    required, the policy writes the action as a JSON object.
    """
    observation: str | None = None
    """The observation's field that the policy sees. Absent: all fields, as JSON if there are several."""
    instruction: str = attrs.field(default="", metadata={VERBATIM: True})
    """The system message, which tells the policy how to act; OpenEnv's environments provide none."""
    reward: Literal["last", "sum"] = "last"
    """`last`: an episode's reward is the reward of the last step, as in OpenEnv's own harness. `sum`: the sum of all steps' rewards."""
    steps: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )
    """Number of steps after which an episode is over, for environments that do not end episodes. Absent: no limit."""

    def __attrs_post_init__(self) -> None:
        if (self.project is None) == (self.url is None):
            given = "both `project` and `url`" if self.project else "neither `project` nor `url`"
            raise ValueError(f"the environment has {given}; expected exactly one of them")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url is {self.url!r}; expected http://HOST:PORT or https://HOST")
