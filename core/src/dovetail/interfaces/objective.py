"""Objective: what a training engine minimises for a role; ObjectiveSpec: what workers build it from.

An engine does the same for all of them: it lets the objective `prepare` the mini-batch once, asks for the `denominators` of
the whole, and calls `term` for every micro-batch. Each term is its own part of a sum that is already divided, so that adding
the parts' gradients is all that is left. Legend: N samples, T response tokens, packed end to end.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import attrs

from dovetail.dispatch.registration import UNIT_COLUMNS, Unit
from dovetail.errors import ConfigError, nearest
from dovetail.interfaces.plugin import ColumnPlugin, PluginConfig
from dovetail.interfaces.runtime import PluginRef

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

    from dovetail.batch.batch import Batch
    from dovetail.interfaces.plugin import Reduction
    from dovetail.metrics import Metric


@attrs.frozen(kw_only=True)
class OutputSpec:
    """An output of a model for every response token."""

    name: str
    dtype: str = "float32"
    inner: tuple[int, ...] = ()
    """Shape of one token's value; () is a number. 0 is a size that the caller chooses."""
    reads: frozenset[str] = frozenset()
    """Columns that it is computed from, besides those that every forward pass reads."""

    def sized(self, *inner: int, reads: Iterable[str] = ()) -> OutputSpec:
        """Return the spec of this output with a size for each token, computed from these columns."""
        return attrs.evolve(self, inner=inner, reads=self.reads.union(reads))


@attrs.frozen(kw_only=True)
class ObjectiveSpec:
    """An objective as it is sent to the workers that build it (`dovetail_stages.numerics.build_objective`).

    Made by `dovetail.plugins.objective_spec`. Workers keep what they have built for a plugin and its config; scalars may
    differ from update to update.
    """

    plugin: PluginRef
    """A plugin of kind `objective`, with its resolved config."""
    requires: frozenset[str]
    """Columns that every mini-batch must carry."""
    outputs: tuple[OutputSpec, ...]
    """Outputs that the engine computes with gradient."""
    unit: Unit = "sample"
    """Unit of samples that dispatch and micro-batches keep together, found by `pair_id` or `group_id`."""
    scalars: Mapping[str, float] = attrs.field(factory=dict)
    """Weights that `term` gets, by name."""

    @property
    def output_names(self) -> frozenset[str]:
        """Names of the outputs."""
        return frozenset(output.name for output in self.outputs)


@attrs.frozen(kw_only=True, eq=False)
class ObjectiveTerm:
    """One micro-batch's part of the objective.

    Attributes:
        loss: float32 [], a sum that is already divided by the mini-batch's denominators; carries the gradient.
        metrics: figures that may still be tensors; `dovetail_stages.numerics.resolve_metrics` fetches and merges them.
        finite: bool [], whether the loss and every output that it was made of is finite. An output may be NaN
            where neither loss nor gradient shows it, as where a token is clipped or rejected.
    """

    loss: Float[Tensor, ""]
    metrics: Mapping[str, Metric]
    finite: Bool[Tensor, ""]


class Objective(ColumnPlugin):
    """A loss over packed samples that does not depend on how they are cut into micro-batches."""

    unit: ClassVar[Unit] = "sample"
    """Unit of samples that a term must see together, in any order."""
    trained_at: ClassVar[Literal["tokens", "end"]] = "tokens"
    """Tokens with `response_mask` 1 in a run on a dataset's examples: `tokens`, those that are trained on; `end`, one token after each
    response, whose value stands for the whole text."""
    key_figures: ClassVar[Mapping[str, Literal["up", "down"]]] = {"loss": "down"}
    """Metrics of `term` that show progress, without the role's name, each with its better direction. Console, summary and report show
    them first, for training and, where `validate` computes them, for held-out examples."""
    scalars: ClassVar[Mapping[str, float]] = {}
    """Weights that may change between updates, each with its default."""

    @classmethod
    @abstractmethod
    def outputs(cls, config: PluginConfig) -> tuple[OutputSpec, ...]:
        """Return the outputs that the engine must compute with gradient, such as `OUTPUTS["log_probs"]`."""

    @classmethod
    def spec(cls, plugin: PluginRef, scalars: Mapping[str, float]) -> ObjectiveSpec:
        """Return the spec from which workers build the objective.

        Args:
            plugin: refers to this class, with its config.
            scalars: the scalars that differ from their defaults.

        Raises:
            ConfigError: the objective has no such scalar.
        """
        for name in scalars.keys() - cls.scalars.keys():
            near = nearest(name, cls.scalars)
            raise ConfigError(
                f"{name!r} is not a scalar of objective {cls.name!r}; expected one of {sorted(cls.scalars)}",
                hint=f"did you mean {near!r}?" if near else None,
            )
        outputs = cls.outputs(plugin.config)
        columns = set(cls.requires(plugin.config)).union(*(output.reads for output in outputs))
        if cls.unit != "sample":
            columns.add(UNIT_COLUMNS[cls.unit])
        return ObjectiveSpec(
            plugin=plugin,
            requires=frozenset(columns),
            outputs=outputs,
            unit=cls.unit,
            scalars={**cls.scalars, **scalars},
        )

    def prepare(self, mini_batch: Batch, reduction: Reduction) -> Batch:
        """Return the mini-batch with the columns that the loss computes over all of it.

        Args:
            mini_batch: this rank's part of the mini-batch, with the required columns, which are finite where the mask is 1.
            reduction: sums over the ranks that hold the other parts.

        Raises:
            ColumnError: a column is not as the objective needs it.
        """
        return mini_batch

    @abstractmethod
    def denominators(self, mini_batch: Batch, reduction: Reduction) -> Mapping[str, float]:
        """Return the denominators of the mini-batch's sums, by name.

        Args:
            mini_batch: this rank's part of the prepared mini-batch.
            reduction: sums over the ranks that hold the other parts.
        """

    @abstractmethod
    def term(
        self,
        outputs: Mapping[str, Float[Tensor, "T ..."]],
        micro_batch: Batch,
        denominators: Mapping[str, float],
        scalars: Mapping[str, float],
    ) -> ObjectiveTerm:
        """Return this micro-batch's part of the loss.

        Args:
            outputs: the tensors that `outputs` names, aligned with the packed `response_mask`. They carry the gradient;
                values at masked tokens do not matter.
            micro_batch: whole units of the prepared mini-batch.
            denominators: the denominators of the whole mini-batch.
            scalars: a value for each scalar of the class.

        Raises:
            ColumnError: a column does not line up with the response tokens.
        """
