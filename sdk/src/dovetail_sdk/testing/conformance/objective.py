"""The suite of objectives, run as an engine runs them, and its base for policy losses. N samples, T response tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar

import numpy as np
import pytest

from dovetail.batch import Batch, Ragged
from dovetail.interfaces import Objective
from dovetail.metrics import merge_metrics, values
from dovetail_sdk.testing.conformance.plugin import PluginConformance
from dovetail_sdk.testing.conformance.random_batches import beside, draw
from dovetail_sdk.testing.objectives import ObjectiveUpdate, spec_of, update_of
from dovetail_sdk.testing.ranks import on_ranks

LENGTHS = (3, 7, 2, 5, 1, 9, 4, 6)
"""Number of response tokens of each sample of a mini-batch."""
PARTS = {
    "one by one": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "uneven": [[2, 3, 6, 7, 0, 1], [4, 5]],
    "empty ones": [[], [0, 1, 2, 3, 4, 5, 6, 7], []],
}
"""Splits of the mini-batch into micro-batches that keep two neighbouring samples (one pair, one group) together."""
SINGLE = {"single": [[row] for row in range(8)]}
"""A split that separates pairs, for objectives that treat every sample alone."""


class ObjectiveCases(PluginConformance):
    """Base of the suites of objectives and policy losses.

    Its tests check that the split into micro-batches and ranks doesn't change an update.
    """

    tolerance: ClassVar[float] = 1e-5
    """Largest difference that counts as rounding."""
    scalars: ClassVar[Mapping[str, float]] = {}
    """Values of the objective's scalars that differ from the defaults."""

    def goal(self) -> Objective:
        """Return the objective under test."""
        raise NotImplementedError

    def mini_batch(self, seed: int) -> Batch:
        """Return eight samples with the columns that the objective requires.

        Samples 2k and 2k + 1 stay in one micro-batch, except in tests of objectives that treat every sample by itself.
        """
        raise NotImplementedError

    def outputs(self, mini_batch: Batch, seed: int) -> dict[str, np.ndarray]:
        """Return random model outputs for a mini-batch: an array [T, …] for every output that the objective names."""
        raise NotImplementedError

    def update(
        self, mini_batch: Batch, outputs: Mapping[str, np.ndarray], **how: Any
    ) -> ObjectiveUpdate:
        """Compute the objective on a mini-batch and outputs, [T, …] each; `how` holds keyword arguments of `update_of`."""
        return update_of(self.goal(), mini_batch, outputs, scalars=self.scalars, **how)

    def same(self, got: ObjectiveUpdate, want: ObjectiveUpdate) -> None:
        """Fail unless two updates agree within rounding."""
        assert got.loss == pytest.approx(want.loss, rel=self.tolerance, abs=self.tolerance)
        for name, gradient in want.gradients.items():
            np.testing.assert_allclose(got.gradients[name], gradient, atol=self.tolerance)
        assert values(got.metrics) == pytest.approx(values(want.metrics), rel=1e-4, abs=1e-6)

    @pytest.mark.parametrize("parts", [*PARTS.values(), *SINGLE.values()], ids=[*PARTS, *SINGLE])
    def test_the_cut_into_micro_batches_does_not_matter(self, parts: list[list[int]]) -> None:
        if parts in SINGLE.values() and self.goal().unit != "sample":
            pytest.skip(f"the objective's unit is the {self.goal().unit}, not the sample")
        batch = self.mini_batch(1)
        outputs = self.outputs(batch, 1)
        self.same(self.update(batch, outputs, parts=parts), self.update(batch, outputs))

    @pytest.mark.parametrize("cut", [2, 6])
    def test_ranks_do_not_matter(self, cut: int) -> None:
        batch = self.mini_batch(2)
        outputs = self.outputs(batch, 2)
        token = int(batch["response_mask"].offsets[cut])
        halves = [batch.slice(0, cut), batch.slice(cut, len(batch))]
        scored = [
            {name: found[where] for name, found in outputs.items()}
            for where in (slice(0, token), slice(token, None))
        ]
        ranks = on_ranks(
            2, lambda rank, sums: self.update(halves[rank], scored[rank], reduction=sums)
        )
        together = ObjectiveUpdate(
            loss=sum(rank.loss for rank in ranks),
            gradients={
                name: np.concatenate([rank.gradients[name] for rank in ranks]) for name in outputs
            },
            metrics=merge_metrics(rank.metrics for rank in ranks),
            finite=True,
        )
        self.same(together, self.update(batch, outputs))

    def test_the_order_of_units_does_not_matter(self) -> None:
        batch = self.mini_batch(3)
        outputs = self.outputs(batch, 3)
        order = [6, 7, 0, 1, 4, 5, 2, 3]
        moved = {name: _rows(batch, found, order) for name, found in outputs.items()}
        got, want = self.update(batch.take(order), moved), self.update(batch, outputs)
        self.same(
            got,
            ObjectiveUpdate(
                loss=want.loss,
                gradients={n: _rows(batch, g, order) for n, g in want.gradients.items()},
                metrics=want.metrics,
                finite=True,
            ),
        )

    def test_columns_are_left_as_they_were(self) -> None:
        batch = self.mini_batch(6)
        before = deepcopy(batch)
        self.update(batch, self.outputs(batch, 6))
        assert batch.equals(before)


