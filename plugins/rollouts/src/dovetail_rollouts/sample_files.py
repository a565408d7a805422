"""The content of sample files (JSONL, one record a sample): the choice of samples, their tokens, and the observer `KeptSamples`.

Legend: T tokens of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.batch import Batch, Ragged
from dovetail.hooks import hookimpl
from dovetail.interfaces import Failure, Sample, Tokenizer
from dovetail.telemetry import RunDirectory, dump_json

FAILURES_SHOWN = 64
"""The most samples without a score that are written in addition to the samples that the config selects."""
_OF_TOKENS = {"old_log_probs", "ref_log_probs", "advantages"}
"""Columns to write for each token of a kept sample, if they have been fetched to this process."""
_SHARE = 32
"""Divisor of the run's byte limit that gives the limit of one step's file, so that some files remain when others are removed."""


def shown(samples: Sequence[Sample], limit: int) -> list[Sample]:
    """Return the first samples, up to the limit (−1: all), and up to 64 further samples without a score."""
    if limit < 0:
        return list(samples)
    failures = [s for s in samples[limit:] if isinstance(s.outcome, Failure)]
    return [*samples[:limit], *failures[:FAILURES_SHOWN]]


def token_row(
    sample: Sample, tokenizer: Tokenizer, *, episodes_only: bool = True
) -> dict[str, Any]:
    """Return the tokens of a sample for a sample file, under the key `tokens`.

    Args:
        sample: a sample with its completion.
        tokenizer: the tokenizer of the run.
        episodes_only: whether to return nothing for a sample of a single response.

    Returns:
        Lists of length T over all sequences, end to end: `text` of each token, `mask` (1 where the policy produced the token),
        and the rollout's `log_probs` in nats (None where the mask is 0). `log_probs` is absent if the engine gave none. With
        several sequences, `sequences` has the length of each in tokens and, from the second on, the text of its prompt.
    """
    if not sample.sequences or (episodes_only and sample.trajectory is None):
        return {}
    ids_T = sample.response_ids.tolist()
    # Decoded after another token, since some tokenizers drop the space before the first word of a text.
    before = list(tokenizer("a", add_special_tokens=False)["input_ids"])[-1:]
    start = str(tokenizer.decode(before))
    texts = {
        token: str(tokenizer.decode([*before, token])).removeprefix(start) for token in set(ids_T)
    }
    tokens: dict[str, Any] = {
        "text": [texts[token] for token in ids_T],
        "mask": sample.produced_T.astype(int).tolist(),
    }
    given = [c.raw_log_probs if c.log_probs is None else c.log_probs for c in sample.sequences]
    known = [log_probs_T for log_probs_T in given if log_probs_T is not None]
    if len(known) == len(given):
        tokens["log_probs"] = [
            round(value, 4) if produced else None
            for value, produced in zip(np.concatenate(known).tolist(), tokens["mask"], strict=True)
        ]
    if sample.earlier:
        tokens["sequences"] = [
            {
                "length": len(c.response_ids),
                "prompt": ""
                if c.prompt_ids is None
                else str(tokenizer.decode(c.prompt_ids.tolist(), skip_special_tokens=False)),
            }
            for c in sample.sequences
        ]
    return {"tokens": tokens}


class KeptSamples:
    """Writes notable samples of step N to `samples/kept_N.jsonl`; if the files grow too large, removes those of every second step.

    The row of a chosen sample has the fields of `samples/step_N.jsonl`, `kept` (the rules that chose the sample), `advantage` (the mean
    over the tokens that the policy produced), `trained` (false if a filter dropped the sample, or it failed), and `tokens` with per-token
    columns. The other samples of `samples/step_N.jsonl` have rows with three fields: `sample_id`, `advantage`, and an empty `kept`. If
    room is left, further samples of the chosen samples' groups follow; their `kept` is empty, and they have no columns of the batch.

    Args:
        tokenizer: the tokenizer of the run.
        size: the limit in bytes for all such files of a run together.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._tokenizer, self._size = tokenizer, size
        self._samples: Sequence[Sample] = ()
        self._batch: Batch | None = None

    @hookimpl
    def run_started(self, config: Any, directory: Path) -> None:
        """Read the steps and sizes of the files that the run wrote before it was resumed."""
        self._directory = RunDirectory(directory)
        self._shown = config.trainer.samples_per_step
        found = (directory / "samples").glob("kept_*.jsonl")
        self._sizes = {int(f.stem.removeprefix("kept_")): f.stat().st_size for f in found}
        common = math.gcd(*self._sizes)
        self._every = (common & -common) or 1
        """Interval in steps between kept steps, a power of two."""

    @hookimpl
    def rollout_finished(self, samples: Sequence[Sample]) -> None:
        """Keep the samples of the step in memory, for `update_finished` to choose from."""
        self._samples, self._batch = samples, None

    @hookimpl
    def stage_finished(self, after: Batch) -> None:
        """Keep the step's batch in memory; its columns per token, as far as stages have computed them, are written with chosen samples."""
        if len(after):
            self._batch = after

    @hookimpl
    def update_finished(self, step: int) -> None:
        """Choose the samples to keep, and write them."""
        samples, batch = self._samples, self._batch
        self._samples, self._batch = (), None
        if not samples or step % self._every:
            return
        rows, size = list[dict[str, Any]](), 0
        for row in self._rows(samples, batch):
            more = len(dump_json(row).encode()) + 1
            if size + more <= self._size // _SHARE:
                rows.append(row)
                size += more
        if rows:
            path = self._directory.write_samples(step, rows, name="kept")
            self._sizes[step] = path.stat().st_size
        while sum(self._sizes.values()) > self._size:
            self._every *= 2
            for other in [other for other in self._sizes if other % self._every]:
                (self._directory.path / "samples" / f"kept_{other}.jsonl").unlink(missing_ok=True)
                del self._sizes[other]

    def _rows(self, samples: Sequence[Sample], batch: Batch | None) -> Iterator[dict[str, Any]]:
        """Yield rows of the samples that a rule chose, then of samples in `samples/step_N.jsonl`, then of the rest of the chosen groups."""
        places = _places(samples, batch)
        advantages = dict(_advantages(places, batch))
        by_id = {sample.sample_id: sample for sample in samples}
        rules: dict[str, list[str]] = {}
        for rule, sample in chosen(samples, advantages):
            rules.setdefault(sample.sample_id, []).append(rule)

        def row_of(name: str) -> dict[str, Any]:
            row = by_id[name].row() | {"kept": rules.get(name, []), "trained": name in places}
            return row | ({"advantage": round(advantages[name], 4)} if name in advantages else {})

        for name in rules:
            yield row_of(name) | self._tokens_of(by_id[name], places.get(name, ()), batch)
        shown = len(samples) if self._shown < 0 else self._shown
        for sample in samples[:shown]:
            name = sample.sample_id
            if name in advantages and name not in rules:
                yield {"sample_id": name, "kept": [], "advantage": round(advantages[name], 4)}
        groups = {by_id[name].group for name in rules}
        for sample in samples[shown:]:
            if sample.group in groups and sample.sample_id not in rules:
                yield row_of(sample.sample_id) | token_row(sample, self._tokenizer)

    def _tokens_of(
        self, sample: Sample, places: Sequence[int], batch: Batch | None
    ) -> dict[str, Any]:
        """Return a sample's tokens, with columns from its rows (`places`) of the batch; empty if the sample has no tokens."""
        told = token_row(sample, self._tokenizer, episodes_only=False)
        if batch is not None and places and told:
            for column in sorted(_OF_TOKENS & batch.columns.keys()):
                if not isinstance(batch[column], Ragged) or not batch[column].fetched:
                    continue  # columns that no stage has fetched stay on the workers
                values_T = _tokens(batch, column, places)
                if column != "advantages" or np.ptp(values_T):
                    told["tokens"][column] = np.round(values_T, 4).tolist()
        return told


