"""The ledger: the state of every (epoch, prompt, attempt), so that no prompt is lost or used twice.

issue ──► issued ── take ──► taken(step) ── use ──► used
            │ ◄── give_back ──┘    │          retry: the next attempt, in the same state
            └──────────────────────┴─────── drop ──► dropped(reason)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import attrs

from dovetail.data.bitmap import pack, unpack
from dovetail.errors import LedgerError

STATE_VERSION = 1
OVERLONG, BAD = "overlong", "bad_row"
"""Reasons for dropping a streamed row: too long, or unusable as an example."""

Key = tuple[int, int, int]
"""Epoch, the prompt's index in the epoch (`Prompt.index`), and attempt, all counted from 0."""


@attrs.define(eq=False)
class _Epoch:
    """An epoch that is not yet complete. Every issued prompt is in exactly one of open, used, dropped."""

    open: dict[int, int | None] = attrs.field(factory=dict)
    """Prompt in flight → the step that has taken its samples, or None; in order of issue."""
    used: set[int] = attrs.field(factory=set)
    dropped: dict[int, str] = attrs.field(factory=dict)
    """Dropped prompt → the reason."""
    attempts: dict[int, int] = attrs.field(factory=dict)
    """Prompt → number of attempts issued, if more than one."""

    @property
    def issued(self) -> int:
        """Number of prompts issued at least once."""
        return len(self.open) + len(self.used) + len(self.dropped)

    def latest(self, prompt: int) -> int:
        """Return the number of the prompt's last attempt, from 0."""
        return self.attempts.get(prompt, 1) - 1


