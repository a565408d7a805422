"""Config class of the environment `verifiers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from dovetail.sections import VERBATIM
from dovetail_environments import WorkerSection


def _named(_section: object, _attribute: object, taskset: str) -> None:
    if not taskset.strip():
        raise ValueError(
            "the setting `taskset` is empty; expected the name of a package with a task set, such as gsm8k-v1"
        )


@attrs.frozen(kw_only=True)
class VerifiersConfig(WorkerSection):
    """Settings of `verifiers`, which runs a taskset of verifiers."""

    taskset: str = attrs.field(default="", validator=_named)
    """The package of the taskset, such as `gsm8k-v1`, installed for the interpreter `python`."""
    taskset_config: Mapping[str, Any] = attrs.field(factory=dict)
    """Settings of the taskset: the fields of its TasksetConfig."""
    harness: str = "null"
    """The harness that runs the taskset: `null` only chats, `bash` adds a shell, other names are packages. verifiers' harnesses install their
    requirements with uv.
    """
    harness_config: Mapping[str, Any] = attrs.field(factory=dict)
    """Settings of the harness: the fields of its HarnessConfig."""
    runtime: Mapping[str, Any] = attrs.field(
        factory=lambda: {"type": "subprocess"}, metadata={VERBATIM: True}
    )
    """The runtime of the harness: `{type: subprocess}` on this machine as the run's user, `{type: docker}`, `{type: podman}` or `{type:
    apptainer}`.
    """
