"""An engine that dies while it generates is started again, and the run ends as if it had lived."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from run_files import assert_same, steps_of, tensors_of

from dovetail.errors import RolloutError, WeightSyncError
from dovetail.run.run import resume, train
from dovetail_rollout_hf.rollout import HfRollout

QUIET = ("trainer.validate_before=false", "trainer.validate_after=false")
SAMPLES_A_STEP = 16


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Engines die when they have finished so many samples in all; the first number is taken off at each death."""
    left: list[int] = []
    submit, counted = HfRollout.submit, [0]

    async def mortal(self: Any, request: Any) -> AsyncIterator[Any]:
        if getattr(self, "gone", False):
            raise RolloutError("the engine is gone")
        async for completion in submit(self, request):
            if not getattr(self, "gone", False):
                counted[0] += 1
                self.gone = bool(left) and counted[0] > left[0]
                if self.gone:
                    left.pop(0)
            if self.gone:
                raise RolloutError("the engine died")
            yield completion

    monkeypatch.setattr(HfRollout, "submit", mortal)
    monkeypatch.setattr(HfRollout, "alive", lambda self: not getattr(self, "gone", False))
    return left


def test_the_weights_are_those_of_a_run_whose_engine_lived_and_the_run_goes_on(
    config: Path, tmp_path: Path, deaths: list[int]
) -> None:
    train(config, [*QUIET, f"output_dir={tmp_path / 'lived'}"])
    assert len(tensors_of(tmp_path / "lived/tests/run", 3)) > 0

    deaths += [SAMPLES_A_STEP * 3 + count for count in (5, SAMPLES_A_STEP + 3)]
    died = tmp_path / "died"
    train(config, [*QUIET, f"output_dir={died}", "trainer.total_steps=2"])
    assert deaths == []
    assert_same(tensors_of(tmp_path / "lived/tests/run", 2), tensors_of(died / "tests/run", 2))
    steps = steps_of(died / "tests/run")
    assert [step["rollout/restarts"] for step in steps] == [1.0, 1.0]
    assert all(step["weight_check/max_difference"] < 1e-4 for step in steps)

    resume(died / "tests/run", ["trainer.total_steps=3"])
    assert_same(tensors_of(tmp_path / "lived/tests/run", 3), tensors_of(died / "tests/run", 3))


def test_an_engine_that_dies_again_and_again_ends_the_run_and_says_why(
    config: Path, tmp_path: Path, deaths: list[int]
) -> None:
    deaths += [3, 4, 5, 6]
    with pytest.raises(WeightSyncError, match=r"(?s)step 1: every rollout replica.*engine died"):
        train(config, [*QUIET, f"output_dir={tmp_path / 'died'}"])
    assert deaths == [6]
