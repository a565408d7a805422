"""Config classes of environments and of their agent loop. This module imports nothing but config sections."""
# ruff: noqa: RUF009 - plugin_field makes an attrs field, as attrs.field does

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from dovetail.sections import ABOVE_ZERO, VERBATIM, PluginSection, plugin_field
from dovetail_gateway import GatewaySection, is_command

_COUNT = attrs.validators.ge(1)
_COMMAND: Any = attrs.validators.optional(is_command)
HELD_OUT = "held_out"
"""Name of the split with an environment's held-out tasks, on which no step trains."""


@attrs.frozen(kw_only=True)
class EnvironmentSection(PluginSection):
    """Base of every environment's config."""

    weight: float | None = attrs.field(default=None, validator=ABOVE_ZERO)
    """Weight of the environment's prompts in an epoch, relative to the sum of all weights. Either all environments have a weight or
    none; if none has one, each is weighted by its number of tasks.
    """
    tasks: int = attrs.field(default=1000, validator=_COUNT)
    """Maximum number of training tasks; an environment with fewer tasks provides all its tasks."""
    held_out: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    """Maximum number of held-out tasks, for validation and `dovetail eval`."""
    at_limit: float = 0.0
    """Reward of an episode that reached a limit on turns or tokens before the environment could score it."""


@attrs.frozen(kw_only=True)
class WorkerSection(EnvironmentSection):
    """Base of the config of an environment that runs in a separate interpreter."""

    python: str | None = attrs.field(default=None, validator=_COMMAND, metadata={VERBATIM: True})
    """The Python interpreter with the environment's packages, such as `.venv-games/bin/python`, or a command that ends with an interpreter,
    such as `uv run --with textarena python`. Absent: the run's own interpreter.
    """
    workers: int = attrs.field(default=4, validator=_COUNT)
    """Maximum number of concurrent episodes, each in a separate process; a process runs one episode after another."""
    start_seconds: float = attrs.field(default=120.0, validator=attrs.validators.gt(0))
    """Seconds that a process may take to start, or to list the tasks."""
    episode_seconds: float | None = attrs.field(default=600.0, validator=ABOVE_ZERO)
    """Seconds that an episode may take, not counting the time in which the policy answers its calls. An episode that takes longer fails,
    and its process is killed. null: no limit.
    """


@attrs.frozen(kw_only=True)
class ProgramEnvironmentConfig(WorkerSection):
    """Settings of `program`, an environment in a Python file, or in a command that answers requests in lines of JSON."""

    file: str | None = None
    """A Python file with the functions `tasks` and `episode`, run by the interpreter `python`."""
    command: str | None = attrs.field(default=None, validator=_COMMAND, metadata={VERBATIM: True})
    """A command, instead of `file`, that reads requests and writes answers as lines of JSON, such as
    `docker run --rm -i --network host IMAGE`.
    """
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    """Settings passed to the file's functions or to the command."""

    def __attrs_post_init__(self) -> None:
        if (self.file is None) == (self.command is None):
            given = "both `file` and `command`" if self.file else "neither `file` nor `command`"
            raise ValueError(f"the environment has {given}; expected exactly one of them")


_USER = """\
You are the user of an assistant, and what stands above is what you want and know. Speak as that user, in one short message at a time, and say \
only what you are asked. When you have what you want, answer [satisfied]; when you can't get it, answer [unsatisfied]."""


def _is_url(_config: Any, _attribute: Any, value: str) -> None:
    if not value.startswith(("http://", "https://")):
        raise ValueError(f"url is {value!r}; expected an address such as http://127.0.0.1:8000/v1")


def _given_text(_config: Any, attribute: attrs.Attribute[str], value: str) -> None:
    if not value.strip():
        raise ValueError(f"the setting `{attribute.name}` is empty; expected a text")


@attrs.frozen(kw_only=True)
class SimulatedUserConfig(WorkerSection):
    """Settings of a simulated user, played by a second model."""

    file: str = attrs.field(default="", validator=_given_text)
    """File with one task per line, a JSON object: `user`, the user's goal and knowledge; `opening`, the user's first message; optionally
    `answer`, a text that the policy's last message has to contain, and `system`, the policy's system message."""
    url: str = attrs.field(default="", validator=_is_url)
    """The base URL of an OpenAI-compatible endpoint, such as `http://127.0.0.1:8000/v1`; `/chat/completions` is appended."""
    model: str = attrs.field(default="", validator=_given_text)
    """Name of the user's model at the endpoint."""
    auth_env: str | None = None
    """Environment variable that holds the API key, sent as a bearer token."""
    extra_body: Mapping[str, Any] = attrs.field(factory=dict)
    """Further keys of the request, such as `{temperature: 0.7, max_tokens: 200}`."""
    instruction: str = attrs.field(default=_USER, metadata={VERBATIM: True})
    """Instruction to the user's model, appended to the task's `user`. The model ends the episode by saying `[satisfied]` or
    `[unsatisfied]`.
    """
    turns: int = attrs.field(default=8, validator=_COUNT)
    """Maximum turns of the policy; after the last turn, the user counts as unsatisfied."""


@attrs.frozen(kw_only=True)
class EnvironmentRowsConfig(PluginSection):
    """Settings of a data source whose rows are the tasks of environments."""

    environments: dict[str, EnvironmentSection] = plugin_field(
        "environment", None, collection="dict"
    )
    """The environments by name. Unless the config sets this field, it gets the environments of the agent loop `environments`."""


@attrs.frozen(kw_only=True)
class EnvironmentsConfig(GatewaySection):
    """Settings of the agent loop `environments`, whose environments provide tasks, run episodes and score them."""

    environments: dict[str, EnvironmentSection] = plugin_field(
        "environment", None, collection="dict"
    )
    """The environments by the name used in metrics: `{sums: {name: reasoning_gym, datasets: [chain_sum]}, games: {name: textarena, games:
    [TicTacToe-v0]}}`.
    """

    def __attrs_post_init__(self) -> None:
        if not self.environments:
            raise ValueError(
                "the setting `environments` is empty; expected at least one environment by name, such as {sums: {name: program, file: sums.py}}"
            )

    def settings(self) -> Mapping[str, Any]:
        """Return values that the environments imply for other sections: `data` for their tasks and weights, `reward` for their scores."""
        named = {name: _given(section) for name, section in self.environments.items()}
        return {
            "data": {
                "source": {"name": "environments", "environments": named},
                "mixture": {
                    name: {"files": [name], "weight": section.weight}
                    for name, section in self.environments.items()
                },
                "val_files": [
                    f"{name}/{HELD_OUT}"
                    for name, section in self.environments.items()
                    if section.held_out
                ],
            },
            "reward": {"function": {"name": "environment"}},
        }


def _given(section: EnvironmentSection) -> dict[str, Any]:
    """Return the fields of a section that differ from their defaults; these include `name` or `path`, which selects the plugin."""
    return {
        field.name: value
        for field in attrs.fields(type(section))
        if (value := getattr(section, field.name)) != _default(field)
    }


def _default(field: Any) -> Any:
    default = field.default
    return default.factory() if isinstance(default, attrs.Factory) else default  # type: ignore[arg-type]
