"""Writes the card (README.md) of a prepared dataset: the origin of its rows, and the changes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import yaml

from dovetail import __version__
from dovetail_datasets.prepare.hub import revision_of
from dovetail_datasets.prepare.recipe import DataRecipe
from dovetail_datasets.prepare.writing import WrittenSplits


@attrs.frozen(kw_only=True)
class Origin:
    """The origin of a dataset's files."""

    folder: Path
    command: str
    """The command that prepares the dataset."""


def card(recipe: DataRecipe, origin: Origin, output: Path, written: WrittenSplits) -> str:
    """Return the card of a prepared dataset: the text of its `README.md`, which begins with the metadata that the hub reads."""
    licence = licence_of(origin.folder) or recipe.licence
    made_with = recipe.made_with()
    revision = revision_of(origin.folder) or "not known: a local copy"
    facts = {
        "dataset": recipe.repository or made_with,
        **({} if made_with else {"revision": revision}),
        "licence": licence,
        "rows are": recipe.rows_are.replace("_", " "),
        "scored by": f"the reward function `{recipe.scored_by}`" if recipe.scored_by else "",
        "command": f"`{origin.command}`",
        "made with": f"dovetail {__version__}",
    }
    metadata: dict[str, Any] = {"license": licence.lower()}
    if recipe.repository:
        metadata["source_datasets"] = [recipe.repository]
    changes = [*recipe.changes]
    changes += [f"{n:,} rows are left out: {why}." for why, n in sorted(written.left_out.items())]
    if written.held_out:
        config = recipe.config
        changes.append(
            f"Validation rows are {config.held_out:.1%} of the prompts of the training split, chosen by seed {config.seed}."
        )
    made = [
        (f"{split}.parquet", f"{rows:,}", digest_of(output / f"{split}.parquet"))
        for split, rows in sorted(written.rows.items())
    ]
    given = [
        (str(file.relative_to(origin.folder)), digest_of(file)) for file in files_of(recipe, origin)
    ]
    parts = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=True)}---",
        f"# {recipe.name}",
        _table(("", ""), [(key, value) for key, value in facts.items() if value]),
        "## Files",
        _table(("file", "rows", "SHA-256"), made),
        "## What was changed",
        "\n".join(f"- {change}" for change in changes),
    ]
    if given:
        parts += ["## Made from", _table(("file", "SHA-256"), given)]
    return "\n\n".join(parts) + "\n"


def files_of(recipe: DataRecipe, origin: Origin) -> list[Path]:
    """Return the files of a dataset that a recipe reads."""
    if recipe.made_with():
        return []
    found = {file for pattern in recipe.patterns().values() for file in origin.folder.glob(pattern)}
    return sorted(file for file in found if file.is_file())


def digest_of(file: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def licence_of(folder: Path) -> str:
    """Return the licence named by the dataset's own card in a folder; empty if there is none."""
    try:
        _, front, _ = (folder / "README.md").read_text(encoding="utf-8").split("---", 2)
        licence = yaml.safe_load(front)["license"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return ""
    return ", ".join(map(str, licence)) if isinstance(licence, list) else str(licence)


def _table(headers: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [[*headers], ["---" for _ in headers], *([*row] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
