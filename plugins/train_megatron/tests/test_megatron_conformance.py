"""The conformance suite on the engine."""

from __future__ import annotations

import pytest
import torch

from dovetail_sdk.testing.conformance import EngineConformance

pytest.importorskip("megatron.core", reason="needs megatron-core")
pytest.importorskip("mbridge", reason="needs mbridge")

from cuda_stand_in import MegatronOnCpu

from dovetail_torch_engines import LoraSection
from dovetail_train_megatron.config import MegatronConfig
from dovetail_train_megatron.engine import MegatronEngine

OF_ALL_WEIGHTS = {
    "test_a_value_update_is_adamw_on_the_gradient_of_the_clipped_loss": "its step is one of all weights, and an adapter's "
    "critic steps its adapter and its head (test_megatron_lora_state.py compares them)"
}


class TestMegatronWithCudaStoodIn(EngineConformance):
    plugin = MegatronOnCpu


@pytest.mark.nightly
class TestMegatronWithAnAdapter(EngineConformance):
    plugin = MegatronOnCpu
    config = MegatronConfig(lora=LoraSection(rank=4))
    expected_failures = OF_ALL_WEIGHTS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestMegatron(EngineConformance):
    plugin = MegatronEngine
    device = "cuda"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestMegatronWithAnAdapterOnCuda(EngineConformance):
    plugin = MegatronEngine
    device = "cuda"
    config = MegatronConfig(lora=LoraSection(rank=4))
    expected_failures = OF_ALL_WEIGHTS
