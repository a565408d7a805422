"""Settings of the environment `openenv`."""

from __future__ import annotations

from typing import Literal

import attrs

from dovetail.sections import VERBATIM
from dovetail_environments import WorkerSection


@attrs.frozen(kw_only=True)
class OpenEnvConfig(WorkerSection):
    """An environment of OpenEnv."""

    project: str | None = None
    """The environment's folder, with its pyproject.toml, or `git+URL`: each worker starts its server with `uv run`, on 127.0.0.1."""
    app: str = "server.app:app"
    """The server's application in `project`; `openenv.yaml` names it, too."""
    url: str | None = None
    """In place of `project`: the address of a running server, such as a container's. It has to accept `workers` concurrent sessions."""
    action: str | None = None
    """The field of an action that gets the policy's text, such as `message`. Absent: the only required field of an action; with several,
    the policy writes the action as a JSON object."""
    observation: str | None = None
    """The field of an observation that the policy sees. Absent: all fields, as JSON where there are several."""
    instruction: str = attrs.field(default="", metadata={VERBATIM: True})
    """The system message, which says how to act; OpenEnv's environments have none."""
    reward: Literal["last", "sum"] = "last"
    """`last`: the reward of an episode is that of its last step, as in OpenEnv's own harness. `sum`: the sum over its steps."""
    steps: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )
    """Steps after which an episode is over, for an environment that does not end it."""

    def __attrs_post_init__(self) -> None:
        if (self.project is None) == (self.url is None):
            given = "project and url" if self.project else "neither project nor url"
            raise ValueError(f"has {given}; expected either file or command")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url is {self.url!r}; expected http://HOST:PORT or https://HOST")
