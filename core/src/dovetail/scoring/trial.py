"""A trial of rewards outside a run: rows of a dataset and responses to them, scored as a run scores them, each with its time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import attrs

from dovetail.config.builtin import FilesConfig
from dovetail.data.files import FilesSource
from dovetail.data.rows import where
from dovetail.data.schema import parse_row
from dovetail.errors import DataError
from dovetail.interfaces.data import Prompt
from dovetail.interfaces.plugin import PluginContext
from dovetail.interfaces.reward import (
    Outcome,
    RewardManager,
    RunningTime,
    Sample,
)
from dovetail.interfaces.reward_calls import RewardFunctions
from dovetail.plugins.exit_guard import guard_exit
from dovetail.plugins.load import make_plugin, ref_for
from dovetail.scoring.functions import configured_functions
from dovetail.scoring.rows import check_sources
from dovetail.scoring.scorer import Scorer
from dovetail.sections import PluginSection, RewardSection

RESPONSE_KEYS = ("responses", "response", "solution_str", "output", "completion", "text")
"""Where a line of a file of responses has its text, or a list of texts; the first that is there counts."""
_SOLUTION_KEYS = ("answer", "solution")
_MEDIA = ("images", "videos")


@attrs.frozen(kw_only=True)
class TrialRow:
    """A row of a dataset, and the responses to score for it."""

    prompt: Prompt
    """Without tokens."""
    responses: tuple[str, ...]
    taken_from: str
    """Where the responses come from."""


@attrs.frozen(kw_only=True, eq=False)
class TrialSample:
    """One response and what became of it."""

    row: TrialRow
    response: str
    function: str | None
    """What scored it; None where the manager has functions of its own."""
    outcome: Outcome
    seconds: float
    """From the manager's start on it to its outcome, over all tries; that of its group where groups are scored."""
    waited: bool = False
    """Whether `seconds` holds time in a queue of the manager: for a free worker, for a batch to fill, for a budget."""


def read_trial(
    dataset: str,
    responses: str | None = None,
    *,
    limit: int | None = None,
    prompt_key: str = "prompt",
) -> list[TrialRow]:
    """Rows in verl's schema, or lines of a run's `samples/step_N.jsonl`, with their responses.

    Without a file of responses, a row's own `response` (or `responses`) is scored, else the worked solution in `extra_info` (`answer`,
    `solution`), else the ground truth itself: a sound reward gives these the full score.

    Args:
        dataset: a parquet or JSONL file, or a pattern of files.
        responses: a parquet or JSONL file with a line for each row, in order: a text or a list of texts under one of RESPONSE_KEYS.
        limit: rows to read, from the first; None for all.
        prompt_key: the column of the prompt.

    Raises:
        DataError: a file can't be read, a row is of another form, or the two files differ in length.
    """
    source = FilesSource(FilesConfig(name="files"), PluginContext())
    rows = source.read([dataset])
    lines = None if responses is None else source.read([responses])
    if lines is not None and len(lines) < len(rows if limit is None else rows[:limit]):
        raise DataError(
            f"{responses} has {len(lines)} lines, and {dataset} has {len(rows)} rows",
            hint=f"write a line for each row, or score the first with --limit {len(lines)}",
        )
    read = []
    for i in range(len(rows) if limit is None else min(limit, len(rows))):
        place = where(rows, i)
        row = {key: value for key, value in rows[i].items() if key not in _MEDIA}
        if "reward_model" not in row and "ground_truth" in row:
            row["reward_model"] = {"ground_truth": row["ground_truth"]}
        parsed = parse_row(row, prompt_key, place)
        if lines is not None:
            texts, key = _own(lines[i])
            if key is None:
                known = ", ".join(RESPONSE_KEYS)
                raise DataError(
                    f"{where(lines, i)}: no text under any of {known}; it has {', '.join(lines[i]) or 'nothing'}",
                    hint='a line is such as {"response": "…"} or {"responses": ["…", "…"]}',
                )
            taken_from = str(responses)
        else:
            texts, taken_from = _known(row, parsed.ground_truth, parsed.extra_info, place)
        read.append(
            TrialRow(
                prompt=Prompt(
                    index=i,
                    raw=parsed.prompt,
                    data_source=parsed.data_source,
                    ground_truth=parsed.ground_truth,
                    extra_info=parsed.extra_info,
                    where=place,
                ),
                responses=texts,
                taken_from=taken_from,
            )
        )
    return read


