"""Objective: the loss that a training engine minimises for a role; ObjectiveSpec: the description from which workers build it.

For every objective an engine calls `prepare` once a mini-batch, then `denominators` for the whole mini-batch, and `term` for every
micro-batch. A term is a sum that is already divided by the denominators, so that the engine only adds the gradients of the terms.
Legend: N samples, T response tokens, packed end to end.
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
    """Shape of one token's value; () is a scalar. 0 stands for a size that the caller chooses."""
    reads: frozenset[str] = frozenset()
    """Columns that the output is computed from, besides the columns that every forward pass reads."""

    def sized(self, *inner: int, reads: Iterable[str] = ()) -> OutputSpec:
        """Return this spec with `inner` as the shape of one token's value, and with `reads` as further columns that the output needs."""
        return attrs.evolve(self, inner=inner, reads=self.reads.union(reads))


@attrs.frozen(kw_only=True)
class ObjectiveSpec:
    """A description of an objective, from which workers build the objective (`dovetail_stages.numerics.build_objective`).

    `dovetail.plugins.objective_spec` makes a spec. Workers cache the objective that they built for a plugin and its config.
    `scalars`, such as a KL coefficient, may change from update to update.
    """

    plugin: PluginRef
    """A plugin of kind `objective`, with its resolved config."""
    requires: frozenset[str]
    """Columns that every mini-batch must carry."""
    outputs: tuple[OutputSpec, ...]
    """Outputs that the engine computes with gradient."""
    unit: Unit = "sample"
    """Samples that stay on one rank and in one micro-batch: a sample, a pair (`pair_id`) or a group (`group_id`)."""
    scalars: Mapping[str, float] = attrs.field(factory=dict)
    """Values of `Objective.scalars` that `Objective.term` gets, by name, such as a KL coefficient."""

    @property
    def output_names(self) -> frozenset[str]:
        """Names of the outputs."""
        return frozenset(output.name for output in self.outputs)


@attrs.frozen(kw_only=True, eq=False)
class ObjectiveTerm:
    """One micro-batch's part of the objective.

    Attributes:
        loss: float32 [], the sum of losses, already divided by the mini-batch's denominators; carries the gradient.
        metrics: metrics whose values may still be tensors; `dovetail_stages.numerics.resolve_metrics` fetches and merges them.
        finite: bool [], whether the loss and all outputs that it depends on are finite. A NaN output need not
            make the loss or the gradient NaN, for example on a clipped token.
    """

    loss: Float[Tensor, ""]
    metrics: Mapping[str, Metric]
    finite: Bool[Tensor, ""]


class Objective(ColumnPlugin):
    """A loss over packed samples that does not depend on the split into micro-batches."""

    unit: ClassVar[Unit] = "sample"
    """Samples that one call of `term` must get together, in any order: a sample, a pair or a group."""
    trained_at: ClassVar[Literal["tokens", "end"]] = "tokens"
    """Which tokens have `response_mask` 1 in a run on a dataset's examples. `tokens`: the tokens to train on. `end`: one token after each
    response, whose value stands for the whole text."""
    key_figures: ClassVar[Mapping[str, Literal["up", "down"]]] = {"loss": "down"}
    """Metrics of `Objective.term` that show progress, each with its better direction; the names lack the role's prefix. Console, summary
    and report show these metrics first, for training and, if `validate` computes them, for held-out examples."""
    scalars: ClassVar[Mapping[str, float]] = {}
    """Coefficients of the loss that may change between updates, by name, each with its default."""

    @classmethod
    @abstractmethod
    def outputs(cls, config: PluginConfig) -> tuple[OutputSpec, ...]:
        """Return the outputs that the engine must compute with gradient, such as `OUTPUTS["log_probs"]`."""

    @classmethod
    def spec(cls, plugin: PluginRef, scalars: Mapping[str, float]) -> ObjectiveSpec:
        """Return the spec from which workers build the objective.

        Args:
            plugin: the reference to this class, with its config.
            scalars: the scalars that differ from their defaults.

        Raises:
            ConfigError: the objective does not have one of the scalars.
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
        """Return the mini-batch with the columns that the loss computes over the whole mini-batch.

        Args:
            mini_batch: this rank's part of the mini-batch, with the required columns, which are finite where the mask is 1.
            reduction: the sum over the ranks that share the mini-batch.

        Raises:
            ColumnError: a column does not meet the objective's needs.
        """
        return mini_batch

    @abstractmethod
    def denominators(self, mini_batch: Batch, reduction: Reduction) -> Mapping[str, float]:
        """Return the denominators of the mini-batch's sums, by name.

        Args:
            mini_batch: this rank's part of the prepared mini-batch.
            reduction: the sum over the ranks that share the mini-batch.
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
            outputs: the model outputs, by name, aligned with the packed `response_mask`. The tensors carry the gradient;
                values at masked tokens do not matter.
            micro_batch: samples of the prepared mini-batch, in whole units (see `unit`).
            denominators: the denominators of the whole mini-batch.
            scalars: the current value of each coefficient in the class attribute `scalars`, by name.

        Raises:
            ColumnError: a column is not aligned with the response tokens.
        """
