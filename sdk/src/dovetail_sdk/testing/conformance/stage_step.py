"""The parts of a step for the suite of stages: facts of a plan, batches, and models with random outputs.

Legend: N samples, T response tokens.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from dovetail.batch import Batch, Column, Ragged
from dovetail.config import config_from_mapping
from dovetail.dispatch import Mesh
from dovetail.dispatch.future import Future
from dovetail.errors import ConfigError
from dovetail.interfaces import OUTPUTS, OutputSpec, PlanFacts, PluginContext
from dovetail.metrics import Mean, Metric
from dovetail.planning.counts import count
from dovetail.planning.resolved_plugins import choose
from dovetail_sdk.testing.conformance.random_batches import along_responses, beside, random_batch

Answer = Callable[[str, Batch, frozenset[str | OutputSpec]], Batch]
"""(role, batch, outputs) → the outputs of a forward pass of the role's model."""


@functools.cache
def plan_facts(overrides: tuple[str, ...], required: frozenset[tuple[str, str]]) -> PlanFacts:
    """Return the facts of a run whose config sets only `model.path` and the overrides; stages declare their needs from these facts.

    Args:
        overrides: `key=value` overrides of the config.
        required: pairs of a column and the stage that requires the column.

    Raises:
        ConfigError: an override is wrong.
        PluginError: a plugin that the config selects is not installed.
    """
    config = config_from_mapping({"model": {"path": "tiny"}}, list(overrides)).config
    return PlanFacts(
        config=config,
        plugins=choose(config),
        updates_per_step=count(config, None).updates_per_step,
        required=dict(required),
    )


def step_batch(
    names: Iterable[str],
    *,
    seed: int,
    groups: int,
    n: int,
    by_token: bool,
    declared: Sequence[Column] = (),
) -> Batch:
    """Return a random batch of groups × n samples of 0 to 12 tokens, as input of a stage.

    Args:
        names: columns to add to `group_id`, `response_mask`, `scores` and `token_rewards`.
        seed: the random seed.
        groups: number of prompts.
        n: the number of samples per prompt.
        by_token: whether `advantages` and `returns` are [T] rather than [N].
        declared: columns that the plugin declares; floats are drawn from a normal distribution, objects are None.
    """
    batch = random_batch(names, seed=seed, groups=groups, n=n, declared=declared)
    rng = np.random.default_rng(seed)
    size, mask = len(batch), batch["response_mask"]
    prompts = [rng.integers(3, 97, length) for length in rng.integers(1, 7, size)]
    known: dict[str, Any] = {
        "sample_id": [f"sample-{row}" for row in range(size)],
        "epoch": np.zeros(size, np.int64),
        "prompt_id": 10 + batch["group_id"],
        "attempt": np.zeros(size, np.int64),
        "sample_index": np.arange(size) % n,
        "trajectory_id": np.arange(size),
        "turn_ids": mask.with_values(np.zeros(mask.total, np.int64)),
        "prompt_ids": Ragged.from_list(prompts, dtype=np.int64),
        "response_ids": mask.with_values(rng.integers(3, 97, mask.total)),
        "token_weight_versions": mask.with_values(np.ones(mask.total, np.int64)),
        "finish_reason": [str(reason) for reason in rng.choice(["stop", "length"], size)],
    }
    if not by_token:
        known |= {
            name: rng.normal(size=size).astype(np.float32) for name in ("advantages", "returns")
        }
    return batch.with_columns({n: values for n, values in known.items() if n in batch})


def with_masked_row(batch: Batch, row: int) -> Batch:
    """Return the batch with sample `row` fully masked; the other ragged columns that depend on the mask are 0 there too."""
    kept = ("response_ids", "token_weight_versions", "turn_ids")
    changed = {}
    for name, column in along_responses(batch).items():
        if name not in kept:
            hidden = beside(column.row_index == row, column.values)
            values = np.where(hidden, column.dtype.type(0), column.values)
            changed[name] = column.with_values(values)
    return batch.with_columns(changed)


def not_finite(batch: Batch) -> list[str]:
    """Return the names of the columns that hold NaN or infinity."""
    columns = {name: getattr(column, "values", column) for name, column in batch.columns.items()}
    return [
        name
        for name, values in columns.items()
        if isinstance(values, np.ndarray)
        and values.dtype.kind == "f"
        and not np.isfinite(values).all()
    ]


