"""Plugin: the base class, with a name, an interface range, capabilities, a Config, `start` and `close`."""

from __future__ import annotations

import logging
from abc import ABC
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import attrs

from dovetail.sections import ModelSection, PluginSection, TrainingSection

if TYPE_CHECKING:
    import numpy as np

    from dovetail.batch.columns import Column
    from dovetail.dispatch.mesh import Mesh

PluginConfig: TypeAlias = Any
"""An instance of a plugin's own `Config`. Only the plugin knows the class; the interface passes the config on without reading it."""
Tokenizer: TypeAlias = Any
"""A tokenizer of transformers. Its classes are not typed, and planning a run does not import them."""
Logger: TypeAlias = Any
"""A logger with the standard methods: `logging.Logger`, or structlog's, whose methods take keywords besides."""


@runtime_checkable
class Reduction(Protocol):
    """Sums over the data-parallel ranks that share a batch; without other ranks, the identity."""

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Return the elementwise sum over ranks. `values` has the same shape and dtype on every rank."""
        ...


class LocalReduction:
    """The reduction of a single rank."""

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Return the values themselves, of any shape."""
        return values


@attrs.frozen(kw_only=True)
class PluginContext:
    """Facts about the run that a plugin receives. A context is cheap to create and to send to a worker."""

    seed: int = 0
    """The run's seed."""
    role: str = ""
    """Role of the plugin: `actor`, `ref`, `critic`, a name of `roles` in the config, `rollout`, … or empty."""
    run_directory: Path | None = None
    """Directory that the run writes to; None outside a run."""
    cache_dir: str | None = None
    """Directory of a dataset's cache (`data.cache_dir`); None: `$DOVETAIL_CACHE`, or `~/.cache/dovetail`."""
    model: ModelSection | None = None
    """The config section of this role's model."""
    head: Literal["lm", "value"] = "lm"
    """Last layer of the role's model: a language model's head, or one value a token."""
    trained: bool = True
    """Whether the weights of the role's model change, by training or by copying from the actor; a frozen model gets no adapter."""
    training: TrainingSection | None = None
    """Optimizer and micro-batch settings of this role; None for roles without a training engine."""
    total_steps: int | None = None
    """Optimizer steps that the run will take, for learning-rate schedules."""
    tokenizer: Tokenizer = None
    """The run's Hugging Face tokenizer; None if there is none."""
    transport: Any = None
    """The WeightTransport that this role sends or receives weights with."""
    weights_follow: bool = False
    """Whether a rollout gets an update of all weights before its first request. If so, the rollout may skip the weights on disk, and
    refuses requests until the update."""
    cache_tokens: int | None = None
    """Largest number of prompt and response tokens that a rollout replica holds at once, by which engines size their KV cache; None if
    unknown."""
    reward_functions: Any = None
    """For a reward manager: the `dovetail_rollouts.RewardFunctions` of the run, which choose for each row the function that scores it."""
    runtime: Any = None
    """The run's Runtime, with which a reward manager or a stage may start processes; None for other plugins."""
    mesh: Mesh | None = None
    """The mesh of the worker group; None means one process."""
    rank: int = 0
    """This worker's rank in its group."""
    device: str = "cpu"
    """The torch device of this worker, such as `cpu` or `cuda:0`."""
    machine: str | None = None
    """Name of this worker's machine if the run is on several machines; else None."""
    machine_rank: int = 0
    """Index of this worker among the group's ranks on the same machine, from 0."""
    reduction: Reduction = attrs.field(factory=LocalReduction)
    """The sum over the ranks that share a batch."""
    logger: Logger = attrs.field(factory=lambda: logging.getLogger("dovetail"))
    """A logger with the standard methods."""


class Plugin(ABC):
    """Base class of every plugin. Construction is cheap and uses no accelerator; `start` does the expensive work."""

    name: ClassVar[str]
    """Name of the plugin, unique among plugins of the same kind: `[a-z][a-z0-9_]*`."""
    api: ClassVar[str]
    """Range of interface versions that the plugin works with, such as `">=1.0,<2"`."""
    aliases: ClassVar[tuple[str, ...]] = ()
    """Further names that select the plugin."""
    capabilities: ClassVar[frozenset[str]] = frozenset()
    """Optional abilities beyond the interface, which decide which conformance tests run."""
    columns: ClassVar[tuple[Column, ...]] = ()
    """Columns of the plugin that core does not define, each a `dovetail.batch.Column`."""
    Config: ClassVar[type[PluginSection]] = PluginSection
    """The plugin's config class, frozen attrs, from `<package>/config.py`."""

    def __init__(self, config: PluginConfig, context: PluginContext) -> None:
        self.config = config
        self.context = context

    def start(self) -> None:
        """Load models, start processes and allocate accelerator memory."""

    def close(self) -> None:
        """Release all resources; safe to call twice."""

    def state(self) -> Mapping[str, Any]:
        """Return the state that a checkpoint keeps.

        Checkpoints keep the state of the trainer, stages, the advantage estimator, the reward manager, a rollout correction before the
        update, KL controllers and sample filters. Other plugins have no state in checkpoints.

        Returns:
            None, bool, int, float, str, NumPy arrays of any shape and NumPy scalars, in mappings with string keys, lists and tuples, nested
            in any way. NumPy's dtypes are bool, int8 to int64, uint8 to uint64, float16, float32 and float64. Arrays need no copy: they are
            written before the run continues.

        A value of another type ends the run with a CheckpointError, before the first step or when the checkpoint is written. The error
        names the plugin, the value's place in the state and its type. Keep a set as a sorted list, bytes as
        `np.frombuffer(data, np.uint8)` and complex64 as `array.view(np.float32)`.
        """
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned, before the first step of a resumed run.

        Args:
            state: the restored state. Arrays have the same dtype, shape and bits, and are contiguous, writable and in the machine's byte
                order. NumPy scalars have the same type. Mappings are dicts; lists and tuples are lists.
        """


class ColumnPlugin(Plugin):
    """A plugin that reads or writes columns of a batch. The columns depend on the plugin's config alone."""

    @classmethod
    def requires(cls, config: PluginConfig) -> frozenset[str]:
        """Return the names of the columns that the plugin reads under this config."""
        return frozenset()

    @classmethod
    def provides(cls, config: PluginConfig) -> frozenset[str]:
        """Return the names of the columns that the plugin can write under this config."""
        return frozenset()
