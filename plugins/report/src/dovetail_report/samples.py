"""Samples of a run in files beside its report; the page loads a file when its samples are viewed.

A page opened as `file:` may load only scripts. So `report/step_N.js` calls a function of the page with the samples of step N as gzipped
JSON in base64, so that no text of a sample can act as markup or script. `report/index.js` has a line for each sample, which the page lists
and filters. The index also names the run's files from which it was made, so that a later report writes only new samples.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import attrs

from dovetail.errors import DovetailError
from dovetail.telemetry import RunDirectory, numbers, read_rows
from dovetail_report.episode_section import episode
from dovetail_report.suspicions import suspicions
from dovetail_report.text import LONGEST_TEXT, as_text, shorten

FOLDER = "report"
"""Folder of the samples beside `report.html`."""
RULES = ("best", "worst", "longest", "advantage", "failed")
"""Rules by which a sample may have been recorded; each rule is a bit in the index."""
FLAGS = ("failed", "cut", "left out", "suspect", "episode")
"""Properties that a sample may have; each property is a bit in the index."""
_VERSION = 2
_MOST_FILES = 1000
_MOST_BYTES = 15 << 20
_TEXTS = (LONGEST_TEXT // 2, LONGEST_TEXT // 8)
"""Maximum characters of a text: the usual limit, and the lower limit that applies if the files become too large (see `write_samples`)."""
_MOST_ROWS = {"step": 512, "validation": 64}
_MOST_TOKENS = 4000
_OF_TOKENS = ("log_probs", "old_log_probs", "ref_log_probs", "advantages")


@attrs.frozen
class EmbeddedSamples:
    """Facts about the samples in the folder `report`, and the copies of some samples that the page itself contains."""

    count: int
    """Number of samples in the files of the folder `report`."""
    suspect: int
    """Number of samples with suspicious features; see `suspicions`."""
    every: int
    """Interval of the steps whose samples are in the report: every `every`-th step."""
    scripts: list[str]
    """JavaScript with the index and the samples of some steps, which the page uses if the folder `report` is missing."""


def write_samples(directory: Path) -> EmbeddedSamples:
    """Write the samples of a run into the folder `report`; files that have not changed since the last report are not written again.

    If the samples have too many bytes, texts are shortened first. Then the samples of every second step are left out, repeatedly if
    needed; the first and the last step are always kept.

    Raises:
        RunDirectoryError: a file can't be written.
    """
    run = RunDirectory(directory)
    found = sorted(_files(directory), key=lambda file: (file[1], file[0]))
    if not found:
        return EmbeddedSamples(0, 0, 1, [])
    before = _index(directory)
    every, longest = before.get("every", 1), before.get("longest", _TEXTS[0])
    while len(found) > _MOST_FILES * every:
        every *= 2
    (directory / FOLDER).mkdir(exist_ok=True)
    entries: dict[str, dict[str, Any]] = before.get("entries", {})
    while True:
        chosen = [
            file
            for place, file in enumerate(found)
            if file[1] % every == 0 or place in (0, len(found) - 1)
        ]
        known, entries, right = entries, {}, None
        for kind, step in chosen:
            name = f"{kind}_{step}"
            entries[name] = _written(run, kind, step, longest, right, known.get(name))
            right = entries[name]["right"]
        if sum(entry["bytes"] for entry in entries.values()) <= _MOST_BYTES or len(chosen) < 3:
            break
        every, longest = (every, _TEXTS[1]) if longest > _TEXTS[1] else (2 * every, longest)
    for old in (directory / FOLDER).glob("*_*.js"):
        if old.stem not in entries:
            old.unlink()
    index = _script("index", _indexed(entries.values(), every, longest))
    run.write_text(f"{FOLDER}/index.js", index)
    small = {n: e for n, e in entries.items() if e["bytes"] < 200_000}
    inline = {name: small[name] for name in list(small)[:1] + list(small)[-1:]}
    scripts = [_script("inline", _indexed(inline.values(), every, longest))]
    scripts += [(directory / FOLDER / f"{name}.js").read_text("utf-8") for name in inline]
    flags = [row[-1] for entry in entries.values() for row in entry["rows"]]
    suspect = sum(flag >> FLAGS.index("suspect") & 1 for flag in flags)
    return EmbeddedSamples(len(flags), suspect, every, scripts)


def _files(directory: Path) -> Iterable[tuple[str, int]]:
    """Yield the kind and the step of every file of samples. Files `kept_N.jsonl` are left out: `_written` adds their samples to those of
    step N.
    """
    for path in (directory / "samples").glob("*_*.jsonl"):
        kind, _, step = path.stem.rpartition("_")
        if kind in _MOST_ROWS and step.isdecimal():
            yield kind, int(step)


def _index(directory: Path) -> dict[str, Any]:
    """Return the index of an earlier report, with `entries`, the entry of each file by name; empty if the index is missing or unusable."""
    with suppress(OSError, ValueError, LookupError, TypeError, EOFError):
        text = (directory / FOLDER / "index.js").read_text("utf-8")
        index = json.loads(gzip.decompress(base64.b64decode(text.split('"')[3])))
        if index["version"] == _VERSION:
            prompts = index["prompts"]
            index["entries"] = {
                entry["name"]: entry | {"rows": [[prompts[r[0]], *r[1:]] for r in entry["rows"]]}
                for entry in index["files"]
            }
            return dict(index)
    return {}


def _indexed(entries: Iterable[Mapping[str, Any]], every: int, longest: int) -> dict[str, Any]:
    """Return the content of `index.js`, with each prompt stored once.

    Args:
        entries: the entries of the files of samples, from `_written`.
        every: the interval of the steps in the report.
        longest: the maximum characters of a text.
    """
    prompts: dict[str, int] = {}
    files = [
        {**e, "rows": [[prompts.setdefault(r[0], len(prompts)), *r[1:]] for r in e["rows"]]}
        for e in entries
    ]
    head = {"version": _VERSION, "every": every, "longest": longest, "rules": RULES, "flags": FLAGS}
    return {**head, "prompts": list(prompts), "files": files}


def _script(name: str, value: object) -> str:
    # Halves of surrogate pairs are written as JSON escapes.
    text = json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace")
    packed = gzip.compress(text, 6, mtime=0)
    return f'dovetail("{name}", "{base64.b64encode(packed).decode()}");\n'


def _written(
    run: RunDirectory,
    kind: str,
    step: int,
    longest: int,
    right: float | None,
    before: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Write the samples of a step, unless an earlier report has written the same samples, and return their entry of the index.

    Args:
        run: the run directory.
        kind: the kind of the file of samples, such as `step`.
        step: the step of the samples.
        longest: the maximum characters of a text.
        right: the lowest score of a right answer in earlier steps; see `suspicions`.
        before: the entry of these samples in the earlier report's index; None if it has none.
    """
    name = f"{kind}_{step}"
    sources = [run.path / "samples" / f"{name}.jsonl"]
    if kind == "step":
        sources.append(run.path / "samples" / f"kept_{step}.jsonl")
    stamp: list[Any] = [
        [s.stat().st_size, s.stat().st_mtime_ns] if s.exists() else None for s in sources
    ]
    stamp.append(longest)
    target = run.path / FOLDER / f"{name}.js"
    if before and before["stamp"] == stamp:
        with suppress(OSError):
            if target.stat().st_size == before["bytes"]:
                return dict(before)
    rows = list(islice(_merged([row for s in sources for row in read_rows(s)]), _MOST_ROWS[kind]))
    why, right = suspicions(rows, right)
    samples = [
        sample | {"suspect": s}
        for sample, s in zip((_sample(row, longest) for row in rows), why, strict=True)
    ]
    text = _script(name, samples)
    run.write_text(f"{FOLDER}/{name}.js", text)
    return {
        "name": name,
        "kind": kind,
        "step": step,
        "stamp": stamp,
        "bytes": len(text),
        "right": right,
        "rows": [_line(sample) for sample in samples],
    }


