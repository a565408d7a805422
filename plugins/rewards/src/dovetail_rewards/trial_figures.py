"""What a trial of rewards comes to: scores by source, components, errors by kind, and all of it as JSON values."""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import attrs

from dovetail.interfaces import Failure, Score
from dovetail.scoring import TrialSample

Item = TypeVar("Item")

SCHEMA = 1
_COMPARED = 500
"""Characters of a message that tell it from others."""
_QUOTED = re.compile(r"(?<!\w)(['\"`]).*?\1(?!\w)")
_NUMBER = re.compile(r"0x[0-9a-f]+|-?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?", re.IGNORECASE)


@attrs.frozen(kw_only=True)
class TrialSpread:
    """Count, mean, spread and extremes of some figures; None where there are no figures."""

    count: int
    mean: float | None
    std: float | None
    low: float | None
    high: float | None

    @classmethod
    def of(cls, figures: Sequence[float]) -> TrialSpread:
        """The spread of these figures; `std` is that of a population."""
        if not figures:
            return cls(count=0, mean=None, std=None, low=None, high=None)
        return cls(
            count=len(figures),
            mean=statistics.fmean(figures),
            std=statistics.pstdev(figures),
            low=min(figures),
            high=max(figures),
        )


def as_json(samples: Sequence[TrialSample]) -> dict[str, Any]:
    """The whole trial as JSON values."""
    return {
        "schema": SCHEMA,
        "sources": [
            {
                "data_source": source,
                "function": function,
                "samples": len(group),
                "scores": attrs.asdict(TrialSpread.of(scores(group))),
            }
            for (source, function), group in by_source(samples).items()
        ],
        "components": {
            name: attrs.asdict(TrialSpread.of(figures))
            for name, figures in components(samples).items()
        },
        "failures": dict(Counter(str(failure.kind) for _, failure in failures(samples))),
        "seconds": attrs.asdict(TrialSpread.of([sample.seconds for sample in samples])),
        "waiting_included": any(sample.waited for sample in samples),
        "samples": [_row(sample) for sample in samples],
    }


def extra(sample: TrialSample, name: str) -> tuple[bool, Any]:
    """Whether the function gave an extra of this name, or a scorer of `hybrid` did (`scorer/name`), and the first that is not None."""
    if isinstance(sample.outcome, Failure):
        return False, None
    given = [
        value
        for key, value in sample.outcome.extras.items()
        if key == name or key.endswith(f"/{name}")
    ]
    return bool(given), next((value for value in given if value is not None), None)


def what_failed(sample: TrialSample) -> str | None:
    """Why a sample has no score, or what its function calls the `first_failure` of a response that it scored."""
    if isinstance(sample.outcome, Failure):
        return sample.outcome.message
    _, failure = extra(sample, "first_failure")
    return None if failure is None else str(failure)


def alike_failures(
    samples: Iterable[TrialSample],
) -> dict[str, list[list[tuple[TrialSample, Failure]]]]:
    """Samples without a score, by kind: in groups whose messages differ at most in numbers and quoted text, the largest first."""
    kinds = grouped(failures(samples), lambda pair: str(pair[1].kind))
    return {
        kind: sorted(
            grouped(same, lambda pair: _gist(pair[1].message)).values(),
            key=lambda alike: -len(alike),
        )
        for kind, same in kinds.items()
    }


def _gist(message: str) -> str:
    return _NUMBER.sub("", _QUOTED.sub("", message[:_COMPARED]))


def _row(sample: TrialSample) -> dict[str, Any]:
    row: dict[str, Any] = {
        "where": sample.row.prompt.where,
        "data_source": sample.row.prompt.data_source,
        "function": sample.function,
        "response": sample.response,
        "seconds": sample.seconds,
        "score": None,
        "failure": None,
    }
    if isinstance(sample.outcome, Failure):
        row["failure"] = {
            "kind": str(sample.outcome.kind),
            "message": sample.outcome.message,
            "retryable": sample.outcome.retryable,
        }
    else:
        row["score"] = sample.outcome.value
        row["components"] = dict(sample.outcome.components)
        row["extras"] = {name: _plain(value) for name, value in sample.outcome.extras.items()}
    return row


def _plain(value: object) -> Any:
    """The value where JSON has it, else its text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return repr(value)


def by_source(
    samples: Iterable[TrialSample],
) -> dict[tuple[str | None, str | None], list[TrialSample]]:
    """Samples by their data source and the function that scored them."""
    return grouped(samples, lambda sample: (sample.row.prompt.data_source, sample.function))


def grouped(items: Iterable[Item], key: Callable[[Item], Any]) -> dict[Any, list[Item]]:
    """Items by their key, in the order of first appearance."""
    groups: dict[Any, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return dict(groups)


def scores(samples: Iterable[TrialSample]) -> list[float]:
    """The scores of the samples that have one."""
    return [sample.outcome.value for sample in samples if isinstance(sample.outcome, Score)]


def components(samples: Iterable[TrialSample]) -> dict[str, list[float]]:
    """The figures of every component, by its name."""
    found: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if isinstance(sample.outcome, Score):
            for name, figure in sample.outcome.components.items():
                found[name].append(figure)
    return dict(found)


def failures(samples: Iterable[TrialSample]) -> list[tuple[TrialSample, Failure]]:
    """Samples without a score, each with the reason."""
    return [(s, s.outcome) for s in samples if isinstance(s.outcome, Failure)]
