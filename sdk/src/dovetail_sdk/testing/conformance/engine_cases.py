"""Shared parts of the suites of training engines: tiny models, batches, objectives, and the start of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import ObjectiveSpec, PluginContext, PluginRef, TrainEngine
from dovetail.plugins import make_plugin, objective_spec, plugin_section
from dovetail.sections import ModelSection, PluginSection, TrainingSection
from dovetail_sdk.testing.conformance.plugin import PluginConformance
from dovetail_sdk.testing.tiny import tiny_model_and_tokenizer

Weights = dict[str, torch.Tensor]


class EngineCases(PluginConformance):
    """Base of the suites of training engines: helpers for their tests, but no tests besides those of `PluginConformance`."""

    kind = "engine"
    plugin: ClassVar[type[TrainEngine]]
    device: ClassVar[str] = "cpu"
    """The torch device of the engine under test; the reference model runs on the CPU."""
    tolerance: ClassVar[float] = 2e-5
    """Largest difference that counts as float32 rounding."""
    policy_loss: ClassVar[str] = "reinforce"
    """Name of the policy loss of the test objective; any installed policy loss will do."""

    @pytest.fixture(scope="class")
    @classmethod
    def model_directory(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Make a tiny Qwen2 model with its tokenizer and return the directory."""
        return tiny_model_and_tokenizer(tmp_path_factory.mktemp("tiny"), vocab_size=300)

    def start(
        self,
        model_directory: Path,
        *,
        budget: int = 4096,
        head: Literal["lm", "value"] = "lm",
        **optim: Any,
    ) -> TrainEngine:
        """Start a float32 engine.

        Args:
            model_directory: the directory of the model.
            budget: the maximum number of tokens per micro-batch.
            head: `lm` for an actor, `value` for a critic.
            optim: settings of the optimizer `adamw` that differ from the suite's.
        """
        transport = make_plugin(
            PluginRef(kind="weight_transport", name="in_process"), PluginContext()
        )
        engine: TrainEngine = self.make(
            seed=1,
            role="actor" if head == "lm" else "critic",
            head=head,
            device=self.device,
            model=ModelSection(path=str(model_directory), dtype="float32"),
            training=TrainingSection(
                optim=plugin_section("optimizer", "adamw", **{"lr": 1e-2, "eps": 1e-3, **optim}),
                max_tokens_per_micro_batch=budget,
            ),
            total_steps=10,
            tokenizer=AutoTokenizer.from_pretrained(str(model_directory)),
            transport=transport,
        )
        engine.start()
        return engine

    def batch(self, seed: int = 0, size: int = 9) -> Batch:
        """Return random samples of different lengths, three per prompt, with some tokens masked."""
        rng = np.random.default_rng(seed)
        prompts = [rng.integers(5, 300, rng.integers(1, 9)) for _ in range(-(-size // 3))]
        responses = Ragged.from_list(
            [rng.integers(5, 300, rng.integers(1, 14)) for _ in range(size)], dtype=np.int64
        )
        mask = rng.random(len(responses.values)) < 0.85
        return Batch(
            {
                "group_id": np.arange(size) // 3,
                "prompt_ids": Ragged.from_list(
                    [prompts[i // 3] for i in range(size)], dtype=np.int64
                ),
                "response_ids": responses,
                "response_mask": responses.with_values(mask),
                "temperature": np.full(size, 0.8, np.float32),
                "advantages": rng.normal(size=size).astype(np.float32),
                "sample_id": [f"sample-{seed}-{i}" for i in range(size)],
            }
        )

    def needs_equal_bits(self) -> None:
        """Skip the test if the engine's results may differ in their bits between two equal computations."""
        if self.device != "cpu":
            pytest.skip("bit-identity is promised on the CPU; on an accelerator kernels may differ")
        self.needs("deterministic")

    def objective(self) -> ObjectiveSpec:
        """Return the spec of a policy-gradient objective that averages over tokens."""
        return objective_spec(
            "policy",
            policy_loss=PluginSection(name=self.policy_loss),
            old_log_probs_from_current=True,
        )

    def received(self, engine: TrainEngine, version: int = 1) -> Weights:
        """Return the engine's weights as a rollout engine would receive them."""
        manifest = engine.weight_manifest(version)
        engine.send_weights(version, manifest)
        receiver = engine.context.transport.receiver()
        return {name: tensor.clone().cpu() for name, tensor in receiver.receive(manifest)}

    def after_updates(
        self,
        directory: Path,
        budget: int,
        batch: Batch,
        count: int = 2,
        objective: ObjectiveSpec | None = None,
    ) -> Weights:
        """Start an engine with `budget` tokens per micro-batch, train it for `count` updates on one batch, and return its weights."""
        engine = self.start(directory, budget=budget)
        try:
            for _ in range(count):
                engine.update(batch, objective or self.objective())
            return self.received(engine)
        finally:
            engine.close()

    def assert_close(self, got: Weights, expected: Weights) -> None:
        """Assert that the weights of two models are equal within float32 rounding."""
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(got[name], tensor, atol=self.tolerance, rtol=1e-4)
