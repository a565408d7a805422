"""Writes the rows of a recipe as Parquet files in two passes. The first pass finds column types, overlap and the rows to hold out."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set as AbstractSet
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import attrs
import pyarrow as pa
import pyarrow.parquet as pq

from dovetail.errors import DataError, PluginBrokenError
from dovetail.plugins import called, title_of
from dovetail_datasets.prepare.recipe import DataRecipe, Split, UnusedRow

T = TypeVar("T")
_AT_ONCE = 1000
"""Number of rows of a Parquet row group."""
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "prompts": ("prompt", "data_source", "reward_model"),
    "preferences": ("prompt", "chosen", "rejected"),
    "unpaired_preferences": ("prompt", "response", "label"),
    "conversations": ("messages",),
}
"""Columns that rows must have, by kind of example."""
_ORDER: tuple[Split, ...] = ("test", "validation", "train")
"""Order of reading. Training rows come last, since they are compared with the rows of the other splits."""


@attrs.define
class WrittenSplits:
    """The files that a recipe wrote."""

    rows: dict[Split, int]
    """Number of rows of each file, by split."""
    left_out: Counter[str]
    """The number of rows that were left out, by reason."""
    held_out: bool
    """Whether validation rows were taken from the training split."""


class RecipeWriter:
    """Writes the rows that a recipe makes from a dataset as Parquet files.

    Args:
        recipe: the recipe, whose `start` has been called.
        folder: the folder with the dataset's files.
    """

    def __init__(self, recipe: DataRecipe, folder: Path) -> None:
        self._recipe, self._folder = recipe, folder
        self._title = title_of("data_recipe", recipe)
        self._left_out: Counter[str] = Counter()
        self._schemas: list[pa.Schema] = []

    def write(self, output: Path) -> WrittenSplits:
        """Write `SPLIT.parquet` for each split into a folder.

        Raises:
            DataError: a file is missing, a row or column is wrong, splits overlap, or there are too few rows.
            PluginBrokenError: the recipe raised an error of its own, or returned something other than a row.
        """
        splits = [split for split in _ORDER if split in self._recipe.patterns()]
        kept = {split: self._survey(split) for split in splits}
        self._check_overlap(kept)
        for split in splits:
            if not kept[split]:
                raise DataError(
                    f"the split {split!r} has no row to write (rows left out: {self._reasons()})",
                    hint="check that the files belong to the dataset of the recipe",
                )
        held = set() if "validation" in kept else self._held_out(kept["train"])
        schema = pa.unify_schemas(self._schemas, promote_options="permissive")
        count: Counter[Split] = Counter()
        for split in splits:
            rows = self._rows(split, kept[split], schema, without=held)
            count[split] = _write(output / f"{split}.parquet", rows)
        if held:
            rows = self._rows("train", kept["train"], schema, of=held)
            count["validation"] = _write(output / "validation.parquet", rows)
        rows_of = {split: count[split] for split in reversed(_ORDER) if split in count}
        return WrittenSplits(rows=rows_of, left_out=self._left_out, held_out=bool(held))

    def _reasons(self) -> str:
        return "; ".join(f"{reason}: {n:,}" for reason, n in self._left_out.items()) or "none"

    def _survey(self, split: Split) -> dict[int, tuple[int, str]]:
        """Return the prompt digest and the location (file and number) of each kept row, by the row's index in the split.

        Also records the column types, and the reasons for which rows are left out.
        """
        kept: dict[int, tuple[int, str]] = {}
        seen: set[int] = set()
        for lot in _lots(self._converted(split)):
            rows = []
            for number, where, row in lot:
                if isinstance(row, UnusedRow):
                    self._left_out[row.reason] += 1
                    continue
                digest = _digest(row)
                if self._recipe.distinct and digest in seen:
                    self._left_out["repeats the prompt of an earlier row"] += 1
                    continue
                seen.add(digest)
                kept[number] = digest, where
                rows.append(row)
            if rows:
                self._schemas.append(pa.schema(list(_array(rows, lot[0][1]).type)))
        return kept

    def _converted(self, split: Split) -> Iterator[tuple[int, str, dict[str, Any] | UnusedRow]]:
        """Yield, for every row of a split, its index in the split, its location (file and number) and the converted row."""
        recipe = self._recipe
        for number, (where, given) in enumerate(recipe.read(split, self._folder)):
            if isinstance(given, DataError):
                raise given
            row = called(lambda: self._title, recipe.convert, given, where)
            if not isinstance(row, UnusedRow):
                missing = [c for c in _NEEDED[recipe.rows_are] if c not in row]
                if missing:
                    raise PluginBrokenError(
                        f"{self._title} converted {where} to a row without the column(s) {', '.join(missing)}; expected the columns {', '.join(_NEEDED[recipe.rows_are])}"
                    )
                if recipe.rows_are == "prompts":
                    row["extra_info"] = {
                        **row.get("extra_info", {}),
                        "index": number,
                        "split": split,
                    }
            yield number, where, row

    def _check_overlap(self, kept: dict[Split, dict[int, tuple[int, str]]]) -> None:
        """Refuse or drop training rows whose prompt is also in another split."""
        others = {
            digest: where
            for split, rows in kept.items()
            if split != "train"
            for digest, where in rows.values()
        }
        both = {number: row for number, row in kept["train"].items() if row[0] in others}
        if not both:
            return
        if self._recipe.config.overlap == "error":
            column = "messages" if self._recipe.rows_are == "conversations" else "prompt"
            digest, where = next(iter(both.values()))
            raise DataError(
                f"the prompts of {len(both):,} training row(s) are also in validation or test rows; the first: the {column!r} of {where} equals that of {others[digest]}",
                hint="set overlap=drop to leave such rows out of the training split",
            )
        self._left_out["has the prompt of a validation or test row"] += len(both)
        for number in both:
            del kept["train"][number]

    def _held_out(self, kept: dict[int, tuple[int, str]]) -> set[int]:
        """Return the digests of the prompts to hold out for validation, chosen by a hash of seed and prompt digest."""
        config = self._recipe.config
        prompts = {digest for digest, _ in kept.values()}
        if len(prompts) < 2:
            raise DataError(
                f"no prompt can be held out for validation: the training split has {len(prompts)} distinct prompt(s); expected at least 2 (rows left out: {self._reasons()})",
                hint="check that the files belong to the dataset of the recipe",
            )
        order = sorted(prompts, key=lambda digest: _hash(f"{config.seed} {digest}".encode()))
        return set(order[: min(max(1, round(config.held_out * len(order))), len(order) - 1)])

    def _rows(
        self,
        split: Split,
        kept: dict[int, tuple[int, str]],
        schema: pa.Schema,
        *,
        of: set[int] | None = None,
        without: AbstractSet[int] = frozenset(),
    ) -> Iterator[pa.Table]:
        """Yield the kept rows of a split as tables of the same schema.

        Args:
            split: the split.
            kept: the rows to keep, as `_survey` returns them.
            schema: the schema of all tables.
            of: digests of the only prompts to yield; None yields all prompts.
            without: digests of prompts not to yield.
        """
        chosen = (
            row
            for number, _, row in self._converted(split)
            if number in kept
            if kept[number][0] not in without and (of is None or kept[number][0] in of)
        )
        for lot in _lots(chosen):
            yield pa.Table.from_struct_array(pa.array(lot, pa.struct(list(schema))))


def _lots(items: Iterable[T]) -> Iterator[list[T]]:
    iterator = iter(items)
    while lot := list(islice(iterator, _AT_ONCE)):
        yield lot


def _array(rows: list[dict[str, Any]], where: str) -> pa.StructArray:
    try:
        return pa.array(rows)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(
            f"a column has values of several types in the {len(rows):,} row(s) from {where} on: {error}",
            hint="correct the rows, or change the recipe to write these values as text",
        ) from error


def _write(path: Path, tables: Iterator[pa.Table]) -> int:
    """Write tables to one file, and return the number of rows. Without tables, no file is created."""
    count, writer = 0, None
    try:
        for table in tables:
            writer = writer or pq.ParquetWriter(path, table.schema)
            writer.write_table(table)
            count += len(table)
    finally:
        if writer is not None:
            writer.close()
    return count


def _digest(row: Mapping[str, Any]) -> int:
    """Return the digest of a row's prompt and images; without a prompt, of its messages before the last."""
    asked = row["prompt"] if "prompt" in row else row["messages"][:-1]
    images = [repr(image) for image in row.get("images", ())]
    return _hash(json.dumps([asked, images], sort_keys=True, default=repr).encode())


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
