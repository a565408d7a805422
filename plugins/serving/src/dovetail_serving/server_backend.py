"""ServerBackend: an engine behind HTTP, on a server that the replica starts or that was started by hand."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from secrets import token_hex
from typing import Any, ClassVar, TypeVar

import numpy as np

from dovetail.errors import RolloutError, WeightSyncError
from dovetail.interfaces import PluginConfig, PluginContext, WeightManifest
from dovetail.metrics import Metric
from dovetail.workers import LoopThread
from dovetail_serving.backend import Backend, SampleCall, SampleResult
from dovetail_serving.calls import ServerCalls
from dovetail_serving.connection import ServerConnection
from dovetail_serving.own_server import OwnServer, PortTakenError
from dovetail_serving.weight_wire import Outcome, manifest_info, transport_info

T = TypeVar("T")
_PORTS_TRIED = 3


class ServerBackend(Backend):
    """A backend on a server that answers Dovetail's HTTP paths, `/dovetail/v1/…` (`routes`).

    Requests use persistent connections on a separate event loop.

    Args:
        config: the rollout's config; its `urls` are the servers to join, one per replica, or empty.
        context: the rollout's context.

    Attributes:
        url: the server's address; empty before `start`.
        patience: seconds without an answer to health checks after which the server counts as dead.
    """

    engine: ClassVar[str]
    """The engine's name in messages."""
    token_variable: ClassVar[str]
    """Environment variable with the token that a joined server requires."""
    patience = 60.0

    def __init__(self, config: PluginConfig, context: PluginContext) -> None:
        self.config, self.context = config, context
        self._loop: LoopThread | None = None
        self._connection: ServerConnection | None = None
        self._calls: ServerCalls | None = None
        self._own: OwnServer | None = None
        self.url = ""

    @abstractmethod
    def start_server(self, token: str) -> OwnServer:
        """Start a server that requires this token, without waiting until the server is ready."""

    @abstractmethod
    async def join(self, connection: ServerConnection) -> None:
        """Check that a server that the user started answers requests and fits the run.

        Raises:
            RolloutError: the server does not answer or fit; the hint says how to start a suitable server.
        """

    @abstractmethod
    def metrics_from(self, totals: Mapping[str, float]) -> Mapping[str, Metric]:
        """Return the metrics since the last call, given the server's totals since its start."""

    def start(self) -> None:
        """Start a server and wait until it answers, or join the server that `urls` names for this replica.

        Raises:
            RolloutError: the server does not answer, does not fit the run, or ended.
            DovetailError: the start failed for a known cause.
        """
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        context = self.context
        self._loop = LoopThread(f"{self.engine}-server-{context.rank}")
        if self.config.urls:
            self.url = _url_of(self.config.urls, context.rank)
            self._connect(os.environ.get(self.token_variable, ""))
            self._wait(self.join(self._reach()))
        else:
            self._start_own()
        if context.transport is not None:
            info = transport_info(context.transport, context)
            outcome = Outcome(**self._ask("connect", {"info": info}))
            if outcome.error is not None:
                raise WeightSyncError(
                    f"the {self.engine} server at {self.url} can't connect to the weight transport: {outcome.error}",
                    hint=outcome.hint,
                )

    def _start_own(self) -> None:
        for left in reversed(range(_PORTS_TRIED if self.config.port is None else 1)):
            token = token_hex(16)
            self._own = self.start_server(token)
            self.url = self._own.url
            self._connect(token)
            try:
                self._wait(self._own.ready(self._reach()))
            except PortTakenError:
                # Another process took the port between the search for a free port and the server's start.
                if not left:
                    raise
                self._wait(self._reach().close())
                self._own.close()
            else:
                return

    async def generate(self, call: SampleCall) -> SampleResult:
        return await self._open().run(self._running().generate(call))

    async def abort(self, call_ids: Sequence[str]) -> None:
        await self._open().run(self._running().abort(list(call_ids)))

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        arrays = [np.asarray(ids, np.int32) for ids in sequences]
        frame = await self._open().run(self._reach().ask("score", {}, arrays))
        return [scores.astype(np.float32) for scores in frame.arrays]

    async def reset_cache(self) -> None:
        await self._open().run(self._reach().ask("reset_cache"))

    async def freeze(self) -> None:
        await self._open().run(self._reach().ask("freeze"))

    async def thaw(self) -> None:
        await self._open().run(self._reach().ask("thaw"))

    def load(self, version: int, manifest: WeightManifest) -> None:
        try:
            outcome = Outcome(**self._ask("load", {"manifest": manifest_info(manifest)}))
        except RolloutError as error:
            raise WeightSyncError(
                f"weight update {version} broke off: {error.message}", hint=error.hint
            ) from error
        failure = outcome.failure()
        if failure is not None:
            raise failure

    def sleep(self, tags: frozenset[str], *, keep_weights: bool) -> int:
        answer = self._ask("sleep", {"tags": sorted(tags), "keep_weights": keep_weights})
        return int(answer["freed"])

    def wake(self, tags: frozenset[str]) -> None:
        self._ask("wake", {"tags": sorted(tags)})

    def metrics(self) -> Mapping[str, Metric]:
        if not self.alive():
            return {}
        return self.metrics_from({name: float(of) for name, of in self._ask("metrics").items()})

    def alive(self) -> bool:
        """Return whether the backend is connected to a server that no check has found dead."""
        return self._connection is not None and self._connection.alive

    @property
    def draining(self) -> bool:
        return self._connection is not None and self._connection.draining

    def close(self) -> None:
        """End the server that this backend started; leave a joined server running."""
        loop, connection, own = self._loop, self._connection, self._own
        self._loop = self._connection = self._calls = self._own = None
        if loop is not None:
            if connection is not None:
                loop.wait(connection.close())
            loop.close()
        if own is not None:
            own.close()

    # -- helpers ------------------------------------------------------------------------------

    def _connect(self, token: str) -> None:
        own = self._own

        async def connected() -> tuple[ServerConnection, ServerCalls]:
            connection = ServerConnection(
                self.url,
                engine=self.engine,
                token=token,
                patience=self.patience,
                ended=own.ended if own is not None else lambda: None,
                died=own.death if own is not None else self._joined_death,
            )
            return connection, ServerCalls(connection)

        self._connection, self._calls = self._wait(connected())

    def _joined_death(self, how: str) -> RolloutError:
        return RolloutError(
            f"{self.engine} has died: {how}",
            hint="start the server again by hand, as it was started; its output says why it ended",
        )

    def _ask(self, name: str, header: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return dict(self._wait(self._reach().ask(name, header)).header)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self._open().wait(work)

    def _open(self) -> LoopThread:
        if self._loop is None:
            raise self._not_connected()
        return self._loop

    def _reach(self) -> ServerConnection:
        if self._connection is None:
            raise self._not_connected()
        return self._connection

    def _running(self) -> ServerCalls:
        if self._calls is None:
            raise self._not_connected()
        return self._calls

    def _not_connected(self) -> RolloutError:
        return RolloutError(f"the {self.engine} server is not connected", hint="call start() first")


def _url_of(urls: Sequence[str], rank: int) -> str:
    if len(urls) == 1:  # also for a replica that is added during the run
        return urls[0].rstrip("/")
    if rank >= len(urls):
        raise RolloutError(
            f"rollout replica {rank} has no server to join: rollout.urls has {len(urls)} URLs, for replicas 0 to {len(urls) - 1}",
            hint="leave rollout.replicas out: the run then has one replica for each URL",
        )
    return urls[rank].rstrip("/")
