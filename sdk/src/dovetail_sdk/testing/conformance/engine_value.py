"""Tests of training engines that can be a critic (capability `value_head`): one value a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

from dovetail.batch import Batch
from dovetail.errors import ConfigError, WeightSyncError
from dovetail.interfaces import ObjectiveSpec, TrainEngine
from dovetail.metrics import values
from dovetail.plugins import objective_spec
from dovetail_sdk.testing.conformance.engine_cases import EngineCases
from dovetail_sdk.testing.tiny import tiny_model

VALUES = frozenset({"values"})
CLIP = 0.02
"""Range of the value clipping. It is small, so that the clipped error is the larger one for some tokens, and the unclipped for others."""


class ValueRoleConformance(EngineCases):
    """The critic tests of `EngineConformance`, for engines with the capability `value_head`."""

    @pytest.fixture(scope="class")
    @classmethod
    def value_directory(
        cls, model_directory: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> Path:
        """Make a tiny checkpoint with a value head (a token classifier with one label) and return the directory."""
        cls().needs("value_head")
        directory = tmp_path_factory.mktemp("tiny_value")
        tokenizer = AutoTokenizer.from_pretrained(str(model_directory))
        tiny_model(directory, tokenizer, head="value")
        tokenizer.save_pretrained(str(directory))
        return directory

    def value_objective(self) -> ObjectiveSpec:
        """Return the spec of the clipped value loss, averaged over tokens."""
        return objective_spec("value", clip=CLIP)

    def values(self, engine: TrainEngine, batch: Batch) -> np.ndarray:
        """Return float32 [T]: the engine's value of every token."""
        return engine.forward(batch, VALUES)["values"].values

    def value_batch(self, engine: TrainEngine, seed: int) -> Batch:
        """Return a batch for a critic update: random samples, the engine's values with noise as old `values`, and random `returns`."""
        batch = self.batch(seed)
        column = engine.forward(batch, VALUES)["values"]
        noise = np.random.default_rng(seed).normal(size=(2, len(column.values)))
        return batch.with_columns(
            {
                "values": column.with_values((column.values + 0.03 * noise[0]).astype(np.float32)),
                "returns": column.with_values(noise[1].astype(np.float32)),
            }
        )

    def values_after(self, directory: Path, budget: int, seed: int) -> np.ndarray:
        """Start a critic, train it for two updates on one batch, and return its values of that batch, float32 [T].

        `budget` is the maximum number of tokens per micro-batch.
        """
        engine = self.start(directory, budget=budget, head="value")
        try:
            batch = self.value_batch(engine, seed)
            for _ in range(2):
                engine.update(batch, self.value_objective())
            return self.values(engine, batch)
        finally:
            engine.close()

    def reference(self, directory: Path) -> torch.nn.Module:
        """Load the checkpoint in `directory` with transformers alone, as the reference model."""
        model: torch.nn.Module = AutoModelForTokenClassification.from_pretrained(
            str(directory), dtype=torch.float32
        )
        return model.eval()

    def reference_values(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return float32 [T]: the model's value of the state before each response token, sample by sample, with gradients."""
        found = []
        for prompt, response in zip(batch["prompt_ids"], batch["response_ids"], strict=True):
            ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
            found.append(model(ids).logits[0, len(prompt) - 1 : -1, 0])
        return torch.cat(found) * torch.from_numpy(batch["response_mask"].values)

    def test_values_are_those_of_the_state_before_each_token(self, value_directory: Path) -> None:
        batch = self.batch(10)
        engine = self.start(value_directory, head="value")
        got = engine.forward(batch, VALUES)["values"]
        engine.close()
        with torch.no_grad():
            expected_T = self.reference_values(self.reference(value_directory), batch)
        assert np.abs(got.values).max() > 0
        np.testing.assert_allclose(got.values, expected_T.numpy(), atol=self.tolerance)

    def test_a_checkpoint_without_a_value_head_starts_with_a_value_of_0(
        self, value_directory: Path, model_directory: Path
    ) -> None:
        engine = self.start(model_directory, head="value")
        batch = self.value_batch(engine, 11)
        assert not self.values(engine, batch).any()
        engine.update(batch, self.value_objective())
        assert self.values(engine, batch).any()
        engine.close()

    def test_a_value_update_is_adamw_on_the_gradient_of_the_clipped_loss(
        self, value_directory: Path
    ) -> None:
        engine = self.start(value_directory, head="value")
        batch = self.value_batch(engine, 12)
        metrics = values(engine.update(batch, self.value_objective()))
        got = self.values(engine, batch)
        training = engine.context.training
        engine.close()
        assert training is not None
        model = self.reference(value_directory)
        mask_T = torch.from_numpy(batch["response_mask"].values)
        old_T, returns_T = (torch.from_numpy(batch[n].values) for n in ("values", "returns"))
        values_T = self.reference_values(model, batch)
        near_T = torch.clamp(values_T, old_T - CLIP, old_T + CLIP)
        losses_T = torch.maximum((values_T - returns_T) ** 2, (near_T - returns_T) ** 2) / 2
        loss = losses_T[mask_T].mean()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), training.grad_clip)
        optim: Any = training.optim
        torch.optim.AdamW(
            model.parameters(),
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
        ).step()
        assert metrics["critic/value_loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert metrics["critic/grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        assert 0 < metrics["critic/value_clip_frac"] < 1
        with torch.no_grad():
            expected_T = self.reference_values(model, batch)
        np.testing.assert_allclose(got, expected_T.numpy(), atol=1e-4)

    def test_a_value_update_does_not_depend_on_micro_batches(self, value_directory: Path) -> None:
        small, large = (self.values_after(value_directory, budget, 13) for budget in (24, 4096))
        np.testing.assert_allclose(small, large, atol=10 * self.tolerance)

    def test_the_next_value_update_after_load_is_bit_identical(
        self, value_directory: Path, tmp_path: Path
    ) -> None:
        self.needs_equal_bits()
        engine = self.start(value_directory, head="value")
        batch = self.value_batch(engine, 14)
        engine.update(batch, self.value_objective())
        engine.save(tmp_path)
        engine.update(batch, self.value_objective())
        expected = self.values(engine, batch)
        engine.close()
        other = self.start(value_directory, head="value")
        other.load(tmp_path)
        other.update(batch, self.value_objective())
        np.testing.assert_array_equal(self.values(other, batch), expected)
        other.close()

    def test_an_export_keeps_the_value_head(self, value_directory: Path, tmp_path: Path) -> None:
        engine = self.start(value_directory, head="value")
        batch = self.value_batch(engine, 15)
        engine.update(batch, self.value_objective())
        expected = self.values(engine, batch)
        engine.export(tmp_path)
        engine.close()
        other = self.start(tmp_path, head="value")
        np.testing.assert_allclose(self.values(other, batch), expected, atol=self.tolerance)
        other.close()

    def test_each_head_refuses_what_the_other_computes(
        self, value_directory: Path, model_directory: Path
    ) -> None:
        batch = self.batch(16)
        critic = self.start(value_directory, head="value")
        with pytest.raises(ConfigError, match="log_probs"):
            critic.forward(batch, frozenset({"log_probs"}))
        with pytest.raises(ConfigError, match="log_probs"):
            critic.update(batch, self.objective())
        with pytest.raises(WeightSyncError):
            critic.weight_manifest(1)
        valued = self.value_batch(critic, 16)
        critic.close()
        actor = self.start(model_directory)
        with pytest.raises(ConfigError, match="values"):
            actor.forward(batch, VALUES)
        with pytest.raises(ConfigError, match="values"):
            actor.update(valued, self.value_objective())
        actor.close()
