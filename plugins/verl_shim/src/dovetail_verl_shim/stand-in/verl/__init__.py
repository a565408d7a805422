"""Stand-in for the package verl, with the names that user files commonly import; other names need verl itself."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    raise ImportError(
        f"dovetail-verl-shim has no verl.{name}; to run a file that imports it, install verl itself"
        if not name.startswith("__")
        else name
    )
