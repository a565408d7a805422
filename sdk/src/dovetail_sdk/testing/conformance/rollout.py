"""What holds for every rollout engine, checked on a tiny model against a plain transformers forward pass."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dovetail.config.sections import ModelSection
from dovetail.errors import DovetailError
from dovetail.interfaces import make_plugin
from dovetail.interfaces.plugin import PluginContext
from dovetail.interfaces.rollout import (
    BaseRollout,
    Completion,
    FinishReason,
    RolloutRequest,
    SamplingParams,
)
from dovetail.interfaces.runtime import PluginRef
from dovetail.interfaces.transport import TensorSpec, WeightManifest
from dovetail.numerics.streams import SampleStream
from dovetail_sdk.testing.conformance.plugin import PluginConformance
from dovetail_sdk.testing.tiny import tiny_model_and_tokenizer

PROMPTS = ((7, 8, 9), (11, 12, 13, 14, 15, 16, 17), (21,))


class RolloutConformance(PluginConformance):
    """Subclass it, set `plugin`, and pytest runs what its capabilities promise."""

    kind = "rollout"
    plugin: ClassVar[type[BaseRollout]]
    device: ClassVar[str] = "cpu"
    """The torch device of the plugin; the reference runs on the CPU."""
    tolerance: ClassVar[float] = 1e-4
    """Largest difference of log-probabilities, in nats, from the reference in float32."""

    @pytest.fixture(scope="class")
    @classmethod
    def model_directory(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A tiny Qwen2 model with its tokenizer."""
        return tiny_model_and_tokenizer(tmp_path_factory.mktemp("tiny"), vocab_size=300)

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, model_directory: Path) -> Iterator[BaseRollout]:
        """One started engine for the whole suite."""
        engine = cls().start(model_directory)
        yield engine
        engine.close()

    def start(self, model_directory: Path) -> BaseRollout:
        """Start an engine on this model, with the transport `in_process`."""
        transport = make_plugin(
            PluginRef(kind="weight_transport", name="in_process"), PluginContext()
        )
        engine: BaseRollout = self.make(
            seed=1,
            role="rollout",
            device=self.device,
            model=ModelSection(path=str(model_directory), dtype="float32"),
            tokenizer=AutoTokenizer.from_pretrained(str(model_directory)),
            transport=transport,
        )
        engine.start()
        return engine

    def generate(
        self, engine: BaseRollout, *requests: RolloutRequest
    ) -> dict[str, list[Completion]]:
        """Every request's samples, in sample order, all requests running together."""

        async def one(request: RolloutRequest) -> list[Completion]:
            found = [completion async for completion in engine.submit(request)]
            return sorted(found, key=lambda completion: completion.sample)

        async def everything() -> list[list[Completion]]:
            return await asyncio.gather(*(one(request) for request in requests))

        found = asyncio.run(everything())
        return {request.request_id: done for request, done in zip(requests, found, strict=True)}

    def request(self, prompt: int, n: int = 4, **sampling: Any) -> RolloutRequest:
        """N samples of prompt number `prompt`."""
        settings = {"max_new_tokens": 8, "ignore_eos": True, **sampling}
        return RolloutRequest(
            request_id=f"prompt{prompt}",
            prompt_ids=np.array(PROMPTS[prompt], dtype=np.int64),
            sampling=SamplingParams(**settings),
            streams=tuple(SampleStream(seed=1, prompt=prompt, sample=s) for s in range(n)),
        )

    def reference(
        self, model_directory: Path, prompt: int, completion: Completion, temperature: float
    ) -> np.ndarray:
        """float32 [T]: log-probabilities of the response by one plain forward pass."""
        model = AutoModelForCausalLM.from_pretrained(str(model_directory), dtype=torch.float32)
        ids = torch.tensor([[*PROMPTS[prompt], *completion.response_ids.tolist()]])
        with torch.no_grad():
            logits_TV = model(ids).logits[0, len(PROMPTS[prompt]) - 1 : -1] / temperature
        chosen_T = ids[0, len(PROMPTS[prompt]) :, None]
        log_probs_T = logits_TV.log_softmax(-1).gather(-1, chosen_T)[:, 0]
        return np.asarray(log_probs_T.numpy(), dtype=np.float32)

    def needs(self, capability: str) -> None:
        """Skip the test where the plugin does not claim this capability."""
        if capability not in self.plugin.capabilities:
            pytest.skip(f"{self.plugin.name} does not claim the capability {capability!r}")

    # -- generation --------------------------------------------------------------------------

    def test_every_sample_arrives_once_and_within_the_limit(self, engine: BaseRollout) -> None:
        found = self.generate(engine, *(self.request(p, n=3) for p in range(len(PROMPTS))))
        for completions in found.values():
            assert [c.sample for c in completions] == [0, 1, 2]
            for completion in completions:
                assert completion.response_ids.dtype == np.int64
                assert len(completion.response_ids) == 8
                assert completion.finish_reason == FinishReason.LENGTH
                assert completion.weight_versions.shape == completion.response_ids.shape

    def test_a_stop_token_ends_a_response_and_is_part_of_it(self, engine: BaseRollout) -> None:
        free = self.generate(engine, self.request(0, n=1, temperature=0.0))["prompt0"][0]
        stop = int(free.response_ids[3])
        end = int(np.flatnonzero(free.response_ids == stop)[0]) + 1
        request = self.request(0, n=1, temperature=0.0, stop_token_ids=(stop,))
        stopped = self.generate(engine, request)["prompt0"][0]
        np.testing.assert_array_equal(stopped.response_ids, free.response_ids[:end])
        assert stopped.finish_reason == FinishReason.STOP

    def test_greedy_samples_of_one_prompt_are_equal(self, engine: BaseRollout) -> None:
        first, *others = self.generate(engine, self.request(1, temperature=0.0))["prompt1"]
        for other in others:
            np.testing.assert_array_equal(other.response_ids, first.response_ids)

    def test_samples_of_one_prompt_differ(self, engine: BaseRollout) -> None:
        found = self.generate(engine, self.request(0, n=8))["prompt0"]
        assert len({tuple(c.response_ids.tolist()) for c in found}) > 1

    # -- log-probabilities -------------------------------------------------------------------

    def test_log_probs_are_given_only_when_asked_for(self, engine: BaseRollout) -> None:
        for completion in self.generate(engine, self.request(0))["prompt0"]:
            assert completion.log_probs is None

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_log_probs_agree_with_a_plain_forward_pass(
        self, engine: BaseRollout, model_directory: Path, temperature: float
    ) -> None:
        self.needs("logprobs")
        for prompt in range(len(PROMPTS)):
            request = self.request(prompt, n=2, temperature=temperature, log_probs=True)
            for completion in self.generate(engine, request)[request.request_id]:
                expected_T = self.reference(model_directory, prompt, completion, temperature)
                assert completion.log_probs is not None
                np.testing.assert_allclose(completion.log_probs, expected_T, atol=self.tolerance)

    def test_raw_log_probs_ignore_the_truncation(
        self, engine: BaseRollout, model_directory: Path
    ) -> None:
        self.needs("raw_logprobs")
        request = self.request(0, n=2, top_k=5, log_probs=True, raw_log_probs=True)
        for completion in self.generate(engine, request)["prompt0"]:
            expected_T = self.reference(model_directory, 0, completion, 1.0)
            assert completion.log_probs is not None
            assert completion.raw_log_probs is not None
            np.testing.assert_allclose(completion.raw_log_probs, expected_T, atol=self.tolerance)
            assert (completion.log_probs >= completion.raw_log_probs - self.tolerance).all()

    # -- seeds -------------------------------------------------------------------------------

    def test_a_sample_does_not_depend_on_its_batch_mates(self, engine: BaseRollout) -> None:
        self.needs("per_sample_seed")
        crowd = self.generate(engine, *(self.request(p) for p in range(len(PROMPTS))))
        for prompt in range(len(PROMPTS)):
            alone = self.generate(engine, self.request(prompt, n=1))[f"prompt{prompt}"][0]
            np.testing.assert_array_equal(
                alone.response_ids, crowd[f"prompt{prompt}"][0].response_ids
            )

    def test_a_continued_sample_goes_on_as_if_never_cut(self, engine: BaseRollout) -> None:
        self.needs("per_sample_seed")
        whole = self.generate(engine, self.request(0, n=1))["prompt0"][0]
        first = self.request(0, n=1)
        continued = attrs.evolve(
            first,
            prompt_ids=np.concatenate([first.prompt_ids, whole.response_ids[:3]]),
            streams=tuple(attrs.evolve(stream, offset=3) for stream in first.streams),
            sampling=attrs.evolve(first.sampling, max_new_tokens=5),
        )
        rest = self.generate(engine, continued)["prompt0"][0]
        np.testing.assert_array_equal(rest.response_ids, whole.response_ids[3:])

    # -- abort -------------------------------------------------------------------------------

    def test_an_aborted_request_still_yields_its_samples(self, engine: BaseRollout) -> None:
        async def scenario() -> list[Completion]:
            request = self.request(0, n=2, max_new_tokens=2000)

            async def collect() -> list[Completion]:
                return [completion async for completion in engine.submit(request)]

            running = asyncio.create_task(collect())
            await asyncio.sleep(0.2)
            await engine.abort([request.request_id])
            return await asyncio.wait_for(running, timeout=30)

        found = asyncio.run(scenario())
        assert sorted(c.sample for c in found) == [0, 1]
        assert {c.finish_reason for c in found} == {FinishReason.ABORT}

    # -- weights -----------------------------------------------------------------------------

    def weights(self, model_directory: Path) -> dict[str, torch.Tensor]:
        """The model's weights by name, tied ones once."""
        model = AutoModelForCausalLM.from_pretrained(str(model_directory), dtype=torch.float32)
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    def manifest(self, version: int, tensors: dict[str, torch.Tensor]) -> WeightManifest:
        """A manifest of these tensors."""
        return WeightManifest(
            version=version,
            tensors=tuple(
                TensorSpec(name=n, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
                for n, t in tensors.items()
            ),
        )

    def test_new_weights_arrive_and_are_versioned(self, model_directory: Path) -> None:
        engine = self.start(model_directory)
        try:
            before = self.generate(engine, self.request(1, n=1, temperature=0.0))["prompt1"][0]
            weights = self.weights(model_directory)
            changed = {name: tensor * 1.5 + 0.01 for name, tensor in weights.items()}
            for version, tensors in ((5, changed), (6, weights)):
                manifest = self.manifest(version, tensors)
                engine.context.transport.sender().send(manifest, tensors.items())
                engine.receive_weights(version, manifest)
                after = self.generate(engine, self.request(1, n=1, temperature=0.0))["prompt1"][0]
                assert set(after.weight_versions.tolist()) == {version}
            np.testing.assert_array_equal(after.response_ids, before.response_ids)
        finally:
            engine.close()

    def test_a_torn_update_leaves_the_old_weights_in_force(self, model_directory: Path) -> None:
        engine = self.start(model_directory)
        try:
            request = self.request(1, n=1, temperature=0.0)
            before = self.generate(engine, request)["prompt1"][0]
            weights = self.weights(model_directory)
            torn = {name: tensor + 1 for name, tensor in list(weights.items())[:3]}
            manifest = self.manifest(9, weights)

            def send_and_receive() -> None:
                engine.context.transport.sender().send(manifest, torn.items())
                engine.receive_weights(9, manifest)

            with pytest.raises(DovetailError):
                send_and_receive()
            after = self.generate(engine, request)["prompt1"][0]
            np.testing.assert_array_equal(after.response_ids, before.response_ids)
            np.testing.assert_array_equal(after.weight_versions, before.weight_versions)
        finally:
            engine.close()
