"""A tracker whose library is not installed is an error before anything heavy starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.errors import PluginNeedsError
from dovetail.run.run import train
from dovetail.workers.inline import InlineRuntime
from dovetail_trackers.wandb import WandbTracker

INSTALL = "pip install 'dovetail-trackers[wandb]'"


@pytest.fixture(autouse=True)
def _lacks_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WandbTracker, "module", "no_such_library")


def test_train_says_it_before_it_starts_the_runtime(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InlineRuntime, "start", lambda self: pytest.fail("the runtime started"))
    with pytest.raises(PluginNeedsError) as caught:
        train(config, ["tracking=[jsonl,wandb]"])
    assert caught.value.hint == INSTALL
    assert not (tmp_path / "runs" / "tests" / "run").exists()
