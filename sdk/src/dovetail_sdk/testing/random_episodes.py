"""Random episodes, and the check that their tokens are those of the engine's prompts and responses."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias

import numpy as np

from dovetail.errors import RolloutError
from dovetail.interfaces import (
    AgentLoop,
    BaseRollout,
    Completion,
    PluginContext,
    RolloutRequest,
    Session,
    Turn,
)
from dovetail.interfaces.rollout import closable
from dovetail.sections import EpisodeSection
from dovetail_rollouts import Group

MESSAGES = [{"role": "user", "content": "question"}]
"""The prompt of every episode."""

Body = Callable[[Session], Awaitable[None]]
EngineCall: TypeAlias = tuple[RolloutRequest, Completion]
"""The request to an engine, for one sample, and the completion that the engine produced."""


class FunctionLoop(AgentLoop):
    """Agent loop that runs a function, which may begin further token sequences of the episode with `Session.fork`.

    Args:
        body: the function, called with the episode's session.
        limits: fields of the loop's config, such as `max_turns`.
    """

    name = "loop"
    api = ">=1.0,<2"
    Config = EpisodeSection
    capabilities = frozenset({"forks"})

    def __init__(self, body: Body, **limits: Any) -> None:
        super().__init__(EpisodeSection(**limits), PluginContext())
        self.body = body

    async def run(self, session: Session) -> None:
        await self.body(session)


def calls_of(count: int) -> list[dict[str, Any]]:
    """Return `count` tool calls in the form that chat templates read."""
    return [
        {
            "id": f"call{number:05}",
            "type": "function",
            "function": {"name": "add", "arguments": {"a": number}},
        }
        for number in range(count)
    ]


def results_of(count: int, text: str) -> list[dict[str, Any]]:
    """Return the results of `count` calls, all with the same text."""
    return [
        {"role": "tool", "tool_call_id": f"call{n:05}", "name": "add", "content": text}
        for n in range(count)
    ]


def random_episode(parallel: int) -> Body:
    """Return a function that runs a random episode, seeded by the sample's id.

    The episode has turns, length limits, further sequences (`Session.fork`), messages, texts and rewards.

    Args:
        parallel: the maximum number of tool calls in a turn; 0 for no calls.
    """

    async def run(session: Session) -> None:
        rng = random.Random(session.sample_id)
        sessions = [session]
        for _ in range(rng.randrange(1, 6)):
            if rng.random() < 0.3:
                sessions.append(session.fork(rng.choice([None, MESSAGES])))
            session = rng.choice(sessions)
            limit = rng.choice([None, 1, 5])
            await session.generate(max_new_tokens=limit)
            await asyncio.sleep(0)
            text = "".join(rng.choices("abc é\n<>", k=rng.randrange(40)))
            match rng.randrange(4):
                case 0:
                    await session.observe([{"role": "user", "content": text}])
                case 1 if parallel:
                    count = rng.randrange(1, parallel + 1)
                    await session.observe(results_of(count, text), calls_of(count))
                case 2:
                    await session.observe(text)
                case _:
                    session.reward(rng.random())

    return run


class RecordedEngine:
    """Records the requests and results of a started engine. Once a test sets `killed`, the engine's requests raise RolloutError.

    Args:
        engine: the engine whose `submit` is replaced; each request has one sample.
        calls: the list to which results are appended; several engines may share it.
    """

    def __init__(self, engine: BaseRollout, calls: list[EngineCall]) -> None:
        self.killed = False
        """Whether a request raises RolloutError instead of returning its sample; set by tests."""
        self._submit, self._calls = engine.submit, calls
        engine.submit = self._recorded  # type: ignore[method-assign]

    async def _recorded(self, request: RolloutRequest) -> AsyncGenerator[Completion, None]:
        async with aclosing(closable(self._submit(request))) as completions:
            async for completion in completions:
                if self.killed:
                    raise RolloutError("the engine was killed by the test")
                self._calls.append((request, completion))
                yield completion


def check_episodes(group: Group, calls: Sequence[EngineCall]) -> None:
    """Assert that every sample of a group consists, token for token, of the recorded prompts and responses."""
    of_samples: dict[str, dict[tuple[int, ...], list[EngineCall]]] = {}
    for call in calls:
        found = re.match(r"(.+\.s\d+)((?:\.f\d+)*)\.t", call[0].request_id)
        assert found is not None
        path = tuple(map(int, re.findall(r"\d+", found[2])))
        of_samples.setdefault(found[1], {}).setdefault(path, []).append(call)
    for sample in group.samples:
        trajectory, own = sample.trajectory, of_samples[sample.sample_id]
        assert trajectory is not None
        assert len(own) == len(sample.sequences)
        assert {turn.sequence for turn in trajectory.turns} == set(range(len(own)))
        for number, path in enumerate(sorted(own)):
            turns = [turn for turn in trajectory.turns if turn.sequence == number]
            _check_sequence(sample.sequences[number], own[path], turns, sample.prompt.prompt_ids)


def _check_sequence(
    completion: Completion,
    own: Sequence[EngineCall],
    turns: Sequence[Turn],
    prompt_ids_P: np.ndarray,
) -> None:
    """Assert that a token sequence of an episode consists of the engine's prompts and responses, with their log-probabilities and weight
    versions, and that all other tokens are masked.

    Args:
        completion: the sequence, as part of the sample.
        own: the engine calls of the sequence, in order.
        turns: the turns of the sequence.
        prompt_ids_P: token ids of the sample's prompt, used unless the completion has its own.
    """
    prompt_ids_P = prompt_ids_P if completion.prompt_ids is None else completion.prompt_ids
    whole = np.concatenate([prompt_ids_P, completion.response_ids])
    mask_T = completion.produced_T
    for request, produced in own:
        start = len(request.prompt_ids)
        end = start + len(produced.response_ids)
        np.testing.assert_array_equal(whole[:start], request.prompt_ids)
        np.testing.assert_array_equal(whole[start:end], produced.response_ids)
        place = slice(start - len(prompt_ids_P), end - len(prompt_ids_P))
        assert mask_T[place].all()
        np.testing.assert_array_equal(completion.weight_versions[place], produced.weight_versions)
        assert completion.log_probs is not None
        np.testing.assert_array_equal(completion.log_probs[place], produced.log_probs)
    assert mask_T.sum() == sum(len(produced.response_ids) for _, produced in own)
    assert completion.log_probs is not None
    assert not completion.log_probs[~mask_T].any()
    assert (completion.weight_versions[~mask_T] == -1).all()
    last_request, last = own[-1]
    np.testing.assert_array_equal(whole, [*last_request.prompt_ids, *last.response_ids])
    spans_T = np.zeros(len(mask_T), np.bool_)
    for turn in turns:
        spans_T[turn.start : turn.stop] = True
    np.testing.assert_array_equal(mask_T, spans_T)
