"""Calling off: a sender that waits for a lost receiver is notified, and the other receivers stop waiting too."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from dovetail.errors import CalledOffError, WeightSyncError
from dovetail.interfaces import PluginContext
from dovetail_sdk.testing.transport_ends import contents, manifest_of
from dovetail_transports.config import NcclConfig, SharedMemoryConfig
from dovetail_transports.nccl.transport import NcclTransport
from dovetail_transports.shared_memory.transport import SharedMemoryTransport

TENSORS = {"w": torch.arange(100.0)}
FOREVER = 3600.0
"""A time limit in seconds that no test reaches."""

Make = Callable[..., Any]


@pytest.fixture(params=["shared_memory", "nccl"])
def make(request: pytest.FixtureRequest, meetings: Path) -> Make:
    """A function that makes transports of one kind, which find each other."""

    def made(role: str = "rollout", rank: int = 0) -> Any:
        context = PluginContext(role=role, rank=rank)
        if request.param == "nccl":
            return NcclTransport(NcclConfig(name="nccl", backend="gloo", timeout=FOREVER), context)
        config = SharedMemoryConfig(
            name="shared_memory", directory=str(meetings), channel="test", timeout=FOREVER
        )
        return SharedMemoryTransport(config, context)

    return made


def failure(future: Future[Any]) -> BaseException | None:
    return future.exception(timeout=60)


@pytest.mark.timeout(120)
def test_a_sender_that_waits_is_told_and_so_is_who_came_and_who_comes_late(make: Make) -> None:
    sender, early, late = make("actor").sender(), make().receiver(), make(rank=1).receiver()
    # The sender waits for three receivers: one connects, one connects late, and one never connects.
    manifest = attrs.evolve(sender.prepare(manifest_of(TENSORS)), receivers=3)
    with ThreadPoolExecutor(3) as threads:
        sending = threads.submit(sender.send, manifest, TENSORS.items())
        receiving = threads.submit(lambda: contents(early.receive(manifest)))
        with pytest.raises(TimeoutError):
            sending.result(timeout=1.0)
        # The message of a dead engine may be long, with bytes that take six in JSON.
        make("controller").call_off(manifest, "replica 2: its process died" + "\x1b" * 9000)
        error = failure(sending)
        assert isinstance(error, CalledOffError)
        assert "replica 2: its process died" in str(error)
        for refused in (receiving, threads.submit(lambda: contents(late.receive(manifest)))):
            told = failure(refused)
            assert isinstance(told, CalledOffError)
            assert "weight update 1 broke off" in str(told)

        # The next attempt is a new update.
        again = attrs.evolve(sender.prepare(manifest_of(TENSORS)), receivers=2)
        sending = threads.submit(sender.send, again, TENSORS.items())
        both = [
            threads.submit(lambda end=end: contents(end.receive(again))) for end in (early, late)
        ]
        for received in both:
            assert received.result(timeout=60) == contents(iter(TENSORS.items()))
        assert failure(sending) is None
    for end in (sender, early, late):
        end.close()


@pytest.mark.timeout(120)
def test_an_update_under_way_with_all_its_receivers_goes_on(make: Make) -> None:
    sender, receiver = make("actor").sender(), make().receiver()
    manifest = attrs.evolve(sender.prepare(manifest_of(TENSORS)), receivers=1)

    def gathering() -> Any:
        make("controller").call_off(manifest, "too late")
        yield from TENSORS.items()

    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(sender.send, manifest, gathering())
        assert contents(receiver.receive(manifest)) == contents(iter(TENSORS.items()))
        assert failure(sending) is None
    for end in (sender, receiver):
        end.close()


def test_who_can_not_be_told_is_named() -> None:
    transport = NcclTransport(NcclConfig(name="nccl", backend="gloo"), PluginContext())
    manifest = attrs.evolve(manifest_of(TENSORS), rendezvous="127.0.0.1:1/password")
    with pytest.raises(WeightSyncError, match=r"weight update 1 .*127\.0\.0\.1:1"):
        transport.call_off(manifest, "gone")


def test_who_does_not_answer_was_not_told() -> None:
    transport = NcclTransport(NcclConfig(name="nccl", backend="gloo"), PluginContext())
    sender = transport.sender()
    manifest = sender.prepare(manifest_of(TENSORS))
    place, _, _ = (manifest.rendezvous or "").rpartition("/")
    with pytest.raises(WeightSyncError, match="is cancelled"):
        transport.call_off(attrs.evolve(manifest, rendezvous=f"{place}/wrong"), "gone")
    sender.close()


def test_a_word_that_can_not_be_left_is_an_error_of_ours(meetings: Path) -> None:
    config = SharedMemoryConfig(name="shared_memory", directory=str(meetings), channel="test")
    transport = SharedMemoryTransport(config, PluginContext())
    manifest = attrs.evolve(manifest_of(TENSORS), update_id="longer than a file's name may be" * 9)
    with pytest.raises(WeightSyncError, match="is cancelled"):
        transport.call_off(manifest, "gone")
