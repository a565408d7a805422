"""Messages to and from an engine's processes, as JSON: the transport to create, the manifest of an update, and the outcome."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import cattrs

from dovetail.errors import CalledOffError, DovetailError, WeightSyncError
from dovetail.interfaces import (
    AdapterSpec,
    PluginContext,
    PluginRef,
    TensorSpec,
    WeightManifest,
    WeightReceiver,
    WeightTransport,
)
from dovetail.plugins import load_plugin_class, make_plugin
from dovetail_serving.backend import OthersFailedError, WeightsUntouchedError


def transport_info(transport: WeightTransport, context: PluginContext) -> dict[str, Any]:
    """Return JSON values from which another process can construct the same weight transport.

    Returns:
        `{"transport": {name, path, attribute, config}, "context": {seed, role, rank, machine, run_directory}}`. `path` and `attribute`
        locate a transport from a user's file, and are None for an installed one; the values of `context` are those of `PluginContext`.
    """
    config = attrs.asdict(transport.config)
    place = context.run_directory
    return {
        "transport": {
            "name": transport.name,
            "path": config.get("path"),
            "attribute": config.get("attribute"),
            "config": config,
        },
        "context": {
            "seed": context.seed,
            "role": context.role or "rollout",
            "rank": context.rank,
            "machine": context.machine,
            "run_directory": None if place is None else str(Path(place).resolve()),
        },
    }


class WeightEnd:
    """The receiving side of a weight transport, in one of an engine's processes.

    Attributes:
        receiver: the receiver of weight updates.
    """

    def __init__(self, transport: WeightTransport) -> None:
        self._transport = transport
        self.receiver: WeightReceiver = transport.receiver()

    @contextmanager
    def taking(self, manifest: WeightManifest) -> Iterator[None]:
        """Call the weight update off if the `with` block, which receives and loads the weights, fails.

        An engine answers only after all its processes have ended the update. Without the call-off, the other processes would wait until
        their time-outs.
        """
        try:
            yield
        except CalledOffError:
            raise
        except Exception as error:
            reason = error.message if isinstance(error, DovetailError) else _with_type(error)
            try:
                self._transport.call_off(manifest, reason)
            except Exception:  # noqa: BLE001 - what failed first is what counts
                traceback.print_exc()
            raise

    def close(self) -> None:
        """Release buffers and connections."""
        self.receiver.close()


def end_from(transport: Mapping[str, Any], context: Mapping[str, Any], device: str) -> WeightEnd:
    """Construct a transport from the values of `transport_info`, and return its receiving side for this process.

    Args:
        transport: the value of `transport` in the result of `transport_info`.
        context: the value of `context` in the result of `transport_info`.
        device: the torch device of the received weights.

    Raises:
        PluginError: the transport is not installed in this environment.
    """
    ref = PluginRef(
        kind="weight_transport",
        name=transport["name"],
        path=transport["path"],
        attribute=transport["attribute"],
    )
    config = cattrs.structure(dict(transport["config"]), load_plugin_class(ref).Config)
    place = context["run_directory"]
    made: Any = make_plugin(
        attrs.evolve(ref, config=config),
        PluginContext(
            seed=context["seed"],
            role=context["role"],
            rank=context["rank"],
            machine=context.get("machine"),
            run_directory=None if place is None else Path(place),
            device=device,
        ),
    )
    return WeightEnd(made)


def manifest_info(manifest: WeightManifest) -> dict[str, Any]:
    """Return a manifest as JSON values, which `manifest_from` reads."""
    return attrs.asdict(manifest)


def manifest_from(info: Mapping[str, Any]) -> WeightManifest:
    """Return the manifest with the values from `manifest_info`."""
    adapter = info["adapter"]
    if adapter is not None:
        adapter = AdapterSpec(
            **{**adapter, "target_modules": tuple(adapter["target_modules"])},
        )
    tensors = tuple(
        TensorSpec(name=t["name"], shape=tuple(t["shape"]), dtype=t["dtype"])
        for t in info["tensors"]
    )
    return WeightManifest(**{**info, "adapter": adapter, "tensors": tensors})


@attrs.frozen(kw_only=True)
class Outcome:
    """The result of an update in one of an engine's processes, or in all of them."""

    error: str | None = None
    """The reason why the update failed; None if it succeeded."""
    hint: str | None = None
    changed: bool = False
    """Whether any weight of the model was overwritten."""
    adapter: int | None = None
    """The id by which the engine knows the adapter that the update loaded; None if the update was not an adapter."""
    called_off: bool = False
    """Whether the update was called off before its start, because another receiver will not connect."""

    @classmethod
    def of_failure(cls, error: Exception, *, changed: bool) -> Outcome:
        """Return the outcome of a weight update that raised an exception.

        Unless the exception is a DovetailError, its traceback is printed to the engine's log.

        Args:
            error: the exception.
            changed: whether the update had overwritten any weight of the model.
        """
        if isinstance(error, DovetailError):
            off = isinstance(error, CalledOffError)
            return cls(error=error.message, hint=error.hint, changed=changed, called_off=off)
        traceback.print_exception(error)
        return cls(error=_with_type(error), changed=changed)

    def text(self) -> str:
        """Return the outcome as JSON."""
        return json.dumps(attrs.asdict(self))

    def failure(self) -> WeightSyncError | None:
        """Return the error for the rollout's caller; None if the update succeeded."""
        if self.error is None:
            return None
        kind: type[WeightSyncError] = WeightSyncError if self.changed else WeightsUntouchedError
        if self.called_off and not self.changed:
            kind = OthersFailedError
        return kind(self.error, hint=self.hint)


def outcome_of(
    act: Callable[[], int | None], changed: Callable[[], bool] = lambda: False
) -> Outcome:
    """Run an operation on an engine's weights, and return its outcome.

    Never raises, since engines do not pass on exceptions from their worker processes.

    Args:
        act: the operation, which returns the engine's id of the adapter that it loaded, or None if it loaded no adapter.
        changed: a function, called after a failure, that returns whether any weight of the model was overwritten.
    """
    try:
        adapter = act()
    except Exception as error:  # noqa: BLE001 - told in the outcome
        return Outcome.of_failure(error, changed=changed())
    return Outcome(adapter=adapter, changed=True)


def merged_outcomes(outcomes: Sequence[str], version: int) -> Outcome:
    """Merge the outcomes of an update in all of an engine's processes.

    Args:
        outcomes: each process's `Outcome.text()`, by rank.
        version: the version of the update, for the message.

    Returns:
        The first process's outcome if all succeeded; else the outcome of a failed process, whose error names its rank. `changed` is true if
        any process changed its model.
    """
    found = [Outcome(**json.loads(text)) for text in outcomes]
    rank = first_failed(found)
    if rank is None:
        return found[0]
    first = found[rank]
    where = f" in worker {rank}" if len(found) > 1 else ""
    error = first.error or ""
    message = error if f"update {version}" in error else f"weight update {version} failed: {error}"
    changed = any(one.changed for one in found)
    return attrs.evolve(first, error=message + where, changed=changed)


def first_failed(outcomes: Sequence[Outcome]) -> int | None:
    """Return the index of a process that failed; None if all succeeded.

    A process that failed by itself is preferred to one whose update was called off.
    """
    failed = [index for index, one in enumerate(outcomes) if one.error is not None]
    return min(failed, key=lambda index: outcomes[index].called_off, default=None)


def _with_type(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
