"""SchedulerWorker: runs Dovetail's commands in an SGLang scheduler: receive, verify and load weights, and measure free memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch
import torch.distributed as dist

from dovetail.errors import WeightSyncError
from dovetail.interfaces import WeightManifest, WeightReceiver
from dovetail_rollout_sglang.adapters import Adapters
from dovetail_rollout_sglang.loading import load
from dovetail_serving import (
    Outcome,
    WeightEnd,
    end_from,
    first_failed,
    free_bytes,
    manifest_from,
    outcome_of,
)

_workers: WeakKeyDictionary[Any, SchedulerWorker] = WeakKeyDictionary()


def worker_of(updater: Any) -> SchedulerWorker:
    """Return the `SchedulerWorker` of a scheduler, created on first access.

    Args:
        updater: the object that updates the scheduler's weights.
    """
    runner = updater.tp_worker.model_runner
    model = runner.model
    if model not in _workers:
        adapters = Adapters(getattr(runner, "lora_manager", None))
        _workers[model] = SchedulerWorker(model, updater.tp_cpu_group, adapters)
    return _workers[model]


class SchedulerWorker:
    """Runs Dovetail's commands on one scheduler's shard of a model.

    Args:
        model: the SGLang model.
        group: the tensor-parallel ranks' process group on a CPU backend. All ranks get the same commands, and the first rank's
            answer is used.
        adapters: the adapters of this process.
    """

    def __init__(self, model: Any, group: Any, adapters: Adapters) -> None:
        self._model, self._group, self._adapters = model, group, adapters
        self._device = next(model.parameters()).device
        self._end: WeightEnd | None = None
        self._changed = False

    def answer(self, command: bytes) -> str:
        """Run one of Dovetail's commands, and return its outcome.

        Args:
            command: a JSON object whose field `do` is one of:

                - `connect`: create the receiver of weights. `info` is what `transport_info` returned.
                - `load`: load a weight update. `manifest` is what `manifest_info` returned, `adapter` the name for the update's adapter,
                  and `in_force` the name of the current adapter; a name is null without an adapter.
                - `free_bytes`: measure free memory. No further fields.

        Returns:
            The `Outcome` of all ranks together, with the field `free_bytes`, as JSON. Errors are returned, not raised, since a
            scheduler that raises ends its server.
        """
        request = json.loads(command)
        acts: Mapping[str, Callable[[], None]] = {
            "connect": lambda: self._connect(request["info"]),
            "load": lambda: self._load(
                request["manifest"], request["adapter"], request["in_force"]
            ),
            "free_bytes": lambda: None,
        }
        self._changed = False
        outcome = self._outcome(acts[request["do"]])
        return json.dumps(self._together(outcome, free_bytes(self._device)))

    def _connect(self, info: Mapping[str, Any]) -> None:
        if self._end is not None:
            self._end.close()
            self._end = None
        self._end = end_from(info["transport"], info["context"], str(self._device))

    def _load(self, info: Mapping[str, Any], adapter: str | None, in_force: str | None) -> None:
        manifest = manifest_from(info)
        if self._end is None:
            raise WeightSyncError("this SGLang has no weight transport: `connect` was not called")
        with self._end.taking(manifest):
            if manifest.kind == "adapter" and adapter is not None:
                self._adapters.refuse_none(manifest)
                tensors = _kept(self._end.receiver, manifest)
                self._adapters.load(manifest, tensors, adapter, in_force)
            else:
                self._take(self._end.receiver, manifest)
                # The current adapter stays until the next update: requests that were just interrupted may still name it.
                self._adapters.drop_all_but(in_force)

    def _take(self, receiver: WeightReceiver, manifest: WeightManifest) -> None:
        if manifest.kind != "full":
            raise WeightSyncError(
                f"weight update {manifest.version} of kind {manifest.kind!r} can't be loaded into the engine; expected 'full'"
            )

        def touched() -> None:
            self._changed = True

        load(
            self._model,
            receiver.receive(manifest),
            lasting=receiver.lasting,
            device=self._device,
            touched=touched,
        )
        if self._device.type != "cpu":
            torch.accelerator.synchronize()

    def _outcome(self, act: Callable[[], None]) -> Outcome:
        return outcome_of(act, lambda: self._changed)

    def _together(self, outcome: Outcome, free: int) -> dict[str, Any]:
        size = dist.get_world_size(self._group)
        if size == 1:
            return {**attrs.asdict(outcome), "free_bytes": free}
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, (outcome, free), group=self._group)
        everyone = [one for one, _ in gathered]
        rank = first_failed(everyone)
        if rank is not None:
            outcome = attrs.evolve(everyone[rank], error=f"{everyone[rank].error} in rank {rank}")
        outcome = attrs.evolve(outcome, changed=any(one.changed for one in everyone))
        return {**attrs.asdict(outcome), "free_bytes": sum(bytes_ for _, bytes_ in gathered)}


def _kept(receiver: WeightReceiver, manifest: WeightManifest) -> dict[str, torch.Tensor]:
    """Return all tensors of an update by name, verified and copied to host memory."""
    return {
        name: tensor.detach().to("cpu", copy=True) for name, tensor in receiver.receive(manifest)
    }
