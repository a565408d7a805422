"""Fixtures of the data tests: small files, and a tokenizer with and without a chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_rows import files_source, trained

from dovetail.config import config_from_mapping
from dovetail.sections import DataSection, ModelSection, RunConfig
from dovetail_datasets.load_examples import load_examples
from dovetail_datasets.prompts import load_prompts
from dovetail_datasets.tokenizer import load_tokenizer
from dovetail_sdk.testing import template_tokenizer, tiny_tokenizer


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes rows to a file of this name (parquet by its ending, else JSONL, texts as they are) and returns its path."""

    def write_rows(name: str, rows: Sequence[Any]) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(list(rows)), path)
        else:
            lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
            path.write_text("".join(f"{line}\n" for line in lines))
        return str(path)

    return write_rows


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer that has a ChatML template."""
    directory = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer(directory)
    return directory


@pytest.fixture
def run_config(tokenizer_directory: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """Makes the config of a run with this trainer, model and `data` section."""

    def make(
        trainer: Any = "supervised", model: Mapping[str, Any] | None = None, **data: Any
    ) -> RunConfig:
        document = {
            "model": {"path": str(tokenizer_directory), **(model or {})},
            "output_dir": str(tmp_path / "runs"),
            "trainer": {"name": trainer} if isinstance(trainer, str) else trainer,
            "data": {"cache_dir": str(tmp_path / "cache"), **data},
        }
        return config_from_mapping(document).config

    return make


@pytest.fixture(scope="module")
def tokenizer(tokenizer_directory: Path) -> Any:
    """The tokenizer of that directory, one for each module."""
    return load_tokenizer(ModelSection(path=str(tokenizer_directory)))


@pytest.fixture
def templated(tokenizer_directory: Path) -> Callable[..., Any]:
    """Makes a tokenizer with another chat template, of which some texts may be special tokens."""

    def make(template: str | None, special: Sequence[str] = ()) -> Any:
        tokenizer = load_tokenizer(ModelSection(path=str(tokenizer_directory)))
        if special:
            tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
        tokenizer.chat_template = template
        return tokenizer

    return make


@attrs.frozen
class Read:
    """Rows after reading: their texts, and the content that the chat template leaves out."""

    prompts: list[str]
    texts: list[str]
    """Text of each answer with its prompt."""
    trained: list[str]
    """Trained text of each answer, with `…` in place of untrained text between trained parts."""
    left_out: tuple[str, ...]
    spelled: int
    """Number of control tokens that the rows spell, which are encoded as text."""


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
        data = DataSection(max_prompt_length=limit, max_response_length=9999, **section)
        given = files_source(), [write(file, rows)], tokenizer, data, ModelSection(path=model)
        if kind == "prompts":
            found = load_prompts(*given, tools=tools)
        else:
            found = load_examples(*given, kind)
        answers = [(e, a) for e in found.prompts for a in getattr(e, "answers", ())]
        return Read(
            prompts=[tokenizer.decode(each.prompt_ids.tolist()) for each in found.prompts],
            texts=[tokenizer.decode([*e.prompt_ids, *a.ids]) for e, a in answers],
            trained=["…".join(trained(tokenizer, a)) for _, a in answers],
            left_out=found.left_out,
            spelled=found.spelled,
        )

    return read_rows
