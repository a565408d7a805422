"""Loading weights into a worker's part of the model, the way TensorRT-LLM updates it itself: in pieces, then finished."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from dovetail_rollout_trtllm.engine_imports import finalizer
from dovetail_rollout_trtllm.engine_types import ModelEngine, Worker, call_if_there

PIECE_BYTES = 512 << 20
"""How much is handed over at once: a piece lies beside the model on the accelerator."""

Named = tuple[str, Tensor]


class Update:
    """One update of one worker.

    Args:
        worker: whose model is updated.
        device: the torch device of the model.

    Attributes:
        changed: whether anything of the model may have been overwritten.
    """

    def __init__(self, worker: Worker, device: torch.device) -> None:
        self._worker, self._device = worker, device
        self.changed = False

    @torch.no_grad()
    def load(self, tensors: Iterable[Named], *, lasting: bool) -> None:
        """Load a whole set of weights, while nothing is generated, and forget cached prefixes.

        Where this fails half-way, the model holds a mixture of old and new weights, and can be loaded again.

        Args:
            tensors: verified, by their Hugging Face names.
            lasting: whether each stays as it is after the next has been asked for.
        """
        executor = self._worker.engine
        with executor.control_action():
            model_engine = executor.model_engine
            pieces = _pieces(tensors, self._device, lasting=lasting)
            try:
                for piece in pieces:
                    self._begin(model_engine)
                    model_engine.model_loader.reload(
                        model_engine.model, piece, allow_partial_loading=True
                    )
                    # The next piece may come in the memory of this one.
                    self._wait()
                if not self.changed:
                    return
                self._finish(model_engine)
            except BaseException:
                if self.changed:
                    call_if_there(model_engine.model_loader, "abort_update_weights")
                raise
            self._wait()
            executor.reset_prefix_cache()

    def _begin(self, model_engine: ModelEngine) -> None:
        """Make the model ready, once the first piece is there: until then it is as it was."""
        if self.changed:
            return
        self._wait()
        self.changed = True
        # Compiled modules have other names, under which nothing would be loaded.
        call_if_there(model_engine, "unwrap_compiled_model_for_refit")
        call_if_there(model_engine.model_loader, "begin_update_weights")
        _on_modules(model_engine.model, "pre_reload_weights")

    def _finish(self, model_engine: ModelEngine) -> None:
        """Let modules derive what they derive from their weights."""
        finish = finalizer()
        if finish is not None:
            finish(self._worker)
        else:
            call_if_there(model_engine.model_loader, "finalize_update_weights")
            _on_modules(model_engine.model, "process_weights_after_loading", "post_load_weights")
        call_if_there(
            model_engine, "restore_compiled_model_after_refit", self._worker.engine.resource_manager
        )

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def _pieces(
    tensors: Iterable[Named], device: torch.device, *, lasting: bool
) -> Iterator[dict[str, Tensor]]:
    """Tensors on the model's device, as many together as `PIECE_BYTES` hold."""
    piece: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        here = tensor.to(device) if lasting else tensor.to(device, copy=True)
        if piece and size + here.nbytes > PIECE_BYTES:
            yield piece
            piece, size = {}, 0
        piece[name] = here
        size += here.nbytes
    if piece:
        yield piece


def _on_modules(model: nn.Module, *hooks: str) -> None:
    """Call these hooks of every module that has them and still has its weights, module by module."""
    for module in model.modules():
        if getattr(module, "_weights_removed", False):
            continue
        for hook in hooks:
            found = getattr(module, hook, None)
            if found is not None:
                found()
