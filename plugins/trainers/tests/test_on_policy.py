"""The on-policy trainer: the order of a step, and when it validates and saves."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.interfaces import PluginContext
from dovetail.sections import TrainerSection
from dovetail_sdk.testing import ScriptedRun
from dovetail_trainers.on_policy import OnPolicyTrainer

STEP = ["step", "collect", "learn", "publish_weights"]
NEVER = {
    "validate_before": False,
    "validate_after": False,
    "validate_every": 0,
    "save_every": 0,
    "save_last": False,
}


def calls(steps: int, *, done: int = 0, **settings: Any) -> list[str]:
    """The trainer's calls of a run; only steps unless a setting adds others."""
    run = ScriptedRun(steps, step=done)
    config = TrainerSection(name="on_policy", **{**NEVER, **settings})
    OnPolicyTrainer(config, PluginContext()).run(run)
    return run.calls


def test_weights_are_published_before_the_first_step_and_in_each() -> None:
    assert calls(2) == ["publish_weights", *STEP, *STEP]


@pytest.mark.parametrize(
    ("settings", "when"),
    [
        ({"validate_before": True}, [("validate", 0)]),
        ({"validate_after": True}, [("validate", 4)]),
        ({"save_last": True}, [("save", 4)]),
        ({"validate_every": 2}, [("validate", 2)]),
        ({"save_every": 3}, [("save", 3)]),
        ({"save_last": True, "validate_after": True}, [("save", 4), ("validate", 4)]),
    ],
)
def test_it_validates_and_saves_when_the_config_says_so(
    settings: dict[str, Any], when: list[tuple[str, int]]
) -> None:
    """After the last step, only `save_last` and `validate_after` decide."""
    made = calls(4, **settings)
    found = [(call, made[:at].count("learn")) for at, call in enumerate(made)]
    assert [pair for pair in found if pair[0] in ("validate", "save")] == when


def test_a_resumed_run_is_not_validated_again_before_its_first_step() -> None:
    assert calls(2, done=1, validate_before=True) == ["publish_weights", *STEP]
