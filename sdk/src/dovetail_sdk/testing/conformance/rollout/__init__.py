"""The suite of rollout engines, checked on a tiny model against a plain transformers forward pass.

class TestMyEngine(RolloutConformance):
    plugin = MyRollout
"""

from dovetail_sdk.testing.conformance.rollout.adapters import AdapterCases
from dovetail_sdk.testing.conformance.rollout.generation import GenerationCases
from dovetail_sdk.testing.conformance.rollout.interruptions import InterruptionCases
from dovetail_sdk.testing.conformance.rollout.log_probs import LogProbCases
from dovetail_sdk.testing.conformance.rollout.memory import MemoryCases
from dovetail_sdk.testing.conformance.rollout.suite import RolloutSuite
from dovetail_sdk.testing.conformance.rollout.updates import UpdateCases

__all__ = ["RolloutConformance", "RolloutSuite"]


class RolloutConformance(
    GenerationCases, LogProbCases, InterruptionCases, UpdateCases, AdapterCases, MemoryCases
):
    """Conformance suite for rollout engines: subclass it and set `plugin`; the plugin's capabilities decide which tests run.

    Override attributes and methods of `RolloutSuite` to set the engine's device, the weight transport, and how an update is sent. An
    engine in other processes needs a `weight_transport` that reaches these processes. An engine with the capability `lora` needs a
    `config` with room for adapters.
    """
