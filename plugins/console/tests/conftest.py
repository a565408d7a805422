"""The little distributions of `small_packages`, for the doctor; a run of a few steps."""

from __future__ import annotations

from small_packages import installed, world

__all__ = ["installed", "world"]
