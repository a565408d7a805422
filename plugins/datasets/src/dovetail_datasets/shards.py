"""Shards: examples of consecutive rows, in memory or in a file of the token cache that is mapped into memory.

A dataset's folder in the cache is named after all inputs of its tokens, a shard's file after its index and the digest of its bytes. A file
whose bytes do not have this digest is made again. Several processes may write the same file at the same time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from dovetail.interfaces import BadRow, Tokenizer
from dovetail_datasets.example_rows import Example, TrainedResponse
from dovetail_datasets.left_out import Tally
from dovetail_datasets.limits import Truncation

_OWN = ("raw", "where", "data_source", "labels", "lost")
"""Fields of an example that a shard's file stores as JSON, besides its index, tokens and masks."""
SHARD_ROWS = 1024
"""Maximum rows of a shard; a shard also ends with its row group."""


@attrs.frozen(kw_only=True)
class ShardFacts:
    """Facts about a shard's rows besides their examples."""

    rows: int
    bad: tuple[BadRow, ...]
    overlong: int
    truncated: Truncation
    spelled: int
    """The number of control tokens, such as an end of turn, in the texts of rows; they are encoded as plain text."""
    left_out: Tally
    images: bool = False
    """Whether a row has an image; its example then also depends on other files."""
    digest: str
    """Digest of the examples' tokens and loss masks."""


class Shard:
    """Examples of consecutive rows, by the row's index in the dataset.

    Args:
        facts: the facts of the rows.
        examples: the examples of rows that are neither bad nor too long, in order.
    """

    def __init__(self, facts: ShardFacts, examples: Sequence[Example]) -> None:
        self.facts, self._examples = facts, examples
        self.rows = np.array([example.index for example in examples], np.int64)
        """int64 [E], ascending: indices, in the dataset, of the rows that have an example."""

    @property
    def has_images(self) -> bool:
        """Whether an example has an image."""
        return any(example.media for example in self._examples)

    def example(self, place: int) -> Example:
        """Return the example of row `self.rows[place]`; `rows` holds the indices of the rows that have an example."""
        return self._examples[place]

    def get(self, row: int) -> Example | BadRow | None:
        """Return the example made from a row; a BadRow with the error if the row is bad, and None if it is too long."""
        place = int(np.searchsorted(self.rows, row))
        if place < len(self.rows) and self.rows[place] == row:
            return self.example(place)
        return next((bad for bad in self.facts.bad if bad.row == row), None)


class ShardFile(Shard):
    """A shard in a file; only the requested examples are read.

    Args:
        path: the path of the file.

    Raises:
        ValueError, OSError, KeyError: the file is damaged, or can't be read.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        with pa.memory_map(str(path)) as file:
            content = file.read_buffer()
        if _digest(content) != path.stem.partition("-")[2]:
            raise ValueError(
                f"the shard {path} is damaged: the digest of its content is not the one in its name"
            )
        table = pa.ipc.open_file(content).read_all().combine_chunks()
        facts = json.loads(table.schema.metadata[b"facts"])
        facts["truncated"] = Truncation(**facts["truncated"])
        facts["bad"] = tuple(BadRow(**bad) for bad in facts["bad"])
        tally = facts["left_out"]
        facts["left_out"] = Tally(**{**tally, "rows": Counter(tally["rows"])})
        super().__init__(ShardFacts(**facts), ())
        self._own, self.rows = table["own"], table["row"].to_numpy()
        self._ids, self._mask = (_lists(table, name) for name in ("ids", "mask"))
        self._lengths = _lists(table, "lengths")

    def example(self, place: int) -> Example:
        ids_T = self._ids(place).astype(np.int64)
        mask_T = self._mask(place).astype(np.bool_)
        cuts = np.cumsum(self._lengths(place))
        own: dict[str, Any] = json.loads(self._own[place].as_py())
        return Example(
            index=int(self.rows[place]),
            prompt_ids=ids_T[: cuts[0]],
            answers=tuple(
                TrainedResponse(ids=ids_T[a:b], mask=mask_T[a:b]) for a, b in pairwise(cuts)
            ),
            **own,
        )


class ShardFolder:
    """A dataset's folder in the token cache.

    Args:
        path: the path of the folder, which is created with the first shard.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._refused = path, False
        found = sorted(path.glob("*.arrow")) if path.is_dir() else []
        self._files = {int(each.stem.partition("-")[0]): each for each in found}

    def has(self, number: int) -> bool:
        """Return whether the shard with the index `number` existed when the folder was opened."""
        return number in self._files

    def open(self, number: int, size: int) -> ShardFile | None:
        """Return the shard with the index `number`; None if there is no file of it.

        A file that is damaged or does not hold `size` rows is deleted, and the result is None too.
        """
        import pyarrow as pa

        path = self._files.get(number)
        if path is None:
            return None
        with suppress(ValueError, OSError, KeyError, TypeError, pa.ArrowException):
            found = ShardFile(path)
            if found.facts.rows == size:
                return found
        with suppress(OSError):
            path.unlink()
        return None

    def write(self, number: int, facts: ShardFacts, examples: Sequence[Example]) -> Path | None:
        """Write a shard and return its file; None if a row has images, which are in other files, or if writing fails."""
        if facts.images:
            return None
        content = _written(facts, examples)
        path = self._path / f"{number}-{_digest(content)}.arrow"
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._path) as own:
                written = Path(own) / path.name
                written.write_bytes(content)
                written.replace(path)
        except OSError as error:
            if not self._refused:
                logging.getLogger("dovetail").warning(
                    "token ids can't be written to the cache (data.cache_dir): %s", error
                )
            self._refused = True
            return None
        return path


