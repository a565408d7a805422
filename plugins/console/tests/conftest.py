"""Fixtures: the small distributions of `small_packages`, for `dovetail doctor`; a run of a few steps."""

from __future__ import annotations

from small_packages import installed, world

__all__ = ["installed", "world"]
