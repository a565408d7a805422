"""Stand-in for pinned host memory, which needs an accelerator: plain memory is used instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same function of torch's, deaf to `pin_memory`."""

    def made(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return make(*args, **options)

    return made


def install() -> None:
    """Where there is no accelerator, let nothing be pinned."""
    if torch.accelerator.is_available():
        return
    for name in ("empty", "full", "ones", "tensor", "zeros"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign,assignment]
