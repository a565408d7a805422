"""What holds for every training engine, checked on a tiny model against a plain transformers forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dovetail.batch import Batch, Ragged
from dovetail.config.sections import ModelSection, OptimSection, TrainingSection
from dovetail.interfaces import make_plugin
from dovetail.interfaces.engine import TrainEngine
from dovetail.interfaces.objective import ObjectiveSpec
from dovetail.interfaces.plugin import PluginContext
from dovetail.interfaces.runtime import PluginRef
from dovetail.telemetry.metrics import values
from dovetail_sdk.testing.conformance.plugin import PluginConformance
from dovetail_sdk.testing.tiny import tiny_model_and_tokenizer

Weights = dict[str, torch.Tensor]


class EngineConformance(PluginConformance):
    """Subclass it, set `plugin`, and pytest runs what its capabilities promise."""

    kind = "engine"
    plugin: ClassVar[type[TrainEngine]]
    device: ClassVar[str] = "cpu"
    """The torch device of the plugin; the reference runs on the CPU."""
    tolerance: ClassVar[float] = 2e-5
    """Largest difference that counts as float32 rounding."""
    policy_loss: ClassVar[str] = "reinforce"
    """The policy loss of the test objective; any installed one does."""

    @pytest.fixture(scope="class")
    @classmethod
    def model_directory(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A tiny Qwen2 model with its tokenizer."""
        return tiny_model_and_tokenizer(tmp_path_factory.mktemp("tiny"), vocab_size=300)

    def start(self, model_directory: Path, *, budget: int = 4096, **optim: Any) -> TrainEngine:
        """Start an engine in float32."""
        transport = make_plugin(
            PluginRef(kind="weight_transport", name="in_process"), PluginContext()
        )
        engine: TrainEngine = self.make(
            seed=1,
            role="actor",
            device=self.device,
            model=ModelSection(path=str(model_directory), dtype="float32"),
            training=TrainingSection(
                optim=OptimSection(**{"lr": 1e-2, "eps": 1e-3, **optim}),
                max_tokens_per_micro_batch=budget,
            ),
            total_steps=10,
            tokenizer=AutoTokenizer.from_pretrained(str(model_directory)),
            transport=transport,
        )
        engine.start()
        return engine

    def batch(self, seed: int = 0, size: int = 9) -> Batch:
        """Random samples of different lengths; three share each prompt; some tokens are masked."""
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
            }
        )

    def objective(self) -> ObjectiveSpec:
        """A policy gradient with the mean over tokens."""
        return ObjectiveSpec(
            policy_loss=PluginRef(kind="policy_loss", name=self.policy_loss),
            loss_aggregation=PluginRef(kind="loss_aggregation", name="token_mean"),
            old_log_probs_from_current=True,
            requires=frozenset({"advantages"}),
        )

    def received(self, engine: TrainEngine, version: int = 1) -> Weights:
        """The engine's weights, as a rollout would receive them."""
        manifest = engine.weight_manifest(version)
        engine.send_weights(version, manifest)
        receiver = engine.context.transport.receiver()
        return {name: tensor.clone().cpu() for name, tensor in receiver.receive(manifest)}

    def after_updates(self, directory: Path, budget: int, batch: Batch, count: int = 2) -> Weights:
        """Weights after some updates on one batch."""
        engine = self.start(directory, budget=budget)
        try:
            for _ in range(count):
                engine.update(batch, self.objective())
            return self.received(engine)
        finally:
            engine.close()

    def assert_close(self, got: Weights, expected: Weights) -> None:
        """Equal within float32 rounding."""
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(got[name], tensor, atol=self.tolerance, rtol=1e-4)

    # -- forward -----------------------------------------------------------------------------

    def test_log_probs_agree_with_a_plain_forward_pass_in_the_callers_order(
        self, model_directory: Path
    ) -> None:
        batch = self.batch()
        engine = self.start(model_directory)
        got = engine.forward(batch, frozenset({"log_probs"}))["log_probs"]
        engine.close()
        model = AutoModelForCausalLM.from_pretrained(str(model_directory), dtype=torch.float32)
        for row in range(len(batch)):
            prompt, response = batch["prompt_ids"][row], batch["response_ids"][row]
            ids = torch.tensor([[*prompt.tolist(), *response.tolist()]])
            with torch.no_grad():
                logits_TV = model(ids).logits[0, len(prompt) - 1 : -1] / 0.8
            expected_T = logits_TV.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
            masked_T = expected_T.numpy() * batch["response_mask"][row]
            np.testing.assert_allclose(got[row], masked_T, atol=self.tolerance)

    def test_forward_does_not_depend_on_micro_batches(self, model_directory: Path) -> None:
        batch = self.batch(1)
        results = []
        for budget in (24, 4096):
            engine = self.start(model_directory, budget=budget)
            results.append(engine.forward(batch, frozenset({"log_probs", "entropies"})))
            engine.close()
        for name in ("log_probs", "entropies"):
            small, large = (result[name].values for result in results)
            np.testing.assert_allclose(small, large, atol=self.tolerance)

    # -- update ------------------------------------------------------------------------------

    def test_update_does_not_depend_on_micro_batches(self, model_directory: Path) -> None:
        batch = self.batch(2)
        self.assert_close(
            self.after_updates(model_directory, 24, batch),
            self.after_updates(model_directory, 4096, batch),
        )

    def test_update_does_not_depend_on_the_order_of_samples(self, model_directory: Path) -> None:
        batch = self.batch(3)
        shuffled = batch.take(np.random.default_rng(0).permutation(len(batch)))
        self.assert_close(
            self.after_updates(model_directory, 64, shuffled),
            self.after_updates(model_directory, 64, batch),
        )

    def test_update_lowers_the_objective(self, model_directory: Path) -> None:
        batch = self.batch(4)
        ones = batch.with_columns({"advantages": np.ones(len(batch), np.float32)})
        engine = self.start(model_directory)
        losses = [values(engine.update(ones, self.objective()))["actor/pg_loss"] for _ in range(5)]
        engine.close()
        assert losses[-1] < losses[0]

    # -- save and load -----------------------------------------------------------------------

    def test_the_next_update_after_load_is_bit_identical(
        self, model_directory: Path, tmp_path: Path
    ) -> None:
        if self.device != "cpu":
            pytest.skip("bit-identity is promised on the CPU; on an accelerator kernels may differ")
        if "deterministic" not in self.plugin.capabilities:
            pytest.skip(f"{self.plugin.name} does not claim the capability 'deterministic'")
        batch = self.batch(5)
        engine = self.start(model_directory, schedule="cosine", warmup_steps=2)
        engine.update(batch, self.objective())
        engine.save(tmp_path)
        engine.update(batch, self.objective())
        expected = self.received(engine)
        engine.close()
        other = self.start(model_directory, schedule="cosine", warmup_steps=2)
        other.load(tmp_path)
        other.update(batch, self.objective())
        got = self.received(other)
        other.close()
        for name, tensor in expected.items():
            assert torch.equal(got[name], tensor), name

    def test_export_is_a_model_that_transformers_loads(
        self, model_directory: Path, tmp_path: Path
    ) -> None:
        engine = self.start(model_directory)
        engine.update(self.batch(6), self.objective())
        engine.export(tmp_path)
        expected = self.received(engine)
        engine.close()
        model = AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype=torch.float32)
        AutoTokenizer.from_pretrained(str(tmp_path))
        self.assert_close(
            {n: p.detach() for n, p in model.named_parameters() if n in expected}, expected
        )

    def test_weights_carry_their_version(self, model_directory: Path) -> None:
        engine = self.start(model_directory)
        manifest = engine.weight_manifest(3)
        engine.close()
        assert manifest.version == 3
        assert attrs.evolve(manifest, version=4).tensors == manifest.tensors
