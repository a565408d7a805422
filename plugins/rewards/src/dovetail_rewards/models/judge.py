"""The reward manager `judge`: a generative reward model behind an OpenAI-compatible endpoint, with a budget of requests and tokens."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from statistics import pstdev
from typing import Any

from dovetail.errors import RewardError
from dovetail.interfaces import (
    Failure,
    FailureKind,
    Outcome,
    PluginConfig,
    PluginContext,
    RewardManager,
    RunningTime,
    Sample,
)
from dovetail_rewards.judge_config import JudgeConfig
from dovetail_rewards.managers.budget import Budget
from dovetail_rewards.managers.cache import OutcomeCache
from dovetail_rewards.managers.places import Places
from dovetail_rewards.models.chat_client import ChatClient, ChatReply, Refusal
from dovetail_rewards.models.question import Question
from dovetail_rewards.models.verdict import NoVerdict, Verdicts
from dovetail_rollouts import outcome_from

LONGEST_BACKOFF = 30.0
"""The longest wait before a retry, in seconds."""
_SHOWN = 2000
"""Number of characters of a judgement, from its end, that are written with the samples."""


class JudgeManager(RewardManager):
    """Scores single samples by the verdicts of a language model.

    The score is the `aggregate` of `votes` verdicts. With several votes, the components are `votes` (successful judgements) and
    `vote_spread` (the verdicts' standard deviation). A sample with fewer than `min_votes` successful judgements fails like the first failed
    judgement: an unreachable judge, or an answer that can't be parsed.

    Every request, retries included, is charged to one budget; waiting for the budget does not count as running time.

    In a config:

        reward:
          manager:
            url: "http://127.0.0.1:8000/v1"
            model: judge
            template: "{{ prompt }} {{ response }} End with `Score: n`, n from 0 to 10."
    """

    name = "judge"
    api = ">=1.0,<2"
    aliases = ("generative_reward_model",)
    capabilities = frozenset({"timeout", "service"})
    queues = True
    Config = JudgeConfig

    def __init__(self, config: JudgeConfig, context: PluginContext) -> None:
        super().__init__(config, context)
        self.budget = Budget(
            config.requests_per_minute, config.tokens_per_minute, window=config.window
        )
        self.cache = OutcomeCache(config.cache_size)
        self._client: ChatClient | None = None
        self._places = Places(config.workers)

    @classmethod
    def needs_functions(cls, config: PluginConfig) -> bool:
        return False

    def start(self) -> None:
        """Compile the templates and read the credential.

        Raises:
            ConfigError: a template has errors, or the environment lacks the credential.
        """
        self._question = Question(self.config)
        self._verdicts = Verdicts(self.config)
        self._client = ChatClient(self.config)

    async def score(self, samples: Sequence[Sample], time: RunningTime) -> list[Outcome]:
        assert self._client is not None, "the judge is not started"
        return list(await asyncio.gather(*(self._score(s, time) for s in samples)))

    async def _score(self, sample: Sample, time: RunningTime) -> Outcome:
        try:
            messages = self._question.messages(sample)
        except RewardError as error:
            return Failure(kind=FailureKind.EXCEPTION, message=str(error))
        key = self._key(messages)
        outcome: Outcome | None = self.cache.get(key)
        if outcome is None:
            outcome = await self._judged(messages, time)
            self.cache.put(key, outcome)
        return outcome

    async def _judged(self, messages: list[dict[str, str]], time: RunningTime) -> Outcome:
        votes = await asyncio.gather(
            *(self._vote(messages, time) for _ in range(self.config.votes))
        )
        failures = [vote for vote in votes if isinstance(vote, Failure)]
        given = [vote for vote in votes if not isinstance(vote, Failure)]
        needed = self.config.min_votes or self.config.votes
        if len(given) < needed:
            return failures[0]
        verdicts = [verdict for verdict, _ in given]
        answer: dict[str, Any] = {"score": self._verdicts.together(verdicts)}
        if self.config.votes > 1:
            answer |= {"votes": len(verdicts), "vote_spread": pstdev(verdicts)}
        answer["judgement"] = given[0][1][-_SHOWN:]
        return outcome_from(answer, f"judge {self.config.model}")

    async def _vote(
        self, messages: list[dict[str, str]], time: RunningTime
    ) -> tuple[float, str] | Failure:
        """Return one judgement's verdict and text, or the last failure after all tries."""
        pause = 0.0
        for attempt in range(self.config.tries):
            if attempt:
                backoff = min(self.config.backoff * 2 ** (attempt - 1), LONGEST_BACKOFF)
                with time.waiting():
                    await asyncio.sleep(max(backoff, pause))
            reply = await self._ask(messages, time)
            if isinstance(reply, ChatReply):
                try:
                    return self._verdicts.of(reply.text), reply.text
                except NoVerdict as error:
                    # A judge that samples may give a verdict in the next try.
                    reply = Refusal(failure=self._without(error, reply.text))
            failure, pause = reply.failure, reply.pause
            if not failure.retryable:
                break
        return failure

    async def _ask(self, messages: list[dict[str, str]], time: RunningTime) -> ChatReply | Refusal:
        """Send one request, when a slot is free and the budget allows it."""
        client = self._client
        assert client is not None, "the judge was closed"
        characters = sum(len(message["content"]) for message in messages)
        estimate = self.config.tokens_per_request + characters / self.config.characters_per_token
        async with self._places.one(time):
            with time.waiting():
                spending = await self.budget.spend(estimate)
            reply = await client.ask(messages)
        if isinstance(reply, ChatReply) and reply.tokens is not None:
            spending.tokens = reply.tokens
        return reply

    def _without(self, error: NoVerdict, text: str) -> Failure:
        """Return the failure for an answer without a verdict."""
        return Failure(
            kind=FailureKind.INVALID_VALUE,
            message=f"judge {self.config.model} gave no valid verdict: {error}; the answer ends with {text[-120:]!r}",
            retryable=self.config.temperature != 0,
        )

    def _key(self, messages: list[dict[str, str]]) -> bytes | None:
        """Return the cache key of a question; None if the judge may answer differently next time."""
        if self.config.temperature != 0 or not self.config.cache_size:
            return None
        return hashlib.blake2b(json.dumps(messages).encode(), digest_size=16).digest()

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()
