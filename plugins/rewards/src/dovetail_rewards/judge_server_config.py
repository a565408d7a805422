"""Config class of a judge's own server. Nothing here imports more than attrs."""

from __future__ import annotations

from typing import Any

import attrs

_ABOVE_ZERO: Any = attrs.validators.gt(0)
_NOT_NEGATIVE: Any = attrs.validators.ge(0)
_PORT: Any = attrs.validators.optional([attrs.validators.ge(1), attrs.validators.le(65535)])


def _is_index(_: Any, attribute: attrs.Attribute[Any], value: tuple[int, ...]) -> None:
    """Refuse what counts no accelerators."""
    if any(index < 0 for index in value) or len(set(value)) < len(value):
        raise ValueError(
            f"{attribute.name}={list(value)} are no indices of accelerators: each is 0 or above, and named once"
        )


@attrs.frozen(kw_only=True)
class JudgeServerConfig:
    """A vLLM server on this machine's loopback interface, for the time of a run."""

    python: str | None = None
    """The Python interpreter whose environment has vLLM, such as `/opt/vllm/bin/python`; None: the one that trains."""
    devices: tuple[int, ...] = attrs.field(default=(), validator=_is_index)
    """Indices of the accelerators that it computes on: those that no other role has. Empty: whatever it finds."""
    arguments: dict[str, Any] = attrs.field(factory=dict)
    """Further arguments of vLLM's server by name, such as `{max_model_len: 8192, gpu_memory_utilization: 0.9}`. `tensor_parallel_size` is by default the number of `devices`."""
    environment: dict[str, str] = attrs.field(factory=dict)
    """Environment variables of its processes."""
    port: int | None = attrs.field(default=None, validator=_PORT)
    """Where it listens; None takes a free one."""
    start_timeout: float = attrs.field(default=900.0, validator=_ABOVE_ZERO)
    """Seconds until it must be healthy."""
    restarts: int = attrs.field(default=2, validator=_NOT_NEGATIVE)
    """How often in a run it is started again after it has died."""