def chosen(
    samples: Sequence[Sample], advantages: Mapping[str, float]
) -> Iterator[tuple[str, Sample]]:
    """Yield each rule's name with the one sample of the step that it chooses.

    The rules: `best` and `worst` score, `longest` response, `advantage` (the largest absolute value) and `failed` (the first sample
    without a score). Except for `failed`, a rule chooses no sample if the value is the same in all samples.

    Args:
        samples: the samples of a step.
        advantages: the mean advantage of each sample that is trained on, by sample id.
    """
    scored = [(s.score, s) for s in samples if s.score is not None]
    sized = [(s.response_length, s) for s in samples if s.completion is not None]
    moved = [(abs(advantages[s.sample_id]), s) for s in samples if s.sample_id in advantages]
    for rule, pairs, pick in (
        ("best", scored, max),
        ("worst", scored, min),
        ("longest", sized, max),
        ("advantage", moved, max),
    ):
        if len({value for value, _ in pairs}) > 1:
            yield rule, pick(pairs, key=lambda pair: pair[0])[1]
    failed = next((s for s in samples if isinstance(s.outcome, Failure)), None)
    if failed is not None:
        yield "failed", failed


def _places(samples: Sequence[Sample], batch: Batch | None) -> dict[str, list[int]]:
    """Return the indices of each sample's rows in the batch (one row a sequence), by sample id; samples outside the batch are left out."""
    rows = {name: row for row, name in enumerate(batch["sample_id"])} if batch is not None else {}
    found = {}
    for sample in samples:
        name, count = sample.sample_id, len(sample.sequences)
        ids = [f"{name}.q{number}" if number else name for number in range(count)]
        if ids and rows.keys() >= set(ids):
            found[name] = [rows[one] for one in ids]
    return found


def _tokens(batch: Batch, column: str, rows: Sequence[int]) -> np.ndarray:
    """Return a column's values on the tokens of these rows, concatenated, float64 or bool [T]."""
    values_T = np.concatenate([batch[column][row] for row in rows])
    return values_T if values_T.dtype == np.bool_ else values_T.astype(np.float64)


def _advantages(
    places: Mapping[str, Sequence[int]], batch: Batch | None
) -> Iterator[tuple[str, float]]:
    """Yield each sample's id and advantage; if advantages are per token, the mean over the tokens that the policy produced."""
    if batch is None or "advantages" not in batch:
        return
    for name, rows in places.items():
        if not isinstance(batch["advantages"], Ragged):
            yield name, float(batch["advantages"][rows].mean())
            continue
        mask_T = _tokens(batch, "response_mask", rows)
        if mask_T.any():
            yield name, float(_tokens(batch, "advantages", rows)[mask_T].mean())
