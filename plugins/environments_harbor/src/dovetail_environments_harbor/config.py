"""Config class of the environment `harbor`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from dovetail.sections import VERBATIM
from dovetail_environments import WorkerSection

SANDBOX = "sandbox"
"""Name of the runtime that uses no container."""
_INSTRUCTION = """\
You work in a Linux shell. Answer with one block of commands,
```bash
...
```
which are run, and you are shown what they print. An answer without such a block ends the task."""


def _named(_section: object, _attribute: object, folder: str) -> None:
    if not folder.strip():
        raise ValueError(
            "the setting `folder` is empty; expected a folder of Harbor's tasks, or one task's folder"
        )


@attrs.frozen(kw_only=True)
class HarborConfig(WorkerSection):
    """Settings of `harbor`, which runs tasks of Harbor."""

    folder: str = attrs.field(default="", validator=_named)
    """A folder of tasks, or a single task: a folder with task.toml, instruction.md and tests."""
    runtime: str = "docker"
    """The runtime of tasks, by Harbor's name: `docker`, `podman`, `singularity`, or a service that Harbor supports. `sandbox` uses the
    sandbox of `dovetail-rewards` instead of a container, with this machine's programs and no network; the task's Dockerfile is not run.
    """
    runtime_config: Mapping[str, Any] = attrs.field(factory=dict, metadata={VERBATIM: True})
    """Further arguments of the runtime, as Harbor defines them."""
    instruction: str = attrs.field(default=_INSTRUCTION, metadata={VERBATIM: True})
    """The system message, which tells the policy how to use the shell."""
    command_seconds: int = attrs.field(default=60, validator=attrs.validators.ge(1))
    """Seconds that one block of commands may run; a block that takes longer is ended, and the policy is shown a message about it."""
    output_characters: int = attrs.field(default=8000, validator=attrs.validators.ge(100))
    """Maximum characters of a block's output that the policy sees; the middle of longer output is cut."""
