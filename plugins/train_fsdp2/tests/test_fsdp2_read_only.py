"""Engines do not write into their input arrays, which other roles and processes read too."""

import numpy as np
import pytest

from dovetail.batch import Batch, Ragged
from dovetail.plugins import objective_spec
from dovetail_train_fsdp2.config import Fsdp2Config, LoraSection

VALUE = objective_spec("value")
CONFIGS = [
    pytest.param({"packing": "never", "share_prompts": "never"}, id="padded"),
    pytest.param({"packing": "never", "share_prompts": "always"}, id="shared"),
    pytest.param({"packing": "always", "share_prompts": "never"}, id="packed"),
    pytest.param({"packing": "always", "share_prompts": "always"}, id="shared packs"),
    pytest.param({"lora": LoraSection(rank=4)}, id="lora"),
]


def read_only(batch):
    """The same, such as it comes out of shared memory."""

    def locked(array):
        array = array.copy()
        array.flags.writeable = False
        return array

    columns = {}
    for name, values in batch.columns.items():
        if isinstance(values, Ragged):
            columns[name] = Ragged(locked(values.values), locked(values.offsets))
        else:
            columns[name] = locked(values) if isinstance(values, np.ndarray) else values
    return Batch(columns)


def locked_arrays(batch):
    for values in batch.columns.values():
        if isinstance(values, Ragged):
            yield from (values.values, values.offsets)
        elif isinstance(values, np.ndarray):
            yield values


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_batch_that_can_not_be_written_to_gives_the_same(
    tiny, make_engine, batch, valued, objective, config, head
):
    outputs, goal = frozenset({"log_probs", "entropies"}), objective
    if head == "value":
        batch, outputs, goal = valued, frozenset({"values"}), VALUE
    given, before = read_only(batch), read_only(batch)
    assert not any(array.flags.writeable for array in locked_arrays(given))
    found = {}
    for which, samples in (("given", given), ("own", batch)):
        engine = make_engine(tiny, config=Fsdp2Config(**config), head=head, budget=64)
        metrics = engine.update(samples, goal)
        scores = engine.forward(samples, outputs)
        found[which] = ({n: m.value for n, m in metrics.items()}, scores)
    assert found["given"][0] == found["own"][0]
    assert found["given"][1].equals(found["own"][1])
    # A tensor that shares the memory could be written to although the array is read-only.
    assert given.equals(before)
    assert batch.equals(before)
    assert not any(array.flags.writeable for array in locked_arrays(given))
