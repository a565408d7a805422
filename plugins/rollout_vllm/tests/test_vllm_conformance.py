"""The conformance suite on a real vLLM: its engine, and weights through shared memory from this process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dovetail.interfaces import BaseRollout
from dovetail_rollout_vllm.config import VllmRolloutConfig
from dovetail_rollout_vllm.rollout import VllmRollout
from dovetail_rollout_vllm.versions import VLLM
from dovetail_sdk.testing.conformance import RolloutConformance
from dovetail_sdk.testing.tiny import tiny_model_and_tokenizer
from dovetail_transports.config import SharedMemoryConfig

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(VLLM.installed() is None, reason="vLLM is not installed here"),
]


class TestVllmEngine(RolloutConformance):
    plugin = VllmRollout
    config = VllmRolloutConfig(
        name="vllm", enforce_eager=True, max_model_len=4096, max_adapter_rank=4
    )
    weight_transport = SharedMemoryConfig(name="shared_memory", timeout=60.0)

    @pytest.fixture(scope="class")
    @classmethod
    def model_directory(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Heads of 32: vLLM has no smaller ones on a CPU."""
        directory = tmp_path_factory.mktemp("rollout") / "tiny"
        return tiny_model_and_tokenizer(directory, vocab_size=300, hidden_size=128)

    @pytest.fixture
    def engine(self, fresh: BaseRollout) -> BaseRollout:
        """The engine that is updated serves all cases: starting one takes longer than all of them."""
        return fresh


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a GPU")
class TestVllmEngineOnAccelerator(TestVllmEngine):
    device = "cuda"
    # An accelerator may add up a float32 matrix product in another order than a CPU.
    tolerance = 1e-3
    # Without adapters, which vLLM does not compute in float32 on accelerators.
    config = VllmRolloutConfig(
        name="vllm", max_model_len=4096, gpu_memory_utilization=0.2, offload=True
    )
