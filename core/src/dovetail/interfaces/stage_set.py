"""StageSet: the stages of a step that the config need not name, and their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from dovetail.errors import PlanError
from dovetail.interfaces.plugin import Plugin, PluginConfig

if TYPE_CHECKING:
    from dovetail.batch.batch import Batch
    from dovetail.interfaces.objective import ObjectiveSpec
    from dovetail.interfaces.stage import PlanFacts
    from dovetail.sections import PluginSection


class StageSet(Plugin):
    """Names the stages of a step for one family of algorithms, selected by `algorithm.stage_set`.

    The planner asks each stage whether it is active (`Stage.because`). A stage in `algorithm.stages` replaces the set's stage of the same
    name. The class methods depend on the set's own config and the facts alone.
    """

    stages: ClassVar[tuple[str, ...]]
    """Names of stages, in their order within each phase. `NAME@DISTRIBUTION` names the stage of one distribution if several have a
    stage `NAME`."""

    @classmethod
    def selects(
        cls, config: PluginConfig, facts: PlanFacts
    ) -> Mapping[str, tuple[str, PluginSection | None]]:
        """Return the kind and the config section of every plugin that the set's stages use, by key path."""
        return {}

    @classmethod
    def run_by_stages(cls, config: PluginConfig, facts: PlanFacts) -> frozenset[str]:
        """Return the key paths of plugins that a stage of the set runs. The stage then requires the columns that these plugins require."""
        return frozenset()

    @classmethod
    def lacks(cls, config: PluginConfig, facts: PlanFacts, column: str) -> str | None:
        """Return why no stage of the set writes a column; None for a column that belongs to other plugins."""
        return None

    @classmethod
    def check(cls, config: PluginConfig, facts: PlanFacts, stages: Sequence[Any]) -> None:
        """Check the config against the active stages.

        Args:
            config: the plugin's own config.
            facts: the facts with the finished list of stages.
            stages: the active stages of the plan: `name`, `reads`, `provides`, `rewrites` and others.

        Raises:
            PlanError: config and stages contradict each other; the error names both.
        """

    @classmethod
    def measure(
        cls, spec: ObjectiveSpec, batch: Batch, outputs: Batch, seed: int
    ) -> dict[str, float]:
        """Return the metrics of an objective on one mini-batch of samples that are not trained on.

        Args:
            spec: the spec of the objective.
            batch: N samples, with the columns that the objective requires.
            outputs: N rows with the model outputs that the objective reads, by name.
            seed: the run's seed.

        Raises:
            PlanError: the set does not measure objectives.
        """
        raise PlanError(
            f"the stage set {cls.name!r} can't compute the loss on held-out examples: it does not define `measure`",
            hint="set data.val_files=[], or define `measure` in the stage set",
        )
