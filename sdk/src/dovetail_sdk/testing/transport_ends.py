"""Ends of a weight transport in processes of their own, and the tensors that tests send between them."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

import attrs
import torch
from torch import Tensor

from dovetail.errors import WeightSyncError
from dovetail.interfaces import (
    PluginConfig,
    PluginContext,
    TensorSpec,
    WeightManifest,
    WeightTransport,
)
from dovetail_sdk.testing.processes import start_forked

START_SECONDS = 120.0
"""Seconds within which a process must start."""

_HANGS = "hangs"

Contents = list[tuple[str, str, tuple[int, ...], bytes]]
"""Received tensors: name, dtype, shape and bytes of each, in order."""


def case_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Return tensors of several dtypes: large and small ones, an empty one, a scalar, and two names of one tensor (tied)."""
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(37, 5, generator=generator)
    return {
        "embed.weight": embedding,
        "norm.weight": torch.randn(5, generator=generator).bfloat16(),
        "scalar": torch.randn((), generator=generator),
        "empty": torch.empty(0, 4),
        "odd": torch.randn(3, generator=generator).half(),
        "positions": torch.randint(0, 1 << 40, (7,), generator=generator),
        "mask": torch.rand(5, generator=generator) > 0.5,
        "quantised": torch.randn(9, generator=generator).to(torch.float8_e4m3fn),
        "zero_points": torch.randint(0, 256, (13,), generator=generator, dtype=torch.uint8),
        "scales": torch.randn(3, 1, generator=generator).double(),
        "block.weight": torch.randn(64, 33, generator=generator).bfloat16(),
        "transposed": torch.randn(6, 4, generator=generator).t(),
        "head.weight": embedding,
    }


