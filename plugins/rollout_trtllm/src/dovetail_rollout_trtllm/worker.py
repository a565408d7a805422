"""DovetailWorker: what the rollout asks of each of TensorRT-LLM's workers, which adds these methods to its own class."""

from __future__ import annotations

import json
from typing import Any

import torch

from dovetail.errors import WeightSyncError
from dovetail.serving import WeightEnd, end_from, free_bytes, manifest_from, outcome_of
from dovetail_rollout_trtllm.engine_types import Worker
from dovetail_rollout_trtllm.loading import Update

_END = "dovetail_weight_end"


class DovetailWorker:
    """Called through TensorRT-LLM's `collective_rpc` by name; arguments and results are text or numbers.

    None of them raises: the first worker's exception would hide what the others did.
    """

    def dovetail_connect(self: Any, info: str) -> str:
        """Make the receiver of weights.

        Args:
            info: JSON of `weight_wire.transport_info`.

        Returns:
            JSON of an `Outcome`.
        """

        def act() -> None:
            told = json.loads(info)
            close_end(self)
            setattr(self, _END, end_from(told["transport"], told["context"], str(device_of(self))))

        return outcome_of(act).text()

    def dovetail_receive(self: Any, info: str) -> str:
        """Receive an update, verify and load it.

        Args:
            info: JSON of `weight_wire.manifest_info`.

        Returns:
            JSON of an `Outcome`.
        """
        update = Update(self, device_of(self))

        def act() -> None:
            manifest = manifest_from(json.loads(info))
            end = end_of(self)
            with end.taking(manifest):
                if manifest.kind != "full":
                    raise WeightSyncError(
                        f"update {manifest.version} of kind {manifest.kind!r} can't be loaded here"
                    )
                update.load(end.receiver.receive(manifest), lasting=end.receiver.lasting)

        return outcome_of(act, lambda: update.changed).text()

    def dovetail_reset_cache(self: Any) -> str:
        """Forget cached prefixes; returns JSON of an `Outcome`."""

        def act() -> None:
            worker: Worker = self
            with worker.engine.control_action():
                worker.engine.reset_prefix_cache()

        return outcome_of(act).text()

    def dovetail_free_bytes(self: Any) -> int:
        """Free memory of this worker's accelerator as its driver sees it; 0 on a CPU."""
        return free_bytes(device_of(self))


def device_of(worker: Worker) -> torch.device:
    """The torch device of a worker's model."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, worker.device_id)


def end_of(worker: Any) -> WeightEnd:
    """The worker's end of the weight transport.

    Raises:
        WeightSyncError: it was not made.
    """
    found: WeightEnd | None = vars(worker).get(_END)
    if found is None:
        raise WeightSyncError(
            "this TensorRT-LLM was not told where weights come from", hint="connect it first"
        )
    return found


def close_end(worker: Any) -> None:
    """Close the worker's end of the weight transport, where there is one."""
    found: WeightEnd | None = vars(worker).pop(_END, None)
    if found is not None:
        found.close()
