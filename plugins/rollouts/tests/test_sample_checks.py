"""Checks of a step's samples: an error about an interface names the plugin with its version."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import numpy as np
import pytest

from dovetail.errors import PluginBrokenError
from dovetail.interfaces import Completion, FinishReason
from dovetail.sections import PluginSection
from dovetail_rollouts.sample_checks import check_completions

ROLLOUT = PluginSection(name="hf")
GOOD = Completion(
    request_id="r",
    sample=0,
    response_ids=np.array([5, 6, 7]),
    finish_reason=FinishReason.STOP,
    weight_versions=np.array([1, 1, 2]),
    log_probs=np.array([-1.0, -0.5, 0.0], np.float32),
)


def check(completion: Completion) -> None:
    sample = SimpleNamespace(sample_id="s7", completion=completion, earlier=())
    check_completions([sample], ROLLOUT, 3)


def test_a_sound_completion_passes():
    check(GOOD)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"response_ids": [5, 6, 7]}, "response_ids is list, not int64 [T]"),
        ({"response_ids": np.array([5, 6, 7], np.int32)}, "response_ids is int32 [3]"),
        ({"response_ids": np.arange(4)}, "it has 4 tokens;"),
        ({"weight_versions": np.array([1, 1])}, "weight_versions is int64 [2], not int64 [3]"),
        ({"weight_versions": np.ones(3)}, "weight_versions is float64 [3]"),
        ({"log_probs": np.zeros(3)}, "log_probs is float64 [3], not float32 [3]"),
        ({"log_probs": np.zeros(2, np.float32)}, "log_probs is float32 [2], not float32 [3]"),
        ({"log_probs": np.array([0, 0.5, 0], np.float32)}, "log_probs has the value 0.5"),
    ],
)
def test_what_a_rollout_got_wrong_is_named_with_plugin_version_and_sample(change, words):
    with pytest.raises(PluginBrokenError) as caught:
        check(attrs.evolve(GOOD, **change))
    assert words in str(caught.value)
    assert "rollout/hf (dovetail-rollout-hf " in str(caught.value)
    assert "sample 's7'" in str(caught.value)
