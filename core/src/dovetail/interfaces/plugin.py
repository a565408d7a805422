"""What every plugin is: a class with a name, an interface range, capabilities, a Config, and a life."""

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
"""A plugin's own `Config`. Only the plugin knows which class that is; the interface passes it on and reads nothing of it."""
Tokenizer: TypeAlias = Any
"""A tokenizer of transformers, whose classes are not typed and are not imported where a run is only planned."""
Logger: TypeAlias = Any
"""A logger with the standard methods: `logging.Logger`, or structlog's, whose methods take keywords besides."""


@runtime_checkable
class Reduction(Protocol):
    """Sums over the data-parallel ranks that share a batch; without other ranks, the identity."""

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Sum element by element over ranks, same shape and dtype on every rank."""
        ...


class LocalReduction:
    """The reduction of a single rank."""

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Return the values themselves, of any shape."""
        return values


@attrs.frozen(kw_only=True)
class PluginContext:
    """What a plugin knows about its run. Cheap to create and to send to a worker."""

    seed: int = 0
    """The run's seed."""
    role: str = ""
    """Role of the plugin: `actor`, `ref`, `critic`, a name of `roles` in the config, `rollout`, … or empty."""
    run_directory: Path | None = None
    """Directory that the run writes to; None outside a run."""
    cache_dir: str | None = None
    """Directory of a dataset's cache (`data.cache_dir`); None: `$DOVETAIL_CACHE`, or `~/.cache/dovetail`."""
    model: ModelSection | None = None
    """The model of this role."""
    head: Literal["lm", "value"] = "lm"
    """Last layer of the role's model: a language model's head, or one value a token."""
    trained: bool = True
    """Whether the weights of the role's model change, by updates or by following the actor; a frozen model gets no adapter."""
    training: TrainingSection | None = None
    """Optimizer and micro-batch settings of this role; None for roles without a training engine."""
    total_steps: int | None = None
    """Optimizer steps that the run will take, for learning-rate schedules."""
    tokenizer: Tokenizer = None
    """The run's Hugging Face tokenizer, where there is one."""
    transport: Any = None
    """The WeightTransport that this role sends or receives weights with."""
    weights_follow: bool = False
    """Whether a rollout gets an update of all weights before its first request. It may then skip the weights on disk, and refuses
    requests until that update."""
    cache_tokens: int | None = None
    """Most tokens of prompts and responses that a rollout replica's samples hold at once, by which engines size their KV cache; None
    where unknown."""
    reward_functions: Any = None
    """A reward manager's `dovetail_rollouts.RewardFunctions`: which function scores a row."""
    runtime: Any = None
    """The run's Runtime, for a reward manager or a stage, which may start processes with it; None elsewhere."""
    mesh: Mesh | None = None
    """The mesh of the worker group; None means one process."""
    rank: int = 0
    """This worker's rank in its group."""
    device: str = "cpu"
    """The torch device of this worker, such as `cpu` or `cuda:0`."""
    machine: str | None = None
    """Name of this worker's machine where the run is on several machines; else None."""
    machine_rank: int = 0
    """This worker's place among the ranks of its group on the same machine, from 0."""
    reduction: Reduction = attrs.field(factory=LocalReduction)
    """Sums over the ranks that share a batch."""
    logger: Logger = attrs.field(factory=lambda: logging.getLogger("dovetail"))
    """A logger with the standard methods."""


class Plugin(ABC):
    """Base of every plugin. Construction is cheap and uses no accelerator; `start` does the work."""

    name: ClassVar[str]
    """Name of the plugin, unique within the kind: `[a-z][a-z0-9_]*`."""
    api: ClassVar[str]
    """Range of interface versions that it works with, such as `">=1.0,<2"`."""
    aliases: ClassVar[tuple[str, ...]] = ()
    """Further names that select it."""
    capabilities: ClassVar[frozenset[str]] = frozenset()
    """Optional abilities beyond the interface; they decide which conformance tests run."""
    columns: ClassVar[tuple[Column, ...]] = ()
    """Columns that core does not define, each a `dovetail.batch.Column`."""
    Config: ClassVar[type[PluginSection]] = PluginSection
    """Its frozen attrs config class, from `<package>/config.py`."""

    def __init__(self, config: PluginConfig, context: PluginContext) -> None:
        self.config = config
        self.context = context

    def start(self) -> None:
        """Load models, start processes, allocate on accelerators."""

    def close(self) -> None:
        """Release everything; safe to call twice."""

    def state(self) -> Mapping[str, Any]:
        """Return the state that a checkpoint keeps.

        Checkpoints keep the state of the trainer, stages, the advantage estimator, the reward manager, a rollout correction before the
        update, KL controllers and sample filters. Other plugins have no state in checkpoints.

        Returns:
            None, bool, int, float, str, NumPy arrays of any shape and NumPy scalars, in mappings with string keys, lists and tuples, nested
            in any way. NumPy's dtypes are bool, int8 to int64, uint8 to uint64, float16, float32 and float64. Arrays need no copy: they are
            written before the run goes on.

        Anything else ends the run with a CheckpointError, before its first step or when the checkpoint is written, which names the plugin, the place in its state and
        the type. A set can be kept as a sorted list, bytes as `np.frombuffer(data, np.uint8)`, complex64 as `array.view(np.float32)`.
        """
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, before the first step of a resumed run.

        Args:
            state: the restored state: arrays with the same dtype, shape and bits, contiguous, writable, and in the machine's byte order;
                NumPy scalars of the same type; mappings as dicts, lists and tuples as lists.
        """


class ColumnPlugin(Plugin):
    """A plugin that reads or writes columns of a batch, depending on its own config alone."""

    @classmethod
    def requires(cls, config: PluginConfig) -> frozenset[str]:
        """Return names of the columns that it reads under this config."""
        return frozenset()

    @classmethod
    def provides(cls, config: PluginConfig) -> frozenset[str]:
        """Return names of the columns that it can write under this config."""
        return frozenset()
