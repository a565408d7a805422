"""Fixtures: configs over the installed plugins, and the findings of one rule in a config."""

from __future__ import annotations

from pathlib import Path

import pytest

PICKY = """
import attrs
from dovetail.sections import RolloutSection
from dovetail.interfaces import BaseRollout

@attrs.frozen(kw_only=True)
class PickyConfig(RolloutSection):
    min_p: float = 0.05

    def truncation(self):
        return {**super().truncation(), **({"min_p": (self.min_p, 0.0)} if self.min_p else {})}

class Picky(BaseRollout):
    capabilities = frozenset({"logprobs"})
    Config = PickyConfig

Picky.__abstractmethods__ = frozenset()
"""
MUTE = '''
from collections.abc import AsyncIterator
from dovetail.interfaces import BaseRollout

class Mute(BaseRollout):
    """An engine that gives no log-probabilities."""
    name = "mute"
    api = ">=1.0,<2"
    capabilities = frozenset()

Mute.__abstractmethods__ = frozenset()
'''


@pytest.fixture
def mute(tmp_path: Path) -> dict[str, str]:
    """The section of a rollout engine without log-probabilities."""
    (tmp_path / "mute.py").write_text(MUTE)
    return {"path": str(tmp_path / "mute.py"), "attribute": "Mute"}


@pytest.fixture
def picky(tmp_path: Path) -> dict[str, str]:
    """The section of a rollout engine that leaves out unlikely tokens, by a setting that only this engine has."""
    (tmp_path / "picky.py").write_text(PICKY)
    return {"path": str(tmp_path / "picky.py"), "attribute": "Picky"}
