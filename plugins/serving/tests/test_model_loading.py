"""Loading weights into an engine's model, for every engine."""

from __future__ import annotations

import pytest
from torch import nn

from dovetail.errors import WeightSyncError
from dovetail_serving import refuse_missing_weights, without_adapters


class Around(nn.Module):
    """A layer with room for an adapter, as engines wrap around a model's layers."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


def roomy() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(Around(nn.Linear(2, 2))), nn.Linear(2, 2))


def test_while_weights_load_the_model_is_as_it_was_before_it_got_room_for_adapters() -> None:
    model = roomy()
    inner = model[0][0].base_layer
    with without_adapters(model):
        names = [name for name, _ in model.named_parameters()]
    assert names == ["0.0.weight", "0.0.bias", "1.weight", "1.bias"]
    assert model[0][0].base_layer is inner


def test_a_load_that_fails_gives_the_room_back() -> None:
    model = roomy()
    with pytest.raises(ZeroDivisionError), without_adapters(model):
        _ = 1 / 0
    assert isinstance(model[0][0], Around)


def test_what_got_nothing_is_named_the_first_three_of_it() -> None:
    refuse_missing_weights([])
    with pytest.raises(WeightSyncError, match="model: a") as few:
        refuse_missing_weights(["a", "b", "c"])
    assert "more" not in few.value.message
    with pytest.raises(WeightSyncError, match="a, b, c and 2 more"):
        refuse_missing_weights(["a", "b", "c", "d", "e"])
