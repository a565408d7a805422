"""Helpers for tests with rollout replicas: making their context, and sending them weights."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from dovetail.errors import CalledOffError, WeightSyncError
from dovetail.interfaces import BaseRollout, PluginContext, WeightManifest, WeightSender
from dovetail.sections import ModelSection


def replica_context(model: Path, run_directory: Path, /, **settings: Any) -> PluginContext:
    """Return the context of replica 0 of a run with seed 1, on a model in float32.

    Args:
        model: directory in Hugging Face format.
        run_directory: the run directory.
        settings: fields of `PluginContext` to add or replace.
    """
    fields = {
        "seed": 1,
        "role": "rollout",
        "run_directory": run_directory,
        "model": ModelSection(path=str(model), dtype="float32"),
    }
    return PluginContext(**{**fields, **settings})


def send_weights(
    engine: BaseRollout,
    sender: WeightSender,
    manifest: WeightManifest,
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Send an update while the engine receives, as a run with several processes does.

    If the engine refuses the update, the sender's update is cancelled, as in a run, so that the sender does not wait.

    Args:
        engine: a started engine.
        sender: the trainer's end of the engine's transport.
        manifest: names, shapes and dtypes of the tensors; this function sets `receivers`.
        tensors: names and values, in the manifest's order.

    Raises:
        WeightSyncError: the update did not arrive completely. An error that the engine raised takes precedence.
    """
    manifest = sender.prepare(attrs.evolve(manifest, receivers=engine.receivers))
    with ThreadPoolExecutor(1) as thread:
        receiving = thread.submit(engine.receive_weights, manifest.version, manifest)
        receiving.add_done_callback(lambda done: _call_off(engine, manifest, done.exception()))
        try:
            sender.send(manifest, tensors)
        except WeightSyncError as not_sent:
            raise receiving.exception() or not_sent from None
        receiving.result()


def _call_off(engine: BaseRollout, manifest: WeightManifest, error: BaseException | None) -> None:
    transport = engine.context.transport
    if error is None or transport is None or isinstance(error, CalledOffError):
        return
    with suppress(WeightSyncError):  # the update has ended already
        transport.call_off(manifest, str(error))
