"""Tiny models, rollouts on them that need no engine, and what tests do with those that do."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.interfaces.rollout import RolloutRequest, SamplingParams
from dovetail.interfaces.transport import AdapterSpec, TensorSpec, WeightManifest
from dovetail.numerics.streams import SampleStream
from dovetail_rollout_vllm.config import VllmRolloutConfig
from dovetail_rollout_vllm.rollout import VllmRollout
from dovetail_sdk.testing.conformance.rollout.plain import PlainModel
from dovetail_sdk.testing.replicas import replica_context, send_weights
from dovetail_sdk.testing.tiny import tiny_model_and_tokenizer

Weights = dict[str, torch.Tensor]


class Acts:
    """What tests do with a started engine.

    Attributes:
        rank: of adapters.
        prompt: token ids of requests that name none.
    """

    rank, alpha = 4, 8.0
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

    def adapter(
        self, plain: PlainModel, version: int, *, strength: float = 0.02
    ) -> tuple[WeightManifest, Weights]:
        """A random adapter of all query and down projections, by peft's names, float32."""
        generator = torch.Generator().manual_seed(version)
        tensors: Weights = {}
        for name, weight in plain.weights().items():
            if name.endswith(("q_proj.weight", "down_proj.weight")):
                prefix = f"base_model.model.{name.removesuffix('.weight')}"
                rows, columns = weight.shape
                down = torch.randn(self.rank, columns, generator=generator)
                tensors[f"{prefix}.lora_A.weight"] = down
                up = torch.randn(rows, self.rank, generator=generator)
                tensors[f"{prefix}.lora_B.weight"] = strength * up
        specs = tuple(
            TensorSpec(name=n, shape=tuple(t.shape), dtype="float32") for n, t in tensors.items()
        )
        targets = ("down_proj", "q_proj")
        described = AdapterSpec(rank=self.rank, alpha=self.alpha, target_modules=targets)
        return WeightManifest(
            version=version, kind="adapter", tensors=specs, adapter=described
        ), tensors

    def merged(self, plain: PlainModel, tensors: Weights) -> PlainModel:
        """The reference with W + s · B A in the adapted layers."""
        model, weights = plain.changed(), plain.weights()
        with torch.no_grad():
            for name, parameter in model._model.named_parameters():
                parameter.copy_(weights[name])
                prefix = f"base_model.model.{name.removesuffix('.weight')}"
                if f"{prefix}.lora_A.weight" in tensors:
                    update = tensors[f"{prefix}.lora_B.weight"] @ tensors[f"{prefix}.lora_A.weight"]
                    parameter.add_(update * (self.alpha / self.rank))
        return model


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
