"""A trial of rewards outside a run: responses to rows of a dataset are scored as in a run, and timed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import attrs

from dovetail.errors import DataError
from dovetail.interfaces import (
    Outcome,
    PluginContext,
    Prompt,
    RewardManager,
    RowVerdict,
    RunningTime,
    Sample,
    Score,
)
from dovetail.plugins import guard_exit, make_plugin, ref_for
from dovetail.sections import PluginSection, RewardSection
from dovetail_datasets import NumberedRow, parse_row, read_rows
from dovetail_rollouts.scoring.functions import configured_functions
from dovetail_rollouts.scoring.rows import check_sources
from dovetail_rollouts.scoring.scorer import Scorer

RESPONSE_KEYS = ("responses", "response", "solution_str", "output", "completion", "text")
"""The keys under which a line of a responses file may have its text or list of texts; the first key present is used."""
_SOLUTION_KEYS = ("answer", "solution")
_REFERENCES = (*(f"extra_info.{key}" for key in _SOLUTION_KEYS), "ground_truth")
_MEDIA = ("images", "videos")


@attrs.define(kw_only=True, eq=False)
class TrialSample:
    """One response that `try_rewards` scores, and its outcome."""

    prompt: Prompt
    """The row's prompt, not tokenized."""
    response: str
    taken_from: str
    """Where the response comes from, for messages: the responses file, or the row's column or key."""
    function: str | None = attrs.field(init=False, default=None)
    """The name of the function that scored the response; None if the manager has its own functions."""
    outcome: Outcome = attrs.field(init=False)
    seconds: float = attrs.field(init=False, default=0.0)
    """Seconds in the manager over all attempts, including queueing; the group's time if groups are scored."""


def try_rewards(
    section: RewardSection,
    dataset: str,
    responses: str | None = None,
    *,
    limit: int | None = None,
    prompt_key: str = "prompt",
) -> list[TrialSample]:
    """Check rows as a run does before training, then score their responses with the section's manager, functions, limits and retries.

    Without a file of responses, a row's own `response` (or `responses`) is scored, else the worked solution in `extra_info` (`answer`,
    `solution`), else the ground truth itself. A correct reward function gives these the full score.

    Args:
        section: the reward section.
        dataset: a parquet or JSONL file in verl's schema, `samples/step_N.jsonl` of a run, or a pattern of files.
        responses: a parquet or JSONL file with a line for each row, in order: a text or a list of texts under one of RESPONSE_KEYS.
        limit: the number of rows to read, from the first; None for all.
        prompt_key: the column of the prompt.

    Raises:
        DataError: a file or row can't be read, `responses` has fewer lines than there are rows to score, a row has no response, or a ground
            truth can't be scored.
        ConfigError: a row has no reward function; see `check_sources`.
        PluginError: the manager or a function can't be loaded.
    """
    return score_samples(section, [*_samples(dataset, responses, limit, prompt_key)])


def score_samples(section: RewardSection, samples: list[TrialSample]) -> list[TrialSample]:
    """Score samples in place, and return them. See `try_rewards` for arguments and errors."""
    guard_exit()
    functions = configured_functions(section, PluginContext())
    check_sources(functions, {s.prompt.index: s.prompt for s in samples}.values())
    ref = ref_for("reward_manager", section.manager or PluginSection(name="naive"))
    manager: Any = make_plugin(ref, PluginContext(reward_functions=functions))
    try:
        manager.start()
        if manager.needs_functions(manager.config):
            for sample in samples:
                sample.function = functions.function_for(sample.prompt.data_source).name
        asyncio.run(_score(samples, manager, section))
    finally:
        manager.close()
    return samples


def verdict(sample: TrialSample) -> RowVerdict:
    """Return the verdict on a response: its score, if any, and a text with the score or the failure and the start of the response."""
    outcome, score = sample.outcome, None
    if isinstance(outcome, Score):
        score, found = outcome.value, f"{outcome.value:g}"
    else:
        found = f"no score ({outcome.kind}: {outcome.message})"
    return RowVerdict(
        row=sample.prompt.index,
        where=str(sample.prompt),
        text=f"{found} for its {sample.taken_from}, {sample.response[:80]!r}",
        score=score,
    )


