"""Checkpoints on disk: whole or not there, and known to be undamaged."""

from __future__ import annotations

from dovetail.checkpoint.best import Best
from dovetail.checkpoint.manifest import Manifest
from dovetail.checkpoint.mark import BestCheckpoint
from dovetail.checkpoint.store import CheckpointStore

__all__ = ["Best", "BestCheckpoint", "CheckpointStore", "Manifest"]
