"""Counts code lines: lines without blanks, comments and docstrings.

Usage: python tests/architecture/code_lines.py FILE_OR_FOLDER …
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

_LAYOUT = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


def code_lines(text: str) -> int:
    """Return how many lines of Python source hold code. A string that is a statement, as docstrings of fields are, is a docstring."""
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in _LAYOUT
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        text_alone = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if text_alone and isinstance(node.value.value, str):
            lines -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(lines)


def lines_below(*places: Path) -> int:
    """Return the code lines of these Python files, and of those below these folders."""
    files = [f for place in places for f in ([place] if place.is_file() else place.rglob("*.py"))]
    return sum(code_lines(file.read_text()) for file in files)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        sys.stdout.write(f"{lines_below(Path(argument)):8,}  {argument}\n")
