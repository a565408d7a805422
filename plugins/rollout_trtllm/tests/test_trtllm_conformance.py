"""The conformance suite with a fake `trtllm-serve`; the client, its processes and updates are real."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from dovetail.interfaces import BaseRollout
from dovetail_rollout_trtllm.config import TrtllmRolloutConfig
from dovetail_rollout_trtllm.rollout import TrtllmRollout
from dovetail_sdk.testing.conformance import RolloutConformance


@pytest.mark.nightly
class TestTrtllm(RolloutConformance):
    plugin = TrtllmRollout
    config: ClassVar[Any] = TrtllmRolloutConfig(name="trtllm")

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _program(cls, trtllm_serve: str) -> None:
        cls.config = TrtllmRolloutConfig(name="trtllm", executable=trtllm_serve)

    @pytest.fixture
    def engine(self, fresh: BaseRollout) -> BaseRollout:
        """One replica serves all cases."""
        return fresh
