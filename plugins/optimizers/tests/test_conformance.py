"""The conformance suites on this package's plugins."""

from dovetail_optimizers.conformance import (
    TestAdafactor,
    TestAdamW,
    TestAdamW8bit,
    TestConstant,
    TestCosine,
    TestLinear,
    TestMomentum,
    TestMuon,
    TestSgd,
    TestWarmupStableDecay,
    TestWarmupStableDecayBySquareRoot,
)

__all__ = [
    "TestAdafactor",
    "TestAdamW",
    "TestAdamW8bit",
    "TestConstant",
    "TestCosine",
    "TestLinear",
    "TestMomentum",
    "TestMuon",
    "TestSgd",
    "TestWarmupStableDecay",
    "TestWarmupStableDecayBySquareRoot",
]
