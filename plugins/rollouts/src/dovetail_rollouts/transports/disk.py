"""The disk transport: an update is a directory of safetensors buckets that appears atomically.

Layout below the transport's directory: `version_00000007/bucket_00000.safetensors …` and
`manifest.json` with the update's id and each tensor's bucket and digest. A receiver waits for the id of its own
manifest, so it ignores files that an earlier run or an earlier attempt left in the directory.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from dovetail.errors import ConfigError, WeightSyncError
from dovetail.interfaces import (
    PluginConfig,
    PluginContext,
    WeightManifest,
    WeightReceiver,
    WeightSender,
    WeightTransport,
)
from dovetail_rollouts.transports.checks import Bucket, bucketed, gather_the_rest, matched
from dovetail_rollouts.transports.config import DiskTransportConfig

_INDEX = "manifest.json"
_POLL_SECONDS = 0.01


class DiskTransport(WeightTransport):
    """Writes weights to a directory that trainers and rollouts share."""

    name = "disk"
    api = ">=1.0,<2"
    capabilities = frozenset({"across_processes", "across_machines"})
    Config = DiskTransportConfig

    def __init__(self, config: DiskTransportConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        if config.directory is None and context.run_directory is None:
            raise ConfigError(
                "the disk transport needs a directory for its files, since there is no run directory",
                hint="set rollout.weight_transport.directory",
            )

    @property
    def directory(self) -> Path:
        """The directory of the updates."""
        if self.config.directory is not None:
            return Path(self.config.directory)
        return Path(self.context.run_directory or ".") / "weights"

    def sender(self) -> WeightSender:
        # No receiver waits for the updates of an earlier run, which only take up space.
        if self.context.rank == 0:
            for stale in self.directory.glob("version_*"):
                shutil.rmtree(stale, ignore_errors=True)
        return _Sender(self.directory, self.config, self.context)

    def receiver(self) -> WeightReceiver:
        return _Receiver(self.directory, self.config)


@attrs.frozen(eq=False)
class _Sender(WeightSender):
    directory: Path
    config: PluginConfig
    context: PluginContext

    def send(self, manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]]) -> None:
        gathered = iter(tensors)
        if self.context.rank != 0:
            # Every rank takes part in gathering the tensors, but only rank 0 writes them.
            gather_the_rest(matched(manifest, gathered))
            return
        try:
            self._write(manifest, bucketed(manifest, gathered, digest=self.config.verify))
        except OSError as error:
            gather_the_rest(gathered)
            raise WeightSyncError(
                f"weight update {manifest.version} can't be written to {self.directory}: {error}",
                hint="free space in this directory, or set rollout.weight_transport.directory",
            ) from error

    def _write(self, manifest: WeightManifest, buckets: Iterable[Bucket]) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        target = _target(self.directory, manifest.version)
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            index = []
            for number, bucket in enumerate(buckets):
                file = f"bucket_{number:05d}.safetensors"
                names = [name for name, _ in bucket.tensors]
                # Cloned, since tied tensors share memory, which safetensors refuses.
                data = {name: tensor.cpu().contiguous().clone() for name, tensor in bucket.tensors}
                try:
                    save_file(data, partial / file)
                except SafetensorError as error:  # raised if the disk is full
                    raise OSError(str(error)) from error
                digests = [f"{digest:016x}" for digest in bucket.digests]
                index.append({"file": file, "names": names, "digests": digests})
            (partial / _INDEX).write_text(
                json.dumps(
                    {
                        "version": manifest.version,
                        "update_id": manifest.update_id,
                        "buckets": index,
                    }
                )
            )
            if target.exists():
                shutil.rmtree(target)
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        for old in _versions(self.directory)[: -self.config.keep]:
            shutil.rmtree(old, ignore_errors=True)


@attrs.frozen(eq=False)
class _Receiver(WeightReceiver):
    directory: Path
    config: PluginConfig

    def receive(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        source = _target(self.directory, manifest.version)
        index = self._wait_for(source, manifest)
        yield from matched(manifest, self._read(source, index, manifest.version))

    def _wait_for(self, source: Path, manifest: WeightManifest) -> dict[str, Any]:
        deadline = time.monotonic() + self.config.timeout
        while True:
            index = _index(source)
            if index is not None and index.get("update_id") == manifest.update_id:
                return index
            if time.monotonic() > deadline:
                found = (
                    f"; the files there belong to another attempt to send it, {index.get('update_id')}"
                    if index
                    else ""
                )
                raise WeightSyncError(
                    f"weight update {manifest.version} did not appear at {source} within "
                    f"{self.config.timeout:g} seconds{found}",
                    hint="let trainer and rollout share this directory, or raise "
                    "rollout.weight_transport.timeout",
                )
            time.sleep(_POLL_SECONDS)

    def _read(
        self, source: Path, index: dict[str, Any], version: int
    ) -> Iterator[tuple[str, Tensor]]:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            for entry in index["buckets"]:
                loaded = load_file(source / entry["file"])
                bucket = Bucket(
                    tuple((name, loaded[name]) for name in entry["names"]),
                    tuple(int(digest, 16) for digest in entry["digests"]),
                )
                bucket.verify(version)
                yield from bucket.tensors
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise _unreadable(source, version, error) from error


def _index(source: Path) -> dict[str, Any] | None:
    """Return the index of an update; None if the index does not exist yet or can't be read."""
    try:
        index = json.loads((source / _INDEX).read_text())
    except (OSError, ValueError):
        return None
    return index if isinstance(index, dict) else None


def _unreadable(source: Path, version: int, error: Exception) -> WeightSyncError:
    return WeightSyncError(
        f"weight update {version} at {source} can't be read: {error!r}",
        hint="the old weights stay in force; send the update again",
    )


def _target(directory: Path, version: int) -> Path:
    return directory / f"version_{version:08d}"


def _versions(directory: Path) -> list[Path]:
    """Return the directories of complete updates, oldest first."""
    whole = [path for path in directory.glob("version_*") if not path.suffix]
    numbered = []
    for path in whole:
        with suppress(ValueError):
            numbered.append((int(path.name.removeprefix("version_")), path))
    return [path for _, path in sorted(numbered)]
