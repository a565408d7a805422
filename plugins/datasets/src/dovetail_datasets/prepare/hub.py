"""Downloads files of a dataset from the Hugging Face hub into the hub's cache."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from dovetail.errors import DataError


def download(repository: str, patterns: Iterable[str], revision: str | None) -> Path:
    """Download a dataset's card and its files that match `patterns`, unless they are in the hub's cache, and return their folder.

    Args:
        repository: the repository's name on the hub.
        patterns: the patterns of the files.
        revision: a commit, branch or tag; by default the latest.

    Raises:
        DataError: the files can't be downloaded: no such repository, no access, no network.
    """
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError

    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository,
                repo_type="dataset",
                revision=revision,
                allow_patterns=[*patterns, "README.md"],
            )
        )
    except Exception as error:
        hint = "copy the dataset's files to this machine, laid out as on the hub, and name their folder with --from DIR"
        if isinstance(error, GatedRepoError):
            hint = f"accept the dataset's terms on its hub page, and log in (`hf auth login`); or {hint}"
        cause = " ".join(str(error).split())[:300]
        raise DataError(
            f"the dataset {repository!r} can't be downloaded: {type(error).__name__}: {cause}",
            hint=hint,
        ) from error


def revision_of(folder: Path) -> str:
    """Return the commit of a folder in the hub's cache; empty for any other folder."""
    name = folder.resolve().name
    return name if re.fullmatch(r"[0-9a-f]{40}", name) else ""
