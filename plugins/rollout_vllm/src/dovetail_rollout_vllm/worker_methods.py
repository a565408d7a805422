"""WorkerMethods: methods that the rollout calls on each vLLM worker. vLLM adds them to its worker class."""

from __future__ import annotations

import json
from typing import Any

from dovetail_rollout_vllm.adapters import add_adapter
from dovetail_rollout_vllm.fused import parts_of
from dovetail_rollout_vllm.recorder import LogProbRecorder
from dovetail_rollout_vllm.versions import forget_adapter_state
from dovetail_serving import free_bytes, manifest_from, outcome_of


class WorkerMethods:
    """Methods for vLLM's `collective_rpc`, called by name; arguments and results are text or numbers.

    The methods return errors instead of raising. If a worker raises, vLLM reads no further answers, and the next call would receive
    the unread answers.
    """

    def dovetail_connect(self: Any, info: str) -> str:
        """Create this worker's receiver of weights.

        Args:
            info: the result of `dovetail_serving.weight_wire.transport_info`, as JSON.

        Returns:
            An `Outcome`, as JSON.
        """

        def act() -> None:
            self.init_weight_transfer_engine(json.loads(info))

        return outcome_of(act).text()

    def dovetail_receive(self: Any, info: str) -> str:
        """Receive, verify and load a weight update.

        Args:
            info: the result of `dovetail_serving.weight_wire.manifest_info`, as JSON.

        Returns:
            An `Outcome`, as JSON.
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

        return outcome_of(act, lambda: bool(engine.changed)).text()

    def dovetail_parts(self: Any) -> str:
        """Return the names of the model's fused layers, each with the names of the checkpoint tensors that are fused.

        Returns:
            The result of `fused.parts_of`, as JSON.
        """
        return json.dumps(parts_of(self.get_model()))

    def dovetail_free_bytes(self: Any) -> int:
        """Return the free memory of this worker's accelerator in bytes, as the driver reports it; 0 on a CPU."""
        return free_bytes(self.device)

    def dovetail_record(self: Any) -> bool:
        """Make this worker keep log-probabilities until `dovetail_log_probs` fetches them.

        Returns:
            Whether it keeps them; False if it can't, so that vLLM returns the log-probabilities with the tokens.
        """
        self.dovetail_recorder = LogProbRecorder.attach(self)
        return self.dovetail_recorder is not None

    def dovetail_log_probs(self: Any, lengths: str) -> str:
        """Return the log-probabilities of finished requests, and delete them from the recorder.

        Args:
            lengths: JSON object with the number of tokens by request id.

        Returns:
            The result of `LogProbRecorder.take`, as JSON.
        """
        recorder = self.dovetail_recorder  # None on the stages of a pipeline before the last
        return json.dumps(recorder.take(json.loads(lengths)) if recorder else {})
