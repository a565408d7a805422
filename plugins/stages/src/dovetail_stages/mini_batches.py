"""Optimizer steps over a batch: mini-batches of whole groups, several passes, and early stopping."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int64, Shaped

from dovetail.batch import Batch
from dovetail.errors import ConfigError
from dovetail.interfaces import ObjectiveSpec, StepContext
from dovetail.metrics import Metric, is_empty, merge_metrics, values
from dovetail.plugins import broken_plugin
from dovetail.sections import PluginSection

APPROX_KL = "actor/approx_kl"
"""The metric that `actor.max_kl` bounds: KL of a mini-batch to the old policy, in nats a token."""


def mini_batch_rows(
    group_ids_N: Shaped[np.ndarray, "N"],
    *,
    prompts: int,
    epochs: int = 1,
    shuffle: bool = False,
    seed: int = 0,
    step: int,
) -> Iterator[Int64[np.ndarray, "M"]]:
    """Yield the rows of each mini-batch, in ascending order.

    Each pass partitions the batch into mini-batches of whole groups, none of them empty. Groups are taken in
    ascending order of their ids, or with `shuffle` in a random order, drawn anew for each pass.

    Args:
        group_ids_N: int64 [N], ids of the samples' groups.
        prompts: number of groups in a mini-batch; the last mini-batch of a pass may have fewer.
        epochs: number of passes over the batch.
        shuffle: whether every pass takes the groups in a new random order.
        seed: the seed of the run, from which the orders derive.
        step: the run's current step, counted from 1, from which the orders derive as well.
    """
    ids_G, rank_N = np.unique(group_ids_N, return_inverse=True)
    for epoch in range(epochs):
        place_G = np.arange(len(ids_G))
        if shuffle:
            place_G = shuffled_places(len(ids_G), seed=seed, step=step, epoch=epoch)
        number_N = place_G[rank_N] // prompts
        order_N = np.argsort(number_N, kind="stable")
        sizes = np.bincount(number_N, minlength=-(-len(ids_G) // prompts))
        yield from np.split(order_N, np.cumsum(sizes)[:-1]) if len(ids_G) else ()


def shuffled_places(count: int, *, seed: int, step: int, epoch: int) -> Int64[np.ndarray, "G"]:
    """Return a random position for each of `count` groups, int64 [G], which depends on seed, step and epoch alone.

    Sorts raw 64-bit draws of Philox (Salmon et al., SC 2011): unlike NumPy's `permutation`, raw draws are the
    same in every version of NumPy.
    """
    name = f"{seed}/mini_batches/{step}/{epoch}".encode()
    key = np.frombuffer(hashlib.blake2b(name, digest_size=16).digest(), dtype="<u8")
    draws = np.random.Philox(key=key.astype(np.uint64)).random_raw(count)
    return np.argsort(draws, kind="stable").astype(np.int64)


def train_role(
    role: str,
    batch: Batch,
    step: StepContext,
    objective: ObjectiveSpec,
    *,
    prompts: int,
    epochs: int,
    max_kl: float | None = None,
) -> tuple[dict[str, float], bool]:
    """Train a role with one optimizer step for each mini-batch, and count these optimizer steps in `step.updates`.

    Args:
        role: the role of the trained model.
        batch: N samples with the columns that the objective requires, and `group_id`.
        step: the current step.
        objective: the objective to minimise.
        prompts: number of groups in a mini-batch.
        epochs: number of passes over the batch.
        max_kl: the bound of `actor/approx_kl`; None for no bound. After a mini-batch above the bound, the remaining mini-batches are
            skipped. A mini-batch's KL is measured before its own optimizer step, so the first is 0.

    Returns:
        Metrics merged over the mini-batches that were trained on, and whether some were skipped.

    Raises:
        PluginBrokenError: the engine did not return metrics; checked in the first step only.
        NumericsError: a loss or gradient is not finite; that mini-batch changed no weight.
        ConfigError: `max_kl` is set, and the first update reports no `actor/approx_kl`.
    """
    parts: list[Mapping[str, Metric]] = []
    mini_batches = list(
        mini_batch_rows(
            batch["group_id"],
            prompts=prompts,
            epochs=epochs,
            shuffle=step.config.actor.shuffle,
            seed=step.config.seed,
            step=step.number,
        )
    )
    for rows in mini_batches:
        metrics: Any = step.roles[role].update(batch.take(rows), objective).result()
        step.updates[role] += 1
        if step.first:
            check_update_metrics(metrics, role, step.facts.engine(role).config)
        parts.append(metrics)
        if max_kl is not None and _kl_of(metrics, max_kl) > max_kl:
            break
    return values(merge_metrics(parts)), len(parts) < len(mini_batches)


def _kl_of(metrics: Mapping[str, Metric], max_kl: float) -> float:
    if APPROX_KL not in metrics:
        raise ConfigError(
            f"actor.max_kl is {max_kl:g}, but the actor's loss reports no metric {APPROX_KL} to compare with it",
            hint="set actor.max_kl=null, choose a policy loss that reports it, such as algorithm.policy_loss=ppo_clip, or "
            "report a metric of that name from your actor.objective",
        )
    return metrics[APPROX_KL].value


def check_update_metrics(found: object, role: str, section: PluginSection) -> None:
    """Check the metrics that an engine's `update` returned.

    Args:
        found: metrics by name, merged over ranks; or a list with each rank's result if these could not be merged.
        role: the role that was updated.
        section: the config section that selects the engine, by which the error names the plugin.

    Raises:
        PluginBrokenError: `found` is not a mapping, or a metric has a wrong type or name, or is not finite; names the plugin with its
            version.
    """
    if isinstance(found, list) and found:
        found = found[0]  # the first rank's: results that can't be merged come as a list
    if not isinstance(found, Mapping):
        problem = f"update returned {type(found).__name__}, not metrics by name"
        raise broken_plugin("engine", section, problem)
    for name, metric in found.items():
        if problem := _metric_problem(name, metric, role):
            raise broken_plugin("engine", section, f"update returned the metric {name!r} {problem}")


def _metric_problem(name: object, metric: object, role: str) -> str:
    """Return what is wrong with a metric of an update; empty if nothing is.

    A metric to which no value was added may be non-finite, since `dovetail.metrics.values` leaves such metrics out.
    """
    if not isinstance(name, str) or not all(name.partition("/")):
        return (
            f"of the {role}; expected a name with a prefix and a slash, such as {role}/loss, from the engine or "
            "the objective"
        )
    if not isinstance(metric, Metric):
        return f"as {type(metric).__name__}, which can't be merged with those of other mini-batches"
    value = metric.value
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return f"with the value {value!r:.60}; expected a number"
    finite = is_empty(metric) or math.isfinite(value)
    return "" if finite else f"with the value {value:g}; expected a finite number"
