"""Fixtures of the data tests: little files, and a tokenizer with and without a chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dovetail.interfaces import PluginContext
from dovetail.sections import DataSection, ModelSection
from dovetail_datasets.config import FilesConfig
from dovetail_datasets.files import FilesSource
from dovetail_datasets.load_examples import load_examples
from dovetail_datasets.prompts import load_prompts
from dovetail_sdk.testing import template_tokenizer, tiny_tokenizer


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


@attrs.frozen
class Read:
    """Rows as they are read: their texts, and what the chat template leaves out."""

    prompts: list[str]
    texts: list[str]
    """Of each answer with its prompt."""
    trained: list[str]
    """What is trained on of each answer, with `…` where something stands between that is not."""
    left_out: tuple[str, ...]
    spelled: int
    """Control tokens that the rows spell, which are encoded as text."""


@pytest.fixture
def read(write: Callable[..., str]) -> Callable[..., Read]:
    """Reads rows of a kind under a chat template, from a file of this name."""

    def read_rows(
        template: str,
        rows: Sequence[dict[str, Any]],
        kind: Any = "conversations",
        *,
        file: str = "rows.jsonl",
        model: str = "/no/model",
        tools: Any = None,
        limit: int = 9999,
        **section: Any,
    ) -> Read:
        tokenizer = template_tokenizer(template)
        source = FilesSource(FilesConfig(), PluginContext())
        data = DataSection(max_prompt_length=limit, max_response_length=9999, **section)
        given = source, [write(file, rows)], tokenizer, data, ModelSection(path=model)
        if kind == "prompts":
            found = load_prompts(*given, tools=tools)
        else:
            found = load_examples(*given, kind)
        trained = [
            "…".join(
                tokenizer.decode(answer.ids[part].tolist())
                for part in np.ma.clump_unmasked(np.ma.masked_array(answer.ids, ~answer.mask))
            )
            for example in found.prompts
            for answer in getattr(example, "answers", ())
        ]
        texts = [
            tokenizer.decode([*example.prompt_ids, *answer.ids])
            for example in found.prompts
            for answer in getattr(example, "answers", ())
        ]
        prompts = [tokenizer.decode(each.prompt_ids.tolist()) for each in found.prompts]
        return Read(prompts, texts, trained, found.left_out, found.spelled)

    return read_rows
