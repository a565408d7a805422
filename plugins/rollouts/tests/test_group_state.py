"""Finished groups in a checkpoint are read as they were written."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from hypothesis import given, strategies as st

from dovetail.checkpoint.plugin_states import read_states, write_states
from dovetail.interfaces import (
    Completion,
    Failure,
    FailureKind,
    FinishReason,
    Prompt,
    Sample,
    SamplingParams,
    Score,
)
from dovetail.interfaces.rollout import ON_REQUEST
from dovetail_rollouts import Group
from dovetail_rollouts.group_state import pack, unpack


def sampling(asked: Collection[str]) -> SamplingParams:
    """Return the sampling parameters of a config with 8 tokens."""
    return SamplingParams(
        max_new_tokens=8,
        log_probs="rollout_log_probs" in asked,
        raw_log_probs="raw_rollout_log_probs" in asked,
    )


SAMPLING = sampling(())
PROMPTS = {i: Prompt(index=i, prompt_ids=np.arange(i + 1), raw=f"q{i}") for i in range(4)}


def issued(epoch: int, prompt: int, attempt: int) -> Prompt:
    return attrs.evolve(PROMPTS[prompt], epoch=epoch, attempt=attempt)


numbers = st.floats(-5, 5, width=32)


@st.composite
def sample(draw: Any, prompt: int, number: int) -> Sample:
    length, attempt = draw(st.integers(0, 3)), draw(st.integers(0, 2))
    floats_T = st.lists(numbers, min_size=length, max_size=length)

    def array(strategy: Any, dtype: Any) -> np.ndarray | None:
        found = draw(strategy)
        return None if found is None else np.array(found, dtype)

    scored = Score(
        value=draw(numbers),
        token_rewards=array(st.none() | floats_T, np.float32),
        components=draw(st.dictionaries(st.sampled_from(["acc", "format"]), numbers)),
        extras=draw(st.dictionaries(st.just("pred"), st.none() | st.text(max_size=3))),
    )
    failed = Failure(kind=FailureKind.TIMEOUT, message="too slow", retryable=True)
    versions = st.lists(st.integers(0, 9), min_size=length, max_size=length)
    return Sample(
        sample_id=f"train.e0.p{prompt}.a{attempt}.s{number}",
        prompt=issued(0, prompt, attempt),
        completion=Completion(
            request_id=f"train.e0.p{prompt}.a{attempt}",
            sample=number,
            response_ids=np.arange(length),
            finish_reason=draw(st.sampled_from(FinishReason)),
            weight_versions=np.array(draw(versions), np.int64),
            log_probs=array(st.none() | floats_T, np.float32),
            raw_log_probs=array(st.none() | floats_T, np.float32),
        ),
        text=draw(st.text(max_size=3)),
        outcome=draw(st.sampled_from([scored, failed])),
    )


@st.composite
def groups(draw: Any) -> list[Group]:
    found = []
    for prompt in range(draw(st.integers(0, 3))):
        count = draw(st.integers(1, 3))
        greedy = draw(st.booleans())
        found.append(
            Group(
                prompt=issued(0, prompt, 2),
                n=count,
                sampling=sampling(draw(st.sets(st.sampled_from(sorted(ON_REQUEST))))),
                baseline=greedy,
                samples=[draw(sample(prompt, number)) for number in range(count)],
                greedy=draw(sample(prompt, 9)) if greedy else None,
                finished=True,
                due=draw(st.none() | st.integers(1, 3)),
                priority=1 + prompt,
            )
        )
    return found


def plain(group: Group) -> Any:
    """Return all of a group in values that can be compared."""
    return [
        (*group.prompt.key, group.n, group.due, group.priority, group.sampling),
        (group.baseline, group.finished, group.greedy is None),
        [_plain(one) for one in (*group.samples, *filter(None, [group.greedy]))],
    ]


def _plain(one: Sample) -> Any:
    arrays = [
        None if found is None else (found.dtype.name, found.tolist())
        for found in (
            one.completion.response_ids,
            one.completion.weight_versions,
            one.completion.log_probs,
            one.completion.raw_log_probs,
            getattr(one.outcome, "token_rewards", None),
        )
    ]
    outcome = one.outcome
    said = (
        (outcome.kind, outcome.message, outcome.retryable)
        if isinstance(outcome, Failure)
        else (outcome.value, dict(outcome.components), dict(outcome.extras))
    )
    completion = one.completion
    names = (one.sample_id, completion.request_id, completion.sample, completion.finish_reason)
    return names, one.text, one.prompt.attempt, one.prompt.raw, arrays, said


class Kept:
    """A component of a run with this state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state(self) -> dict[str, Any]:
        return self._state


@given(groups())
def test_what_is_written_is_what_is_read(tmp_path_factory: Any, made: list[Group]) -> None:
    folder: Path = tmp_path_factory.mktemp("state")
    part: Any = Kept(pack(made))
    written = json.loads(json.dumps(write_states(folder, {"experience": part})))
    state = read_states(folder, written)["experience"]
    assert [plain(group) for group in unpack(state, issued, sampling)] == [plain(g) for g in made]


def test_what_a_checkpoint_cannot_keep_of_a_score_is_left_out() -> None:
    completion = Completion(
        request_id="a",
        sample=0,
        response_ids=np.arange(2),
        finish_reason=FinishReason.STOP,
        weight_versions=np.zeros(2, np.int64),
    )
    scored = Score(value=1.0, extras={"pred": "4", "model": object(), "big": 2**60_000})
    one = Sample(
        sample_id="a.s0", prompt=issued(0, 1, 0), completion=completion, text="4", outcome=scored
    )
    group = Group(prompt=issued(0, 1, 0), n=1, sampling=SAMPLING, samples=[one], finished=True)
    [found] = unpack(pack([group]), issued, sampling)
    outcome = found.samples[0].outcome
    assert isinstance(outcome, Score)
    assert (outcome.value, outcome.extras) == (1.0, {"pred": "4", "big": hex(2**60_000)})
