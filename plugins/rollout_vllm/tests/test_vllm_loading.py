"""Loading layer by layer inside vLLM: a failed update leaves no tensors behind, and its own error is reported."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dovetail.errors import WeightSyncError
from dovetail.interfaces import WeightManifest
from dovetail_rollout_vllm import loading
from dovetail_rollout_vllm.loading import Counted
from dovetail_rollout_vllm.versions import VLLM
from dovetail_rollout_vllm.worker_methods import WorkerMethods
from dovetail_serving import WeightEnd, manifest_info, merged_outcomes

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(VLLM.installed() is None, reason="vLLM is not installed here"),
]


class Model(nn.Linear):
    """A model of one layer, which takes what comes without a look at it."""

    def load_weights(self, tensors: Counted) -> set[str]:
        return {name for name, _ in tensors}


def half_way(model: nn.Module) -> None:
    from vllm.model_executor.model_loader.reload import (
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    record_metadata_for_reloading(model)
    initialize_layerwise_reload(model)
    info = get_layerwise_info(model)
    info.load_numel = 2
    info.loaded_weights.append(("weight", None))


def test_tensors_that_wait_for_others_of_their_layer_are_forgotten() -> None:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    model = nn.Linear(2, 2)
    half_way(model)

    loading._forget_what_waits(model)

    assert get_layerwise_info(model).load_numel == 0
    assert get_layerwise_info(model).loaded_weights == []


def test_what_broke_an_update_off_is_what_is_told() -> None:
    def tensors():
        yield "bias", torch.zeros(2)
        raise WeightSyncError("the sender is gone")

    model = Model(2, 2)
    with pytest.raises(WeightSyncError, match="sender is gone"):
        loading.load(model, None, Counted(tensors(), lasting=True, device="cpu"))


def test_a_worker_that_fails_calls_the_update_off_and_is_named() -> None:
    from dovetail_rollout_vllm.transfer_engine import DovetailTransferEngine

    reasons: list[str] = []
    transport: Any = SimpleNamespace(
        receiver=lambda: None, call_off=lambda manifest, reason: reasons.append(reason)
    )
    engine: Any = DovetailTransferEngine.__new__(DovetailTransferEngine)
    engine._end = WeightEnd(transport)
    worker = SimpleNamespace(weight_transfer_engine=engine, vllm_config=None)
    info = json.dumps(manifest_info(WeightManifest(version=1, kind="delta", tensors=())))
    told = WorkerMethods.dovetail_receive(worker, info)
    assert "delta" in reasons[0]
    off = json.dumps({"error": "told so", "called_off": True})
    assert merged_outcomes([off, told], version=1).error == f"{reasons[0]} in worker 1"
