"""What holds for every policy loss.

It runs within the objective that trains with it, so that what is checked is what an engine does: columns are prepared over the
mini-batch, cut into micro-batches, spread over ranks, aggregated. N samples, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
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
    Reduction,
)
from dovetail.metrics import Metric, merge_metrics, values
from dovetail.plugins import load_plugin_class, make_plugin, ref_for
from dovetail.sections import PluginSection
from dovetail_sdk.testing.conformance.advantage_batches import beside, inner_of
from dovetail_sdk.testing.conformance.plugin import PluginConformance
from dovetail_sdk.testing.objectives import update_of
from dovetail_sdk.testing.ranks import on_ranks

LENGTHS = (3, 7, 0, 5, 1, 9, 4, 6)
"""Response tokens of the samples of a mini-batch."""
PARTS = {
    "one by one": [[0], [1], [2], [3], [4], [5], [6], [7]],
    "uneven": [[0, 1, 2, 3, 4], [5], [6, 7]],
    "empty ones": [[2], [0, 1, 3, 4, 5, 6, 7]],
}
"""Cuts of it into micro-batches."""


@attrs.frozen(kw_only=True, eq=False)
class Update:
    """What a mini-batch gave: its loss, the gradient of each sample's log-probabilities, and metrics by name."""

    loss: float
    gradient: list[np.ndarray]
    metrics: dict[str, Metric]


class PolicyLossConformance(PluginConformance):
    """Subclass it, set `plugin`, and pytest runs the suite."""

    kind = "policy_loss"
    plugin: ClassVar[type[PolicyLoss]]
    tolerance: ClassVar[float] = 1e-5
    """Largest difference that counts as rounding."""
    smooth: ClassVar[bool] = False
    """Set it where the aggregated loss has no stop-gradient that its value shows: its gradient is then compared with
    finite differences, for one advantage a sample.
    """

    # What a third party may override

    def mini_batch(self, seed: int, lengths: Sequence[int] = LENGTHS, spread: float = 0.3) -> Batch:
        """What the loss requires and prepares from, and the current `log_probs`; policies differ by about `spread` nats."""
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

    def objective(self) -> Objective:
        """The loss in the objective `policy`, with the aggregation that it prescribes, or `token_mean`."""
        of_policies: Any = load_plugin_class(PluginRef(kind="objective", name="policy"))
        section = PluginSection(name=self.plugin.aggregation or "token_mean")
        aggregation = make_plugin(ref_for("loss_aggregation", section), PluginContext())
        parts = (self.make(), aggregation, None)
        own = {"parts": classmethod(lambda *_, **__: parts)}
        objective: Objective = type("OfTheLoss", (of_policies,), own)(
            of_policies.Config(name="policy"), PluginContext()
        )
        return objective

    def update(
        self,
        mini_batch: Batch,
        parts: Sequence[Sequence[int]] | None = None,
        reduction: Reduction | None = None,
        dtype: Any = np.float32,
        shift: np.ndarray | float = 0.0,
    ) -> Update:
        """Loss, gradient and metrics of this rank's part of a mini-batch, cut into parts (rows); `shift`, [T] or one number, moves
        log-probabilities.
        """
        goal = self.objective()
        outputs = {
            output.name: mini_batch[output.name].values.astype(dtype)
            for output in goal.outputs(goal.config)
        }
        outputs["log_probs"] = outputs["log_probs"] + dtype(shift)
        found = update_of(goal, mini_batch, outputs, parts=parts, reduction=reduction)
        gradient = mini_batch["log_probs"].with_values(found.gradients["log_probs"])
        return Update(loss=found.loss, gradient=list(gradient), metrics=found.metrics)

    def inputs(self, mini_batch: Batch, dtype: torch.dtype = torch.float32) -> LossInputs:
        """All samples as `token_losses` sees them: masked tokens hold 0, and `prepare` has made its columns."""
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

    def same(self, got: Update, want: Update, order: Sequence[int] | None = None) -> None:
        """Fail unless two updates agree; `order` says which sample of `want` each one of `got` is."""
        assert got.loss == pytest.approx(want.loss, rel=self.tolerance, abs=self.tolerance)
        for row, gradient in zip(order or range(len(want.gradient)), got.gradient, strict=True):
            np.testing.assert_allclose(gradient, want.gradient[row], atol=self.tolerance)
        expected = values(want.metrics)
        assert values(got.metrics) == pytest.approx(expected, rel=1e-4, abs=1e-6)

    # What holds

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
        found = self.update(self.mini_batch(0, spread=spread))
        assert np.isfinite(found.loss)
        assert all(np.isfinite(row).all() for row in found.gradient)
        assert np.isfinite(list(values(found.metrics).values())).all()

    @pytest.mark.parametrize("spread", [0.05, 0.3])
    def test_what_masked_tokens_hold_does_not_matter(self, spread: float) -> None:
        batch = self.mini_batch(1, spread=spread)
        hidden_T = ~batch["response_mask"].values
        soiled = {
            name: column.with_values(
                np.where(beside(hidden_T, column.values), np.float32(np.nan), column.values)
            )
            for name, column in batch.columns.items()
            if isinstance(column, Ragged) and column.dtype.kind == "f"
        }
        got, want = self.update(batch.with_columns(soiled)), self.update(batch)
        self.same(got, want)
        assert np.all(np.concatenate(got.gradient)[hidden_T] == 0)

    @pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
    def test_the_cut_into_micro_batches_does_not_matter(self, parts: list[list[int]]) -> None:
        batch = self.mini_batch(2)
        self.same(self.update(batch, parts), self.update(batch))

    def test_the_order_of_samples_does_not_matter(self) -> None:
        batch = self.mini_batch(3)
        order = np.random.default_rng(3).permutation(len(batch)).tolist()
        self.same(self.update(batch.take(order)), self.update(batch), order)

    @pytest.mark.parametrize("cut", [1, 3, 5])
    def test_ranks_do_not_matter(self, cut: int) -> None:
        batch = self.mini_batch(4)
        halves = [batch.slice(0, cut), batch.slice(cut, len(batch))]
        parts = on_ranks(2, lambda rank, reduction: self.update(halves[rank], reduction=reduction))
        together = Update(
            loss=sum(part.loss for part in parts),
            gradient=[row for part in parts for row in part.gradient],
            metrics=merge_metrics(part.metrics for part in parts),
        )
        self.same(together, self.update(batch))

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
        silent = mask.with_values(np.zeros(len(mask.values), np.bool_))
        found = self.update(batch.with_columns({"response_mask": silent}))
        assert found.loss == 0
        assert all((row == 0).all() for row in found.gradient)

    def test_columns_are_left_as_they_were(self) -> None:
        batch = self.mini_batch(7)
        before = {name: np.array(getattr(c, "values", c)) for name, c in batch.columns.items()}
        self.update(batch)
        for name, column in batch.columns.items():
            np.testing.assert_array_equal(getattr(column, "values", column), before[name])

    def test_the_gradient_agrees_with_finite_differences(self) -> None:
        if not self.smooth:
            pytest.skip("a stop-gradient of this loss shows in its value (`smooth` is not set)")
        batch = self.mini_batch(8)
        tokens, step = len(batch["log_probs"].values), 1e-6
        gradient = np.concatenate(self.update(batch, dtype=np.float64).gradient)
        for token in range(tokens):
            move = np.zeros(tokens)
            move[token] = step
            up, down = (
                self.update(batch, dtype=np.float64, shift=sign * move).loss for sign in (1, -1)
            )
            assert (up - down) / (2 * step) == pytest.approx(gradient[token], rel=1e-4, abs=1e-7)
