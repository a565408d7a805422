"""Files that are generated: written, or compared with what is on disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path


def differences(texts: Mapping[Path, str], stale: Iterable[Path] = ()) -> list[str]:
    """Return how files on disk differ from what `write` would leave, a line each; empty where they do not.

    Args:
        texts: the content of each file.
        stale: files that were generated for what is gone.
    """
    found = []
    for file, text in texts.items():
        if not file.is_file():
            found.append(f"{file} does not exist")
        elif file.read_text(encoding="utf-8") != text:
            found.append(f"{file} is out of date")
    return found + [f"{file} describes what is gone" for file in stale]


def write(texts: Mapping[Path, str], stale: Iterable[Path] = ()) -> None:
    """Write the files that differ, and remove the stale ones with folders that they leave empty."""
    for file, text in texts.items():
        if differences({file: text}):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    for file in stale:
        file.unlink()
        if not any(file.parent.iterdir()):
            file.parent.rmdir()


def stale_files(folder: Path, texts: Mapping[Path, str], mark: str) -> list[Path]:
    """Return the Markdown files below a folder that begin with the mark of generated ones and are not among the texts."""
    return [
        file
        for file in sorted(folder.rglob("*.md"))
        if file not in texts and file.read_text(encoding="utf-8").startswith(mark)
    ]
