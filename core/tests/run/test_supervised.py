"""A run that a supervisor watches: it has one alone, and learns why the run fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail.cli import train
from dovetail.config import config_from_mapping
from dovetail.errors import RunDirectoryError
from dovetail.plugins.index import PluginIndex


class Supervisor:
    """Stands for an entry point, and notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def load(self) -> Any:
        return lambda config, path, *rest: self.calls.append((path, *rest))


@pytest.mark.parametrize("restarts", [0, 3])
def test_one_supervisor_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    supervisor = Supervisor()
    monkeypatch.setattr(PluginIndex, "extensions", lambda *_: [(supervisor, None)])
    document = {"model": {"path": "m"}, "trainer": {"run_restarts": restarts}}
    config, path = config_from_mapping(document).config, tmp_path / "run"
    assert train._supervised(config, path, ["train"]) is bool(restarts)
    for called, arguments, variables, cause in supervisor.calls:
        assert (called, arguments) == (path, ["train"])
        assert variables == {train.SUPERVISED: str(path), train.CAUSE: str(cause)}
    monkeypatch.setenv(train.SUPERVISED, str(path))
    assert not train._supervised(config, path, ["train"])
    assert train._supervised(config, tmp_path / "another", ["train"]) is bool(restarts)
    assert len(supervisor.calls) == 2 * bool(restarts)


def test_why_a_run_fails_is_kept_for_its_supervisor_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, kept in (
        (RunDirectoryError("rank 3 died\nand more"), "rank 3 died"),
        (ValueError(), "ValueError"),
    ):
        with pytest.raises(type(error)), train.cause_kept():
            raise error
        monkeypatch.setenv(train.CAUSE, str(tmp_path / "cause"))
        with pytest.raises(type(error)), train.cause_kept():
            raise error
        assert (tmp_path / "cause").read_text() == kept
        monkeypatch.delenv(train.CAUSE)
