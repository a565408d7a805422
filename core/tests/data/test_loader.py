"""Orders and batches: deterministic, without gaps, across epochs and resumes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dovetail.data.ledger import Ledger
from dovetail.data.loader import PromptLoader
from dovetail.errors import DataError, LedgerError
from dovetail.interfaces import PluginContext, Prompt, Sampler
from dovetail.sections import PluginSection


def prompts(count: int, length: int = 3) -> list[Prompt]:
    """Row numbers have gaps, as after filtering."""
    return [
        Prompt(index=3 * i + 1, prompt_ids=np.full(length, i, dtype=np.int64), raw=str(i))
        for i in range(count)
    ]


class SequentialSampler(Sampler):
    """The order of the rows."""

    name = "in_sequence"
    api = ">=1.0,<2"

    def order(self, size: int, epoch: int) -> np.ndarray:
        return np.arange(size)


class RandomSampler(Sampler):
    """A permutation by seed and epoch."""

    name = "random"
    api = ">=1.0,<2"

    def order(self, size: int, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.context.seed or 0, epoch]).permutation(size)


def shuffled(run_seed: int = 0) -> RandomSampler:
    return RandomSampler(PluginSection(), PluginContext(seed=run_seed))


def loader(
    count: int = 10, batch: int = 4, ledger: Ledger | None = None, sampler: Any = None
) -> PromptLoader:
    return PromptLoader(prompts(count), sampler or shuffled(), batch, ledger or Ledger())


def names(issued: list[Prompt]) -> list[tuple[int, int, int]]:
    return [prompt.key for prompt in issued]


def settle(ledger: Ledger, issued: list[Prompt]) -> None:
    for key in names(issued):
        ledger.take(*key, step=1)
        ledger.use(*key)


@given(count=st.integers(1, 30), batch=st.integers(1, 30), steps=st.integers(1, 30))
@settings(deadline=None)
def test_batches_run_on_across_epochs_and_leave_nothing_over(count, batch, steps) -> None:
    batch = min(batch, count)
    ledger = Ledger()
    source = loader(count, batch, ledger)
    seen: list[tuple[int, int, int]] = []
    for _ in range(steps):
        issued = source.next_batch()
        assert len(issued) == batch
        settle(ledger, issued)
        ledger.check()
        seen += names(issued)
    assert len(set(seen)) == len(seen) == steps * batch
    rows = [prompt.index for prompt in prompts(count)]
    for epoch in range(steps * batch // count):
        assert sorted(row for e, row, _ in seen if e == epoch) == rows
    assert source.epoch == pytest.approx(steps * batch / count)
    assert ledger.counts()["used"] == steps * batch


def test_a_refill_may_ask_for_fewer() -> None:
    source = loader(10, 4)
    whole = loader(10, 4)
    assert names(source.next_batch(1) + source.next_batch(3)) == names(whole.next_batch())


def test_passes_over_the_data_count_what_came_to_its_end_and_not_what_was_issued() -> None:
    ledger = Ledger()
    source = loader(10, 4, ledger)
    first, ahead = source.next_batch(), source.next_batch()
    assert source.epoch == 0
    for key in names(first):
        ledger.take(*key, step=1)
    assert source.epoch == 0
    ledger.use(*names(first)[0])
    ledger.drop(*names(first)[1], "filtered")
    assert source.epoch == pytest.approx(0.2)
    assert len(ledger.open()) == len(ahead) + 2


def test_a_batch_larger_than_the_data_is_refused_with_the_numbers() -> None:
    message = "data.train_batch_size is 11 prompts, but there are only 10 to train on"
    with pytest.raises(DataError, match=message) as error:
        loader(10, 11)
    assert "set data.train_batch_size=10 or less" in str(error.value)


@given(
    before=st.integers(0, 12),
    after=st.integers(1, 12),
    abandoned=st.booleans(),
    first=st.booleans(),
)
@settings(deadline=None)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(before, after, abandoned, first) -> None:
    """Stopped between steps, or in the middle of one that left its prompts in flight."""
    straight_ledger, ledger = Ledger(), Ledger()
    straight, stopped = loader(10, 4, straight_ledger), loader(10, 4, ledger)
    for _ in range(before):
        settle(straight_ledger, straight.next_batch())
        settle(ledger, stopped.next_batch())
    position = stopped.state()
    if abandoned:
        left = stopped.next_batch()
        ledger.take(*names(left)[0], step=1)
        stopped.load_state(position)
    saved = json.loads(json.dumps([stopped.state(), ledger.state()]))

    resumed_ledger = Ledger()
    resumed = loader(10, 4, resumed_ledger)
    loads = [lambda: resumed.load_state(saved[0]), lambda: resumed_ledger.load_state(saved[1])]
    for load in loads if first else loads[::-1]:
        load()
    for _ in range(after):
        expected, actual = straight.next_batch(), resumed.next_batch()
        assert names(actual) == names(expected)
        settle(straight_ledger, expected)
        settle(resumed_ledger, actual)
        resumed_ledger.check()
    assert resumed_ledger.counts() == straight_ledger.counts()


def reload(
    saved: list[dict[str, Any]], batch: int = 4, sampler: Any = None
) -> tuple[PromptLoader, Ledger]:
    """In the order in which a checkpoint is restored: the loader, then the ledger."""
    loader_state, ledger_state = json.loads(json.dumps(saved))
    ledger = Ledger()
    resumed = loader(10, batch, ledger, sampler)
    resumed.load_state(loader_state)
    ledger.load_state(ledger_state)
    return resumed, ledger


def test_what_was_in_flight_is_handed_out_in_batches_of_the_size_asked_for() -> None:
    ledger = Ledger()
    source = loader(10, 5, ledger)
    settle(ledger, source.next_batch())
    settle(ledger, source.next_batch(1))
    position = source.state()
    left = names(source.next_batch())  # straddles the end of the epoch
    assert {epoch for epoch, _, _ in left} == {0, 1}
    source.load_state(position)

    resumed, ledger = reload([source.state(), ledger.state()], batch=2)
    handed_out = []
    for step in range(4):
        assert resumed.epoch == pytest.approx((6 + 2 * step) / 10)
        position = resumed.state()
        abandoned = resumed.next_batch()
        ledger.take(*names(abandoned)[0], step=1)
        ledger.give_back(1)
        resumed.load_state(position)  # stopped in mid-step, and gone on
        issued = resumed.next_batch()
        assert names(issued) == names(abandoned)
        assert len(issued) == 2
        settle(ledger, issued)
        assert ledger.taken(1) == []
        handed_out += names(issued)
    assert handed_out[:5] == left
    assert ledger.counts()["used"] == 6 + 8
    ledger.check()


@given(
    before=st.integers(0, 7),
    in_flight=st.booleans(),
    batch=st.integers(1, 10),
    sequential=st.booleans(),
    abandon=st.integers(0, 3),
)
@settings(deadline=None)
def test_another_order_after_a_resume_loses_no_prompt_and_uses_none_twice(
    before, in_flight, batch, sequential, abandon
) -> None:
    ledger = Ledger()
    stopped = loader(10, 4, ledger)
    seen: list[tuple[int, int, int]] = []
    for _ in range(before):
        issued = stopped.next_batch()
        settle(ledger, issued)
        seen += names(issued)
    position = stopped.state()
    left = names(stopped.next_batch()) if in_flight else []
    stopped.load_state(position)

    other = SequentialSampler(PluginSection(), PluginContext()) if sequential else shuffled(1)
    resumed, ledger = reload([stopped.state(), ledger.state()], batch, other)
    assert resumed.epoch == pytest.approx(len(seen) / 10)
    again: list[tuple[int, int, int]] = []
    step = 0
    while len(seen) + len(again) < 40:
        position = resumed.state()
        if step == abandon:
            resumed.next_batch()
            resumed.load_state(position)
        if step == abandon + 1:  # and once more, in the order that it now has
            resumed, ledger = reload([position, ledger.state()], batch, other)
        issued = resumed.next_batch()
        assert len(issued) == batch
        settle(ledger, issued)
        again += names(issued)
        assert resumed.epoch == pytest.approx((len(seen) + len(again)) / 10)
        step += 1
    assert again[: len(left)] == left
    seen += again
    rows = [prompt.index for prompt in prompts(10)]
    for epoch in range(4):
        assert sorted(row for e, row, _ in seen if e == epoch) == rows
    assert len(set(seen)) == len(seen) == ledger.counts()["used"]
    ledger.check(in_flight=True)
    assert ledger.counts()["complete_epochs"] >= 3


def test_a_resume_with_other_data_is_refused() -> None:
    state = loader(10).state()
    for other in (
        loader(11),
        PromptLoader(prompts(10, length=4), shuffled(), 4, Ledger()),
    ):
        with pytest.raises(DataError, match="training prompts"):
            other.load_state(state)
    saved = Ledger(size=10).state()
    with pytest.raises(LedgerError, match=r"counts 10 prompts.*has 11"):
        Ledger(size=11).load_state(saved)
    restored = Ledger()
    restored.load_state(saved)
    with pytest.raises(LedgerError, match=r"counts 10 prompts.*has 11"):
        loader(11, ledger=restored)


def test_a_sampler_that_gives_no_permutation_is_refused() -> None:
    class Broken(SequentialSampler):
        name = "broken"

        def order(self, size: int, epoch: int) -> np.ndarray:
            return np.zeros(size, dtype=np.int64)

    broken = Broken(PluginSection(), PluginContext())
    with pytest.raises(DataError, match=r"sampler 'broken' did not.*of 10 rows for epoch 0"):
        loader(sampler=broken).next_batch()
