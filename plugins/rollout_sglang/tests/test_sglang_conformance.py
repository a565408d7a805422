"""The conformance suite on a real SGLang server, with weights through shared memory from this process.

Without an accelerator, SGLang's kernels are stand-ins, and it computes by PyTorch: the suite then tests the protocol and the data.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from dovetail.interfaces import BaseRollout
from dovetail_rollout_sglang.config import SglangRolloutConfig
from dovetail_rollout_sglang.rollout import SglangRollout
from dovetail_rollout_sglang.versions import SGLANG
from dovetail_sdk.testing.conformance import RolloutConformance
from dovetail_transports.config import SharedMemoryConfig

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(SGLANG.installed() is None, reason="SGLang is not installed here"),
]

PLAIN = json.loads((Path(__file__).with_name("stand_ins") / "arguments.json").read_text())
"""Arguments with which SGLang computes by PyTorch only."""


@pytest.mark.usefixtures("stand_ins")
class TestSglangServer(RolloutConformance):
    plugin = SglangRollout
    # Enough tokens for an interruption, since SGLang on plain PyTorch is slow.
    long_response = 400
    config: ClassVar[Any] = SglangRolloutConfig(
        name="sglang", max_model_len=4096, engine_args=PLAIN
    )
    weight_transport = SharedMemoryConfig(name="shared_memory", timeout=60.0)

    @pytest.fixture
    def engine(self, fresh: BaseRollout) -> BaseRollout:
        """The server that is updated serves all cases: starting one takes longer than all of them."""
        return fresh


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a GPU")
class TestSglangServerOnAccelerator(TestSglangServer):
    """Without the stand-ins. The environment variable names further arguments, a JSON object, where this machine's SGLang lacks
    what it would choose: `{"attention_backend": "triton", "sampling_backend": "pytorch"}` without FlashAttention 3.
    """

    device = "cuda"
    # SGLang's norm kernels compute in 16 bits only.
    dtype = "bfloat16"
    tolerance = 0.1
    long_response = 2000
    config: ClassVar[Any] = SglangRolloutConfig(
        name="sglang",
        max_model_len=4096,
        gpu_memory_utilization=0.2,
        offload=True,
        engine_args=json.loads(os.environ.get("DOVETAIL_TEST_SGLANG_ARGUMENTS", "{}")),
    )
