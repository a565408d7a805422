"""The ledger: no prompt lost, none used twice, whatever the order of events and however often it is saved."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dovetail.data.bitmap import pack, unpack
from dovetail.data.ledger import Ledger
from dovetail.errors import LedgerError


def used(ledger: Ledger, epoch: int, prompt: int) -> None:
    attempt = ledger.issue(epoch, prompt)
    ledger.take(epoch, prompt, attempt, step=1)
    ledger.use(epoch, prompt, attempt)


def test_a_prompt_goes_from_issued_to_used() -> None:
    ledger = Ledger()
    assert ledger.issue(0, 7) == 0
    assert ledger.open() == [(0, 7, 0)]
    ledger.take(0, 7, 0, step=3)
    assert ledger.taken(3) == ledger.open() == [(0, 7, 0)]
    assert ledger.taken(4) == []
    ledger.use(0, 7, 0)
    assert ledger.open() == ledger.taken(3) == []
    assert ledger.counts() == {
        "used": 1,
        "open": 0,
        "dropped": {},
        "complete_epochs": 0,
    }
    ledger.check()


def test_what_a_step_gives_back_is_in_flight_and_another_step_may_take_it() -> None:
    ledger = Ledger()
    for prompt, step in ((7, 3), (8, 4), (9, 3)):
        ledger.take(0, prompt, ledger.issue(0, prompt), step=step)
    ledger.use(0, 9, 0)
    ledger.give_back(3)
    assert ledger.taken(3) == []
    assert ledger.taken(4) == [(0, 8, 0)]
    assert ledger.open() == [(0, 7, 0), (0, 8, 0)]
    assert (ledger.counts()["used"], ledger.counts()["open"]) == (1, 2)
    with pytest.raises(LedgerError, match="no step had taken it"):
        ledger.use(0, 7, 0)
    ledger.take(0, 7, 0, step=5)
    ledger.use(0, 7, 0)


def test_an_attempt_that_failed_is_tried_again_in_its_place() -> None:
    ledger = Ledger()
    for prompt in (7, 8):
        ledger.issue(0, prompt)
    assert ledger.attempt(0, 7) == 0
    assert ledger.retry(0, 7, 0) == ledger.attempt(0, 7) == 1
    assert ledger.open() == [(0, 7, 1), (0, 8, 0)]
    assert ledger.counts()["dropped"] == {}
    with pytest.raises(
        LedgerError, match=r"attempt 0 of prompt 7 in epoch 0 can't be tried again: it"
    ):
        ledger.retry(0, 7, 0)


def test_the_last_prompt_of_an_epoch_may_be_tried_again_while_the_next_has_begun() -> None:
    ledger = Ledger(size=2)
    used(ledger, 0, 0)
    ledger.issue(0, 1)
    ledger.issue(1, 0)
    ledger.retry(0, 1, 0)
    ledger.take(0, 1, 1, step=1)
    ledger.use(0, 1, 1)
    assert ledger.counts()["complete_epochs"] == 1


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
        (lambda ledger: ledger.issue(0, 1), "prompt 1 can't be issued in epoch 0: .*already used"),
        (lambda ledger: ledger.issue(0, 2), "its attempt 0 is still in flight"),
        (
            lambda ledger: ledger.take(0, 9, 0, step=2),
            "attempt 0 of prompt 9 in epoch 0 can't be taken: .*was never",
        ),
        (
            lambda ledger: ledger.take(5, 1, 0, step=2),
            "prompt 1 in epoch 5 can't be taken: .*never issued",
        ),
        (
            lambda ledger: ledger.take(0, 2, 1, step=2),
            "attempt 1 of prompt 2 in epoch 0 can't be taken: .*was never",
        ),
        (
            lambda ledger: ledger.take(0, 3, 0, step=2),
            "attempt 0 of prompt 3 in epoch 0 can't be taken by step 2: step 1 has taken it",
        ),
        (lambda ledger: ledger.use(0, 2, 0), "no step had taken it"),
        (
            lambda ledger: ledger.use(0, 1, 0),
            "attempt 0 of prompt 1 in epoch 0 can't be used: .*used before",
        ),
        (lambda ledger: ledger.use(0, 4, 0), "dropped before"),
        (
            lambda ledger: ledger.use(0, 5, 0),
            "attempt 0 of prompt 5 in epoch 0 can't be used: .*was dropped",
        ),
        (lambda ledger: ledger.drop(0, 1, 0, "x"), "used before"),
        (lambda ledger: ledger.drop(0, 4, 0, "x"), "dropped before"),
    ],
)
def test_every_wrong_turn_is_an_error_that_names_the_prompt(wrong, message) -> None:
    """1 is used, 2 in flight, 3 taken by step 1, 4 dropped, 5 in flight in its second attempt."""
    ledger = Ledger()
    used(ledger, 0, 1)
    ledger.issue(0, 2)
    ledger.take(0, 3, ledger.issue(0, 3), step=1)
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
    with pytest.raises(LedgerError, match=r"nor dropped .1.: attempt 0 of prompt 7"):
        ledger.check()
    ledger.check(in_flight=True)


def test_an_epoch_that_went_by_without_all_its_prompts_is_an_error() -> None:
    ledger = Ledger(size=2)
    used(ledger, 0, 0)
    ledger.check()
    used(ledger, 1, 0)
    with pytest.raises(LedgerError, match=r"1 prompts .* in epoch 0; expected 2 .*epoch, 1"):
        ledger.check()
    skipping = Ledger(size=1)
    used(skipping, 0, 0)
    used(skipping, 2, 0)
    with pytest.raises(LedgerError, match=r"none of the earlier epochs 1"):
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
    STEPS = (1, 2)

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(size=self.SIZE)
        self.where: dict[tuple[int, int], str] = {}
        self.attempt: dict[tuple[int, int], int] = {}
        self.taken_by: dict[tuple[int, int], int] = {}
        self.epoch = 0

    def those(self, *states: str) -> list[tuple[int, int]]:
        return sorted(key for key, state in self.where.items() if state in states)

    def pick(self, data: Any, *states: str) -> tuple[int, int] | None:
        keys = self.those(*states)
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
        key = self.pick(data, "issued", "taken", "used", "dropped")
        if key is None:
            return
        if self.where[key] == "dropped" and not self.closed(key[0]):
            self.attempt[key] += 1
            assert self.ledger.issue(*key) == self.attempt[key]
            self.where[key] = "issued"
        else:
            with pytest.raises(LedgerError):
                self.ledger.issue(*key)

    @rule(data=st.data(), wrong_attempt=st.booleans(), step=st.sampled_from(STEPS))
    def take(self, data: Any, wrong_attempt: bool, step: int) -> None:
        def take(*key: int) -> None:
            self.ledger.take(*key, step=step)
            self.taken_by[key[:2]] = step

        self.move(data, "taken", ("issued",), wrong_attempt, take)

    @rule(data=st.data(), wrong_attempt=st.booleans())
    def retry(self, data: Any, wrong_attempt: bool) -> None:
        key = self.pick(data, "issued", "taken", "used", "dropped")
        if key is None:
            return
        if wrong_attempt or self.where[key] not in ("issued", "taken"):
            with pytest.raises(LedgerError):
                self.ledger.retry(*key, self.attempt[key] + wrong_attempt)
            return
        self.attempt[key] += 1
        assert self.ledger.retry(*key, self.attempt[key] - 1) == self.attempt[key]

    @rule(step=st.sampled_from(STEPS))
    def give_back(self, step: int) -> None:
        self.ledger.give_back(step)
        back = [key for key in self.those("taken") if self.taken_by[key] == step]
        self.where.update(dict.fromkeys(back, "issued"))

    @rule(data=st.data(), wrong_attempt=st.booleans())
    def use(self, data: Any, wrong_attempt: bool) -> None:
        self.move(data, "used", ("taken",), wrong_attempt, self.ledger.use)

    @rule(data=st.data(), wrong_attempt=st.booleans(), reason=st.sampled_from("ab"))
    def drop(self, data: Any, wrong_attempt: bool, reason: str) -> None:
        def drop(*key: int) -> None:
            self.ledger.drop(*key, reason)

        self.move(data, "dropped", ("issued", "taken"), wrong_attempt, drop)

    def move(self, data: Any, to: str, allowed: tuple[str, ...], wrong: bool, event: Any) -> None:
        key = self.pick(data, "issued", "taken", "used", "dropped")
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
        self.where.update(dict.fromkeys(self.those("taken"), "issued"))

    @invariant()
    def nothing_is_lost_or_counted_twice(self) -> None:
        self.ledger.check(in_flight=True)
        states = Counter(self.where.values())
        counts = self.ledger.counts()
        assert counts["used"] == states["used"]
        assert counts["open"] == states["issued"] + states["taken"]
        assert sum(counts["dropped"].values()) == states["dropped"]
        for step in self.STEPS:
            assert sorted(self.ledger.taken(step)) == [
                (*key, self.attempt[key])
                for key in self.those("taken")
                if self.taken_by[key] == step
            ]
        for key in self.those("issued", "taken"):
            assert self.ledger.attempt(*key) == self.attempt[key]
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
