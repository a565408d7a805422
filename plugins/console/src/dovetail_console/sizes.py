"""Sizes in bytes as commands print them."""

from __future__ import annotations


def write_bytes(size: int) -> str:
    """Return a size as text, in the largest unit in which the number is at least 1."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size / 2**10:,.1f} KiB"
