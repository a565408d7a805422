"""Stand-ins for verl's file helpers, for local files."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def copy_to_local(src: str, *_: Any, **__: Any) -> str:
    """Return the path unchanged.

    Raises:
        ValueError: the path is on HDFS.
    """
    if src.startswith("hdfs:"):
        raise ValueError(f"{src} is on HDFS; copy it to a disk first")
    return str(Path(src).expanduser())
