"""Time limits of single methods exist only for methods that a run calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.config import load_config
from dovetail.errors import ConfigError
from dovetail.interfaces import TrainEngine
from dovetail_runtime_ray.config import METHODS_OF_ENGINES, METHODS_OF_REPLICAS, RayConfig
from dovetail_runtime_ray.replica import RayReplica


def test_a_method_that_no_run_calls_is_an_error_with_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: {path: some/model}\nruntime: {name: ray, time_limits: {save: 9, updates: 60}}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    (told,) = caught.value.problems
    assert "time_limits.updates" in told
    assert "'update'" in told


def test_every_method_that_is_called_may_have_a_limit() -> None:
    public = {n for n, v in vars(TrainEngine).items() if callable(v) and not n.startswith("_")}
    # No worker is asked to export a state that no engine has loaded.
    assert set(METHODS_OF_ENGINES) == public - {"export_saved", "export_adapter", "quantization"}
    asked = {n for n, v in vars(RayReplica).items() if callable(v) and not n.startswith("_")}
    # `alive` and `close` have fixed time limits of their own.
    assert set(METHODS_OF_REPLICAS) == asked - {"alive", "close"}
    limits = dict.fromkeys((*METHODS_OF_ENGINES, *METHODS_OF_REPLICAS), 1.0)
    assert RayConfig(name="ray", time_limits=limits).time_limits == limits
