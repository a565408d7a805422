"""How the suite of weight transports runs one: its ends in this process, at once, and what came of an update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
from torch import Tensor

from dovetail.errors import WeightSyncError
from dovetail.interfaces.transport import (
    WeightManifest,
    WeightReceiver,
    WeightSender,
    WeightTransport,
)
from dovetail_sdk.testing.conformance.plugin import PluginConformance
from dovetail_sdk.testing.transport_ends import Contents, TransportPlace, contents

Outcome = Contents | WeightSyncError


class EndsOfATransport(PluginConformance):
    """Makes the ends, and runs an update between them."""

    kind = "weight_transport"
    plugin: ClassVar[type[WeightTransport]]
    device: ClassVar[str] = "cpu"
    """Of the ends, and of the tensors that are sent."""

    @pytest.fixture(autouse=True)
    def run_directory(self, tmp_path: Path) -> Path:
        """The run's directory of every end in a test."""
        self._run_directory = tmp_path
        return tmp_path

    def make(self, **context: Any) -> Any:
        """A transport of the test's run."""
        return super().make(
            **{"run_directory": self._run_directory, "device": self.device, **context}
        )

    # How the suite runs it

    @contextmanager
    def ends(self, receivers: int = 1) -> Iterator[tuple[WeightSender, list[WeightReceiver]]]:
        """A sender and receivers in this process."""
        transport = self.make()
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
    ) -> tuple[WeightSyncError | None, list[Outcome]]:
        """One update: the sender's error, and what each receiver got or its error."""
        manifest = self.prepared(sender, manifest, len(receivers))

        with ThreadPoolExecutor(len(receivers) + 1) as threads:
            running = [threads.submit(outcome_of, receiver, manifest) for receiver in receivers]
            failed = None
            try:
                sender.send(manifest, self.placed(tensors))
            except WeightSyncError as error:
                failed = error
            return failed, [future.result() for future in running]

    def prepared(
        self, sender: WeightSender, manifest: WeightManifest, receivers: int
    ) -> WeightManifest:
        """The manifest as both ends get it."""
        return sender.prepare(attrs.evolve(manifest, receivers=receivers))

    def placed(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Tensors as a trainer gathers them: each made just before it is asked for, and gone after it."""
        for name, tensor in tensors.items():
            yield name, tensor.to(self.device, copy=True)

    def place(self) -> TransportPlace:
        """For ends in processes of their own."""
        return TransportPlace(
            plugin=self.plugin,
            config=self.make_config(),
            run_directory=self._run_directory,
            device=self.device,
        )

    def needs_processes(self) -> None:
        """Skip where the ends must be in one process."""
        if "across_processes" not in self.plugin.capabilities:
            pytest.skip("it does not claim the capability 'across_processes'")


def outcome_of(receiver: WeightReceiver, manifest: WeightManifest) -> Outcome:
    """What a receiver got of an update, or its error."""
    try:
        return contents(receiver.receive(manifest))
    except WeightSyncError as error:
        return error
