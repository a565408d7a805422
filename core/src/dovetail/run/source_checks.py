"""Checks of an experience source: the samples that it gives, and the weights that it sends. Errors name the source and its distribution."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from dovetail.batch.batch import Batch
from dovetail.batch.columns import Column, complaints_about
from dovetail.errors import ColumnError, PluginBrokenError
from dovetail.interfaces.plugin import Logger
from dovetail.interfaces.source import ExperienceSource, StepAsk
from dovetail.interfaces.stage import Experience, StepContext
from dovetail.plugins.titles import called, describe, title_of
from dovetail.run.actor_weights import ActorWeights

KEY = ("epoch", "prompt_id", "attempt")
OF_IMAGES = frozenset({"media", "image_mask"})
"""Columns that only samples with images have."""


def keys_of(batch: Batch) -> set[tuple[int, int, int]]:
    """Return the set of (epoch, prompt, attempt) of all samples."""
    return set(zip(*(batch[column].tolist() for column in KEY), strict=True))


def collected(source: ExperienceSource, step: StepContext, ask: StepAsk) -> Experience:
    """Collect the samples that `ask` requests for a step from the experience source, the plugin that provides them.

    Raises:
        PluginBrokenError: the source does not return an `Experience`.
    """
    found = _called(source, source.collect, step, ask)
    if not all(hasattr(found, name) for name in ("samples", "reasons", "batch")):
        problem = f"returned {describe(found)} from `collect`, not an experience"
        hint = "return an object with `samples`, `reasons` and `batch()`"
        raise _broken(source, problem, hint)
    return found


def batch_of(source: ExperienceSource, step: StepContext, known: Mapping[str, Column]) -> Batch:
    """Return the columns of a step before its first stage, after checks.

    The number of groups is checked in each step, the columns in a process's first step.

    Args:
        source: the experience source that gave the columns.
        step: the step, whose experience holds the columns.
        known: the declared columns by name: those of core and of the run's plugins.

    Raises:
        PluginBrokenError: the groups or columns differ from those that the source declares.
    """
    batch: Any = _called(source, step.experience.batch)
    if not isinstance(batch, Batch):
        problem = f"collected an experience whose `batch()` returned {describe(batch)}, not a Batch"
        raise _broken(source, problem, "end `batch()` with `return Batch({…})`")
    if step.first and len(batch):
        planned = step.facts.plugins["source"]
        promised = planned.cls.gives(planned.config, step.facts)
        allowed = promised | planned.cls.on_request | OF_IMAGES
        if absent := sorted(promised - set(batch.names)):
            problem = f"returned no column {absent[0]!r}, which its `gives` promises"
            raise _broken(
                source, problem, "put the column into the batch, or leave it out of `gives`"
            )
        if extra := sorted(set(batch.names) - allowed):
            problem = f"returned the column {extra[0]!r}, which it does not declare"
            raise _broken(
                source, problem, "name the column in `gives`, or leave it out of the batch"
            )
        if complaints := complaints_about(batch, known):
            problem = (
                f"returned columns that differ from their declaration: {'; '.join(complaints)}"
            )
            raise _broken(
                source,
                problem,
                "give the columns their declared dtypes and shapes (`dovetail.batch.GLOSSARY`)",
            )
    wanted, kept = step.config.data.train_batch_size, keys_of(batch) if len(batch) else set()
    every = kept | set(step.experience.reasons)
    if len(every) < wanted or len(kept) > wanted:
        problem = f"collected {len(every)} of the {wanted} groups that step {step.number} takes"
        if len(kept) > wanted:
            problem = f"collected {len(kept)} groups for step {step.number}, which takes {wanted}"
        raise _broken(
            source,
            problem,
            "collect `ask.groups` groups, each with its own key; enter a group that is not trained on in `reasons`, with the reason",
        )
    return batch


@contextmanager
def publishing(source: ExperienceSource, weights: ActorWeights, logger: Logger) -> Iterator[None]:
    """Check that a source sends the actor's weights within the block.

    Sending weights twice is logged as a warning: it only costs time, and is right if all receivers were lost in between.

    Raises:
        PluginBrokenError: the source did not send changed weights.
    """
    before = weights.sent
    yield
    if (times := weights.sent - before) > 1:
        title = title_of("source", source)
        logger.warning(f"{title} sent weights {times} times in one call of `publish`")
    if source.follows and weights.stale:
        problem = "sent no weights in `publish`, though the actor's weights have changed since it last sent them"
        hint = "send them in `with site.weights.sending(…)`, or set `follows = False`"
        raise _broken(source, problem, hint)


def _called(source: ExperienceSource, method: Callable[..., Any], *arguments: object) -> Any:
    """Call a method of the source, and name the source in its errors."""
    title = partial(title_of, "source", source)
    try:
        return called(title, method, *arguments)
    except ColumnError as error:
        error.during(title())
        raise


def _broken(source: ExperienceSource, problem: str, hint: str) -> PluginBrokenError:
    return PluginBrokenError(f"{title_of('source', source)} {problem}", hint=hint)
