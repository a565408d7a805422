"""The updates of a step: a batch cut into mini-batches of whole groups, pass after pass, and when to stop early."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from jaxtyping import Int64, Shaped

from dovetail.batch.batch import Batch
from dovetail.errors import ConfigError
from dovetail.metrics import Metric, merge_metrics, values

if TYPE_CHECKING:
    from dovetail.interfaces.objective import AnyObjectiveSpec

APPROX_KL = "actor/approx_kl"
"""The metric by which `actor.max_kl` stops: KL of a mini-batch to the old policy, in nats a token."""


@attrs.frozen(kw_only=True)
class Cut:
    """How the batch of a step becomes mini-batches."""

    prompts: int
    """Groups a mini-batch; the last one of a pass may have fewer."""
    epochs: int = 1
    """Passes over the batch."""
    shuffle: bool = False
    """Another order of the groups in every pass."""
    seed: int = 0
    """The run's seed, which the orders derive from."""

    def rows(
        self, group_ids_N: Shaped[np.ndarray, "N"], step: int
    ) -> Iterator[Int64[np.ndarray, "M"]]:
        """The rows of each mini-batch in turn, ascending; none is empty, and in each pass they partition the batch.

        Groups are taken by their position among those that are there, in ascending order of their ids, or in
        the pass's own order.

        Args:
            group_ids_N: int64 [N], ids of the samples' groups.
            step: number of the step, which the orders derive from.
        """
        ids_G, rank_N = np.unique(group_ids_N, return_inverse=True)
        for epoch in range(self.epochs):
            place_G = np.arange(len(ids_G))
            if self.shuffle:
                place_G = shuffled_places(len(ids_G), seed=self.seed, step=step, epoch=epoch)
            number_N = place_G[rank_N] // self.prompts
            order_N = np.argsort(number_N, kind="stable")
            sizes = np.bincount(number_N, minlength=-(-len(ids_G) // self.prompts))
            yield from np.split(order_N, np.cumsum(sizes)[:-1]) if len(ids_G) else ()


def shuffled_places(count: int, *, seed: int, step: int, epoch: int) -> Int64[np.ndarray, "G"]:
    """A place for each of `count` groups, int64 [G]: a permutation that follows from the three names alone.

    Sorts raw 64-bit draws of Philox (Salmon et al., SC 2011): unlike NumPy's `permutation`, raw draws are the
    same in every version of NumPy.
    """
    name = f"{seed}/mini_batches/{step}/{epoch}".encode()
    key = np.frombuffer(hashlib.blake2b(name, digest_size=16).digest(), dtype="<u8")
    draws = np.random.Philox(key=key.astype(np.uint64)).random_raw(count)
    return np.argsort(draws, kind="stable").astype(np.int64)


@attrs.frozen(kw_only=True)
class Updates:
    """What the updates of a step came to."""

    metrics: Mapping[str, float]
    """Merged over the mini-batches that were trained on."""
    count: int
    """Optimizer steps."""
    stopped: bool = False
    """Whether some were left out because the policy had moved too far."""


def run_updates(
    group: Any,
    batch: Batch,
    objective: AnyObjectiveSpec,
    cut: Cut,
    *,
    step: int,
    max_kl: float | None = None,
    after_each: Callable[[Mapping[str, Metric]], object] = lambda _: None,
) -> Updates:
    """Take one optimizer step for each mini-batch.

    Args:
        group: the worker group that is trained.
        batch: N samples with what the objective requires, and `group_id`.
        objective: what is minimised.
        cut: mini-batches and passes.
        step: number of the step.
        max_kl: leave out the rest once `actor/approx_kl` of a mini-batch is above this. It is measured
            before the mini-batch's own optimizer step, so that it is 0 in the first one.
        after_each: called with its metrics after every optimizer step.

    Raises:
        NumericsError: a loss or gradient is not finite; the mini-batch at fault changed nothing.
        ConfigError: `max_kl` is set, and the first update reports no `actor/approx_kl`.
    """
    parts: list[Mapping[str, Metric]] = []
    pieces = list(cut.rows(batch["group_id"], step))
    for rows in pieces:
        metrics = group.update(batch.take(rows), objective).result()
        after_each(metrics)
        parts.append(metrics)
        if max_kl is not None and _kl_of(metrics, max_kl) > max_kl:
            break
    stopped = len(parts) < len(pieces)
    return Updates(metrics=values(merge_metrics(parts)), count=len(parts), stopped=stopped)


def with_loss_mask(batch: Batch) -> Batch:
    """The batch as the actor trains on it: `loss_mask`, where there is one, in place of `response_mask`."""
    if "loss_mask" not in batch:
        return batch
    return batch.with_columns({"response_mask": batch["loss_mask"]}).drop(["loss_mask"])


def _kl_of(metrics: Mapping[str, Metric], max_kl: float) -> float:
    if APPROX_KL not in metrics:
        raise ConfigError(
            f"actor.max_kl is {max_kl:g}, but the policy loss reports no {APPROX_KL} to compare it with",
            hint="set actor.max_kl=null, or choose a loss that reports it, such as "
            "algorithm.policy_loss=ppo_clip",
        )
    return metrics[APPROX_KL].value
