"""Upload of a directory to a repository of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from dovetail.errors import CheckpointError, ConfigError


@contextmanager
def on_hub(repository: str) -> Iterator[Path]:
    """Yield the path of a temporary directory, whose content is committed to the repository at the end of the block.

    A missing repository is created first, as private. Without credentials, nothing is written.

    Args:
        repository: the repository, `USER/NAME`.

    Raises:
        ConfigError: credentials are missing.
        CheckpointError: the hub refuses the commit, or can't be reached.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError

    if get_token() is None:
        raise ConfigError(
            f"{repository} can't be written: no credentials for the Hugging Face hub were found",
            hint="run `hf auth login`, or set HF_TOKEN",
        )
    api = HfApi()
    with TemporaryDirectory(prefix="dovetail-hub-") as folder:
        try:
            api.create_repo(repository, private=True, exist_ok=True)
        except HFValidationError as error:
            raise ConfigError(
                f"{repository!r} is not a valid repository name: {error}",
                hint="name the repository USER/NAME",
            ) from error
        except Exception as error:
            raise _refused(repository, error) from error
        directory = Path(folder) / "model"
        yield directory
        if not directory.exists():
            return
        try:
            api.upload_folder(
                repo_id=repository, folder_path=directory, commit_message="Exported by Dovetail"
            )
        except Exception as error:
            raise _refused(repository, error) from error


def _refused(repository: str, error: Exception) -> CheckpointError:
    """Return the error for a refused upload; the hub client's own errors have no common class."""
    said = " ".join(str(error).split()) or type(error).__name__
    return CheckpointError(
        f"the Hugging Face hub refused the upload to {repository}: {said}",
        hint="check that the token may write to this repository, and that the hub can be reached (HF_ENDPOINT, HF_HUB_OFFLINE)",
    )
