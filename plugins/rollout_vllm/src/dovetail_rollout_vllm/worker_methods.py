"""WorkerMethods: what the rollout asks of each of vLLM's workers. vLLM adds them to its own worker class."""

from __future__ import annotations

import json
from typing import Any

import attrs

from dovetail.serving.weight_wire import Outcome, first_failed, manifest_from
from dovetail_rollout_vllm.adapters import add_adapter
from dovetail_rollout_vllm.fused import parts_of
from dovetail_rollout_vllm.versions import forget_adapter_state


class WorkerMethods:
    """Called through vLLM's `collective_rpc` by name; arguments and results are text or numbers.

    None of them raises: vLLM passes on the first worker's exception alone and leaves the answers of the others unread,
    which the next call would take for its own.
    """

    def dovetail_connect(self: Any, info: str) -> str:
        """Make the receiver of weights.

        Args:
            info: JSON of `wire.transport_info`.

        Returns:
            JSON of an `Outcome`.
        """
        return _outcome(lambda: self.init_weight_transfer_engine(json.loads(info)))

    def dovetail_receive(self: Any, info: str) -> str:
        """Receive an update, verify and load it.

        Args:
            info: JSON of `wire.manifest_info`.

        Returns:
            JSON of an `Outcome`.
        """
        from vllm.config import set_current_vllm_config

        engine = self.weight_transfer_engine
        manifest = manifest_from(json.loads(info))

        def act() -> int | None:
            with engine.taking(manifest):
                if manifest.kind == "adapter":
                    return add_adapter(self, manifest, engine.receive_whole(manifest))
                with set_current_vllm_config(self.vllm_config):
                    engine.receive_weights(engine.parse_update_info({"manifest": json.loads(info)}))
                forget_adapter_state(self)
                return None

        return _outcome(act, lambda: bool(engine.changed))

    def dovetail_parts(self: Any) -> str:
        """What the model puts together from several tensors of a checkpoint.

        Returns:
            JSON of `fused.parts_of`.
        """
        return json.dumps(parts_of(self.get_model()))

    def dovetail_free_bytes(self: Any) -> int:
        """Free memory of this worker's accelerator as its driver sees it; 0 on a CPU."""
        import torch

        if not torch.accelerator.is_available():
            return 0
        torch.accelerator.synchronize()
        free, _ = torch.get_device_module(self.device).mem_get_info()
        return int(free)


def _outcome(act: Any, changed: Any = lambda: False) -> str:
    try:
        adapter = act()
    except Exception as error:  # noqa: BLE001 - reported to the caller, see WorkerMethods
        found = Outcome.of_failure(error, changed=changed())
    else:
        found = Outcome(adapter=adapter, changed=True)
    return json.dumps(attrs.asdict(found))


def merged(outcomes: list[str], version: int) -> Outcome:
    """What an update came to in all workers together.

    Args:
        outcomes: JSON of each worker's `Outcome`, by rank.
        version: of the update, for the message.

    Returns:
        The first worker's where all succeeded; else an error that says who failed, and whether any of them changed.
    """
    found = [Outcome(**json.loads(text)) for text in outcomes]
    rank = first_failed(found)
    if rank is None:
        return found[0]
    first = found[rank]
    where = f" in worker {rank}" if len(found) > 1 else ""
    error = first.error or ""
    said = error if f"update {version}" in error else f"weight update {version} failed: {error}"
    changed = any(one.changed for one in found)
    return attrs.evolve(first, error=said + where, changed=changed)
