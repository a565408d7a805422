"""WeightSync: sends each version of the actor's weights to every replica, and handles failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import attrs

from dovetail.dispatch import Future
from dovetail.errors import (
    CalledOffError,
    ReceiverError,
    RequestRefusedError,
    WeightSyncError,
)
from dovetail.interfaces import Logger, PluginContext, Site, WeightManifest
from dovetail.plugins import make_plugin
from dovetail_rollouts.replica_states import ReplicaFault, describe
from dovetail_rollouts.replicas import EVERYTHING
from dovetail_rollouts.rollout_pool import RolloutPool
from dovetail_rollouts.rollout_service import RolloutService
from dovetail_rollouts.weight_check import WeightCheck

GRACE_SECONDS = 10.0
"""Seconds that replicas may take to notice a failed sender; after that the sender's error is raised without waiting for them."""

WEIGHTS = frozenset({"weights"})
KV_CACHE = frozenset({"kv_cache"})


class WeightSync:
    """Sends each version of the actor's weights to the replicas, restarts failed replicas, and puts all to sleep between rollouts.

    Args:
        site: the parts of the run that `ExperienceSource.open` receives; its plan names the weight transport and the rollout's capabilities.
        service: the service that generates with the weights, and waits while they are sent.
        pool: the replicas that receive weights.
        weight_check: the comparison of the actor's and the replicas' log-probabilities after an update.
    """

    def __init__(
        self, site: Site, service: RolloutService, pool: RolloutPool, weight_check: WeightCheck
    ) -> None:
        self._actor, self._service, self._pool = site.actor, service, pool
        self._logger, self._check_stop = site.logger, site.check_stop
        self._weights, self._offload_manager = site.weights, site.offloading
        self._outer_phase, self._prefix = site.phase, ""
        self._metrics, self._weight_check = site.metrics, weight_check
        self._max_restarts = site.config.rollout.max_restarts
        self._rebuilt = 0
        self._offload, self._resting = site.config.rollout.offload, False
        self._discards = "discards_weights" in site.plan.facts.plugins["rollout"].cls.capabilities
        self._at_once = site.plan.placement.source.ends_meet
        self._on_each_machine = site.plan.placement.source.on_each_machine
        self._transport_ref = site.plan.refs["rollout.weight_transport"]
        self._run_directory = site.path
        self._discarded = False
        """Whether replicas sleep without their weights, so that only an update wakes them."""
        service.bring_back_with(self.rescue)

    def publish(self) -> None:
        """Send the actor's weights to every replica, as a new version, if the weights or the members of the pool have changed.

        They are also sent if sleeping replicas have discarded their weights.

        Raises:
            WeightSyncError: a replica did not receive the weights, even after restarts; see `bring`.
        """
        if not (self._weights.stale or self._discarded or self._pool.replicas.changing):
            return
        with self._weights.sending(self._arrived) as version:
            self.bring(version)
        self._service.settle()
        self._check_stop()

    def ready(self) -> None:
        """Move the training models off the accelerator, move the replicas with their weights onto it, and start generation."""
        if self._resting:
            self._make_room()
        else:
            self._offload_manager.settle()
        if self._offload and not self._woken():
            with self._weights.sending(self._arrived) as version:
                self.bring(version)
            self._offload_manager.settle()
        self._resting = False
        self._service.resume()

    def _make_room(self) -> None:
        """Move offloaded roles off the accelerator; if the rollout sleeps between steps, also free unused memory of the other roles."""
        self._offload_manager.settle()
        if self._offload:
            self._offload_manager.free_caches()

    def rest(self) -> None:
        """Suspend generation and move the replicas off the accelerator until `ready`, if `rollout.offload` is set."""
        if not self._offload or self._resting:
            return
        self._service.suspend(self._outer_phase)
        with self._phase("sleep"):
            self._metrics()["rollout/freed_bytes"] = float(self._sleep())
        self._resting = True

    def generated(self) -> None:
        """Reset the count of restarts after successful generation."""
        self._rebuilt = 0

    def rescue(self, lost: Sequence[ReplicaFault]) -> None:
        """Restart replicas with the current weights after all were lost or drained during a rollout. See `bring` for errors."""
        self._prefix = "rollout/"
        try:
            with self._weights.sending(self._arrived) as version, self._phase("rebuild"):
                self.bring(version)
        except WeightSyncError as error:
            if lost:  # else all replicas were drained
                causes = "; ".join(str(fault) for fault in lost)
                error.during(f"every rollout replica was lost ({causes})")
            raise
        finally:
            self._prefix = ""
        self._offload_manager.settle()

    # -- one version ---------------------------------------------------------------------------

    def bring(self, version: int) -> None:
        """Send the actor's weights as `version` to every replica, and verify with the weight check that each replica uses them.

        Replicas that have died or failed are restarted, before or after the update. The version is then sent again to
        all replicas, so that no replica serves incomplete weights.

        Raises:
            WeightSyncError: after `rollout.max_restarts` restarts, a replica still lacks the version or computes with other
                weights.
            DovetailError: the sender's own error.
        """
        faults, doubted = self._pool.replicas.lost(), False
        probing = self._weight_check.due(version)
        if self._pool.replicas.changing:
            probing = self._weight_check.possible
        while True:
            if faults:
                self._start_again(faults, version)
                probing = self._weight_check.possible
            expected, faults = self._update(version, probing=probing)
            if not faults and probing:
                with self._phase("weight_check"):
                    figures, faults = self._weight_check.compare(expected, self._service.score)
                self._metrics().update(figures)
                self._logger.info("weights_checked", version=version, **figures)
                faults = self._let_go(faults)
                if faults and (doubted or self._rebuilt == self._max_restarts):
                    raise faults[0].error
                for fault in faults:
                    if isinstance(fault.error.__cause__, RequestRefusedError):
                        raise fault.error  # a restarted replica would refuse too
                doubted = bool(faults)
            if not faults:
                self._discarded = self._resting = False
                for member in self._pool.replicas.welcome(version):
                    self._logger.info(
                        "rollout_replica_joined",
                        replica=member.number,
                        address=member.address,
                        version=version,
                    )
                return

    def _update(self, version: int, *, probing: bool) -> tuple[Any, tuple[ReplicaFault, ...]]:
        """Make one attempt to send the weights to all replicas.

        Args:
            version: the version of the weights.
            probing: whether the weight check follows.

        Returns:
            The trainer's log-probabilities for the weight check, None without `probing`; and the faults of the replicas that failed.
        """
        faults: tuple[ReplicaFault, ...]
        expected, faults = None, ()
        if self._offload:
            # Also at the start of a run and after a restart of replicas, since the actor needs the memory.
            with self._phase("sleep"):
                self._sleep()
        with self._offload_manager.present("actor"):
            if probing:
                with self._phase("weight_check"):
                    expected = self._weight_check.expect(self._actor)
            if self._offload:
                self._offload_manager.free_caches()
                with self._phase("wake"):
                    faults = self._pool.replicas.wake(WEIGHTS)
            if not faults:
                with self._service.held(self._phase), self._phase("weight_sync"):
                    faults = self._transfer(version)
        if self._offload:
            self._make_room()
            with self._phase("wake"):
                faults = faults or self._pool.replicas.wake(KV_CACHE)
        return expected, faults

    def _transfer(self, version: int) -> tuple[ReplicaFault, ...]:
        """Add and remove the replicas that join or leave at this update, then send the weights and record the bytes a second.

        Returns:
            The faults of the replicas that did not receive the weights.

        Raises:
            WeightSyncError: no replica is left.
        """
        began = time.perf_counter()
        manifest: WeightManifest = self._actor.weight_manifest(version).result()
        self._pool.replicas.settle()
        self._let_go(self._pool.replicas.check_manifest(version, manifest))
        if not self._pool.replicas.size:
            raise WeightSyncError(
                f"weights of version {version} can't be sent: the last rollout replica has left the pool",
                hint="resume the run with replicas; next time, add a replica with `dovetail pool add` before you drain the last one",
            )
        replicas = self._pool.replicas
        manifest = attrs.evolve(
            manifest,
            receivers=replicas.receivers,
            receivers_on=replicas.receivers_on if self._on_each_machine else {},
        )
        faults = self._both_ends(version, manifest)
        seconds = max(time.perf_counter() - began, 1e-9)
        self._metrics()["perf/weight_sync_bytes_per_second"] = manifest.total_bytes / seconds
        return faults

    def _both_ends(self, version: int, manifest: WeightManifest) -> tuple[ReplicaFault, ...]:
        """Send the weights from the actor and receive them on all replicas; return the faults of the replicas that failed.

        Raises:
            Exception: the actor's own error, unless receivers caused it.
        """
        if not self._at_once:
            self._actor.send_weights(version, manifest).result()
            return self._pool.replicas.receive_weights(version, manifest)
        first = FirstFailure(lambda why: self._transport().call_off(manifest, why), self._logger)
        receiving = Future.in_thread(
            lambda: self._pool.replicas.receive_weights(version, manifest, first.heard),
            name="dovetail-receive-weights",
        )
        refusal: WeightSyncError | None = None
        try:
            self._actor.send_weights(version, manifest).result()
        except WeightSyncError as error:
            refusal = error
            if not isinstance(error, ReceiverError) and not self._receivers_failed(receiving):
                raise
        except Exception:
            with suppress(Exception):
                receiving.result(GRACE_SECONDS)
            raise
        faults = receiving.result()
        if refusal is not None and not faults:
            raise refusal
        if isinstance(refusal, CalledOffError):
            # No replica has received any of the update, so replicas that only waited need no restart.
            return first.causes(faults)
        return faults

    def _transport(self) -> Any:
        """Construct the weight transport in the controller's process, only to call an update off."""
        context = PluginContext(role="controller", run_directory=self._run_directory)
        return make_plugin(self._transport_ref, context)

    def _receivers_failed(self, receiving: Future[tuple[ReplicaFault, ...]]) -> bool:
        """Return whether receivers caused a sender's error: one is dead, or some failed while others received the update."""
        try:
            faults = receiving.result(GRACE_SECONDS)
        except TimeoutError:
            return False
        return 0 < len(faults) < self._pool.replicas.size or any(fault.dead for fault in faults)

    # -- replicas that failed ------------------------------------------------------------------

    def _start_again(self, faults: Sequence[ReplicaFault], version: int) -> None:
        """Restart the replicas that failed, if the run needs them.

        Raises:
            WeightSyncError: `rollout.max_restarts` restarts in a row did not help.
        """
        if self._offload:
            self._make_room()
        unreached: set[int] = set()
        while faults := self._let_go(faults, unreached):
            if self._rebuilt == self._max_restarts:
                if faults := self._let_go(faults, {fault.number for fault in faults}):
                    raise self._refusal(faults, version)
                return
            self._rebuilt += 1
            self._logger.warning(
                "rollout_replicas_started_again",
                replicas=[fault.number for fault in faults],
                cause="; ".join(str(fault) for fault in faults),
                time=f"{self._rebuilt} of {self._max_restarts} in a row",
                **({"hint": hint} if (hint := getattr(faults[0].error, "hint", None)) else {}),
            )
            wanted = [fault.number for fault in faults]
            with self._phase("rebuild"):
                faults = self._pool.replicas.restart(wanted)
            unreached = {fault.number for fault in faults}
            self._count("rollout/restarts", len(wanted) - len(faults))

    def _let_go(
        self, faults: Sequence[ReplicaFault], unreached: Collection[int] = ()
    ) -> tuple[ReplicaFault, ...]:
        """Remove replicas that the run can do without, and return the faults of the others; see `ReplicaSet.let_go`."""
        kept, gone = self._pool.replicas.let_go(faults, unreached=unreached)
        for fault in gone:
            self._logger.warning(
                "rollout_replica_left", replica=fault.number, cause=describe(fault.error)
            )
        return kept

    def _refusal(self, faults: Sequence[ReplicaFault], version: int) -> Exception:
        first = faults[0].error
        if (
            self._pool.replicas.size == 1
            and isinstance(first, WeightSyncError)
            and not self._rebuilt
        ):
            return first
        tried = f" after {self._rebuilt} restart(s)" if self._rebuilt else ""
        error = WeightSyncError(
            f"{len(faults)} of {self._pool.replicas.size} replicas did not receive weights of version {version}{tried}: "
            + "; ".join(f"replica {fault.number}: {describe(fault.error)}" for fault in faults),
            hint=getattr(first, "hint", None)
            or "if the cause may be temporary, raise rollout.max_restarts (the number of restarts in a row)",
        )
        error.__cause__ = first
        return error

    def _arrived(self, version: int) -> bool:
        return version in self._pool.replicas.versions.values()

    def _woken(self) -> bool:
        """Wake the replicas; return False if they need an update, because they have no weights or did not wake."""
        if self._discarded:
            return False
        with self._phase("wake"):
            return not self._pool.replicas.wake()

    def _sleep(self) -> int:
        freed = self._pool.replicas.sleep(EVERYTHING, keep_weights=not self._discards)
        self._discarded = self._discards
        return freed

    def _count(self, name: str, more: float) -> None:
        metrics = self._metrics()
        metrics[name] = metrics.get(name, 0.0) + more

    def _phase(self, name: str) -> AbstractContextManager[None]:
        return self._outer_phase(self._prefix + name)


class FirstFailure:
    """Notifies the sender of a weight update once, when the first replica fails while other replicas wait for the sender.

    A replica that fails because the update was aborted does not count as the first.

    Args:
        tell: a function that notifies the sender, given the reason.
        logger: the logger of a failure of `tell`.
    """

    def __init__(self, tell: Callable[[str], None], logger: Logger) -> None:
        self._tell, self._logger = tell, logger
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def heard(self, error: Exception) -> None:
        """Record that a replica has failed, and notify the sender if it is the first. Thread-safe."""
        if isinstance(error, CalledOffError):
            return
        with self._lock:
            if self._error is not None:
                return
            self._error = error
        try:
            self._tell(describe(error))
        except Exception as failed:  # noqa: BLE001 - what the replica says counts, not this
            # The sender then waits until its transport's time limit.
            self._logger.warning("weight_sender_not_told", error=describe(failed))

    def causes(self, faults: Sequence[ReplicaFault]) -> tuple[ReplicaFault, ...]:
        """Return the faults that caused the others: those of the first replica that failed and of dead replicas.

        If there are none of these, all faults are returned.
        """
        found = tuple(f for f in faults if f.error is self._error or f.dead)
        return found or tuple(faults)
