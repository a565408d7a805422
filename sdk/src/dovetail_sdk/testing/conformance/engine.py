"""The suite of training engines, checked on a tiny model against a plain transformers forward pass."""

from __future__ import annotations

from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dovetail.errors import NumericsError
from dovetail.metrics import values
from dovetail.plugins import objective_spec
from dovetail.sections import PluginSection
from dovetail_sdk.testing import covariance_loss, pair_objective
from dovetail_sdk.testing.conformance.engine_value import ValueRoleConformance


class EngineConformance(ValueRoleConformance):
    """Conformance suite for training engines: subclass it and set `plugin`; the plugin's capabilities decide which tests run."""

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

    def test_columns_that_a_loss_prepares_do_not_depend_on_micro_batches(
        self, model_directory: Path
    ) -> None:
        loss = PluginSection(path=covariance_loss.__file__, attribute="CovarianceLoss")
        objective = objective_spec("policy", policy_loss=loss, old_log_probs_from_current=True)
        batch = self.batch(7)
        old = np.random.default_rng(7).uniform(-6, -4, len(batch["response_ids"].values))
        batch = batch.with_columns(
            {"old_log_probs": batch["response_ids"].with_values(old.astype(np.float32))}
        )
        small, large = (
            self.after_updates(model_directory, budget, batch, 1, objective)
            for budget in (24, 4096)
        )
        self.assert_close(small, large)
        plain = self.after_updates(model_directory, 4096, batch, 1)
        assert any(not torch.equal(plain[name], large[name]) for name in plain)

    def test_pairs_that_an_objective_compares_stay_together(self, model_directory: Path) -> None:
        section = PluginSection(path=pair_objective.__file__, attribute="PairMargin")
        objective = objective_spec(section)
        batch = self.batch(9, size=12)
        pairs = {"pair_id": np.arange(12) % 6, "chosen": np.arange(12) < 6}
        batch = batch.with_columns(pairs)
        small, large = (
            self.after_updates(model_directory, budget, batch, 1, objective)
            for budget in (24, 4096)
        )
        self.assert_close(small, large)
        turned = batch.with_columns({"chosen": np.arange(12) >= 6})
        other = self.after_updates(model_directory, 4096, turned, 1, objective)
        assert any(not torch.equal(other[name], large[name]) for name in other)

    @pytest.mark.parametrize("what", ["advantages", "loss"])
    def test_a_number_that_is_not_finite_stops_the_update_before_any_weight_changes(
        self, model_directory: Path, what: str
    ) -> None:
        batch = self.batch(8)
        spoilt = batch
        if what == "advantages":
            # A sample that is fully masked out may hold any value.
            mask = batch["response_mask"]
            rows = np.where(mask.row_index == 4, False, mask.values)
            advantages = batch["advantages"].copy()
            advantages[[2, 4]] = np.nan
            spoilt = batch.with_columns(
                {"advantages": advantages, "response_mask": mask.with_values(rows)}
            )
        else:
            huge = np.full(len(batch), 3e38, np.float32)
            spoilt = batch.with_columns({"advantages": huge})
        engine = self.start(model_directory)
        engine.update(batch, self.objective())
        before = self.received(engine, 1)
        with pytest.raises(NumericsError) as caught:
            engine.update(spoilt, self.objective())
        after = self.received(engine, 2)
        engine.close()
        for name, tensor in before.items():
            assert torch.equal(after[name], tensor), name
        if what == "advantages":
            assert caught.value.sample_ids == ("sample-8-2",)

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
        self.needs_equal_bits()
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

    def test_updates_after_begin_save_do_not_change_what_is_written(
        self, model_directory: Path, tmp_path: Path
    ) -> None:
        self.needs_equal_bits()
        batch = self.batch(5)
        engine = self.start(model_directory)
        engine.update(batch, self.objective())
        engine.begin_save(tmp_path)
        expected = engine.update(batch, self.objective())
        engine.finish_save()
        updated = self.received(engine)
        engine.close()
        other = self.start(model_directory)
        other.load(tmp_path)
        assert values(other.update(batch, self.objective())) == values(expected)
        got = self.received(other)
        other.close()
        for name, tensor in updated.items():
            assert torch.equal(got[name], tensor), name

    @pytest.mark.parametrize("share", [1.0, 0.25])
    def test_weights_move_by_their_share_towards_those_of_another_engine(
        self, model_directory: Path, tmp_path: Path, share: float
    ) -> None:
        self.needs("follows")
        batch = self.batch(7)
        leader, follower = self.start(model_directory), self.start(model_directory)
        before = self.received(follower)
        for _ in range(2):
            leader.update(batch, self.objective())
        leader.write_weights(tmp_path)
        follower.average_weights(tmp_path, share)
        target, got = self.received(leader), self.received(follower)
        scores = [e.forward(batch, frozenset({"log_probs"})) for e in (leader, follower)]
        leader.close()
        follower.close()
        assert any(not torch.equal(before[name], target[name]) for name in before)
        if share == 1:
            assert all(torch.equal(got[name], target[name]) for name in before)
            np.testing.assert_array_equal(*(score["log_probs"].values for score in scores))
        else:
            expected = {n: (1 - share) * before[n] + share * target[n] for n in before}
            self.assert_close(got, expected)

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