def _merged(rows: Sequence[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """Yield each sample once, with its rows merged, and samples of one prompt together."""
    by_id: dict[str, dict[str, Any]] = {}
    for place, row in enumerate(rows):
        by_id.setdefault(str(row.get("sample_id", place)), {}).update(row)
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for row in by_id.values():
        if "prompt" in row or "response" in row:
            by_prompt.setdefault(_prompt_key(row), []).append(row)
    for group in by_prompt.values():
        yield from group


def _prompt_key(row: Mapping[str, Any]) -> str:
    """Return the key that samples of one prompt share: the sample's id without its ending `.sN`, or the prompt for any other id."""
    group, dot, number = str(row.get("sample_id", "")).rpartition(".s")
    return group if dot and number.isdecimal() else as_text(row.get("prompt"))


def _line(sample: Mapping[str, Any]) -> list[Any]:
    """Return the line of a sample in the index: the end of its prompt, score, advantage, length, rules and flags (as bits)."""
    flags = (
        bool(sample["failure"]),
        sample["reason"] == "length",
        bool(sample["left_out"]),
        bool(sample["suspect"]),
        sample["episode"] is not None,
    )
    return [
        " ".join(sample["prompt"][-400:].split())[-80:],
        sample["score"],
        sample["advantage"],
        sample["length"],
        sum((rule in sample["kept"]) << bit for bit, rule in enumerate(RULES)),
        sum(flag << bit for bit, flag in enumerate(flags)),
    ]


def _sample(row: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """Return a sample as the page shows it; missing and malformed fields of the row become empty.

    Texts have at most `longest` characters; the limit is larger if one of `RULES` selected the sample.
    """
    rules = row.get("kept")
    kept = [rule for rule in RULES if isinstance(rules, list) and rule in rules]
    longest = 2 * LONGEST_TEXT if kept else longest
    failure = row.get("failure")
    if isinstance(failure, Mapping):
        failure = f"{failure.get('kind', 'failed')}: {failure.get('message', '')}"
    components = row.get("components")
    return {
        "id": str(row.get("sample_id", "")),
        "group": _prompt_key(row),
        "prompt": shorten(as_text(row.get("prompt")), longest),
        "response": shorten(as_text(row.get("response")), longest),
        "score": _number(row.get("score")),
        "advantage": _number(row.get("advantage")),
        "length": _number(row.get("response_length")),
        "reason": str(row.get("finish_reason", "")),
        "truth": shorten(as_text(row.get("ground_truth"))),
        "side": str(row.get("side", "")),
        "failure": shorten(str(failure)) if failure else "",
        "left_out": _left_out(row),
        "kept": kept,
        "components": {
            str(name): _number(value)
            for name, value in (components.items() if isinstance(components, Mapping) else ())
        },
        "episode": _episode(row),
        "tokens": _tokens(row.get("tokens"), _MOST_TOKENS if kept else _MOST_TOKENS // 4),
    }


def _number(value: object) -> float | None:
    return float(f"{value:.6g}") if numbers.is_number(value) else None


def _left_out(row: Mapping[str, Any]) -> str:
    """Return why a sample with a score is not trained on; empty if it is trained on."""
    for key in ("filtered", "masked"):
        if row.get(key):
            return f"{'dropped' if key == 'filtered' else key} by filter {row[key]}"
    return "left out by a filter" if row.get("trained") is False and not row.get("failure") else ""


def _episode(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the turns of a sample; None if the sample is one response, or its row is damaged."""
    with suppress(DovetailError, LookupError, TypeError, ValueError, AttributeError):
        return episode(row)
    return None


def _tokens(tokens: Any, most: int) -> dict[str, Any] | None:
    """Return the texts of the first `most` tokens, the number of further tokens (`more`), and the known values of each token, such as its
    log-probability; None if the tokens were not recorded.
    """
    if not isinstance(tokens, Mapping) or not isinstance(tokens.get("text"), list):
        return None
    texts = [str(text) for text in tokens["text"][:most]]
    found: dict[str, Any] = {"text": texts, "more": len(tokens["text"]) - len(texts)}
    for name in _OF_TOKENS:
        values = tokens.get(name)
        if isinstance(values, list) and len(values) == len(tokens["text"]):
            found[name] = [round(v, 3) if numbers.is_number(v) else None for v in values[:most]]
    return found
