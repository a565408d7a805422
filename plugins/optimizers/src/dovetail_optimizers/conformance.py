"""The conformance suites of this package's plugins, which `dovetail plugins check` runs."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from dovetail_optimizers.adafactor import Adafactor
from dovetail_optimizers.adamw import AdamW
from dovetail_optimizers.adamw_8bit import AdamW8bit
from dovetail_optimizers.config import AdafactorConfig, SgdConfig, WsdConfig
from dovetail_optimizers.muon import Muon
from dovetail_optimizers.schedules import Constant, Cosine, Linear, WarmupStableDecay
from dovetail_optimizers.sgd import Sgd
from dovetail_sdk.testing.conformance import OptimizerConformance, ScheduleConformance

TestAdamW = OptimizerConformance.of(AdamW)


class TestAdamW8bit(OptimizerConformance):
    """The conformance suite of `AdamW8bit`, whose state is two moments of 8 bits per weight."""

    plugin = AdamW8bit

    @pytest.fixture(autouse=True)
    def _eager(self) -> Iterator[None]:
        """Run each test without compiling torchao's kernels, since compilation takes a minute; skip the test without torchao."""
        if find_spec("torchao") is None:
            pytest.skip("needs torchao: pip install 'dovetail-optimizers[torchao]'")
        with torch.compiler.set_stance("force_eager"):
            yield


TestMuon = OptimizerConformance.of(Muon)
TestAdafactor = OptimizerConformance.of(Adafactor, AdafactorConfig(name="adafactor", lr=1e-2))
TestSgd = OptimizerConformance.of(Sgd)
TestMomentum = OptimizerConformance.of(
    Sgd, SgdConfig(name="sgd", lr=1e-2, momentum=0.9, nesterov=True)
)
TestConstant = ScheduleConformance.of(Constant)
TestLinear = ScheduleConformance.of(Linear)
TestCosine = ScheduleConformance.of(Cosine)
TestWarmupStableDecay = ScheduleConformance.of(WarmupStableDecay)
TestWarmupStableDecayBySquareRoot = ScheduleConformance.of(
    WarmupStableDecay, WsdConfig(name="wsd", decay_share=0.3, decay="sqrt")
)
