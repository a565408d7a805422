"""Fixtures of the data tests: little files, and a tokenizer with and without a chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dovetail_sdk.testing import tiny_tokenizer


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes rows to a file of this name (parquet by its ending, else JSONL) and returns its path."""

    def write_rows(name: str, rows: Sequence[dict[str, Any]]) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(list(rows)), path)
        else:
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return str(path)

    return write_rows


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer that has a ChatML template."""
    directory = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(directory)
    return directory
