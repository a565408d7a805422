"""Several HfRollout replicas in one process: an update that is sent once reaches every replica."""

from __future__ import annotations

import pytest

from dovetail.interfaces import PluginContext, TensorSpec, WeightManifest
from dovetail_rollouts import RolloutPool
from dovetail_rollouts.transports.config import InProcessTransportConfig
from dovetail_rollouts.transports.in_process import InProcessTransport


@pytest.mark.parametrize("together", [True, False])
def test_two_replicas_take_every_update_from_one_in_process_transport(
    start, generate, request_of, together
) -> None:
    transport = InProcessTransport(InProcessTransportConfig(), PluginContext())
    replicas = [start(transport=transport) for _ in range(2)]
    pool = RolloutPool(replicas)
    sender = transport.sender()
    weights = {name: p.detach().clone() for name, p in replicas[0]._model.named_parameters()}
    specs = tuple(
        TensorSpec(name=name, shape=tuple(w.shape), dtype="float32") for name, w in weights.items()
    )
    for version in (1, 2):
        weights = {name: 1.5 * w for name, w in weights.items()}
        manifest = WeightManifest(version=version, tensors=specs)
        sender.send(manifest, weights.items())
        if together:
            pool.replicas.receive_weights(version, manifest)
        else:
            for replica in replicas:
                replica.receive_weights(version, manifest)
        first, second = (generate(replica, request_of(version)) for replica in replicas)
        for key, completion in first.items():
            assert completion.weight_versions.tolist() == [version] * 8
            assert second[key].weight_versions.tolist() == [version] * 8
            assert second[key].response_ids.tolist() == completion.response_ids.tolist()
