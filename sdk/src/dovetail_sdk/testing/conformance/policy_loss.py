"""The suite of policy losses.

The suite runs a loss within the objective that trains with it, as an engine does: columns are prepared over the mini-batch, cut
into micro-batches, spread over ranks, and aggregated. N samples, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import (
    LocalReduction,
    LossInputs,
    Objective,
    PluginContext,
    PluginRef,
    PolicyLoss,
)
from dovetail.metrics import values
from dovetail.plugins import load_plugin_class, make_plugin, ref_for
from dovetail.sections import PluginSection
from dovetail_sdk.testing.conformance.objective import ObjectiveCases
from dovetail_sdk.testing.conformance.random_batches import beside, inner_of


class PolicyLossConformance(ObjectiveCases):
    """Conformance suite for policy losses: subclass it and set `plugin`."""

    kind = "policy_loss"
    plugin: ClassVar[type[PolicyLoss]]
    smooth: ClassVar[bool] = False
    """Whether the gradient of the aggregated loss is the derivative of its value, unaffected by stop-gradients. If so, the suite compares
    the gradient with finite differences, with one advantage per sample.
    """

    # Methods that a plugin's suite may override

    def mini_batch(
        self, seed: int, lengths: Sequence[int] = (3, 7, 0, 5, 1, 9, 4, 6), spread: float = 0.3
    ) -> Batch:
        """Return random samples of these lengths with `log_probs` and the columns that the loss requires.

        Columns of other policies, such as `old_log_probs`, differ from `log_probs` by about `spread` nats per token.
        """
        rng = np.random.default_rng(seed)
        config = self.make_config()
        mask = Ragged.from_list([rng.random(k) < 0.8 for k in lengths], dtype=np.bool_)
        tokens = len(mask.values)
        log_probs = rng.uniform(-3, -0.1, tokens)
        columns: dict[str, Any] = {
            "response_mask": mask,
            "sample_id": [f"sample {row}" for row in range(len(lengths))],
            "log_probs": log_probs,
        }
        for name in sorted(self.plugin.requires(config) | self.plugin.prepares(config)):
            if name in columns:
                continue
            column = self.known_columns()[name]
            if name.endswith("log_probs"):
                columns[name] = np.minimum(log_probs + spread * rng.normal(size=tokens), -1e-3)
            elif name == "advantages" or column.shape == "dense":
                shape = (len(lengths), *inner_of(column))
                columns[name] = rng.normal(size=shape).astype(column.dtype)
            else:
                columns[name] = rng.normal(size=(tokens, *inner_of(column)))
        return Batch(
            {
                name: mask.with_values(column.astype(np.float32))
                if isinstance(column, np.ndarray) and len(column) == tokens != len(lengths)
                else column
                for name, column in columns.items()
            }
        )

    # How the suite runs it

    def goal(self) -> Objective:
        """Return the objective `policy` with the loss under test and the loss's own aggregation, by default `token_mean`."""
        of_policies: Any = load_plugin_class(PluginRef(kind="objective", name="policy"))
        section = PluginSection(name=self.plugin.aggregation or "token_mean")
        aggregation = make_plugin(ref_for("loss_aggregation", section), PluginContext())
        parts = (self.make(), aggregation, None)
        own = {"parts": classmethod(lambda *_, **__: parts)}
        return type("OfTheLoss", (of_policies,), own)(
            of_policies.Config(name="policy"), PluginContext()
        )

    def outputs(self, mini_batch: Batch, seed: int = 0) -> dict[str, np.ndarray]:
        """Return the columns of a mini-batch that are model outputs, float32 [T]."""
        goal = self.goal()
        names = [output.name for output in goal.outputs(goal.config)]
        return {name: mini_batch[name].values for name in names}

    def inputs(self, mini_batch: Batch, dtype: torch.dtype = torch.float32) -> LossInputs:
        """Return all samples as input of `token_losses`, including the columns that the loss's `prepare` computes; masked tokens hold 0."""
        plugin: PolicyLoss = self.make()
        prepared = plugin.prepare(mini_batch, LocalReduction())
        mask = mini_batch["response_mask"]
        shown_T = torch.tensor(mask.values)
        names = self.plugin.requires(plugin.config) - {"log_probs", "response_mask"}
        flat = {name: mini_batch[name] for name in names} | dict(prepared)
        arrays = {
            name: column.values
            if isinstance(column, Ragged)
            else np.repeat(column, mask.lengths, axis=0)
            for name, column in flat.items()
        }
        tensors = {
            name: torch.tensor(values, dtype=dtype) * beside(shown_T, values)
            for name, values in arrays.items()
        }
        log_probs_T = torch.tensor(mini_batch["log_probs"].values, dtype=dtype)
        return LossInputs(
            log_probs_T=(log_probs_T * shown_T).requires_grad_(),
            mask_T=shown_T,
            offsets_N1=torch.tensor(mask.offsets),
            columns=tensors,
        )

    # Tests

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("seed", range(3))
    def test_one_finite_loss_a_token_with_a_gradient(self, seed: int, dtype: torch.dtype) -> None:
        inputs = self.inputs(self.mini_batch(seed), dtype)
        losses_T = self.make().token_losses(inputs).losses_T
        assert losses_T.shape == inputs.log_probs_T.shape
        assert losses_T.dtype == dtype
        assert torch.isfinite(losses_T[inputs.mask_T]).all()
        (gradient_T,) = torch.autograd.grad(losses_T[inputs.mask_T].sum(), inputs.log_probs_T)
        assert gradient_T.abs().sum() > 0

    @pytest.mark.parametrize("spread", [5.0, 50.0, 1e4])
    def test_extreme_log_ratios_stay_finite(self, spread: float) -> None:
        batch = self.mini_batch(0, spread=spread)
        found = self.update(batch, self.outputs(batch))
        assert np.isfinite(found.loss)
        assert np.isfinite(found.gradients["log_probs"]).all()
        assert np.isfinite(list(values(found.metrics).values())).all()

    @pytest.mark.parametrize("spread", [0.05, 0.3])
    def test_what_masked_tokens_hold_does_not_matter(self, spread: float) -> None:
        batch = self.mini_batch(1, spread=spread)
        hidden_T = ~batch["response_mask"].values
        spoilt = batch.with_columns(
            {
                name: column.with_values(
                    np.where(beside(hidden_T, column.values), np.float32(np.nan), column.values)
                )
                for name, column in batch.columns.items()
                if isinstance(column, Ragged) and column.dtype.kind == "f"
            }
        )
        found = self.update(spoilt, self.outputs(spoilt))
        self.same(found, self.update(batch, self.outputs(batch)))
        assert np.all(found.gradients["log_probs"][hidden_T] == 0)

    def test_samples_do_not_see_their_batch_mates(self) -> None:
        batch = self.mini_batch(5)
        inputs = self.inputs(batch)
        together_T = self.make().token_losses(inputs).losses_T
        for start, stop in zip(inputs.offsets_N1[:-1], inputs.offsets_N1[1:], strict=True):
            alone = LossInputs(
                log_probs_T=inputs.log_probs_T[start:stop],
                mask_T=inputs.mask_T[start:stop],
                offsets_N1=torch.tensor([0, stop - start]),
                columns={name: column[start:stop] for name, column in inputs.columns.items()},
            )
            torch.testing.assert_close(
                self.make().token_losses(alone).losses_T,
                together_T[start:stop],
                atol=self.tolerance,
                rtol=self.tolerance,
            )

    @pytest.mark.parametrize("lengths", [(0, 0), (4, 2)])
    def test_nothing_to_learn_from_is_a_loss_of_0(self, lengths: tuple[int, ...]) -> None:
        batch = self.mini_batch(6, lengths)
        mask = batch["response_mask"]
        silent = batch.with_columns(
            {"response_mask": mask.with_values(np.zeros(len(mask.values), np.bool_))}
        )
        found = self.update(silent, self.outputs(silent))
        assert found.loss == 0
        assert not found.gradients["log_probs"].any()

    def test_the_gradient_agrees_with_finite_differences(self) -> None:
        if not self.smooth:
            pytest.skip("a stop-gradient invalidates finite differences (`smooth` is False)")
        batch = self.mini_batch(8)
        outputs = {n: column.astype(np.float64) for n, column in self.outputs(batch).items()}
        log_probs_T, step = outputs["log_probs"], 1e-6
        gradient_T = self.update(batch, outputs).gradients["log_probs"]
        for token, slope in enumerate(gradient_T):
            move_T = np.zeros(len(log_probs_T))
            move_T[token] = step
            up, down = (
                self.update(batch, {**outputs, "log_probs": log_probs_T + sign * move_T}).loss
                for sign in (1, -1)
            )
            assert (up - down) / (2 * step) == pytest.approx(slope, rel=1e-4, abs=1e-7)
