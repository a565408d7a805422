"""Errors for presets in the wrong place and for misspelt values."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("override", ["preset=dapo", "preset.name=dapo", "algorithm.name=dapo", "algorithm=dapo"])  # fmt: skip
def test_a_preset_in_the_wrong_place_leads_to_its_key(problems, override):
    assert any(
        problem.endswith("a preset is chosen by algorithm.preset=dapo")
        for problem in problems(None, override)
    )


def test_a_misspelt_estimator_still_gets_the_nearest(problems):
    (problem,) = problems(None, "algorithm.kl.in_loss.estimator=K3")
    assert problem.endswith('did you mean "k3"?')
