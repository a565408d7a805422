"""The rollout suite's access to an engine: its start, requests, and weight updates. Engines override what differs."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, cast
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from torch import Tensor
from transformers import AutoTokenizer

from dovetail.interfaces import (
    BaseRollout,
    Completion,
    PluginContext,
    PluginRef,
    RolloutRequest,
    SamplingParams,
    WeightManifest,
    WeightSender,
    WeightTransport,
)
from dovetail.plugins import make_plugin
from dovetail.random_streams import SampleStream
from dovetail.sections import ModelSection, PluginSection
from dovetail_rollouts.transports.config import InProcessTransportConfig
from dovetail_sdk.testing.conformance.plugin import PluginConformance
from dovetail_sdk.testing.conformance.rollout.interrupting import collected
from dovetail_sdk.testing.conformance.rollout.plain import PlainModel
from dovetail_sdk.testing.replicas import send_weights
from dovetail_sdk.testing.tiny import tiny_model_and_tokenizer
from dovetail_sdk.testing.transport_ends import manifest_of

PROMPTS = (
    (7, 8, 9),
    (11, 12, 13, 14, 15, 16, 17),
    (21,),
    tuple(5 + (7 * token) % 290 for token in range(300)),
)
"""Token ids of prompts: short ones, and one that fills several blocks of any engine's prefix cache."""
LONG = len(PROMPTS) - 1
"""Index of the long prompt."""

_senders: WeakKeyDictionary[BaseRollout, WeightSender] = WeakKeyDictionary()
_versions = itertools.count(1)


def next_version() -> int:
    """Return a weight version higher than all versions returned earlier in this process."""
    return next(_versions)


