"""The conformance suite on the engine."""

from __future__ import annotations

import pytest
import torch

from dovetail_sdk.testing.conformance import EngineConformance
from dovetail_train_fsdp2.engine import Fsdp2Engine


class TestFsdp2(EngineConformance):
    plugin = Fsdp2Engine


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a GPU")
class TestFsdp2OnAccelerator(TestFsdp2):
    device = "cuda"
