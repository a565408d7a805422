"""Search over a file: the conformance suite, the order against BM25 by hand, and bad files."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

pytest.importorskip("bm25s", reason="bm25s is not installed")

from dovetail.errors import DataError
from dovetail.interfaces import PluginContext
from dovetail_sdk.testing.conformance import ToolConformance
from dovetail_tools.config import SearchConfig
from dovetail_tools.search import Search

ROWS = [
    {"title": "Rhine", "text": "The Rhine is a river in Europe; it flows through Cologne."},
    {"title": "Nile", "text": "The Nile is a river in Africa, and the longest river there."},
    {"title": "Alps", "text": "The Alps are mountains in Europe."},
    {"title": "Köln", "text": "Köln ist eine Stadt. " + "Dom " * 400},
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "documents.jsonl"
    path.write_text("\n\n".join(map(json.dumps, ROWS)) + "\n")
    return path


def started(path: Path, **settings: Any) -> Search:
    tool = Search(SearchConfig(name="search", documents=str(path), **settings), PluginContext())
    tool.start()
    return tool


def found(tool: Search, query: str) -> str:
    content = asyncio.run(tool.call(None, "search", {"query": query})).content
    assert isinstance(content, str)
    return content


class TestSearch(ToolConformance):
    plugin = Search
    calls = (
        ("search", {"query": "longest river"}, "[1] Nile"),
        ("search", {"query": "zebra"}, "No document"),
        ("search", {"query": ""}, "No document"),
        ("search", {"query": "Stadt"}, "Köln"),
    )

    @pytest.fixture(autouse=True)
    def _file(self, file: Path) -> None:
        type(self).config = SearchConfig(name="search", documents=str(file), title="title")


def test_the_order_is_that_of_bm25(file):
    words = [row["text"].lower().replace(";", "").replace(".", "").replace(",", "").split() for row in ROWS]  # fmt: skip
    mean = sum(map(len, words)) / len(words)

    def score(document: list[str], query: str, k: float = 1.5, b: float = 0.75) -> float:
        total = 0.0
        for word in query.split():
            containing = sum(word in one for one in words)
            idf = math.log(1 + (len(words) - containing + 0.5) / (containing + 0.5))
            count = document.count(word)
            total += idf * count * (k + 1) / (count + k * (1 - b + b * len(document) / mean))
        return total

    for query in ("river europe", "europe mountains", "river"):
        ranked = sorted((one for one in words if score(one, query)), key=lambda one: -score(one, query))  # fmt: skip
        hits = found(started(file, results=4), query).split("\n\n")
        assert [hit.split()[2].lower() for hit in hits] == [one[1] for one in ranked]


def test_results_and_their_length_are_bounded(file):
    text = found(started(file, results=1, max_characters=30), "river dom")
    assert text.startswith("[1] ")
    assert len(text) == 4 + 30 + 1


def test_parquet_is_read_too(tmp_path):
    path = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path)
    assert "Alps" in found(started(path), "mountains")


def test_a_line_of_json_ends_at_a_line_feed_alone(tmp_path):
    path = tmp_path / "d.jsonl"
    texts = ["high\u2028Alps", "deep\x85sea", "a\u2029dome"]
    rows = [json.dumps({"title": "t", "text": text}, ensure_ascii=False) for text in texts]
    path.write_bytes("\r\n".join(rows).encode())
    tool = started(path)
    assert all(text in found(tool, text.split()[1]) for text in texts)


@pytest.mark.parametrize(
    ("name", "content", "facts"),
    [
        ("missing.jsonl", None, "can't be read"),
        ("d.csv", "a", "neither a .jsonl nor a .parquet"),
        ("d.jsonl", "", "contains no documents"),
        ("d.jsonl", "{", "can't be read"),
        ("d.jsonl", "[1]", "line 1 is '[1]'"),
        ("d.jsonl", '{"body": "x"}', "the row has body"),
        ("d.jsonl", '{"text": "x"}\n{"text": null}', "row 2: column 'text' is None"),
        ("d.parquet", "x", "can't be read"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_what_is_wrong(tmp_path, name, content, facts):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=name) as caught:
        started(tmp_path / name)
    assert facts in str(caught.value)
