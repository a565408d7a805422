"""Clusters that can't be reached, and settings that Ray does not take: one clear error each."""

from __future__ import annotations

import socket

import pytest

from dovetail.errors import PlacementError
from dovetail_runtime_ray.cluster import Cluster
from dovetail_runtime_ray.config import RayConfig

pytestmark = pytest.mark.usefixtures("no_cluster")


class Heard:
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, text: str) -> None:
        self.warnings.append(text)


def refused(config: RayConfig) -> str:
    """The message of the error when connecting."""
    with pytest.raises(PlacementError) as caught:
        Cluster(config, 1, Heard())
    return str(caught.value)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_nobody_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port()}"
    assert f"answers at '{address}'" in refused(RayConfig(address=address))
    monkeypatch.setenv("RAY_ADDRESS", address)
    message = refused(RayConfig())
    assert f"answers at '{address}'" in message
    assert "ray start --head" in message


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("no.such.host.invalid:6379", "answers at 'no.such.host.invalid:6379'"),
        ("127.0.0.1:port", "not the address"),
        ("ray://127.0.0.1:10001", "Ray Client"),
    ],
)
def test_addresses_of_nothing(address: str, said: str) -> None:
    assert said in refused(RayConfig(address=address))


def test_auto_where_no_cluster_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services

    # Another program may run a cluster on this machine.
    monkeypatch.setattr(services, "canonicalize_bootstrap_address", lambda _: None)
    message = refused(RayConfig(address="auto"))
    assert "answers at 'auto'" in message
    assert "this machine" in message


def test_a_keyword_that_ray_does_not_know_is_named_with_the_nearest() -> None:
    message = refused(RayConfig(ray_init={"object_store_memry": 1}))
    assert "object_store_memry" in message
    assert "'object_store_memory'" in message


def test_what_the_runtime_sets_itself_wins_and_is_said() -> None:
    from dovetail_runtime_ray.cluster import _given

    heard = Heard()
    given = {"address": "elsewhere:1", "object_store_memory": 10**8}
    assert _given(RayConfig(ray_init=given), heard) == {"object_store_memory": 10**8}
    assert _given(RayConfig(address="auto", ray_init=given), heard) == {}
    assert len(heard.warnings) == 3
    assert "runtime.ray_init.address='elsewhere:1'" in heard.warnings[0]
