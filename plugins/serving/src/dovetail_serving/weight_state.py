"""WeightState: tracks whether an engine's weights are complete enough to generate, and which updates are allowed."""

from __future__ import annotations

from dovetail.errors import RolloutError, WeightSyncError
from dovetail.interfaces import WeightManifest
from dovetail_serving.backend import WeightsUntouchedError


class WeightState:
    """The state of an engine's weights after its updates and sleeps.

    Attributes:
        version: the current weight version; 0 is the model loaded from disk.
        adapted: whether the last update was an adapter.
        asleep: the tags of the memory that is freed at present.
    """

    def __init__(self) -> None:
        self.version = 0
        self.adapted = False
        self.asleep: frozenset[str] = frozenset()
        self._unfit: str | None = None
        self._baseless = False
        """Whether the base weights, to which adapters are applied, are missing or incomplete."""

    def began_empty(self) -> None:
        """Record that the engine has started without the model's weights."""
        self._unfit = "the engine has received no weights yet"

    def updated(self, version: int, manifest: WeightManifest) -> None:
        """Record that an update was loaded completely."""
        self.version, self._unfit, self._baseless = version, None, False
        self.adapted = manifest.kind == "adapter"

    def broke_off(self, version: int, manifest: WeightManifest, error: WeightSyncError) -> None:
        """Record that an update failed; generation is then refused, unless no weight was overwritten."""
        if isinstance(error, WeightsUntouchedError):
            return
        self._unfit = f"weight update {version} failed and left the engine's weights incomplete"
        self._baseless = self._baseless or manifest.kind != "adapter"

    def slept(self, tags: frozenset[str], *, kept_weights: bool) -> None:
        """Record that the engine's memory for these tags was freed; `kept_weights` says whether `wake` restores the weights."""
        self.asleep |= tags
        if "weights" in tags and not kept_weights:
            self._unfit = "the engine's weights were freed during sleep"
            self._baseless = True

    def woke(self, tags: frozenset[str]) -> None:
        """Record that the engine's memory for these tags was allocated again."""
        self.asleep -= tags

    @property
    def fit(self) -> bool:
        """Whether the engine may generate: its weights are there, and no failed update left them incomplete."""
        return self._unfit is None

    def refuse_use(self, what: str) -> None:
        """Refuse to compute with missing or partial weights.

        Args:
            what: the beginning of the error's message, such as `request 'a' can't be generated`.

        Raises:
            RolloutError: the engine sleeps, or its weights are missing or partial.
        """
        if self.asleep:
            slept = f"the engine is asleep, without its {' and '.join(sorted(self.asleep))}"
            raise RolloutError(f"{what}: {slept}", hint="call wake() first")
        if self._unfit is not None:
            raise RolloutError(f"{what}: {self._unfit}", hint="send a complete weight update first")

    def refuse_update(self, version: int, manifest: WeightManifest) -> None:
        """Refuse an update that the current state does not allow.

        Raises:
            WeightSyncError: the memory for weights is freed, or an adapter's base weights are missing.
        """
        who = f"weight update {version}"
        if "weights" in self.asleep:
            raise WeightSyncError(
                f"{who} can't be received: the engine is asleep, and its memory for weights is freed",
                hint="call wake() first",
            )
        if manifest.kind == "adapter" and self._baseless:
            raise WeightSyncError(
                f"{who} is an adapter, but its base weights are not loaded: {self._unfit}",
                hint="send whole weights, or restart the replica",
            )
