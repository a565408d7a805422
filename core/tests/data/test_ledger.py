"""The ledger: no prompt lost, none used twice, whatever the order of events and however often it is saved."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dovetail.data.ledger import Ledger
from dovetail.data.marks import pack, unpack
from dovetail.errors import LedgerError


def used(ledger: Ledger, epoch: int, prompt: int) -> None:
    attempt = ledger.issue(epoch, prompt)
    ledger.finish(epoch, prompt, attempt)
    ledger.use(epoch, prompt, attempt)


def test_a_prompt_goes_from_issued_to_used() -> None:
    ledger = Ledger()
    assert ledger.issue(0, 7) == 0
    assert ledger.open() == [(0, 7, 0)]
    assert ledger.finished() == []
    ledger.finish(0, 7, 0)
    assert ledger.finished() == [(0, 7, 0)]
    ledger.use(0, 7, 0)
    assert ledger.open() == []
    assert ledger.counts() == {"used": 1, "open": 0, "dropped": {}, "complete_epochs": 0}
    ledger.check()


def test_a_dropped_prompt_may_be_issued_again_as_a_further_attempt() -> None:
    ledger = Ledger()
    for attempt in range(3):
        assert ledger.issue(0, 7) == attempt
        ledger.drop(0, 7, attempt, "reward_failures")
    assert ledger.counts()["dropped"] == {"reward_failures": 1}
    used(ledger, 0, 7)
    assert ledger.counts()["dropped"] == {}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda ledger: ledger.issue(0, 1), "prompt 1 issued in epoch 0, in which it was used"),
        (lambda ledger: ledger.issue(0, 2), "while its attempt 0 is in flight"),
        (
            lambda ledger: ledger.finish(0, 9, 0),
            "attempt 0 of prompt 9 in epoch 0 finished, but it was never",
        ),
        (
            lambda ledger: ledger.finish(5, 1, 0),
            "prompt 1 in epoch 5 finished, but it was never issued",
        ),
        (
            lambda ledger: ledger.finish(0, 2, 1),
            "attempt 1 of prompt 2 in epoch 0 finished, but it was never",
        ),
        (lambda ledger: ledger.finish(0, 3, 0), "attempt 0 of prompt 3 in epoch 0 finished twice"),
        (lambda ledger: ledger.use(0, 2, 0), "used before it was finished"),
        (
            lambda ledger: ledger.use(0, 1, 0),
            "attempt 0 of prompt 1 in epoch 0 used, but it was used before",
        ),
        (lambda ledger: ledger.use(0, 4, 0), "used, but it was dropped before"),
        (
            lambda ledger: ledger.use(0, 5, 0),
            "attempt 0 of prompt 5 in epoch 0 used, but it was dropped",
        ),
        (lambda ledger: ledger.drop(0, 1, 0, "x"), "dropped, but it was used before"),
        (lambda ledger: ledger.drop(0, 4, 0, "x"), "dropped, but it was dropped before"),
    ],
)
def test_every_wrong_turn_is_an_error_that_names_the_prompt(wrong, message) -> None:
    """1 is used, 2 in flight, 3 finished, 4 dropped, 5 in flight in its second attempt."""
    ledger = Ledger()
    used(ledger, 0, 1)
    ledger.issue(0, 2)
    ledger.finish(0, 3, ledger.issue(0, 3))
    ledger.drop(0, 4, ledger.issue(0, 4), "filtered")
    ledger.drop(0, 5, ledger.issue(0, 5), "filtered")
    ledger.issue(0, 5)
    before = ledger.state()
    with pytest.raises(LedgerError, match=message):
        wrong(ledger)
    assert ledger.state() == before


def test_what_is_neither_used_nor_dropped_is_lost() -> None:
    ledger = Ledger()
    ledger.issue(0, 7)
    with pytest.raises(
        LedgerError, match="1 attempts were neither used nor dropped: attempt 0 of prompt 7"
    ):
        ledger.check()
    ledger.check(in_flight=True)


def test_an_epoch_that_went_by_without_all_its_prompts_is_an_error() -> None:
    ledger = Ledger(size=2)
    used(ledger, 0, 0)
    ledger.check()
    used(ledger, 1, 0)
    with pytest.raises(
        LedgerError, match="epoch 0: 1 of 2 prompts were issued, and epoch 1 has begun"
    ):
        ledger.check()
    skipping = Ledger(size=1)
    used(skipping, 0, 0)
    used(skipping, 2, 0)
    with pytest.raises(LedgerError, match="no prompt of epochs 1 was issued"):
        skipping.check()


def test_complete_epochs_collapse_to_counts_and_stay_closed() -> None:
    ledger = Ledger(size=50)
    sizes = []
    for epoch in range(40):
        for prompt in range(50):
            if prompt % 10:
                used(ledger, epoch, prompt)
            else:
                ledger.drop(epoch, prompt, ledger.issue(epoch, prompt), "filtered")
        sizes.append(len(json.dumps(ledger.state())))
    assert max(sizes[1:]) - sizes[1] < 10  # more digits, nothing else
    assert ledger.counts() == {
        "used": 40 * 45,
        "open": 0,
        "dropped": {"filtered": 40 * 5},
        "complete_epochs": 39,
    }
    for wrong in (lambda: ledger.issue(3, 10), lambda: ledger.use(3, 10, 0)):
        with pytest.raises(LedgerError, match="complete"):
            wrong()


def test_an_epoch_with_something_in_flight_does_not_collapse() -> None:
    ledger = Ledger(size=2)
    used(ledger, 0, 0)
    ledger.issue(0, 1)
    used(ledger, 1, 0)
    used(ledger, 1, 1)
    used(ledger, 2, 0)
    assert ledger.counts()["complete_epochs"] == 0
    ledger.drop(0, 1, 0, "stale")
    assert ledger.counts()["complete_epochs"] == 2


def test_the_state_of_a_large_epoch_is_small() -> None:
    ledger = Ledger(size=200_000)
    for prompt in range(0, 200_000, 2):
        used(ledger, 0, prompt)
    assert len(json.dumps(ledger.state())) < 40_000


@given(st.sets(st.integers(0, 5000)))
def test_marks_come_back(numbers) -> None:
    assert unpack(pack(numbers)) == numbers


def test_a_state_of_another_version_is_refused() -> None:
    with pytest.raises(LedgerError, match="version 99"):
        Ledger().load_state({**Ledger().state(), "version": 99})


class LedgerMachine(RuleBasedStateMachine):
    """Random events against a model that forgets nothing."""

    SIZE = 4

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(size=self.SIZE)
        self.where: dict[tuple[int, int], str] = {}
        self.attempt: dict[tuple[int, int], int] = {}
        self.epoch = 0

    def pick(self, data: Any, *states: str) -> tuple[int, int] | None:
        keys = sorted(key for key, state in self.where.items() if state in states)
        return data.draw(st.sampled_from(keys)) if keys else None

    def closed(self, epoch: int) -> bool:
        return epoch < self.ledger.counts()["complete_epochs"]

    @rule(data=st.data())
    def issue_next(self, data: Any) -> None:
        """As the loader does: every prompt of an epoch before the next begins."""
        fresh = [p for p in range(self.SIZE) if (self.epoch, p) not in self.where]
        if not fresh:
            self.epoch += 1
            fresh = list(range(self.SIZE))
        key = (self.epoch, data.draw(st.sampled_from(fresh)))
        assert self.ledger.issue(*key) == 0
        self.where[key], self.attempt[key] = "issued", 0

    @rule(data=st.data())
    def issue_again(self, data: Any) -> None:
        key = self.pick(data, "issued", "finished", "used", "dropped")
        if key is None:
            return
        if self.where[key] == "dropped" and not self.closed(key[0]):
            self.attempt[key] += 1
            assert self.ledger.issue(*key) == self.attempt[key]
            self.where[key] = "issued"
        else:
            with pytest.raises(LedgerError):
                self.ledger.issue(*key)

    @rule(data=st.data(), wrong_attempt=st.booleans())
    def finish(self, data: Any, wrong_attempt: bool) -> None:
        self.move(data, "finished", ("issued",), wrong_attempt, self.ledger.finish)

    @rule(data=st.data(), wrong_attempt=st.booleans())
    def use(self, data: Any, wrong_attempt: bool) -> None:
        self.move(data, "used", ("finished",), wrong_attempt, self.ledger.use)

    @rule(data=st.data(), wrong_attempt=st.booleans(), reason=st.sampled_from("ab"))
    def drop(self, data: Any, wrong_attempt: bool, reason: str) -> None:
        def drop(*key: int) -> None:
            self.ledger.drop(*key, reason)

        self.move(data, "dropped", ("issued", "finished"), wrong_attempt, drop)

    def move(self, data: Any, to: str, allowed: tuple[str, ...], wrong: bool, event: Any) -> None:
        key = self.pick(data, "issued", "finished", "used", "dropped")
        if key is None:
            return
        attempt = self.attempt[key] + (data.draw(st.sampled_from([-1, 1])) if wrong else 0)
        if self.where[key] in allowed and not wrong:
            event(*key, attempt)
            self.where[key] = to
        else:
            with pytest.raises(LedgerError):
                event(*key, attempt)

    @rule()
    def save_and_load(self) -> None:
        state = json.loads(json.dumps(self.ledger.state()))
        self.ledger = Ledger(size=self.SIZE)
        self.ledger.load_state(state)
        assert json.loads(json.dumps(self.ledger.state())) == state

    @precondition(lambda self: self.where)
    @rule()
    def crash_and_reopen(self) -> None:
        open_ = {k for k, state in self.where.items() if state in ("issued", "finished")}
        assert {key[:2] for key in self.ledger.reopen()} == open_
        self.where.update(dict.fromkeys(open_, "issued"))

    @invariant()
    def nothing_is_lost_or_counted_twice(self) -> None:
        self.ledger.check(in_flight=True)
        states = Counter(self.where.values())
        counts = self.ledger.counts()
        assert counts["used"] == states["used"]
        assert counts["open"] == states["issued"] + states["finished"]
        assert sum(counts["dropped"].values()) == states["dropped"]
        assert sorted(self.ledger.finished()) == sorted(
            (*key, self.attempt[key]) for key, state in self.where.items() if state == "finished"
        )
        assert all(self.ledger.knows(*key) for key in self.where)

    @invariant()
    def a_settled_ledger_passes_and_no_other(self) -> None:
        if self.ledger.open():
            with pytest.raises(LedgerError):
                self.ledger.check()
        else:
            self.ledger.check()


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase
