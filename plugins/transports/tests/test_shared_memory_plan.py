"""Which runtimes can use the transport `shared_memory`."""

from __future__ import annotations

import pytest

from dovetail.config import config_from_mapping
from dovetail.errors import PlanError
from dovetail.planning.plan import make_plan


def test_a_runtime_that_calls_one_end_after_the_other_is_refused() -> None:
    config = config_from_mapping(
        {"model": {"path": "tiny"}, "rollout": {"weight_transport": "shared_memory"}}, []
    ).config
    with pytest.raises(PlanError, match=r"'shared_memory' .*at the same time"):
        make_plan(config)
