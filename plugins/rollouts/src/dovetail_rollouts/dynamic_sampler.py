"""Rounds of generation: filters drop samples, and groups that lose all samples are replaced by groups of other prompts.

With a filter that drops groups whose rewards are all equal, this is DAPO's dynamic sampling (arXiv 2503.14476).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np
from jaxtyping import Bool

from dovetail.batch import Batch
from dovetail.errors import PluginBrokenError
from dovetail.interfaces import Groups, Sample, SampleFilter
from dovetail.plugins import called, title_of
from dovetail_rollouts.columns import has_baseline, to_batch
from dovetail_rollouts.group import Group

Key = tuple[int, int, int]
"""The key of a prompt in the ledger (`Prompt.key`): the epoch, `Prompt.index`, and the attempt."""


class DynamicSampler:
    """Collects the samples of a step in rounds, until there are as many groups to train on as the step takes.

    Args:
        wanted: the number of groups that the step trains on.
        filters: the sample filters by name, in order.
        temperature: the sampling temperature, which becomes a column of the batch.
        baseline: whether every group has a greedy response as its baseline.
        refills: whether further rounds are allowed; if so, metrics report their number.
        columns: the columns of episodes that filters or stages require: `turn_ids`, `trajectory`.
    """

    def __init__(
        self,
        wanted: int,
        filters: Mapping[str, SampleFilter] | None = None,
        *,
        temperature: float,
        baseline: bool = False,
        refills: bool = False,
        columns: Collection[str] = (),
    ) -> None:
        self._wanted = wanted
        self._filters = dict(filters or {})
        self._temperature, self._columns = temperature, columns
        self._baselines: dict[int, Sample] | None = {} if baseline else None
        self._refills = refills
        self._counts: Counter[str] = Counter()
        for name, chosen in self._filters.items():
            self._counts.update(dict.fromkeys(_counted(name, chosen), 0))
        self.samples, self.kept = (), ()
        self.dropped, self.masked, self.reasons = {}, {}, {}
        self.count = self.prompts = 0

    samples: tuple[Sample, ...]
    """All generated samples, in the order of rounds and prompts."""
    kept: tuple[Sample, ...]
    """The samples that are trained on: scored, and dropped by no filter."""
    dropped: dict[str, str]
    """The name of the filter that dropped a sample, by sample id."""
    masked: dict[str, str]
    """The name of the filter that masked a sample's loss, by sample id."""
    reasons: dict[Key, str]
    """The reason why a prompt is not trained on, by prompt: `filter:<name>`, `baseline_failures` or `reward_failures`."""
    count: int
    """The number of rounds so far."""
    prompts: int
    """The number of prompts so far, over all rounds; this is the group index (`Sample.group`) of the next round's first prompt."""

    @property
    def greedy(self) -> tuple[Sample, ...]:
        """The greedy responses; empty without baselines."""
        return tuple((self._baselines or {}).values())

    @property
    def missing(self) -> int:
        """The number of groups still missing, which the next round generates."""
        return self._wanted - len({sample.group for sample in self.kept})

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers of rounds, prompts, groups and filtered samples, as metrics `filter/…`; empty if there are no filters or refills."""
        if not self._filters and not self._refills:
            return {}
        return {name: float(count) for name, count in self._counts.items()} | {
            "filter/kept_groups": float(self._wanted - self.missing),
            "filter/rounds": float(self.count),
            "filter/generated_prompts": float(self.prompts),
        }

    def add(self, groups: Sequence[Group]) -> None:
        """Add the groups of a round, and run the filters over their samples.

        Samples without a score, or without a score of their baseline, are removed before any filter sees their group.

        Raises:
            PluginBrokenError: a filter raised an error, or did not return one bool for each row of the batch (a row is a sequence).
        """
        self.count += 1
        samples = list[Sample]()
        for number, group in enumerate(groups, self.prompts):
            samples += [attrs.evolve(sample, group=number) for sample in group.samples]
            if self._baselines is not None and group.greedy is not None:
                self._baselines[number] = attrs.evolve(group.greedy, group=number)
        self.prompts += len(groups)
        self.samples += tuple(samples)
        baselines = self._baselines
        scored = [sample for sample in samples if sample.score is not None]
        kept = [s for s in scored if baselines is None or has_baseline(s, baselines)]
        self.reasons |= {sample.prompt.key: "reward_failures" for sample in samples}
        self.reasons |= {sample.prompt.key: "baseline_failures" for sample in scored}
        kept = self._filter(kept) if self._filters else kept
        self.kept += tuple(kept)
        for sample in kept:
            self.reasons.pop(sample.prompt.key, None)

    def batch(self) -> Batch:
        """Return a batch of the trained samples; `loss_mask` is `response_mask`, but 0 on samples that a filter masked."""
        batch = self._batch(self.kept)
        if all(_action(chosen) != "mask" for chosen in self._filters.values()):
            return batch
        lost = np.array([sample.sample_id in self.masked for sample in self.kept], np.bool_)
        lost_N = lost[batch["trajectory_id"]]
        mask = batch["response_mask"]
        return batch.with_columns(
            {"loss_mask": mask.with_values(mask.values & ~lost_N[mask.row_index])}
        )

    def rows(self, samples: Iterable[Sample]) -> list[dict[str, Any]]:
        """Return one JSON record for each of these samples, as the run writes them to a sample file.

        To the fields of `Sample.row`, a record adds the name of the filter that dropped (`filtered`) or masked (`masked`) the sample,
        and the score of the greedy response to the same prompt (`baseline_score`), each if there is one.
        """
        rows = []
        for sample in samples:
            row = sample.row()
            if sample.sample_id in self.dropped:
                row["filtered"] = self.dropped[sample.sample_id]
            if sample.sample_id in self.masked:
                row["masked"] = self.masked[sample.sample_id]
            if self._baselines is not None and sample.group in self._baselines:
                row["baseline_score"] = self._baselines[sample.group].score
            rows.append(row)
        return rows

    def _batch(self, samples: Sequence[Sample]) -> Batch:
        return to_batch(
            samples,
            temperature=self._temperature,
            baselines=self._baselines,
            columns=self._columns,
        )

    def _filter(self, samples: list[Sample]) -> list[Sample]:
        """Run the filters in order, and return the samples that none of them drops.

        If a filter rejects one sequence of a sample, the whole sample is dropped, or masked if the filter masks.
        """
        batch = self._batch(samples)
        rows = np.arange(len(batch))
        for name, chosen in self._filters.items():
            if not len(rows):
                break
            columns = batch.take(rows)
            groups = Groups.of(columns["group_id"], columns["trajectory_id"])
            keep_N = groups.trajectory_mean_N(_checked_keep(chosen, columns, groups)) == 1
            gone = [samples[number] for number in np.unique(columns["trajectory_id"][~keep_N])]
            taken = {sample.sample_id: name for sample in gone}
            if _action(chosen) == "mask":
                self._counts[f"filter/{name}/masked_samples"] += len(gone)
                self.masked |= taken
                continue
            left = len(np.unique(columns["group_id"][keep_N]))
            self._counts[f"filter/{name}/dropped_samples"] += len(gone)
            self._counts[f"filter/{name}/dropped_groups"] += groups.count - left
            self.dropped |= taken
            # Later filters overwrite the reason: the filter that takes a prompt's last samples is the cause.
            self.reasons |= {sample.prompt.key: f"filter:{name}" for sample in gone}
            rows = rows[keep_N]
        return [samples[number] for number in np.unique(batch["trajectory_id"][rows])]


def _action(chosen: SampleFilter) -> str:
    return chosen.action_of(chosen.config)


def _counted(name: str, chosen: SampleFilter) -> tuple[str, ...]:
    """Return the names of the metrics that count what a filter drops or masks."""
    figures = (
        ("masked_samples",) if _action(chosen) == "mask" else ("dropped_samples", "dropped_groups")
    )
    return tuple(f"filter/{name}/{figure}" for figure in figures)


def _checked_keep(chosen: SampleFilter, columns: Batch, groups: Groups) -> Bool[np.ndarray, "N"]:
    """Call a filter on the N rows of a batch, and return which rows it keeps, bool [N].

    Raises:
        PluginBrokenError: the filter raised an error, or did not return a bool array of shape [N]; names the plugin, its file and line.
    """
    name = partial(title_of, "sample_filter", chosen)
    result = called(name, chosen.keep, columns, groups)
    if (
        not isinstance(result, np.ndarray)
        or result.dtype != np.bool_
        or result.shape != (len(columns),)
    ):
        found = (
            f"{result.dtype} of shape {result.shape}"
            if isinstance(result, np.ndarray)
            else type(result).__name__
        )
        raise PluginBrokenError(
            f"{name()} returned {found} for {len(columns)} samples; expected bool of shape ({len(columns)},)",
            hint="return a NumPy array from `keep`, with one bool for each sample",
        )
    return result
