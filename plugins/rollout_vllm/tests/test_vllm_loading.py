"""Loading layer by layer inside vLLM: an update that breaks off leaves nothing behind, and its error is the one that is told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dovetail.errors import WeightSyncError
from dovetail_rollout_vllm import loading
from dovetail_rollout_vllm.loading import Counted
from dovetail_rollout_vllm.versions import installed

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(installed() is None, reason="vLLM is not installed here"),
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
    with pytest.raises(WeightSyncError, match="the sender is gone"):
        loading.load(model, None, Counted(tensors(), lasting=True, device="cpu"))