class Ledger:
    """The record of every issued prompt: in flight, taken by a step, used or dropped.

    For complete epochs before the newest, only counts are kept.

    Args:
        size: the number of prompts in an epoch, which a loader sets; if None, no epoch counts as complete.
    """

    def __init__(self, size: int | None = None) -> None:
        self.size = size
        self._epochs: dict[int, _Epoch] = {}
        self._closed = 0
        self._closed_used = 0
        self._closed_dropped: Counter[str] = Counter()

    def expect(self, size: int) -> None:
        """Declare how many prompts an epoch has.

        Raises:
            LedgerError: another number of prompts was declared before.
        """
        if self.size not in (None, size):
            raise _other_size(self.size, size)
        self.size = size

    # -- transitions of an attempt -------------------------------------------------------------

    def issue(self, epoch: int, prompt: int) -> int:
        """Record a prompt as issued, and return the attempt's number: 0 for the prompt's first attempt in this epoch.

        Raises:
            LedgerError: the prompt is in flight or already used in this epoch, or the epoch is complete.
        """
        if epoch < self._closed:
            raise LedgerError(
                f"prompt {prompt} can't be issued in epoch {epoch}: that epoch is complete"
            )
        record = self._epochs.setdefault(epoch, _Epoch())
        if prompt in record.used:
            raise LedgerError(
                f"prompt {prompt} can't be issued in epoch {epoch}: it was already used in that epoch"
            )
        if prompt in record.open:
            raise LedgerError(
                f"prompt {prompt} can't be issued in epoch {epoch}: its attempt {record.latest(prompt)} is still in flight",
                hint="drop that attempt first",
            )
        if record.dropped.pop(prompt, None) is not None:
            record.attempts[prompt] = record.attempts.get(prompt, 1) + 1
        record.open[prompt] = None
        self._close_behind()
        return record.latest(prompt)

    def take(self, epoch: int, prompt: int, attempt: int, *, step: int) -> None:
        """Record that a step takes the prompt's samples.

        Raises:
            LedgerError: the attempt is not in flight, or a step has taken it already.
        """
        record = self._in_flight(epoch, prompt, attempt, "taken")
        if record.open[prompt] is not None:
            raise LedgerError(
                f"{_name(epoch, prompt, attempt)} can't be taken by step {step}: step {record.open[prompt]} has taken it"
            )
        record.open[prompt] = step

    def give_back(self, step: int) -> None:
        """Mark the prompts of a failed step as in flight again."""
        for record in self._epochs.values():
            for prompt, taken in record.open.items():
                if taken == step:
                    record.open[prompt] = None

    def use(self, epoch: int, prompt: int, attempt: int) -> None:
        """Record that the prompt was trained on.

        Raises:
            LedgerError: the attempt was never issued, not taken, or already used or dropped.
        """
        record = self._in_flight(epoch, prompt, attempt, "used")
        if record.open[prompt] is None:
            raise LedgerError(
                f"{_name(epoch, prompt, attempt)} was marked as used, but no step had taken it"
            )
        del record.open[prompt]
        record.used.add(prompt)
        self._close_behind()

    def retry(self, epoch: int, prompt: int, attempt: int) -> int:
        """Record a failed attempt, and return the next attempt's number; the prompt stays in flight.

        Calling `drop` and then `issue` instead could complete the epoch in between.

        Raises:
            LedgerError: the attempt is not in flight.
        """
        record = self._in_flight(epoch, prompt, attempt, "tried again")
        record.attempts[prompt] = record.attempts.get(prompt, 1) + 1
        return record.latest(prompt)

    def drop(self, epoch: int, prompt: int, attempt: int, reason: str) -> None:
        """Record that the prompt is not trained on, with a reason such as `reward_failures`. The prompt may be issued again.

        Raises:
            LedgerError: the attempt is not in flight.
        """
        record = self._in_flight(epoch, prompt, attempt, "dropped")
        del record.open[prompt]
        record.dropped[prompt] = reason
        self._close_behind()

    def settle(self, step: int, trained: Collection[Key], reasons: Mapping[Key, str]) -> None:
        """Mark every attempt that a step has taken as used or dropped.

        Args:
            step: the step's number.
            trained: the attempts that were trained on; the step's other attempts are dropped.
            reasons: the reasons of drops, where known; the default is `reward_failures`.
        """
        for key in self.taken(step):
            if key in trained:
                self.use(*key)
            else:
                self.drop(*key, reason=reasons.get(key, "reward_failures"))

    # -- queries -------------------------------------------------------------------------------

    def attempt(self, epoch: int, prompt: int) -> int:
        """Return the attempt number of a prompt that is in flight: the number of its latest attempt."""
        return self._epochs[epoch].latest(prompt)

    def open(self) -> list[Key]:
        """Return (epoch, prompt, attempt) of every attempt in flight, in order of issue within each epoch.

        These include attempts that a step has taken.
        """
        return [
            (epoch, prompt, record.latest(prompt))
            for epoch, record in sorted(self._epochs.items())
            for prompt in record.open
        ]

    def taken(self, step: int) -> list[Key]:
        """Return (epoch, prompt, attempt) of the attempts that a step has taken and that are not yet recorded as used or dropped."""
        return [key for key in self.open() if self._epochs[key[0]].open[key[1]] == step]

    def knows(self, epoch: int, prompt: int) -> bool:
        """Return whether the prompt was ever issued in this epoch, even if used or dropped since."""
        record = self._epochs.get(epoch, _Epoch())
        held = prompt in record.open or prompt in record.used or prompt in record.dropped
        return epoch < self._closed or held

    def counts(self) -> dict[str, Any]:
        """Return counts over the whole run: `used`, `open` (prompts in flight), `dropped` by reason, and `complete_epochs`."""
        records = self._epochs.values()
        dropped = self._closed_dropped + Counter(r for e in records for r in e.dropped.values())
        return {
            "used": self._closed_used + sum(len(record.used) for record in records),
            "open": sum(len(record.open) for record in records),
            "dropped": dict(dropped),
            "complete_epochs": self._closed,
        }

    def check(self, *, in_flight: bool = False) -> None:
        """Raise unless every prompt is accounted for exactly once.

        Args:
            in_flight: whether attempts may be in flight, as between the steps of an asynchronous run.

        Raises:
            LedgerError: an attempt is neither used nor dropped, a prompt is counted twice, or an epoch misses prompts.
        """
        newest = max(self._epochs, default=0)
        for epoch, record in sorted(self._epochs.items()):
            both = record.used & record.dropped.keys() | record.open.keys() & (
                record.used | record.dropped.keys()
            )
            if both:
                raise LedgerError(
                    f"in epoch {epoch}, the ledger counts these prompts twice (as used, dropped or in flight): {_some(both)}"
                )
            if self.size is not None and (
                record.issued > self.size or (epoch < newest and record.issued < self.size)
            ):
                raise LedgerError(
                    f"{record.issued} prompts were issued in epoch {epoch}; expected {self.size} (fewer are valid only in the newest epoch, {newest})"
                )
        skipped = set(range(self._closed, newest)) - self._epochs.keys()
        if skipped:
            raise LedgerError(
                f"prompts of epoch {newest} were issued, but none of the earlier epochs {_some(skipped)}"
            )
        if not in_flight and (lost := self.open()):
            names = "; ".join(_name(*key) for key in lost[:5])
            raise LedgerError(f"attempts were neither used nor dropped ({len(lost)}): {names}")

    # -- checkpoints ---------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values, with used and dropped prompts packed as bitmaps."""
        return {
            "version": STATE_VERSION,
            "size": self.size,
            "closed": {
                "epochs": self._closed,
                "used": self._closed_used,
                "dropped": dict(self._closed_dropped),
            },
            "epochs": {str(epoch): _packed(record) for epoch, record in self._epochs.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; attempts that a step had taken are in flight again.

        Raises:
            LedgerError: the state is of another version, or of another number of prompts.
        """
        if state.get("version") != STATE_VERSION:
            raise LedgerError(
                f"the prompt ledger has version {state.get('version')!r}, not {STATE_VERSION}: resume with the dovetail-core that wrote it"
            )
        if state["size"] is not None and self.size is not None and self.size != state["size"]:
            raise _other_size(state["size"], self.size)
        self.size = state["size"] if self.size is None else self.size
        self._closed = state["closed"]["epochs"]
        self._closed_used = state["closed"]["used"]
        self._closed_dropped = Counter(state["closed"]["dropped"])
        self._epochs = {int(epoch): _unpacked(record) for epoch, record in state["epochs"].items()}

    # -- helpers -------------------------------------------------------------------------------

    def _in_flight(self, epoch: int, prompt: int, attempt: int, verb: str) -> _Epoch:
        record = self._epochs.get(epoch, _Epoch())
        if prompt in record.open and record.latest(prompt) == attempt:
            return record
        name = _name(epoch, prompt, attempt)
        if epoch < self._closed:
            raise LedgerError(f"{name} can't be {verb}: epoch {epoch} is complete")
        if not self.knows(epoch, prompt) or attempt > record.latest(prompt):
            raise LedgerError(f"{name} can't be {verb}: it was never issued")
        if prompt in record.used and attempt == record.latest(prompt):
            raise LedgerError(f"{name} can't be {verb}: it was used before")
        raise LedgerError(f"{name} can't be {verb}: it was dropped before")

    def _close_behind(self) -> None:
        """Reduce the oldest epochs to counts, up to the first one that is incomplete or the newest."""
        newest = max(self._epochs, default=0)
        while self._closed < newest and self.size is not None:
            record = self._epochs.get(self._closed)
            if record is None or record.open or record.issued < self.size:
                return
            self._closed_used += len(record.used)
            self._closed_dropped.update(record.dropped.values())
            del self._epochs[self._closed]
            self._closed += 1


def _packed(record: _Epoch) -> dict[str, Any]:
    reasons = sorted(set(record.dropped.values()))
    return {
        "open": list(record.open),
        "used": pack(record.used),
        "dropped": {
            reason: pack(prompt for prompt, why in record.dropped.items() if why == reason)
            for reason in reasons
        },
        "attempts": [[prompt, count] for prompt, count in record.attempts.items()],
    }


def _unpacked(state: Mapping[str, Any]) -> _Epoch:
    return _Epoch(
        open=dict.fromkeys(state["open"]),
        used=unpack(state["used"]),
        dropped={
            prompt: why for why, marks in state["dropped"].items() for prompt in unpack(marks)
        },
        attempts=dict(state["attempts"]),
    )


def _other_size(before: int | None, now: int) -> LedgerError:
    return LedgerError(
        f"the checkpoint's prompt ledger counts {before} prompts an epoch, but the data has {now}",
        hint="resume with the same data files and length limits",
    )


def _name(epoch: int, prompt: int, attempt: int) -> str:
    return f"attempt {attempt} of prompt {prompt} in epoch {epoch}"


def _some(numbers: set[int]) -> str:
    more = len(numbers) - 5
    return ", ".join(map(str, sorted(numbers)[:5])) + (f" and {more} more" if more > 0 else "")