def try_rewards(
    section: RewardSection, rows: Sequence[TrialRow], *, seed: int = 0
) -> list[TrialSample]:
    """Check the rows as before training, then score every response with the section's manager, functions, limits and retries.

    Raises:
        ConfigError, DataError: rows can't be scored; see `check_sources`.
        PluginError: the manager or a function can't be loaded.
    """
    guard_exit()
    functions = configured_functions(section, PluginContext(seed=seed))
    check_sources(functions, (row.prompt for row in rows))
    ref = ref_for("reward_manager", section.manager or PluginSection(name="naive"))
    manager: Any = make_plugin(ref, PluginContext(seed=seed, reward_functions=functions))
    try:
        manager.start()
        needs = manager.needs_functions(manager.config)
        return asyncio.run(_scored(manager, section, rows, functions if needs else None))
    finally:
        manager.close()


async def _scored(
    manager: RewardManager,
    section: RewardSection,
    rows: Sequence[TrialRow],
    functions: RewardFunctions | None,
) -> list[TrialSample]:
    seconds: dict[str, float] = {}
    waited: set[str] = set()
    score = manager.score

    async def timed(samples: Sequence[Sample], time: RunningTime) -> list[Outcome]:
        watched = _WatchedTime(time)
        began = perf_counter()
        try:
            return await score(samples, watched)
        finally:
            took = perf_counter() - began
            for sample in samples:
                seconds[sample.sample_id] = seconds.get(sample.sample_id, 0.0) + took
                if watched.waited:
                    waited.add(sample.sample_id)

    manager.score = timed  # type: ignore[method-assign]
    scorer = Scorer(
        manager, timeout=section.timeout, retries=section.retries, concurrency=section.concurrency
    )
    for i, row in enumerate(rows):
        for j, response in enumerate(row.responses):
            sample = Sample(sample_id=f"{i}.{j}", prompt=row.prompt, text=response)
            scorer.add(sample, group=i, group_size=len(row.responses))
    outcomes = await scorer.finish()
    return [
        TrialSample(
            row=row,
            response=response,
            function=functions.function_for(row.prompt.data_source).name if functions else None,
            outcome=outcomes[f"{i}.{j}"],
            seconds=seconds[f"{i}.{j}"],
            waited=f"{i}.{j}" in waited,
        )
        for i, row in enumerate(rows)
        for j, response in enumerate(row.responses)
    ]


class _WatchedTime(RunningTime):
    """A running time that says whether it ever stood still."""

    def __init__(self, time: RunningTime) -> None:
        super().__init__(time.limit)
        self._time = time
        self.waited = False

    def stop(self) -> None:
        self.waited = True
        self._time.stop()

    def go_on(self) -> None:
        self._time.go_on()


def _own(row: Mapping[str, Any]) -> tuple[tuple[str, ...], str | None]:
    """The responses that a row holds, and under which key; none where it holds none."""
    for key in RESPONSE_KEYS:
        value = row.get(key)
        texts = [value] if isinstance(value, str) else value
        if isinstance(texts, (list, tuple)) and texts and all(isinstance(t, str) for t in texts):
            return tuple(texts), key
    return (), None


def _known(
    row: Mapping[str, Any], truth: object, extra: Mapping[str, Any] | None, place: str
) -> tuple[tuple[str, ...], str]:
    """Responses without a file of them, and where they were found."""
    texts, key = _own(row)
    if key is not None:
        return texts, key
    for key in _SOLUTION_KEYS:
        solution = (extra or {}).get(key)
        if isinstance(solution, str) and solution.strip():
            return (solution,), f"extra_info.{key}"
    if isinstance(truth, (str, int, float)):
        return (str(truth),), "ground_truth"
    raise DataError(
        f"{place}: it has no response, no solution and no ground truth that is a text",
        hint="give responses with --responses FILE",
    )
