"""Conformance suites of the stages."""

from __future__ import annotations

from typing import Any

import attrs

from dovetail.batch import Batch
from dovetail.interfaces import Prompt, StepContext
from dovetail_algorithms.config.stages import ImplicitProcessRewardsConfig
from dovetail_algorithms.stages.best_worst_pairs import BestWorstPairs
from dovetail_algorithms.stages.implicit_process_rewards import ImplicitProcessRewards
from dovetail_algorithms.stages.mismatched_responses import MismatchedResponses
from dovetail_algorithms.stages.spin_pairs import SpinPairs
from dovetail_sdk.testing import template_tokenizer
from dovetail_sdk.testing.chat_templates import CHATML
from dovetail_sdk.testing.conformance import StageConformance

PRM = "roles.prm.objective=implicit_prm"


TestImplicitProcessRewards = StageConformance.of(
    ImplicitProcessRewards, overrides=("algorithm.advantage=prime", PRM)
)
TestImplicitProcessRewardsWithAReferenceOfItsOwn = StageConformance.of(
    ImplicitProcessRewards,
    ImplicitProcessRewardsConfig(name="implicit_process_rewards", reference="start"),
    overrides=("algorithm.advantage=prime", PRM, "roles.prm.path=prm", "roles.start.path=prm"),
)
TestImplicitProcessRewardsOfAnAdapter = StageConformance.of(
    ImplicitProcessRewards,
    overrides=(
        "algorithm.advantage=prime",
        PRM,
        "roles.prm.engine={name: fsdp2, lora: {rank: 2}}",
        "roles.prm.path=prm",
    ),
)
TestMismatchedResponses = StageConformance.of(MismatchedResponses)
TestMismatchedResponsesUnderAdapters = StageConformance.of(
    MismatchedResponses, overrides=("actor.engine={name: fsdp2, lora: {rank: 4}}",)
)
TestBestWorstPairs = StageConformance.of(
    BestWorstPairs, overrides=("actor.objective=dpo", "rollout.n=4")
)


class TestSpinPairs(StageConformance):
    """The stage `spin_pairs`, on prompts with responses of three letters."""

    plugin = SpinPairs
    overrides = ("actor.objective=dpo", "rollout.n=4")

    def make(self, **context: Any) -> SpinPairs:
        """Return the stage with a tokenizer."""
        return super().make(**{"tokenizer": template_tokenizer(CHATML), **context})

    def step(self, batch: Batch, *, number: int = 1) -> StepContext:
        """Make a step whose prompts have responses in the dataset."""
        step = super().step(batch, number=number)
        names = (batch[name].tolist() for name in ("epoch", "prompt_id", "attempt"))
        prompts = [
            Prompt(index=index, raw="", epoch=epoch, attempt=attempt, response="abc")
            for epoch, index, attempt in zip(*names, strict=True)
        ]
        collected: Any = step.experience
        samples = [
            attrs.evolve(sample, prompt=prompt)
            for sample, prompt in zip(collected.samples, prompts, strict=True)
        ]
        step.collected = attrs.evolve(collected, samples=samples)
        return step
