"""ServerBackend: vLLM behind HTTP, a server of the replica's own or one that was started by hand."""

from __future__ import annotations

import os
from collections.abc import Coroutine, Mapping, Sequence
from secrets import token_hex
from typing import Any, TypeVar

import numpy as np

from dovetail.errors import RolloutError, WeightSyncError
from dovetail.interfaces.plugin import PluginContext
from dovetail.interfaces.transport import WeightManifest
from dovetail.telemetry.metrics import Metric
from dovetail_rollout_vllm.backend import Backend, SampleCall, SampleResult, WeightsUntouchedError
from dovetail_rollout_vllm.config import VllmRolloutConfig
from dovetail_rollout_vllm.loop_thread import LoopThread
from dovetail_rollout_vllm.server_calls import ServerCalls
from dovetail_rollout_vllm.server_connection import ServerConnection
from dovetail_rollout_vllm.server_figures import ServerFigures
from dovetail_rollout_vllm.server_messages import TOKEN_VARIABLE
from dovetail_rollout_vllm.server_start import OwnServer, join
from dovetail_rollout_vllm.wire import Outcome, manifest_info, transport_info

T = TypeVar("T")


class ServerBackend(Backend):
    """One vLLM server. Requests go through an event loop of the backend's own, whose connections stay open.

    Attributes:
        url: where the server is; empty before `start`.
        patience: seconds without an answer about its health after which a server counts as dead.
    """

    patience = 60.0

    def __init__(self, config: VllmRolloutConfig, context: PluginContext) -> None:
        self._config, self._context = config, context
        self._loop: LoopThread | None = None
        self._connection: ServerConnection | None = None
        self._calls: ServerCalls | None = None
        self._own: OwnServer | None = None
        self._figures = ServerFigures()
        self.url = ""

    def start(self) -> None:
        """Start a server and wait until it answers, or join the one that `urls` names for this replica.

        Raises:
            RolloutError: it does not answer, is none that fits, or ended; says what it printed or how to start one.
            DovetailError: what vLLM's start failed of, where that is known.
        """
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        config, context = self._config, self._context
        self._loop = LoopThread(f"vllm-server-{context.rank}")
        if config.urls:
            self.url = _url_of(config, context)
            self._connect(os.environ.get(TOKEN_VARIABLE, ""))
            self._wait(join(self._reach(), config, context))
        else:
            token = token_hex(16)
            self._own = OwnServer(config, context, token)
            self.url = self._own.url
            self._connect(token)
            self._wait(self._own.ready(self._reach()))
        if context.transport is not None:
            info = transport_info(context.transport, context)
            outcome = Outcome(**self._ask("connect", {"info": info}))
            if outcome.error is not None:
                raise WeightSyncError(
                    f"the vLLM server at {self.url} can't make its end of the weight transport: {outcome.error}",
                    hint=outcome.hint,
                )

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

    def load(self, version: int, manifest: WeightManifest) -> None:
        try:
            outcome = Outcome(**self._ask("load", {"manifest": manifest_info(manifest)}))
        except RolloutError as error:
            raise WeightSyncError(
                f"weight update {version} broke off: {error.message}", hint=error.hint
            ) from error
        if outcome.error is not None:
            kind = WeightSyncError if outcome.changed else WeightsUntouchedError
            raise kind(outcome.error, hint=outcome.hint)

    def sleep(self, tags: frozenset[str], *, keep_weights: bool) -> int:
        answer = self._ask("sleep", {"tags": sorted(tags), "keep_weights": keep_weights})
        return int(answer["freed"])

    def wake(self, tags: frozenset[str]) -> None:
        self._ask("wake", {"tags": sorted(tags)})

    def figures(self) -> Mapping[str, Metric]:
        if not self.alive():
            return {}
        return self._figures.since({name: float(of) for name, of in self._ask("figures").items()})

    def alive(self) -> bool:
        """Whether nothing has shown yet that the server is dead."""
        return self._connection is not None and self._connection.alive

    def close(self) -> None:
        """End a server of the replica's own; leave a joined one as it is."""
        loop, connection, own = self._loop, self._connection, self._own
        self._loop = self._connection = self._calls = self._own = None
        if loop is not None:
            if connection is not None:
                loop.wait(connection.close())
            loop.close()
        if own is not None:
            own.close()

    # -- the pieces ------------------------------------------------------------------------------

    def _connect(self, token: str) -> None:
        own = self._own

        async def connected() -> tuple[ServerConnection, ServerCalls]:
            connection = ServerConnection(
                self.url,
                token=token,
                patience=self.patience,
                ended=own.ended if own is not None else lambda: None,
                died=own.death if own is not None else _joined_death,
            )
            return connection, ServerCalls(connection)

        self._connection, self._calls = self._wait(connected())

    def _ask(self, name: str, header: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return dict(self._wait(self._reach().ask(name, header)).header)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self._open().wait(work)

    def _open(self) -> LoopThread:
        if self._loop is None:
            raise RolloutError("the vLLM server is not connected", hint="call start first")
        return self._loop

    def _reach(self) -> ServerConnection:
        if self._connection is None:
            raise RolloutError("the vLLM server is not connected", hint="call start first")
        return self._connection

    def _running(self) -> ServerCalls:
        if self._calls is None:
            raise RolloutError("the vLLM server is not connected", hint="call start first")
        return self._calls


def _url_of(config: VllmRolloutConfig, context: PluginContext) -> str:
    if context.rank >= len(config.urls):
        raise RolloutError(
            f"rollout replica {context.rank} has no server to join: rollout.urls names {len(config.urls)}",
            hint="leave rollout.replicas out: there are as many as urls",
        )
    return config.urls[context.rank].rstrip("/")


def _joined_death(how: str) -> RolloutError:
    return RolloutError(
        f"vLLM has died: {how}",
        hint="it was started by hand, and has to be started again by hand; its own output says why it ended",
    )
