"""Episodes with a scripted policy: of programs, and of functions that call a gateway in this process."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from dovetail.interfaces import (
    Completion,
    FinishReason,
    Outcome,
    PluginContext,
    Prompt,
    RewardManager,
    RolloutRequest,
    Sample,
    SamplingParams,
    Score,
    Session,
)
from dovetail.sections import PluginSection
from dovetail_gateway.config import ProgramConfig
from dovetail_gateway.endpoint import EpisodeEndpoint
from dovetail_gateway.program_loop import ProgramLoop
from dovetail_gateway.server import Gateway
from dovetail_gateway.turn_reader import TurnReader
from dovetail_rollouts import Episodes, Generation, Group, RolloutPool, Scorer
from dovetail_sdk.testing import template_tokenizer
from dovetail_sdk.testing.chat_templates import CHATML
from dovetail_sdk.testing.random_episodes import (
    EngineCall,
    FunctionLoop,
    RecordedEngine,
    check_episodes,
)
from dovetail_sdk.testing.scripted_rollout import Script, ScriptedRollout

MESSAGES = ({"role": "user", "content": "question"},)
Policy = Callable[[RolloutRequest, str], str]
"""What the policy says to a request whose prompt reads so."""


def said(*turns: str) -> Policy:
    """A policy that says these turns in each sequence, in order."""
    return lambda request, _: turns[request.streams[0].turn % len(turns)]


@attrs.frozen
class Drawn:
    """Episodes that have ended."""

    samples: Sequence[Sample]
    calls: Sequence[EngineCall]
    group: Group

    @property
    def sample(self) -> Sample:
        (sample,) = self.samples
        return sample

    def counts(self) -> Mapping[str, float]:
        assert self.sample.trajectory is not None
        return self.sample.trajectory.counts

    def audit(self) -> None:
        """Assert that every trained sequence is, token for token, what the engine saw and produced."""
        check_episodes(self.group, self.calls)


def config_of(**settings: Any) -> ProgramConfig:
    settings.setdefault("command", "true")
    return ProgramConfig(name="program", **settings)


class _Engine(ScriptedRollout):
    """Says why a response ended."""

    async def submit(self, request: RolloutRequest) -> AsyncGenerator[Completion, None]:
        async for found in super().submit(request):
            cut = len(found.response_ids) == request.sampling.max_new_tokens
            yield attrs.evolve(found, finish_reason=FinishReason.LENGTH) if cut else found


class _Ones(RewardManager):
    name = "ones"
    api = ">=1.0,<2"

    async def score(self, samples: Any, time: Any) -> list[Outcome]:
        return [Score(value=1.0) for _ in samples]


def draw(
    loop: Any,
    policy: Policy,
    *,
    n: int = 1,
    tokens: int = 4096,
    delay: float = 0.0,
    messages: Sequence[Mapping[str, Any]] = MESSAGES,
    template: str = CHATML,
    **row: Any,
) -> Drawn:
    """Run n episodes of one row at once."""
    tokenizer = template_tokenizer(template)
    end = tokenizer.eos_token_id

    def answer(request: RolloutRequest, sample: int) -> list[int]:
        prompt = tokenizer.decode(request.prompt_ids.tolist())
        ids = [*tokenizer(policy(request, prompt), add_special_tokens=False)["input_ids"], end]
        return list(ids[: request.sampling.max_new_tokens])

    ids = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, return_dict=False
    )
    prompt = Prompt(index=0, prompt_ids=np.array(ids, np.int64), raw=list(messages), **row)
    group = Group(
        prompt=prompt, n=n, sampling=SamplingParams(max_new_tokens=tokens, log_probs=True)
    )
    engine, calls = (
        _Engine.following(Script(answer=answer, delay=delay)),
        list[EngineCall](),
    )
    RecordedEngine(engine, calls)

    async def run() -> None:
        generation = Generation(
            pool=RolloutPool([engine]),
            scorer=Scorer(_Ones(PluginSection(name="ones"), PluginContext()), timeout=30.0),
            tokenizer=tokenizer,
            seed=0,
            episodes=Episodes(loop, tokenizer, loop.chat_tools()),
        )
        await asyncio.gather(*generation.begin([group]))

    asyncio.run(run())
    return Drawn(group.samples, calls, group)


def run_program(source: str, policy: Policy, tmp_path: Path, **settings: Any) -> Drawn:
    """Run episodes of a Python program; for settings see `run_command`."""
    script = tmp_path / "agent.py"
    script.write_text(source)
    return run_command([sys.executable, str(script)], policy, tmp_path, **settings)


def run_command(command: Sequence[str], policy: Policy, tmp_path: Path, **settings: Any) -> Drawn:
    """Run episodes of a command; settings that are not a field of the config are of `draw`."""
    fields = {f.name for f in attrs.fields(ProgramConfig)}
    own = {name: settings.pop(name) for name in fields & settings.keys()}
    config = config_of(command=shlex.join(command), **own)
    context = PluginContext(
        tokenizer=template_tokenizer(settings.get("template", CHATML)), run_directory=tmp_path
    )
    loop = ProgramLoop(config, context)
    loop.start()
    try:
        drawn = draw(loop, policy, **settings)
        assert loop._gateway is None or not loop._gateway._endpoints
        return drawn
    finally:
        loop.close()


def run_client(
    client: Callable[[str, str], Any],
    policy: Policy,
    *,
    config: ProgramConfig | None = None,
    **settings: Any,
) -> tuple[Drawn, Any]:
    """Run an episode in which a function calls the gateway, by its URL and the episode's key; return what it returned, too."""
    config = config or config_of()
    tokenizer = template_tokenizer(settings.get("template", CHATML))
    reader = TurnReader.started(config.parser, PluginContext(tokenizer=tokenizer))
    gateway = Gateway(config)
    found: list[Any] = []
    wrong: list[Exception] = []

    async def body(session: Session) -> None:
        endpoint = EpisodeEndpoint(session, config, reader)
        key = gateway.open(endpoint)
        try:
            found.append(await asyncio.to_thread(client, gateway.url, key))
        except Exception as error:  # for the test, not for the episode
            wrong.append(error)
        finally:
            gateway.close_key(key)
            await endpoint.close()
        if endpoint.fault is not None:
            raise endpoint.fault

    try:
        drawn = draw(
            FunctionLoop(
                body,
                **{
                    n: getattr(config, n)
                    for n in ("max_turns", "max_observation_tokens", "on_history_change")
                },
            ),
            policy,
            **settings,
        )
    finally:
        gateway.close()
    if wrong:
        raise wrong[0]
    return drawn, (found[0] if found else None)


def post(
    url: str, key: str, path: str, body: Any, **headers: str
) -> tuple[int, Any, Mapping[str, str]]:
    """Send a request; return status, body and headers of the response."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        url + path,
        data=None if body is None else data,
        headers={"authorization": f"Bearer {key}", "content-type": "application/json", **headers},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            text, status, found = response.read(), response.status, dict(response.headers)
    except urllib.error.HTTPError as error:
        text, status, found = error.read(), error.code, dict(error.headers)
    return (
        status,
        json.loads(text) if found["content-type"] == "application/json" else text.decode(),
        found,
    )


def resources() -> tuple[int, int, int]:
    """Descriptors, threads and children that this process has."""
    children = sum(len(p.read_text().split()) for p in Path("/proc/self/task").glob("*/children"))
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), children
