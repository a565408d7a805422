"""DovetailTransferEngine: a weight-transfer engine for vLLM that receives weights over any of Dovetail's transports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from dovetail.errors import WeightSyncError
from dovetail.interfaces import WeightManifest, WeightReceiver
from dovetail_rollout_vllm.loading import Counted, load
from dovetail_rollout_vllm.versions import model_config_of
from dovetail_rollouts import received_whole
from dovetail_serving import WeightEnd, end_from, manifest_from


@dataclass
class DovetailInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Argument of `init_weight_transfer_engine`: the result of `dovetail_serving.weight_wire.transport_info`."""

    transport: dict[str, Any] = field(default_factory=dict)
    context: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class DovetailUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Argument of `update_weights`: the result of `dovetail_serving.weight_wire.manifest_info`."""

    manifest: dict[str, Any] = field(default_factory=dict)


class DovetailTransferEngine(WeightTransferEngine[DovetailInitInfo, DovetailUpdateInfo]):  # type: ignore[misc]
    """Receives weight updates in one of vLLM's workers.

    `receive_weights` performs a whole update, and loads verified tensors as they arrive. `start_weight_update` and
    `finish_weight_update` do nothing. vLLM 0.24 needs `is_checkpoint_format=False`.

    Attributes:
        changed: whether the last update, complete or not, has overwritten any weight.
    """

    init_info_cls = DovetailInitInfo
    update_info_cls = DovetailUpdateInfo

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._end: WeightEnd | None = None
        self.changed = False

    def init_transfer_engine(self, init_info: DovetailInitInfo) -> None:
        """Create the receiver of weights; from now on a sender waits for this worker in every update."""
        self.shutdown()
        self._end = end_from(init_info.transport, init_info.context, self.place)

    @property
    def place(self) -> str:
        """The name of this worker's torch device."""
        named = getattr(self, "device", None)
        return str(next(self.model.parameters()).device if named is None else named)

    def start_weight_update(self) -> None:
        """Do nothing, since loading begins with the first verified tensor."""

    def receive_weights(
        self,
        update_info: DovetailUpdateInfo,
        load_weights: Callable[[list[tuple[str, Tensor]]], None] | None = None,
    ) -> None:
        """Receive, verify and load an update of all weights.

        Args:
            update_info: the manifest, with every tensor's shape.
            load_weights: vLLM 0.24's loader, unused, since it may keep more than one layer in memory.

        Raises:
            WeightSyncError: the update did not arrive completely; `changed` tells whether weights were overwritten.
        """
        manifest = manifest_from(update_info.manifest)
        self.changed = False
        if manifest.kind != "full":
            raise WeightSyncError(
                f"weight update {manifest.version} of kind {manifest.kind!r} can't be loaded into the engine; expected 'full'"
            )
        tensors = Counted(self._incoming(manifest), lasting=self._open().lasting, device=self.place)
        try:
            load(self.model, model_config_of(self, self.model), tensors)
            # Exhausts the receiver, which may raise after its last tensor; a further tensor is one that vLLM did not load.
            for name, _ in tensors:
                raise WeightSyncError(f"vLLM did not load the tensor {name!r}")
        finally:
            self.changed = tensors.taken > 0
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """Do nothing, since `receive_weights` finishes the update."""

    def taking(self, manifest: WeightManifest) -> AbstractContextManager[None]:
        """Return a context manager for the receipt of an update. If its block fails, the update
        also ends in the other workers, which would otherwise wait until their time-outs.

        Raises:
            WeightSyncError: the receiver was not created.
        """
        return self._made().taking(manifest)

    def receive_whole(self, manifest: WeightManifest) -> list[tuple[str, Tensor]]:
        """Receive an update that vLLM does not load tensor by tensor, such as an adapter, and return all tensors in the manifest's shapes.

        Raises:
            WeightSyncError: the update did not arrive completely.
        """
        self.changed = False
        return received_whole(self._open(), manifest)

    def shutdown(self) -> None:
        if self._end is not None:
            self._end.close()
            self._end = None

    @staticmethod
    def trainer_send_weights(*_: Any) -> None:
        """Raise an error, since Dovetail's training engines send the weights.

        Raises:
            WeightSyncError: always.
        """
        raise WeightSyncError(
            "trainer_send_weights can't be called: Dovetail's WeightSender sends the weights"
        )

    def _incoming(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        return self._open().receive(manifest)

    def _open(self) -> WeightReceiver:
        return self._made().receiver

    def _made(self) -> WeightEnd:
        if self._end is None:
            raise WeightSyncError(
                "this vLLM is not connected to a weight transport yet",
                hint="call init_weight_transfer_engine, which connects it, before any update",
            )
        return self._end
