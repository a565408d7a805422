"""Tiny models, rollouts without an engine, and helpers for tests on real engines."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.interfaces import RolloutRequest, SamplingParams, WeightManifest
from dovetail.random_streams import SampleStream
from dovetail_rollout_vllm.config import VllmRolloutConfig
from dovetail_rollout_vllm.rollout import VllmRollout
from dovetail_sdk.testing.replicas import replica_context, send_weights
from dovetail_sdk.testing.tiny import tiny_model_and_tokenizer

Weights = dict[str, torch.Tensor]


class Acts:
    """What tests do with a started engine.

    Attributes:
        prompt: token ids of requests that name none.
    """

    prompt = tuple(range(5, 12))

    def request(
        self, name: str = "r", n: int = 4, prompt: Any = None, **sampling: Any
    ) -> RolloutRequest:
        """A request of n samples with 8 tokens each."""
        settings = {"max_new_tokens": 8, "ignore_eos": True, "log_probs": True, **sampling}
        return RolloutRequest(
            request_id=name,
            prompt_ids=np.array(self.prompt if prompt is None else prompt, dtype=np.int64),
            sampling=SamplingParams(**settings),
            streams=tuple(SampleStream(seed=1, sample=s) for s in range(n)),
        )

    def send(self, engine: VllmRollout, manifest: WeightManifest, tensors: Weights) -> None:
        """One update, as a run with several processes does it."""
        assert engine.context.transport is not None
        sender = engine.context.transport.sender()
        try:
            send_weights(engine, sender, manifest, tensors.items())
        finally:
            sender.close()


@pytest.fixture(scope="session")
def acts() -> Acts:
    """What tests do with a started engine."""
    return Acts()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads of 32 and a tokenizer: vLLM has no smaller heads on a CPU."""
    directory = tmp_path_factory.mktemp("vllm") / "tiny"
    return tiny_model_and_tokenizer(directory, vocab_size=300, hidden_size=128)


@pytest.fixture
def config() -> Any:
    """Makes a config."""

    def make(**settings: Any) -> VllmRolloutConfig:
        return VllmRolloutConfig(name="vllm", **settings)

    return make


@pytest.fixture
def context(tiny: Path, tmp_path: Path) -> Any:
    """Makes the context of a replica in a run."""

    return partial(replica_context, tiny, tmp_path)
