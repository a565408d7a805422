"""DataRecipeConformance: the conformance suite of recipes, for a recipe's own tests and for `dovetail plugins check`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dovetail.errors import DataError
from dovetail_datasets.prepare.recipe import DataRecipe, Split
from dovetail_datasets.prepare.writing import RecipeWriter
from dovetail_sdk.testing import tiny_model_and_tokenizer, tiny_vision_model
from dovetail_sdk.testing.chat_templates import CHATML
from dovetail_sdk.testing.conformance import PluginConformance

Rows = Sequence[Mapping[str, Any]]
Files = Mapping[Split, Rows]


class DataRecipeConformance(PluginConformance):
    """Conformance suite for data recipes: subclass it and set `plugin` and `rows`. A recipe that generates its rows needs no `rows`."""

    kind = "data_recipe"
    plugin: ClassVar[type[DataRecipe]]
    rows: ClassVar[Files] = {}
    """Some rows of each split, with the columns and types of the dataset's card. A split from which validation prompts are held out
    needs at least two prompts.
    """
    unread: ClassVar[frozenset[str]] = frozenset()
    """Columns of the dataset that the recipe does not read. The suite checks that a row without one of the others is refused."""

    def write(self, path: Path, rows: Rows) -> None:
        """Write rows in the dataset's file format: Parquet, unless a suite overrides this method."""
        pq.write_table(pa.Table.from_pylist([*rows]), path)

    def file_of(self, split: Split) -> str:
        """Return the path of the split's file in the suite's copy of the repository: the split's pattern with `part` for `*`, and with
        `.parquet` if it has no extension.
        """
        name = self.make().patterns()[split].replace("*", "part")
        return name if Path(name).suffix else f"{name}.parquet"

    def repository(self, folder: Path, rows: Files | None = None) -> Path:
        """Write files with `rows`, by default the suite's, into a folder with the hub's layout, and return the folder."""
        for split, own in (self.rows if rows is None else rows).items():
            path = folder / self.file_of(split)
            path.parent.mkdir(parents=True, exist_ok=True)
            self.write(path, own)
        return folder

    def prepared(self, folder: Path, rows: Files | None = None) -> Path:
        """Prepare rows, by default the suite's, with the recipe, and return the folder with the written Parquet files."""
        if self.plugin.repository and not self.rows:
            pytest.skip("the suite has no rows of the dataset: set its `rows`")
        output = folder / "prepared"
        output.mkdir(parents=True)
        recipe = self.make()
        recipe.start()
        try:
            RecipeWriter(recipe, self.repository(folder / "repository", rows)).write(output)
        finally:
            recipe.close()
        return output

    def test_it_writes_rows_to_train_on_and_rows_that_are_held_out(self, tmp_path: Path) -> None:
        output = self.prepared(tmp_path)
        for split in ("train", "validation"):
            assert pq.read_metadata(output / f"{split}.parquet").num_rows > 0

    def test_it_makes_the_same_files_again(self, tmp_path: Path) -> None:
        first, second = (self.prepared(tmp_path / name) for name in ("first", "second"))
        for file in first.iterdir():
            assert file.read_bytes() == (second / file.name).read_bytes()

    def test_data_look_shows_its_rows_and_data_check_finds_nothing_wrong(
        self, tmp_path: Path
    ) -> None:
        output = self.prepared(tmp_path)
        train = output / "train.parquet"
        columns = pq.read_schema(train).names
        make_model = tiny_vision_model if "images" in columns else tiny_model_and_tokenizer
        settings: dict[str, object] = {
            "model.path": make_model(tmp_path / "model"),
            "data.val_files": output / "validation.parquet",
            "data.max_prompt_length": 8000,
            "data.max_response_length": 8000,
        }
        if "tools" in columns:
            settings["model.chat_template"] = tmp_path / "chatml.jinja"
            (tmp_path / "chatml.jinja").write_text(CHATML, encoding="utf-8")
        given = [str(train), *(f"{key}={value}" for key, value in settings.items())]
        for command in ("look", "check"):
            done = subprocess.run(  # noqa: S603 - our own interpreter
                [sys.executable, "-m", "dovetail", "data", command, *given],
                capture_output=True,
                text=True,
                check=False,
                cwd=tmp_path,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert "left out" not in done.stdout

    def test_a_missing_column_is_named_with_its_file(self, tmp_path: Path) -> None:
        for column in self._columns():
            rows: Files = {
                split: [{k: v for k, v in row.items() if k != column} for row in own]
                for split, own in self.rows.items()
            }
            self._check_refused(tmp_path / column, rows, column)

    def test_a_null_is_named_with_its_column_and_file(self, tmp_path: Path) -> None:
        for column in self._columns():
            first, *others = self.rows["train"]
            rows: Files = {**self.rows, "train": [*others, {**first, column: None}]}
            self._check_refused(tmp_path / column, rows, column)

    def _check_refused(self, folder: Path, rows: Files, column: str) -> None:
        with pytest.raises(DataError) as caught:
            self.prepared(folder, rows)
        assert repr(column) in caught.value.message
        assert "repository/" in caught.value.message

    def _columns(self) -> list[str]:
        """Return the columns that the recipe reads."""
        if not self.rows:
            pytest.skip("the suite has no `rows`, whose columns the recipe would read")
        return sorted(self.rows["train"][0].keys() - self.unread)
