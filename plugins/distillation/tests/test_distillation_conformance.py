"""The conformance suites on this package's plugins."""

from dovetail.sections import PluginSection
from dovetail_distillation.config import DistillConfig
from dovetail_distillation.conformance import (
    TestDistill,
    TestDistillByToken,
    TestDistillJensenShannon,
    TestDistillReverse,
    TestScoreTeacher,
    TestTeacherAdvantage,
)

__all__ = [
    "TestDistill",
    "TestDistillByToken",
    "TestDistillJensenShannon",
    "TestDistillReverse",
    "TestScoreTeacher",
    "TestTeacherAdvantage",
]


class TestDistillAndPolicy(TestDistill):
    """The suite with a policy loss added."""

    config = DistillConfig(
        name="distill", top_k=3, plus=PluginSection(name="policy"), divergence="jsd"
    )

    def oracle(self, mini_batch, outputs):
        return None
