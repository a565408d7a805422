"""The search for a non-finite weight: its result, and its time limit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from dovetail.sections import ModelSection
from dovetail_torch_engines import TorchEngine


def test_a_weight_that_is_not_finite_is_found_within_the_time_given(tmp_path: Path) -> None:
    ones = np.ones((2, 2), np.float32)
    section = ModelSection(path=str(tmp_path))
    save_file({"a": ones, "b": ones}, tmp_path / "model.safetensors")
    assert TorchEngine.bad_weight(section, 60) is None
    save_file({"a": ones, "b": ones * np.inf}, tmp_path / "model.safetensors")
    assert TorchEngine.bad_weight(section, 60) == ("b", tmp_path / "model.safetensors")
    assert TorchEngine.bad_weight(section, 0) is None