class ObjectiveConformance(ObjectiveCases):
    """Conformance suite for objectives: subclass it and set `plugin`. Override `oracle` to check value and gradient."""

    kind = "objective"
    plugin: ClassVar[type[Objective]]

    # Methods that a plugin's suite may override

    def mini_batch(self, seed: int) -> Batch:
        """Return eight samples with the columns that the objective requires; samples 2k and 2k + 1 have the same pair id and group id."""
        rng = np.random.default_rng(seed)
        mask = Ragged.from_list([rng.random(k) < 0.8 for k in LENGTHS], dtype=np.bool_)
        samples = len(LENGTHS)
        columns: dict[str, Any] = {
            "response_mask": mask,
            "sample_id": [f"sample {row}" for row in range(samples)],
            "pair_id": np.arange(samples) // 2,
            "group_id": np.arange(samples) // 2,
        }
        for name in sorted(spec_of(self.goal()).requires - columns.keys()):
            columns[name] = draw(self.known_columns()[name], mask, rng)
        return Batch(columns)

    def outputs(self, mini_batch: Batch, seed: int) -> dict[str, np.ndarray]:
        """Return random model outputs for a mini-batch: an array [T, …] for every output that the objective names."""
        rng = np.random.default_rng([seed, 1])
        tokens = len(mini_batch["response_mask"].values)
        return {
            output.name: rng.normal(size=(tokens, *output.inner)).astype(output.dtype)
            for output in self.plugin.outputs(self.make_config())
        }

    def oracle(
        self, mini_batch: Batch, outputs: Mapping[str, np.ndarray]
    ) -> tuple[float, dict[str, np.ndarray]] | None:
        """Return the float64 loss of a plain formula and its gradient with respect to each output, [T, …]; None without an oracle."""
        return None

    # How the suite runs it

    def goal(self) -> Objective:
        return self.make()

    @pytest.mark.parametrize("seed", range(3))
    def test_value_and_gradient_are_the_oracles(self, seed: int) -> None:
        batch = self.mini_batch(seed)
        outputs = self.outputs(batch, seed)
        expected = self.oracle(batch, outputs)
        if expected is None:
            pytest.skip("the suite has no oracle")
        found = self.update(batch, outputs)
        assert found.finite
        assert found.loss == pytest.approx(expected[0], rel=self.tolerance, abs=self.tolerance)
        for name, gradient in expected[1].items():
            np.testing.assert_allclose(found.gradients[name], gradient, atol=self.tolerance)

    def test_the_loss_is_finite_and_has_a_gradient(self) -> None:
        batch = self.mini_batch(0)
        found = self.update(batch, self.outputs(batch, 0))
        assert found.finite
        assert np.isfinite(found.loss)
        assert all(np.isfinite(gradient).all() for gradient in found.gradients.values())
        assert any(np.any(gradient != 0) for gradient in found.gradients.values())

    def test_what_masked_tokens_hold_does_not_matter(self) -> None:
        batch = self.mini_batch(4)
        hidden_T = ~batch["response_mask"].values
        outputs = self.outputs(batch, 4)
        spoilt = {name: np.where(beside(hidden_T, o), np.nan, o) for name, o in outputs.items()}
        spoilt = {name: o.astype(outputs[name].dtype) for name, o in spoilt.items()}
        found = self.update(batch, spoilt)
        assert found.finite
        self.same(found, self.update(batch, outputs))
        assert all(np.all(gradient[hidden_T] == 0) for gradient in found.gradients.values())

    def test_an_output_that_is_not_finite_is_reported(self) -> None:
        batch = self.mini_batch(5)
        token = int(np.flatnonzero(batch["response_mask"].values)[0])
        for name, output in self.outputs(batch, 5).items():
            output[token] = np.nan
            assert not self.update(batch, {**self.outputs(batch, 5), name: output}).finite


def _rows(batch: Batch, values_T: np.ndarray, order: Sequence[int]) -> np.ndarray:
    """Return values [T, …] with the batch's samples in another order."""
    offsets = batch["response_mask"].offsets
    return np.concatenate([values_T[offsets[row] : offsets[row + 1]] for row in order])