def _samples(
    dataset: str, responses: str | None, limit: int | None, prompt_key: str
) -> Iterator[TrialSample]:
    source: Any = make_plugin(ref_for("dataset", PluginSection(name="files")), PluginContext())
    rows = read_rows(source, [dataset])
    lines = rows if responses is None else read_rows(source, [responses])
    count = len(rows) if limit is None else min(limit, len(rows))
    if len(lines) < count:
        raise DataError(
            f"{responses} has only {len(lines)} lines for the {len(rows)} rows of {dataset}",
            hint=f"write a line for each row, or score only the first rows with --limit {len(lines)}",
        )
    for row, line in zip(rows[:count], lines, strict=False):
        own = samples_of(row, prompt_key, None if responses is None else line)
        if not own:
            keys = RESPONSE_KEYS if responses else (*RESPONSE_KEYS, *_REFERENCES)
            raise DataError(
                f"{line.where} has no response; expected text under one of the keys {', '.join(keys)}",
                hint='give responses with --responses FILE, with lines such as {"response": "…"} or {"responses": ["…", "…"]}',
            )
        for sample in own:
            sample.taken_from = responses or sample.taken_from
        yield from own


def samples_of(
    given: NumberedRow, prompt_key: str, line: NumberedRow | None = None
) -> list[TrialSample]:
    """Return the responses to a row: those in `line` of a file of responses, or else the row's own; see `try_rewards`.

    Returns:
        The responses, not yet scored; empty if there is no text.

    Raises:
        DataError: the row can't be read.
    """
    row = {key: value for key, value in _columns(given).items() if key not in _MEDIA}
    if "ground_truth" in row:
        row.setdefault("reward_model", {"ground_truth": row["ground_truth"]})
    parsed = parse_row(row, prompt_key, given.where)
    found = {key: _columns(line or given).get(key) for key in RESPONSE_KEYS}
    if line is None:
        extra = parsed.extra_info or {}
        given_there = (*(extra.get(key) or None for key in _SOLUTION_KEYS), parsed.ground_truth)
        found |= dict(zip(_REFERENCES, given_there, strict=True))
    taken_from = next((key for key, value in found.items() if _texts(value)), None)
    if taken_from is None:
        return []
    prompt = Prompt(
        index=given.number,
        raw=parsed.prompt,
        data_source=parsed.data_source,
        ground_truth=parsed.ground_truth,
        extra_info=parsed.extra_info,
        where=given.where,
    )
    return [
        TrialSample(prompt=prompt, response=text, taken_from=taken_from)
        for text in _texts(found[taken_from])
    ]


def _columns(row: NumberedRow) -> Mapping[str, Any]:
    if isinstance(row.columns, DataError):
        raise row.columns
    return row.columns


def _texts(value: object) -> list[str]:
    """Return the text or texts that a row holds; empty if the value is anything else."""
    texts = value if isinstance(value, list | tuple) else [value]
    plain = all(isinstance(text, str | int | float) for text in texts)
    return [str(text) for text in texts] if plain else []


async def _score(
    tried: Sequence[TrialSample], manager: RewardManager, section: RewardSection
) -> None:
    score, sizes = manager.score, Counter(sample.prompt.index for sample in tried)

    async def timed(samples: Sequence[Sample], time: RunningTime) -> list[Outcome]:
        began = perf_counter()
        try:
            return await score(samples, time)
        finally:
            for sample in samples:
                tried[int(sample.sample_id)].seconds += perf_counter() - began

    manager.score = timed  # type: ignore[method-assign]
    scorer = Scorer(
        manager, timeout=section.timeout, retries=section.retries, concurrency=section.concurrency
    )
    for i, sample in enumerate(tried):
        group = sample.prompt.index
        asked = Sample(sample_id=str(i), prompt=sample.prompt, text=sample.response)
        scorer.add(asked, group=group, group_size=sizes[group])
    for number, outcome in (await scorer.finish()).items():
        tried[int(number)].outcome = outcome