class RolloutSuite(PluginConformance):
    """Base of all rollout tests: starts engines and sends them requests and weights."""

    kind = "rollout"
    plugin: ClassVar[type[BaseRollout]]
    device: ClassVar[str] = "cpu"
    """The torch device of the engine under test; the reference model runs on the CPU."""
    weights_device: ClassVar[str] = "cpu"
    """The torch device of the tensors that are sent."""
    dtype: ClassVar[Literal["float32", "bfloat16"]] = "float32"
    """Dtype in which the engine computes; the reference model always computes in float32."""
    tolerance: ClassVar[float] = 1e-5
    """Largest difference of log-probabilities, in nats, from the float32 reference model. If the engine computes in another dtype, the
    reference log-probability of a greedy token may be up to twice this difference below the most likely token's."""
    weight_transport: ClassVar[PluginSection] = InProcessTransportConfig(
        name="in_process", timeout=60.0
    )
    """The config of the weight transport. Its timeout of a minute is enough for both ends to connect on a busy machine, and short
    enough for tests of incomplete updates."""
    long_response: ClassVar[int] = 2000
    """Number of tokens of a response that is long enough to interrupt. Prompt and response must fit the engine's maximum length."""

    # -- what an engine may override -----------------------------------------------------------

    def transport(self, run_directory: Path) -> WeightTransport:
        """Return the weight transport of one engine. Its sender and receivers share `run_directory`, which no other engine uses."""
        config = self.weight_transport
        ref = PluginRef(kind="weight_transport", name=str(config.name), config=config)
        transport = make_plugin(ref, PluginContext(run_directory=run_directory))
        return cast("WeightTransport", transport)

    def start(self, model_directory: Path) -> BaseRollout:
        """Start an engine on this model, with its own weight transport."""
        run_directory = Path(tempfile.mkdtemp(prefix="run-", dir=model_directory.parent))
        engine: BaseRollout = self.make(
            seed=1,
            role="rollout",
            run_directory=run_directory,
            device=self.device,
            model=ModelSection(path=str(model_directory), dtype=self.dtype),
            tokenizer=AutoTokenizer.from_pretrained(str(model_directory)),
            transport=self.transport(run_directory),
        )
        engine.start()
        return engine

    def sender(self, engine: BaseRollout) -> WeightSender:
        """Return the trainer's end of the engine's weight transport, created once and closed with the engine."""
        if engine not in _senders:
            _senders[engine] = engine.context.transport.sender()
        return _senders[engine]

    def send(
        self,
        engine: BaseRollout,
        manifest: WeightManifest,
        tensors: Iterable[tuple[str, Tensor]],
    ) -> None:
        """Send an update, in the manifest's shapes, while the engine receives, as a run with several processes does.

        Raises:
            WeightSyncError: the update did not arrive completely. An error that the engine raised takes precedence.
        """
        send_weights(engine, self.sender(engine), manifest, tensors)

    # -- what the cases use --------------------------------------------------------------------

    @pytest.fixture(scope="class")
    @classmethod
    def model_directory(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Make a tiny Qwen2 model with its tokenizer and return the directory."""
        return tiny_model_and_tokenizer(tmp_path_factory.mktemp("rollout") / "tiny", vocab_size=300)

    @pytest.fixture(scope="class")
    @classmethod
    def plain(cls, model_directory: Path) -> PlainModel:
        """Return the reference model with the weights in `model_directory`."""
        return PlainModel.of(model_directory)

    @pytest.fixture(scope="class")
    @classmethod
    def changed(cls, plain: PlainModel) -> PlainModel:
        """Return the reference model with changed weights, which give different responses."""
        changed = plain.changed()
        for prompt in PROMPTS:
            assert changed.greedy(prompt, 8).tolist() != plain.greedy(prompt, 8).tolist()
        return changed

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, model_directory: Path) -> Iterator[BaseRollout]:
        """Yield one started engine, shared by all tests that do not change it."""
        suite = cls()
        engine = suite.start(model_directory)
        yield engine
        suite.close(engine)

    @pytest.fixture(scope="class")
    @classmethod
    def updated_engine(cls, model_directory: Path) -> Iterator[BaseRollout]:
        """Yield one started engine, shared by the tests that update it through `fresh`."""
        suite = cls()
        engine = suite.start(model_directory)
        yield engine
        suite.close(engine)

    @pytest.fixture
    def fresh(self, updated_engine: BaseRollout, plain: PlainModel) -> BaseRollout:
        """Return the engine `updated_engine`, resumed and with the weights of `plain`."""
        asyncio.run(updated_engine.resume())
        self.update(updated_engine, plain)
        return updated_engine

    def close(self, engine: BaseRollout) -> None:
        """Close an engine and the trainer's end of its weight transport."""
        engine.close()
        sender = _senders.pop(engine, None)
        if sender is not None:
            sender.close()

    def update(self, engine: BaseRollout, model: PlainModel, *, bucket_bytes: int = 1 << 20) -> int:
        """Send all weights of a model, empty the engine's caches, and return the new weight version."""
        version = self.send_model(engine, model, bucket_bytes=bucket_bytes)
        asyncio.run(engine.reset_cache())
        return version

    def send_model(
        self, engine: BaseRollout, model: PlainModel, *, bucket_bytes: int = 1 << 20
    ) -> int:
        """Send all weights of a model to the engine and return the new weight version."""
        tensors = model.weights(self.weights_device)
        manifest = manifest_of(tensors, next_version(), bucket_bytes)
        self.send(engine, manifest, tensors.items())
        return manifest.version

    def torn_update(self, engine: BaseRollout, model: PlainModel, fault: str) -> None:
        """Send an update that the engine must refuse.

        Args:
            engine: a started engine.
            model: the new weights.
            fault: `breaks off`: the update stops in the middle. `lacks a tensor`: the update lacks the model's last tensor. `names
                another`: the update sends the last tensor under an unknown name.

        Raises:
            WeightSyncError: the engine's error.
        """
        tensors = model.weights(self.weights_device)
        last = next(reversed(tensors))
        if fault == "lacks a tensor":
            del tensors[last]
        elif fault == "names another":
            tensors[f"{last}.of.nothing"] = tensors.pop(last)
        # Small buckets, so that much of the update has been sent before the failure.
        manifest = manifest_of(tensors, next_version(), bucket_bytes=4096)
        count = len(tensors) // 2 if fault == "breaks off" else len(tensors)
        self.send(engine, manifest, list(tensors.items())[:count])

    def request(self, prompt: int, n: int = 4, **sampling: Any) -> RolloutRequest:
        """Return a request for n samples of `PROMPTS[prompt]`, 8 tokens each by default."""
        settings = {"max_new_tokens": 8, "ignore_eos": True, **sampling}
        return RolloutRequest(
            request_id=f"prompt{prompt}",
            prompt_ids=np.array(PROMPTS[prompt], dtype=np.int64),
            sampling=SamplingParams(**settings),
            streams=tuple(SampleStream(seed=1, prompt=prompt, sample=s) for s in range(n)),
        )

    def generate(
        self, engine: BaseRollout, *requests: RolloutRequest
    ) -> dict[str, list[Completion]]:
        """Run requests concurrently and return each request's samples, in sample order, by request id."""

        async def everything() -> list[list[Completion]]:
            return await asyncio.gather(*(collected(engine, request) for request in requests))

        found = asyncio.run(everything())
        return {request.request_id: done for request, done in zip(requests, found, strict=True)}

    def greedy(self, engine: BaseRollout, prompt: int = 1, **sampling: Any) -> Completion:
        """Return the greedy response to `PROMPTS[prompt]`, with log-probabilities if the engine returns them."""
        sampling = {"temperature": 0.0, "log_probs": self.claims("logprobs"), **sampling}
        request = self.request(prompt, n=1, **sampling)
        return self.generate(engine, request)[request.request_id][0]

    def assert_greedy(self, completion: Completion, prompt: int, model: PlainModel) -> None:
        """Assert that the completion is the model's greedy response to `PROMPTS[prompt]`.

        With another dtype than float32, tokens whose log-probability is almost the largest are accepted too (see `tolerance`).
        """
        ids_T = completion.response_ids
        if self.dtype == "float32":
            np.testing.assert_array_equal(ids_T, model.greedy(PROMPTS[prompt], len(ids_T)))
        else:
            assert model.behind_T(PROMPTS[prompt], ids_T).max() <= 2 * self.tolerance

    def assert_likely(
        self, completion: Completion, prompt: int, model: PlainModel, temperature: float = 1.0
    ) -> None:
        """Assert that the completion's log-probabilities, given `PROMPTS[prompt]`, are the model's within `tolerance`."""
        assert completion.log_probs is not None
        assert completion.log_probs.dtype == np.float32
        expected_T = model.log_probs(PROMPTS[prompt], completion.response_ids, temperature)
        np.testing.assert_allclose(completion.log_probs, expected_T, atol=self.tolerance, rtol=0)

    def claims(self, capability: str) -> bool:
        """Return whether the plugin claims a capability."""
        return capability in self.plugin.capabilities
