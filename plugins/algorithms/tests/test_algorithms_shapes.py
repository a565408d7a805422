"""Shape annotations of the estimators and losses: in tests, arrays of other shapes are refused."""

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError

from dovetail.batch import Ragged
from dovetail.interfaces import Groups, PluginContext
from dovetail.sections import PluginSection
from dovetail_algorithms.estimators.dr_grpo import DrGrpoEstimator
from dovetail_algorithms.estimators.group_baseline import deviations
from dovetail_algorithms.estimators.token_level import PolicyTokens
from dovetail_algorithms.losses.ratio import bounded_log_ratio, ratio_metrics

FOUR, ALL = torch.zeros(4), torch.ones(4, dtype=torch.bool)
MASK = Ragged(np.ones(4, np.bool_), np.array([0, 4]))
GROUPS = Groups.of(np.zeros(4))

# Without shape checks, all these calls would run: arrays broadcast, or their shape has no effect.
WRONG = {
    "two lengths": lambda: bounded_log_ratio(FOUR, FOUR[:1]),
    "a mask that broadcasts": lambda: ratio_metrics(ALL[:1], FOUR),
    "a ratio that broadcasts": lambda: ratio_metrics(ALL, FOUR, ratio_T=FOUR[:1]),
    "narrow scores": lambda: deviations(np.zeros(4, np.float32), GROUPS),
    "narrow scores of an estimator": lambda: DrGrpoEstimator(
        PluginSection(), PluginContext()
    ).relative(np.zeros(4, np.float32), GROUPS),
    "narrow rewards": lambda: PolicyTokens.of(MASK).discounted_sums(np.ones(4, np.float32), 1.0),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_a_wrong_shape_or_dtype_is_refused(call):
    with pytest.raises(TypeCheckError):
        call()
