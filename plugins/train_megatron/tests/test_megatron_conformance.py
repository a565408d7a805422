"""The conformance suite on the engine."""

from __future__ import annotations

import pytest
import torch

from dovetail_sdk.testing.conformance import EngineConformance

pytest.importorskip("megatron.core", reason="needs megatron-core")
pytest.importorskip("mbridge", reason="needs mbridge")

from cuda_stand_in import MegatronOnCpu

from dovetail_train_megatron.engine import MegatronEngine


class TestMegatronWithCudaStoodIn(EngineConformance):
    plugin = MegatronOnCpu


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestMegatron(EngineConformance):
    plugin = MegatronEngine
    device = "cuda"
