"""The suites of the stages."""

from __future__ import annotations

from dovetail_algorithms.config.stages import ImplicitProcessRewardsConfig
from dovetail_algorithms.stages.best_worst_pairs import BestWorstPairs
from dovetail_algorithms.stages.implicit_process_rewards import ImplicitProcessRewards
from dovetail_algorithms.stages.mismatched_responses import MismatchedResponses
from dovetail_sdk.testing.conformance import StageConformance

PRM = "roles.prm.objective=implicit_prm"


class TestImplicitProcessRewards(StageConformance):
    """The run's reference policy is the model's."""

    plugin = ImplicitProcessRewards
    overrides = ("algorithm.advantage=prime", PRM)


class TestImplicitProcessRewardsWithAReferenceOfItsOwn(StageConformance):
    """A frozen role is the model's reference."""

    plugin = ImplicitProcessRewards
    config = ImplicitProcessRewardsConfig(name="implicit_process_rewards", reference="start")
    overrides = ("algorithm.advantage=prime", PRM, "roles.prm.path=prm", "roles.start.path=prm")


class TestImplicitProcessRewardsOfAnAdapter(StageConformance):
    """The model below the adapter is the reference."""

    plugin = ImplicitProcessRewards
    overrides = (
        "algorithm.advantage=prime",
        PRM,
        "roles.prm.engine={name: fsdp2, lora: {rank: 2}}",
        "roles.prm.path=prm",
    )


class TestMismatchedResponses(StageConformance):
    """With a reference of its own."""

    plugin = MismatchedResponses


class TestMismatchedResponsesUnderAdapters(StageConformance):
    """The reference is the actor with its adapters off."""

    plugin = MismatchedResponses
    overrides = ("actor.engine={name: fsdp2, lora: {rank: 4}}",)


class TestBestWorstPairs(StageConformance):
    """Four samples a prompt."""

    plugin = BestWorstPairs
    overrides = ("actor.objective=dpo", "rollout.n=4")
