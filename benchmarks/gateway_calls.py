"""Times the gateway: processor time of a call, beside the engine, with many sessions at once and an engine that answers at once.

Usage: python benchmarks/gateway_calls.py [--sessions 256] [--calls 10] [--words 150]

The clients run in a process of their own. The whole process of the gateway is timed: HTTP, matching, chat template, tokens, sessions.
Without the gateway, the same episodes run in a loop that generates and observes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from typing import Any

import numpy as np

from dovetail.interfaces import (
    AgentLoop,
    Completion,
    FinishReason,
    PluginContext,
    Prompt,
    RolloutRequest,
    SamplingParams,
    Session,
)
from dovetail.random_streams import SampleStream
from dovetail.sections import EpisodeSection
from dovetail_gateway.config import ProgramConfig
from dovetail_gateway.endpoint import EpisodeEndpoint
from dovetail_gateway.server import Gateway
from dovetail_gateway.turn_reader import TurnReader
from dovetail_rollouts import Episodes
from dovetail_sdk.testing import template_tokenizer
from dovetail_sdk.testing.chat_templates import CHATML

ANSWER = "The answer is 42, as one can see. " * 3


def messages(words: int) -> list[dict[str, str]]:
    """Return a prompt of so many words."""
    return [
        {"role": "system", "content": "Help with what is asked. " * (words // 5)},
        {"role": "user", "content": "What is it?"},
    ]


def further(number: int) -> dict[str, str]:
    """Return the message that is appended to an answer."""
    return {"role": "user", "content": f"And what is it after step {number}? " * 4}


async def one_client(url: str, key: str, calls: int, words: int) -> None:
    """Make the calls of a session on one connection."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    said: list[dict[str, Any]] = list(messages(words))
    for number in range(calls):
        body = json.dumps({"model": "policy", "messages": said}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(answer.partition(b"content-length:")[2].partition(b"\r\n")[0])
        made = json.loads(await reader.readexactly(length))
        said += [made["choices"][0]["message"], further(number)]
    writer.close()


async def clients(url: str, calls: int, words: int, keys: list[str]) -> None:
    """Run all clients at once."""
    await asyncio.gather(*(one_client(url, key, calls, words) for key in keys))


class Loop(AgentLoop):
    """Runs a function for each session."""

    name = "function"
    api = ">=1.4,<2"
    capabilities = frozenset({"forks"})

    def __init__(self, body: Any) -> None:
        super().__init__(EpisodeSection(max_turns=1000), PluginContext())
        self._body = body

    async def run(self, session: Session) -> None:
        await self._body(session)


class Timing:
    """Episodes with an engine that answers at once.

    Args:
        sessions: episodes at once.
        calls: of each.
        words: of each prompt.
    """

    def __init__(self, sessions: int, calls: int, words: int) -> None:
        self.sessions, self.calls, self.words = sessions, calls, words
        self.tokenizer = template_tokenizer(CHATML)
        ids = self.tokenizer(ANSWER, add_special_tokens=False)["input_ids"]
        self.ids_T = np.array([*ids, self.tokenizer.eos_token_id], np.int64)
        self.engine_seconds = 0.0

    async def _ask(self, request: RolloutRequest, _: Any) -> Completion:
        await asyncio.sleep(0)
        began = time.thread_time()
        length = len(self.ids_T)
        made = Completion(
            request_id=request.request_id,
            sample=0,
            response_ids=self.ids_T,
            finish_reason=FinishReason.STOP,
            weight_versions=np.zeros(length, np.int64),
            log_probs=np.zeros(length, np.float32),
        )
        self.engine_seconds += time.thread_time() - began
        return made

    async def run(self, body: Any) -> float:
        """Run all episodes; return the processor time of a call in ms, the engine's taken away."""
        episodes = Episodes(Loop(body), self.tokenizer)
        text = self.tokenizer.apply_chat_template(
            messages(self.words), add_generation_prompt=True, tokenize=False
        )
        ids_P = np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)
        prompt = Prompt(index=0, prompt_ids=ids_P, raw=messages(self.words))

        async def one(number: int) -> None:
            request = RolloutRequest(
                request_id=str(number),
                prompt_ids=ids_P,
                sampling=SamplingParams(max_new_tokens=1 << 20, log_probs=True),
                streams=(SampleStream(seed=0, sample=number),),
            )
            found = await episodes.run(
                request, prompt, sample_id=str(number), number=number, ask=self._ask
            )
            assert found.outcome is None, found.outcome
            assert found.trajectory is not None
            assert len(found.trajectory.turns) == self.calls
            assert found.trajectory.sequence_count == 1

        self.engine_seconds, began = 0.0, time.process_time()
        await asyncio.gather(*(one(number) for number in range(self.sessions)))
        spent = time.process_time() - began - self.engine_seconds
        return 1000 * spent / (self.sessions * self.calls)

    async def alone(self, session: Session) -> None:
        """Generate and observe."""
        for number in range(self.calls):
            if number:
                await session.observe([further(number - 1)])
            await session.generate()

    def served(self) -> float:
        """Time calls through the gateway."""
        config = ProgramConfig(command="true", max_turns=1000)
        reader = TurnReader.started(config.parser, PluginContext(tokenizer=self.tokenizer))
        gateway = Gateway(config)
        keys: list[str] = []
        done = asyncio.Event()

        async def body(session: Session) -> None:
            endpoint = EpisodeEndpoint(session, config, reader)
            keys.append(gateway.open(endpoint))
            if len(keys) == self.sessions:
                arguments = [
                    __file__,
                    "--clients",
                    gateway.url,
                    "--calls",
                    str(self.calls),
                    "--words",
                    str(self.words),
                ]
                process = await asyncio.create_subprocess_exec(
                    sys.executable, *arguments, stdin=asyncio.subprocess.PIPE
                )
                await process.communicate(json.dumps(keys).encode())
                done.set()
            await done.wait()
            await endpoint.close()

        try:
            return asyncio.run(self.run(body))
        finally:
            gateway.close()


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--words", type=int, default=150)
    parser.add_argument("--clients", metavar="URL", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.clients:
        asyncio.run(clients(given.clients, given.calls, given.words, json.load(sys.stdin)))
        return
    timing = Timing(given.sessions, given.calls, given.words)
    alone = asyncio.run(timing.run(timing.alone))
    served = timing.served()
    print(
        f"{given.sessions} sessions, {given.calls} calls each, prompt of {given.words} words, {len(os.sched_getaffinity(0))} cores"
    )
    print(
        f"processor time of a call: {served:.2f} ms through the gateway, {alone:.2f} ms in a loop without it"
    )


if __name__ == "__main__":
    main()