def _written(facts: ShardFacts, examples: Sequence[Example]) -> Any:
    import pyarrow as pa

    parts = [[e.prompt_ids, *(answer.ids for answer in e.answers)] for e in examples]
    masks = [
        [np.zeros(len(e.prompt_ids), np.bool_), *(answer.mask for answer in e.answers)]
        for e in examples
    ]
    own = [{name: getattr(example, name) for name in _OWN} for example in examples]
    columns = {
        "row": pa.array([example.index for example in examples], pa.int64()),
        "ids": _packed(parts, np.int32),
        "mask": _packed(masks, np.uint8),
        "lengths": _packed([[[len(part)] for part in each] for each in parts], np.int32),
        "own": pa.array([json.dumps(each, default=str) for each in own], pa.string()),
    }
    table = pa.table(columns).replace_schema_metadata({"facts": json.dumps(attrs.asdict(facts))})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _packed(rows: Sequence[Sequence[Any]], dtype: Any) -> Any:
    """Return a list column in which each row is the concatenation of its parts."""
    import pyarrow as pa

    offsets = np.cumsum([0, *(sum(map(len, parts)) for parts in rows)], dtype=np.int64)
    flat = [np.asarray(part) for parts in rows for part in parts]
    values = np.concatenate(flat) if flat else np.zeros(0)
    return pa.LargeListArray.from_arrays(offsets, pa.array(values.astype(dtype)))


def _lists(table: Any, name: str) -> Callable[[int], np.ndarray]:
    """Return a function that returns the values of a list column at a row index, without a copy."""
    column = table[name].combine_chunks()
    offsets, values = column.offsets.to_numpy(), column.values.to_numpy()
    return lambda place: values[offsets[place] : offsets[place + 1]]


def _digest(content: Any) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def cache_folder(
    given: str | None, tokenizer: Tokenizer, follows_from: Mapping[str, Any]
) -> Path | None:
    """Return the folder of a dataset's shards. None, for no cache: the tokenizer is not a fast one, or its template reads the clock.

    Args:
        given: the cache's directory (`data.cache_dir`); see `cache_root`.
        tokenizer: the tokenizer of the examples.
        follows_from: the further inputs that determine the examples; another input gives another folder.
    """
    # A template that writes the date renders other text tomorrow.
    if not getattr(tokenizer, "is_fast", False) or "strftime_now" in str(tokenizer.chat_template):
        return None
    described = [
        tokenizer.backend_tokenizer.to_str(),
        str(tokenizer.chat_template),
        tokenizer.special_tokens_map,
        {key: follows_from[key] for key in sorted(follows_from)},
        {name: version(name) for name in ("transformers", "tokenizers", "jinja2", "pyarrow")},
        _code(),
    ]
    digest = hashlib.blake2b(json.dumps(described, default=repr).encode(), digest_size=16)
    return cache_root(given) / "tokens" / digest.hexdigest()


def cache_root(given: str | None) -> Path:
    """Return the cache's directory: the given one, `$DOVETAIL_CACHE`, or `~/.cache/dovetail`."""
    return Path(given or os.environ.get("DOVETAIL_CACHE") or "~/.cache/dovetail").expanduser()


@cache
def _code() -> str:
    """Return the digest of this package's modules, so that a change of their code changes the cache key."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