def random_outputs(role: str, batch: Batch, outputs: frozenset[str | OutputSpec]) -> Batch:
    """Return random columns that depend only on role, output and tokens; masked tokens hold 0. Outputs with K token ids per token get the
    ids 0 to K − 1.

    Args:
        role: the role of the model.
        batch: a batch with `prompt_ids`, `response_ids`, `response_mask` and `temperature`.
        outputs: the outputs to return: names of `OUTPUTS`, or specs for outputs of a configurable size.

    Raises:
        ColumnError: a column is missing.
        ConfigError: no model gives this output.
    """
    needed = ("prompt_ids", "response_ids", "response_mask", "temperature")
    batch.require(needed, f"a forward pass of {role}")
    specs = {OUTPUTS.get(o, OutputSpec(name=o)) if isinstance(o, str) else o for o in outputs}
    if unknown := sorted({spec.name for spec in specs} - OUTPUTS.keys()):
        raise ConfigError(
            f"a forward pass of {role} can't return the output {unknown[0]!r}; expected one of {sorted(OUTPUTS)}"
        )
    mask = batch["response_mask"]
    columns = {}
    for spec in specs:
        name, rows = spec.name, []
        batch.require(sorted(spec.reads), f"the output {name!r} of {role}")
        for prompt, response in zip(batch["prompt_ids"], batch["response_ids"], strict=True):
            words = (f"{role}/{name}".encode(), prompt.tobytes(), response.tobytes())
            rng = np.random.default_rng([zlib.crc32(part) for part in words])
            rows.append(rng.uniform(0.05, 1.0, (len(response), *spec.inner)))
        values = Ragged.from_list(rows, dtype=np.float64, inner=spec.inner).values
        if "log_probs" in name:
            values = np.log(values)
        if spec.inner:  # probabilities of several words add up to less than 1
            values = -np.sort(-(values - np.log(values.shape[-1])))
        if spec.dtype == "int32":
            values = np.broadcast_to(np.arange(values.shape[-1]), values.shape)
        shown = beside(mask.values.astype(bool), values)
        columns[name] = mask.with_values(np.where(shown, values, 0).astype(spec.dtype))
    return Batch(columns, length=len(batch))


class RandomModel:
    """A worker group of one role whose model returns random outputs.

    Attributes:
        updates: the number of optimizer steps taken.
    """

    def __init__(self, role: str, answer: Answer) -> None:
        self.role, self.mesh = role, Mesh()
        self.updates = 0
        self._answer = answer

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the method of this worker group that has this name."""
        return getattr(self, method)(*args, **kwargs)

    def forward(self, batch: Batch, outputs: frozenset[str | OutputSpec]) -> Future[Batch]:
        """Return random outputs for the response tokens, one ragged column per output."""
        return Future.completed(self._answer(self.role, batch, frozenset(outputs)))

    def update(self, mini_batch: Batch, objective: Any) -> Future[Mapping[str, Metric]]:
        """Count an optimizer step without training anything, and return half the batch size as the loss.

        Raises:
            ColumnError: a column that the objective requires is missing.
        """
        mini_batch.require(sorted(getattr(objective, "requires", ())), f"an update of {self.role}")
        self.updates += 1
        size = float(len(mini_batch))
        return Future.completed({f"{self.role}/loss": Mean(total=0.5 * size, weight=size)})

    def write_weights(self, directory: Path) -> Future[None]:
        """Write nothing: there are no weights."""
        return Future.completed(None)

    def average_weights(self, directory: Path, share: float) -> Future[None]:
        """Change nothing: outputs do not depend on weights."""
        assert 0 < share <= 1
        return Future.completed(None)

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def __getattr__(self, method: str) -> NoReturn:
        raise AssertionError(
            f"the stage calls {method!r} of the role {self.role!r}; expected forward, update, write_weights or average_weights"
        )


class Roles(dict[str, Any]):
    """Worker groups by role. Access to an unknown role raises an error.

    Attributes:
        refused: roles that were requested and do not exist.
    """

    def __init__(self, roles: Iterable[str], answer: Answer) -> None:
        super().__init__({role: RandomModel(role, answer) for role in roles})
        self.refused: list[str] = []

    def updates(self) -> dict[str, int]:
        """Return the number of optimizer steps taken, by role."""
        return {role: group.updates for role, group in self.items() if group.updates}

    def __missing__(self, role: str) -> NoReturn:
        self.refused.append(role)
        raise AssertionError(
            f"the stage uses the role {role!r}, but its attribute `roles` does not name that role"
        )


class ControllerPlugins(dict[str, Any]):
    """Plugins by the config key that selects each; a plugin is constructed and started on first access."""

    def __init__(self, facts: PlanFacts) -> None:
        super().__init__()
        self._facts = facts

    def __missing__(self, path: str) -> Any:
        selected = self._facts.plugins[path]
        self[path] = plugin = selected.cls(selected.config, PluginContext(seed=1))
        plugin.start()
        return plugin
