"""Configs over the installed plugins, and what one rule says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dovetail.interfaces import Finding
from dovetail.plugins.rules import installed_rules
from dovetail_sdk.testing import findings_of

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
    """The section of a rollout engine that leaves unlikely tokens out, by a setting of its own."""
    (tmp_path / "picky.py").write_text(PICKY)
    return {"path": str(tmp_path / "picky.py"), "attribute": "Picky"}


@pytest.fixture
def judge() -> Callable[..., list[Finding]]:
    """What a rule says of a config made of sections (a model is added) and overrides, for so many prompts."""

    rules = {rule.name: rule.check for rule in installed_rules()}

    def judge(
        rule: str, sections: Mapping[str, Any], *overrides: str, prompts: int | None = 1280
    ) -> list[Finding]:
        return findings_of(rules[rule], *overrides, sections=sections, prompts=prompts)

    return judge
