"""The suite's way to run a weight transport: both ends in this process at the same time, and the outcome of an update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
from torch import Tensor

from dovetail.errors import WeightSyncError
from dovetail.interfaces import (
    PluginContext,
    WeightManifest,
    WeightReceiver,
    WeightSender,
    WeightTransport,
)
from dovetail_sdk.testing.conformance.plugin import PluginConformance
from dovetail_sdk.testing.transport_ends import Contents, TransportPlace, contents

Outcome = Contents | WeightSyncError
PATIENCE = 60.0
"""Seconds that sender and receivers may wait for each other in tests where all of them connect."""
TO_COME = 2.0
"""Seconds that ends wait for each other in tests where some receivers connect, but fewer than the update needs."""
IN_VAIN = 0.3
"""Seconds that an end waits in tests where the other end never answers."""


class EndsOfATransport(PluginConformance):
    """Base of the suite of weight transports: creates a sender and receivers and sends updates between them."""

    kind = "weight_transport"
    plugin: ClassVar[type[WeightTransport]]
    device: ClassVar[str] = "cpu"
    """Device of the sender, of the receivers and of the tensors that are sent."""

    @pytest.fixture(autouse=True)
    def run_directory(self, tmp_path: Path) -> Path:
        """Return the run directory that the sender and the receivers of a test share."""
        self._run_directory = tmp_path
        return tmp_path

    def make(self, *, timeout: float = PATIENCE, **context: Any) -> Any:
        """Return a transport whose sender and receivers wait for each other for up to `timeout` seconds.

        `context` holds further fields of the transport's `PluginContext`.
        """
        fields = {"run_directory": self._run_directory, "device": self.device, **context}
        return self.plugin(self._waiting(timeout), PluginContext(**fields))

    # How the suite runs it

    @contextmanager
    def ends(
        self, receivers: int = 1, *, timeout: float = PATIENCE
    ) -> Iterator[tuple[WeightSender, list[WeightReceiver]]]:
        """Yield a sender and receivers in this process, which wait for each other for up to `timeout` seconds."""
        transport = self.make(timeout=timeout)
        with ExitStack() as closing:
            made = []
            for _ in range(receivers):
                made.append(transport.receiver())
                closing.callback(made[-1].close)
            sender = transport.sender()
            closing.callback(sender.close)
            yield sender, made

    def exchange(
        self,
        sender: WeightSender,
        receivers: Sequence[WeightReceiver],
        manifest: WeightManifest,
        tensors: dict[str, Tensor],
        *,
        at_once: bool = True,
    ) -> tuple[WeightSyncError | None, list[Outcome]]:
        """Send one update; return the sender's error, if any, and each receiver's tensors or error.

        Args:
            sender: a sender that `ends` yielded.
            receivers: the receivers that `ends` yielded with the sender; all of them receive the update.
            manifest: the manifest of the tensors.
            tensors: the tensors, in the manifest's shapes.
            at_once: whether the receivers run at the same time as the sender, rather than after it.
        """
        manifest = self.prepared(sender, manifest, len(receivers))
        with ThreadPoolExecutor(len(receivers)) as threads:

            def receiving() -> list[Future[Outcome]]:
                return [threads.submit(outcome_of, receiver, manifest) for receiver in receivers]

            running = receiving() if at_once else []
            failed = None
            try:
                sender.send(manifest, self.placed(tensors))
            except WeightSyncError as error:
                failed = error
            return failed, [future.result() for future in running or receiving()]

    def prepared(
        self, sender: WeightSender, manifest: WeightManifest, receivers: int
    ) -> WeightManifest:
        """Return the result of the sender's `prepare` for the manifest with this number of receivers."""
        return sender.prepare(attrs.evolve(manifest, receivers=receivers))

    def placed(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield each name with a copy of its tensor […] on the suite's device. Each copy is made on request, as a trainer gathers weights."""
        for name, tensor in tensors.items():
            yield name, tensor.to(self.device, copy=True)

    def place(self) -> TransportPlace:
        """Return the arguments with which separate processes create a sender or a receiver."""
        return TransportPlace(
            plugin=self.plugin,
            config=self._waiting(PATIENCE),
            run_directory=self._run_directory,
            device=self.device,
        )

    @property
    def meets(self) -> bool:
        """Whether the sender and the receivers of an update must run at the same time, so that each side learns of the other's failure."""
        return "ends_meet" in self.plugin.capabilities

    def needs_processes(self) -> None:
        """Skip the test if the sender and the receivers must share one process."""
        self.needs("across_processes")

    def _waiting(self, timeout: float) -> Any:
        """Return the config under test, with this `timeout` in seconds if it has such a field."""
        config = self.make_config()
        return attrs.evolve(config, timeout=timeout) if hasattr(config, "timeout") else config


def outcome_of(receiver: WeightReceiver, manifest: WeightManifest) -> Outcome:
    """Receive an update, and return the received tensors or the receiver's error."""
    try:
        return contents(receiver.receive(manifest))
    except WeightSyncError as error:
        return error
