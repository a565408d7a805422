"""The suite of agent loops."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np

from dovetail.interfaces import (
    AgentLoop,
    Failure,
    Outcome,
    PluginContext,
    Prompt,
    RewardManager,
    RolloutRequest,
    Sample,
    SamplingParams,
    Score,
)
from dovetail.sections import PluginSection
from dovetail_rollouts import Episodes, Generation, Group, RolloutPool, Scorer
from dovetail_sdk.testing.chat_templates import CHATML
from dovetail_sdk.testing.conformance.plugin import PluginConformance
from dovetail_sdk.testing.scripted_rollout import Script, ScriptedRollout
from dovetail_sdk.testing.tiny import template_tokenizer

_PROMPT = ({"role": "user", "content": "question"},)


def draw_episodes(
    loop: AgentLoop,
    prompts: Sequence[Prompt],
    *,
    said: Callable[[int], Sequence[str]],
    n: int = 1,
    tokens: int = 4096,
) -> list[Sample]:
    """Run episodes concurrently with a scripted policy and return their samples. The agent loop is started first and closed at the end.

    Args:
        loop: an agent loop whose context has the tokenizer `template_tokenizer(CHATML)`.
        prompts: prompts with messages in `raw`; this function computes their tokens.
        said: a function from a prompt's index to the texts of the policy's turns, which repeat after the last turn.
        n: the number of samples per prompt.
        tokens: the token limit of a response.
    """
    tokenizer = template_tokenizer(CHATML)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    groups = []
    for prompt in prompts:
        ids = tokenizer.apply_chat_template(
            list(prompt.raw), add_generation_prompt=True, return_dict=False
        )
        made = attrs.evolve(prompt, prompt_ids=np.array(ids, np.int64))
        sampling = SamplingParams(max_new_tokens=tokens, log_probs=True)
        groups.append(Group(prompt=made, n=n, sampling=sampling))

    def answer(request: RolloutRequest, sample: int) -> list[int]:
        stream = request.streams[sample]
        turns = said(stream.prompt)
        text = turns[stream.turn % len(turns)]
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], end]
        return list(ids[: request.sampling.max_new_tokens])

    async def run() -> None:
        generation = Generation(
            pool=RolloutPool([ScriptedRollout.following(Script(answer=answer))]),
            scorer=Scorer(_Ones(), timeout=30.0),
            tokenizer=tokenizer,
            seed=0,
            episodes=Episodes(loop, tokenizer, loop.chat_tools()),
        )
        await asyncio.gather(*generation.begin(groups))

    loop.start()
    try:
        asyncio.run(run())
    finally:
        loop.close()
    return [sample for group in groups for sample in group.samples]


class AgentLoopConformance(PluginConformance):
    """Conformance suite for agent loops: subclass it and set `plugin`."""

    kind = "agent_loop"
    plugin: ClassVar[type[AgentLoop]]
    turns: ClassVar[Sequence[str]] = ("one turn", "another")
    """Texts of the policy's turns, in order; after the last turn, the texts repeat."""
    row: ClassVar[Mapping[str, Any]] = {}
    """Fields of `Prompt` to set besides the messages."""

    def draw(
        self, n: int = 3, *, indices: Sequence[int] = (0,), tokens: int = 4096
    ) -> list[Sample]:
        """Run n episodes per prompt concurrently and return their samples.

        The policy is scripted: its turns have the texts of the suite's attribute `turns`.

        Args:
            n: the number of samples per prompt.
            indices: the indices of the prompts.
            tokens: the token limit of a response.
        """
        loop = self.make(tokenizer=template_tokenizer(CHATML))
        prompts = [Prompt(index=index, raw=list(_PROMPT), **self.row) for index in indices]
        return draw_episodes(loop, prompts, said=lambda _: self.turns, n=n, tokens=tokens)

    def test_every_episode_ends_with_a_score(self) -> None:
        for sample in self.draw():
            assert not isinstance(sample.outcome, Failure), sample.outcome
            assert sample.trajectory is not None
            assert sample.trajectory.turns

    def test_an_episode_is_the_same_whatever_runs_beside_it(self) -> None:
        alone = self.draw(1, indices=(3,))
        together = self.draw(2, indices=(1, 3, 5))
        (found,) = [s for s in together if s.sample_id == alone[0].sample_id]
        assert len(found.response_ids)
        assert len(found.sequences) == len(alone[0].sequences)
        np.testing.assert_array_equal(found.response_ids, alone[0].response_ids)

    def test_it_ends_at_the_limit_on_tokens(self) -> None:
        for sample in self.draw(tokens=1):
            assert not isinstance(sample.outcome, Failure), sample.outcome
            assert sample.response_length == 1

    def test_its_tools_are_json_and_always_the_same(self) -> None:
        loop: Any = self.make(tokenizer=template_tokenizer(CHATML))
        loop.start()
        try:
            assert json.dumps(list(loop.chat_tools())) == json.dumps(list(loop.chat_tools()))
        finally:
            loop.close()

    def test_a_loop_of_one_response_takes_one_turn(self) -> None:
        if self.plugin.one_response:
            assert [len(s.trajectory.turns) for s in self.draw() if s.trajectory] == [1, 1, 1]


class _Ones(RewardManager):
    name = "ones"
    api = ">=1.0,<2"

    def __init__(self) -> None:
        super().__init__(PluginSection(name="ones"), PluginContext())

    async def score(self, samples: Any, time: Any) -> list[Outcome]:
        return [Score(value=1.0) for _ in samples]