def manifest_of(
    tensors: dict[str, Tensor], version: int = 1, bucket_bytes: int = 1 << 20
) -> WeightManifest:
    """Return the manifest of an update with these tensors, […] each, in their order, as version `version`."""
    specs = tuple(
        TensorSpec(name=n, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
        for n, t in tensors.items()
    )
    return WeightManifest(version=version, tensors=specs, bucket_bytes=bucket_bytes)


def contents(tensors: Iterator[tuple[str, Tensor]]) -> Contents:
    """Return name, dtype, shape and bytes of these tensors, each read before the next is requested."""
    return [
        (
            name,
            str(tensor.dtype),
            tuple(tensor.shape),
            tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes(),
        )
        for name, tensor in tensors
    ]


@attrs.frozen(kw_only=True)
class TransportPlace:
    """The arguments with which a process creates the sender or a receiver of a weight transport."""

    plugin: type[WeightTransport]
    config: PluginConfig
    run_directory: Path
    device: str = "cpu"
    """Device of the sender and its tensors."""
    receiver_devices: tuple[str, ...] = ()
    """Devices of the receivers, by rank; if empty, all receivers use the sender's device."""

    def transport(self, side: Literal["sender", "receiver"], rank: int = 0) -> WeightTransport:
        """Create the transport in this process, for a sender or receiver of this rank."""
        device = self.device
        if side == "receiver" and self.receiver_devices:
            device = self.receiver_devices[rank % len(self.receiver_devices)]
        context = PluginContext(
            run_directory=self.run_directory, rank=rank, role=side, device=device
        )
        return self.plugin(self.config, context)


class TransportEnd:
    """A process that runs the sender or one receiver of a weight transport.

    Args:
        place: the arguments with which the process creates the transport.
        side: whether the process runs a sender or a receiver. A receiver is registered before the constructor returns.
        rank: the rank in the plugin context of the sender or receiver.
    """

    def __init__(
        self, place: TransportPlace, side: Literal["sender", "receiver"], rank: int = 0
    ) -> None:
        self._pipe, theirs = multiprocessing.Pipe()

        def make(context: Any) -> Any:
            return context.Process(target=_serve, args=(theirs, place, side, rank), daemon=True)

        if place.device == "cpu":
            [self._process] = start_forked(make)
        else:  # an accelerator's libraries must start in a fresh process
            self._process = make(multiprocessing.get_context("spawn"))
            self._process.start()
        theirs.close()
        self.answer(START_SECONDS)

    def prepare(self, manifest: WeightManifest) -> WeightManifest:
        """Call the sender's `prepare` and return the prepared manifest."""
        self._pipe.send(("prepare", manifest))
        return self.answer()

    def receive(self, manifest: WeightManifest, hang_after: str | None = None) -> Self:
        """Start receiving. `answer` then returns the received tensors as `Contents`.

        Args:
            manifest: the sender's manifest.
            hang_after: the name of the last tensor to request; the process then waits until it is killed.
        """
        self._pipe.send(("receive", manifest, hang_after))
        return self

    def send(self, manifest: WeightManifest, seed: int, hang_before: str | None = None) -> Self:
        """Begin to send `case_tensors(seed)`. `answer` then waits until all tensors are sent.

        Args:
            manifest: the manifest of these tensors.
            seed: the seed of `case_tensors`.
            hang_before: the name of a tensor that is never gathered; before this tensor, the process waits until it is killed.
        """
        self._pipe.send(("send", manifest, seed, hang_before))
        return self

    def answer(self, timeout: float = 60.0) -> Any:
        """Wait for the result of the last call of `receive` or `send`, and return it.

        Raises:
            Exception: the error that the sender or receiver raised.
            TimeoutError: no answer came.
        """
        deadline = time.monotonic() + timeout
        while (found := self._next(deadline))[0] == _HANGS:
            pass
        return found[1]

    def await_hang(self, timeout: float = 60.0) -> None:
        """Wait until the process hangs at the tensor of `hang_after` or `hang_before`.

        Raises:
            Exception: the error that the sender or receiver raised instead of hanging.
            TimeoutError: the process neither hung nor finished in time.
        """
        if self._next(time.monotonic() + timeout)[0] != _HANGS:
            raise RuntimeError("the sender or receiver finished all tensors; expected it to hang")

    def _next(self, deadline: float) -> tuple[str, Any]:
        if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError("the process of the sender or receiver did not answer in time")
        outcome, value = self._pipe.recv()
        if outcome == "raised":
            raise value
        return outcome, value

    def kill(self) -> None:
        """End the process by SIGKILL, without any cleanup."""
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        """Close the sender or receiver and its process; safe to call twice, and after `kill`."""
        if self._process.is_alive():
            self._pipe.send(("close",))
            self._process.join(30)
            if self._process.is_alive():
                self.kill()
        self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(
    pipe: Any, place: TransportPlace, side: Literal["sender", "receiver"], rank: int
) -> None:
    torch.set_num_threads(1)
    # A transport that waits forever must not outlive its test.
    parent = os.getppid()
    transport = place.transport(side, rank)
    end: Any = transport.sender() if side == "sender" else transport.receiver()
    pipe.send(("returned", None))
    while os.getppid() == parent:
        if not pipe.poll(1.0):
            continue
        match pipe.recv():
            case ("close",):
                break
            case ("prepare", manifest):
                outcome = _outcome(lambda manifest=manifest: end.prepare(manifest))
            case ("receive", manifest, hang_after):
                arriving = _received(end, manifest, hang_after, pipe)
                outcome = _outcome(lambda arriving=arriving: contents(arriving))
            case ("send", manifest, seed, hang_before):
                tensors = _gathered(seed, hang_before, place.device, pipe)
                outcome = _outcome(
                    lambda manifest=manifest, tensors=tensors: end.send(manifest, tensors)
                )
        pipe.send(outcome)
    end.close()


def _outcome(act: Any) -> tuple[str, Any]:
    try:
        return "returned", act()
    except WeightSyncError as error:
        return "raised", error


def _gathered(
    seed: int, hang_before: str | None, device: str, pipe: object
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in case_tensors(seed).items():
        if name == hang_before:
            _hang(pipe)
        yield name, tensor.to(device)


def _received(
    end: Any, manifest: WeightManifest, hang_after: str | None, pipe: Any
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in end.receive(manifest):
        yield name, tensor
        if name == hang_after:
            _hang(pipe)


def _hang(pipe: Any) -> None:
    """Report that this process hangs, and wait until the test kills it, or end if the test's process is gone."""
    parent = os.getppid()
    pipe.send((_HANGS, None))
    while os.getppid() == parent:
        time.sleep(0.1)
    os._exit(1)
