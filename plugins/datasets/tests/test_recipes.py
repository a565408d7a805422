"""The suite of the kind on every recipe, on rows in the form of its dataset's card."""

from dovetail_datasets.conformance import (
    TestDapoMathRecipe,
    TestGeometry3kRecipe,
    TestGsm8kRecipe,
    TestHhRlhfRecipe,
    TestMathRecipe,
    TestReasoningGymRecipe,
    TestUltraFeedbackRecipe,
    TestXlamFunctionCallingRecipe,
)

__all__ = [
    "TestDapoMathRecipe",
    "TestGeometry3kRecipe",
    "TestGsm8kRecipe",
    "TestHhRlhfRecipe",
    "TestMathRecipe",
    "TestReasoningGymRecipe",
    "TestUltraFeedbackRecipe",
    "TestXlamFunctionCallingRecipe",
]
