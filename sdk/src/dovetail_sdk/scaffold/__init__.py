"""Writes a complete, working plugin package to start from."""

from __future__ import annotations

from dovetail_sdk.scaffold.into import add_plugin
from dovetail_sdk.scaffold.new import KINDS, LICENCES, new_plugin

__all__ = ["KINDS", "LICENCES", "add_plugin", "new_plugin"]
