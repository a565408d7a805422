"""The conformance suite against a stand-in for TensorRT-LLM: everything but the engine is real, over real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from dovetail.interfaces import BaseRollout
from dovetail_rollout_trtllm.config import TrtllmRolloutConfig
from dovetail_rollout_trtllm.rollout import TrtllmRollout
from dovetail_rollout_trtllm.versions import installed
from dovetail_sdk.testing.conformance import RolloutConformance
from dovetail_sdk.testing.tiny import tiny_model_and_tokenizer
from dovetail_transports.config import SharedMemoryConfig


class TestTrtllmOnStandIn(RolloutConformance):
    """Two workers, which start on random weights: the first update is what the first case generates with."""

    plugin = TrtllmRollout
    config: ClassVar = TrtllmRolloutConfig(name="trtllm")

    @pytest.fixture(scope="class")
    @classmethod
    def model_directory(cls, tiny: Path) -> Path:
        return tiny

    @pytest.fixture(scope="class")
    @classmethod
    def updated_engine(cls, replica: TrtllmRollout) -> Iterator[BaseRollout]:
        """The replica of this module: one process is enough."""
        yield replica
        sender = cls().sender(replica)
        sender.close()

    @pytest.fixture
    def engine(self, fresh: BaseRollout) -> BaseRollout:
        return fresh


@pytest.mark.gpu
@pytest.mark.skipif(installed() is None, reason="TensorRT-LLM is not installed here")
class TestTrtllm(RolloutConformance):
    """The real engine: nobody has run it yet."""

    plugin = TrtllmRollout
    config: ClassVar = TrtllmRolloutConfig(
        name="trtllm", offload=True, kv_cache_memory=0.2, max_model_len=4096
    )
    device = "cuda"
    # A float32 matrix product on an accelerator need not add up in the order of a CPU's.
    tolerance = 1e-3
    weight_transport = SharedMemoryConfig(name="shared_memory", timeout=60.0)

    @pytest.fixture(scope="class")
    @classmethod
    def model_directory(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Heads of 64, which attention kernels have."""
        directory = tmp_path_factory.mktemp("rollout") / "tiny"
        return tiny_model_and_tokenizer(directory, vocab_size=300, hidden_size=256)

    @pytest.fixture
    def engine(self, fresh: BaseRollout) -> BaseRollout:
        return fresh
