"""Search: a tool that ranks the documents of a file by BM25."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.errors import DataError
from dovetail.interfaces import PluginContext, Tool, ToolResult, ToolSchema
from dovetail_tools.config import SearchConfig


class Search(Tool):
    """Tool that finds the documents that match a query best by BM25 (Robertson and Zaragoza 2009), with the library bm25s."""

    name = "search"
    api = ">=2.0,<3"
    Config = SearchConfig

    def __init__(self, config: SearchConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self._documents: list[str] = []
        self._index: Any = None

    def start(self) -> None:
        """Read the documents, and build the index.

        Raises:
            DataError: the file is missing or empty, can't be read, or lacks a column.
        """
        import bm25s

        rows = _rows(Path(self.config.documents).expanduser())
        self._documents = [self._document(row, number) for number, row in enumerate(rows, 1)]
        if not self._documents:
            raise DataError(f"the file {self.config.documents} contains no documents")
        self._index = bm25s.BM25()
        self._index.index(bm25s.tokenize(self._documents, show_progress=False), show_progress=False)

    def close(self) -> None:
        self._documents, self._index = [], None

    def schemas(self) -> Sequence[ToolSchema]:
        query = {"type": "string", "description": "Words to look for."}
        function = {
            "name": "search",
            "description": self.config.description,
            "parameters": {
                "type": "object",
                "properties": {"query": query},
                "required": ["query"],
            },
        }
        return ({"type": "function", "function": function},)

    async def call(self, state: Any, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        # Search in a thread: with millions of documents, a search takes long enough to delay the event loop.
        found = await asyncio.to_thread(self._search, arguments["query"])
        return ToolResult(content="\n\n".join(found) or "No document has any of these words.")

    def _search(self, query: str) -> list[str]:
        import bm25s

        tokens = bm25s.tokenize(query, return_ids=False, show_progress=False)
        count = min(self.config.results, len(self._documents))
        rows, scores = self._index.retrieve(tokens, k=count, show_progress=False)
        hits = [int(row) for row, score in zip(rows[0], scores[0], strict=True) if score > 0]
        most = self.config.max_characters
        return [
            f"[{rank}] {text if len(text) <= most else f'{text[:most]}…'}"
            for rank, text in enumerate((self._documents[hit] for hit in hits), 1)
        ]

    def _document(self, row: Mapping[str, Any], number: int) -> str:
        parts = []
        for column in filter(None, (self.config.title, self.config.text)):
            if not isinstance(row.get(column), str):
                raise DataError(
                    f"{self.config.documents}, row {number}: column {column!r} is {row.get(column)!r:.80}; expected text",
                    hint=f"set the tool's `text` and `title` to text columns; the row has {', '.join(map(str, row))}",
                )
            parts.append(row[column])
        return "\n".join(parts)


def _rows(file: Path) -> Sequence[Mapping[str, Any]]:
    """Return the rows of a file.

    Raises:
        DataError: the file is missing, of another format, or damaged.
    """
    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet

            return pyarrow.parquet.read_table(file).to_pylist()
        if file.suffix != ".jsonl":
            raise DataError(f"the file {file} is neither a .jsonl nor a .parquet file", hint="convert the file to one of these formats")  # fmt: skip
        rows = []
        for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
            row = json.loads(line) if line.strip() else None
            if row is not None and not isinstance(row, dict):
                raise DataError(
                    f"{file}, line {number} is {line.decode()[:80]!r}; expected a JSON object"
                )
            rows += [row] if row is not None else []
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"the file {file} can't be read: {error}") from error
    return rows
