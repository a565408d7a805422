"""The rollout suite's cases of adapters find the faults that they test for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.errors import RolloutError, WeightSyncError
from dovetail.interfaces import BaseRollout, Completion, FinishReason
from dovetail_sdk.testing.conformance.rollout.adapters import EVERY_LAYER, AdapterCases
from dovetail_sdk.testing.conformance.rollout.low_rank import PlainAdapter
from dovetail_sdk.testing.conformance.rollout.plain import PlainModel
from dovetail_sdk.testing.tiny import tiny_model_and_tokenizer
from dovetail_serving import AdaptedSection
from dovetail_serving.adapter_check import refuse_adapter


class Merging(BaseRollout):
    """An engine that merges adapters into a plain model, and generates greedily whatever is asked."""

    name = "merging"
    api = ">=1.0,<2"
    capabilities = frozenset({"logprobs", "lora", "scores", "sleep"})
    Config = AdaptedSection

    def start(self) -> None:
        self.base = self.serving = PlainModel.of(Path(self.context.model.path))
        self.version = 0

    async def submit(self, request):
        count = request.sampling.max_new_tokens
        ids_T = self.serving.greedy(request.prompt_ids, count)
        log_probs_T = self.serving.log_probs(request.prompt_ids, ids_T)
        for sample in range(len(request.streams)):
            yield Completion(
                request_id=request.request_id,
                sample=sample,
                response_ids=ids_T,
                finish_reason=FinishReason.LENGTH,
                weight_versions=np.full(count, self.version),
                log_probs=log_probs_T,
            )

    async def abort(self, request_ids):
        raise RolloutError("nothing runs on")

    async def pause(self, mode=None):
        """Nothing runs on."""

    async def resume(self):
        """Nothing was paused."""

    async def score(self, sequences):
        return [self.serving.score(ids) for ids in sequences]

    def check_manifest(self, version, manifest):
        if manifest.kind == "adapter":
            refuse_adapter(version, manifest, room=self.config.max_adapter_rank, who="it")

    def receive_weights(self, version, manifest):
        self.check_manifest(version, manifest)
        tensors = dict(self.context.transport.receiver().receive(manifest))
        if manifest.kind == "adapter":
            self.take(PlainAdapter(manifest, tensors))
        else:
            model = copy.deepcopy(self.base._model)
            model.load_state_dict(tensors, strict=False)
            self.base = PlainModel(model)
            self.whole()
        self.version = version

    def whole(self) -> None:
        """Whole weights have come."""
        self.serving = self.base

    def take(self, adapter: PlainAdapter) -> None:
        """Use an adapter."""
        try:
            self.serving = adapter.merged(self.base)
        except AttributeError as error:
            raise WeightSyncError(f"no such layer: {error}") from error


class Deaf(Merging):
    def take(self, adapter):
        """Takes it, and does nothing with it."""


class Piling(Merging):
    def take(self, adapter):
        super().take(adapter)
        self.base = self.serving


class Clinging(Merging):
    def whole(self):
        """What was merged stays."""


class Lax(Merging):
    def take(self, adapter):
        kept = {n: t for n, t in adapter.tensors.items() if "side_proj" not in n}
        super().take(PlainAdapter(adapter.manifest, kept))


class Roomy(Merging):
    def check_manifest(self, version, manifest):
        """Whatever comes."""


class Unscaled(Merging):
    def take(self, adapter):
        half = {n: t / 2 if ".lora_A." in n else t for n, t in adapter.tensors.items()}
        super().take(PlainAdapter(adapter.manifest, half))


class Forgetful(Merging):
    def wake(self, tags):
        self.serving = self.base


class Suite(AdapterCases):
    config = AdaptedSection(name="merging", max_adapter_rank=4)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_and_tokenizer(tmp_path_factory.mktemp("adapters") / "tiny", vocab_size=300)


def run(engine_class: type[Merging], case: str, directory: Path) -> None:
    """One case of the suite on a new engine of this class."""
    suite: Any = type("Suite", (Suite,), {"plugin": engine_class})()
    engine, plain = suite.start(directory), PlainModel.of(directory)
    try:
        if case == "whole":
            changed = plain.changed()
            suite.test_whole_weights_take_an_adapters_place_and_another_adapter_lies_upon_them(
                engine, plain, changed
            )
        else:
            getattr(suite, CASES[case][0])(engine, plain, *CASES[case][1:])
    finally:
        suite.close(engine)


CASES: dict[str, tuple[Any, ...]] = {
    "used": ("test_an_adapter_is_used_as_if_it_were_merged", ("q_proj", "up_proj"), False),
    "replaced": ("test_another_adapter_takes_its_place_and_nothing_of_it_is_left_in_caches",),
    "whole": (),
    "refused": (
        "test_an_adapter_that_is_not_taken_leaves_the_one_before_in_force",
        "names another layer",
    ),
    "room": ("test_an_adapter_beyond_its_room_is_refused_before_anything_is_sent",),
    "sleep": ("test_an_adapter_and_what_it_lies_upon_outlast_sleep",),
}


@pytest.mark.parametrize("case", CASES)
def test_a_sound_engine_passes(directory: Path, case: str) -> None:
    run(Merging, case, directory)


@pytest.mark.parametrize(
    ("engine_class", "case"),
    [
        (Deaf, "used"),
        (Unscaled, "used"),
        (Piling, "replaced"),
        (Clinging, "whole"),
        (Lax, "refused"),
        (Roomy, "room"),
        (Forgetful, "sleep"),
    ],
)
def test_a_fault_is_found(directory: Path, engine_class: type[Merging], case: str) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run(engine_class, case, directory)


def test_without_room_the_cases_are_skipped_with_the_reason(directory: Path) -> None:
    class Roomless(Suite):
        plugin = Merging
        config = AdaptedSection(name="merging")

    with pytest.raises(pytest.skip.Exception, match=r"q_proj.*set rollout\.max_adapter_rank=4"):
        Roomless().needs_room(EVERY_LAYER)
