"""The conformance suite on both decoders."""

from __future__ import annotations

import pytest
import torch

from dovetail_rollout_hf.config import HfRolloutConfig
from dovetail_rollout_hf.rollout import HfRollout
from dovetail_sdk.testing.conformance import RolloutConformance


class TestFusedDecoder(RolloutConformance):
    plugin = HfRollout
    config = HfRolloutConfig(name="hf", decoder="fused")


class TestTransformersDecoder(RolloutConformance):
    plugin = HfRollout
    config = HfRolloutConfig(name="hf", decoder="transformers")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a GPU")
class TestFusedDecoderOnAccelerator(TestFusedDecoder):
    device = "cuda"
    tolerance = 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a GPU")
class TestTransformersDecoderOnAccelerator(TestTransformersDecoder):
    device = "cuda"
    tolerance = 1e-4
