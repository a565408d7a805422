"""Observers that distributions declare: found, told, and isolated from one another."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path

import pytest

from dovetail.hooks import Observers


def test_installed_observers_are_loaded_and_a_broken_one_is_reported(
    installed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "dovetail.hooks"):
        observers = Observers()
        observers.load()
        observers.hook.step_finished(step=1, metrics={"actor/loss": 0.1})
    assert set(observers.names) >= {
        "b_failing (acme-extras 1.0.0)",
        "c_recorder (acme-extras 1.0.0)",
    }
    recorder = importlib.import_module("acme_extras.hooks").Recorder
    assert recorder.seen[-1] == (1, {"actor/loss": 0.1})
    assert observers.failures["a_broken (acme-extras 1.0.0)"] == 1
    assert observers.failures["b_failing (acme-extras 1.0.0)"] == 1
    assert "observer a_broken (acme-extras 1.0.0) could" in caplog.text


def test_observers_that_the_environment_names_are_left_out(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_SKIP_OBSERVERS", "report,b_failing")
    observers = Observers()
    observers.load()
    assert "c_recorder (acme-extras 1.0.0)" in observers.names
    assert not [name for name in observers.names if name.startswith(("report", "b_failing"))]
