"""Random episodes on real engines, with new weights between and within turns, and a replica that is lost: they are trained on as the engine saw them."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from transformers import AutoTokenizer

from dovetail.interfaces import (
    BaseRollout,
    FinishReason,
    Outcome,
    PluginContext,
    PluginRef,
    Prompt,
    RewardManager,
    SamplingParams,
    Score,
)
from dovetail.plugins import make_plugin
from dovetail.sections import PluginSection
from dovetail_rollouts import Episodes, Generation, Group, RolloutPool, Scorer
from dovetail_sdk.testing import replica_context, send_weights, tiny_model_and_tokenizer
from dovetail_sdk.testing.chat_templates import CHATML
from dovetail_sdk.testing.conformance.rollout.plain import PlainModel
from dovetail_sdk.testing.random_episodes import (
    MESSAGES,
    EngineCall,
    FunctionLoop,
    RecordedEngine,
    check_episodes,
    random_episode,
)
from dovetail_sdk.testing.transport_ends import manifest_of
from dovetail_transports.config import SharedMemoryConfig
from dovetail_transports.shared_memory.transport import SharedMemoryTransport

SETTINGS: dict[str, dict[str, Any]] = {
    "hf": {},
    "vllm": {"enforce_eager": True, "max_model_len": 1024},
}
LENGTH = 400
"""Tokens of a response."""
STOPS = tuple(range(5, 30))
"""Tokens that end a turn: one of twelve that a model with random weights draws."""


class Zero(RewardManager):
    """Scores nothing."""

    name = "zero"
    api = ">=1.0,<2"

    async def score(self, samples: Any, time: Any) -> list[Outcome]:
        return [Score(value=0.0) for _ in samples]


class Replicas:
    """Two replicas of an engine on a tiny model.

    Args:
        engine: which.
        directory: of the model and of what the replicas write.
    """

    def __init__(self, engine: str, directory: Path) -> None:
        self.calls: list[EngineCall] = []
        model = tiny_model_and_tokenizer(directory / "model", vocab_size=300, hidden_size=128)
        plain = PlainModel.of(model)
        self.models = [plain, plain.changed(), plain]
        """By weight version."""
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.tokenizer.chat_template = CHATML
        module = importlib.import_module(f"dovetail_rollout_{engine}.config")
        made = getattr(module, f"{engine.capitalize()}RolloutConfig")
        config = made(name=engine, **SETTINGS[engine])
        self.engines: list[BaseRollout] = []
        self.of_first: list[psutil.Process] = []
        """Processes of the first replica."""
        for number in range(2):
            place = directory / f"replica_{number}"
            section = SharedMemoryConfig(name="shared_memory", timeout=60.0)
            transport = SharedMemoryTransport(section, replica_context(model, place))
            ref = PluginRef(kind="rollout", name=engine, config=config)
            replica: Any = make_plugin(ref, replica_context(model, place, transport=transport))
            replica.start()
            self.engines.append(replica)
            if not number:
                self.of_first = psutil.Process().children(recursive=True)
        self.recorded = [RecordedEngine(engine, self.calls) for engine in self.engines]

    def ended(self) -> int:
        """How many turns have ended."""
        return sum(found.finish_reason is not FinishReason.ABORT for _, found in self.calls)

    def send(self, version: int) -> None:
        """Send the weights of a version to every replica that was not lost."""
        weights = self.models[version].weights()
        for recorded, engine in zip(self.recorded, self.engines, strict=True):
            if not recorded.killed:
                assert engine.context.transport is not None
                sender = engine.context.transport.sender()
                try:
                    send_weights(engine, sender, manifest_of(weights, version), weights.items())
                finally:
                    sender.close()

    def kill(self) -> None:
        """Lose the first replica."""
        self.recorded[0].killed = True
        for process in self.of_first:
            if "EngineCore" in process.name() or "EngineCore" in " ".join(process.cmdline()):
                os.kill(process.pid, signal.SIGKILL)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


async def draw(replicas: Replicas, group: Group) -> None:
    """Draw a group; after a third of its turns, and after two, all get new weights, and between these one replica is lost."""
    loop = FunctionLoop(random_episode(3), max_turn_tokens=12)
    manager = Zero(PluginSection(name="zero"), PluginContext())
    generation = Generation(
        pool=RolloutPool(replicas.engines),
        scorer=Scorer(manager, timeout=60.0),
        tokenizer=replicas.tokenizer,
        seed=1,
        episodes=Episodes(loop, replicas.tokenizer),
    )
    (task,) = generation.begin([group])

    async def after(share: float) -> None:
        # An episode has two turns and a half in the mean. Those that an update cut short have not ended.
        while replicas.ended() < 2.5 * share * group.n:
            assert not task.done(), task.result()
            await asyncio.sleep(0.01)

    async def update(version: int) -> None:
        await generation.cut_short()
        await asyncio.to_thread(replicas.send, version)
        generation.go_on()

    await after(0.3)
    await update(1)
    await after(0.5)
    replicas.kill()
    await after(0.7)
    await update(2)
    await task


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("engine", "episodes"),
    [
        ("hf", 500),
        pytest.param(
            "vllm",
            200,
            marks=[
                pytest.mark.vllm,
                pytest.mark.skipif(
                    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"
                ),
            ],
        ),
    ],
)
def test_episodes_are_trained_on_as_the_engine_saw_them_under_new_weights_and_a_lost_replica(
    engine: str, episodes: int, tmp_path: Path
) -> None:
    replicas = Replicas(engine, tmp_path)
    try:
        ids = replicas.tokenizer.apply_chat_template(
            MESSAGES, add_generation_prompt=True, return_dict=False
        )
        group = Group(
            prompt=Prompt(index=0, prompt_ids=np.array(ids, np.int64), raw=MESSAGES),
            n=episodes,
            sampling=SamplingParams(max_new_tokens=LENGTH, log_probs=True, stop_token_ids=STOPS),
        )
        asyncio.run(draw(replicas, group))
    finally:
        replicas.close()
    assert [sample.outcome for sample in group.samples if sample.score is None] == []
    check_episodes(group, replicas.calls)
    turns = [turn for s in group.samples if s.trajectory for turn in s.trajectory.turns]
    assert {turn.finish_reason for turn in turns} == {FinishReason.STOP, FinishReason.LENGTH}
    sequences = [sequence for sample in group.samples for sequence in sample.sequences]
    assert len(sequences) > 1.1 * episodes
    of_versions, mixed = set(), 0
    for sequence in sequences:
        prompt_ids = group.prompt.prompt_ids if sequence.prompt_ids is None else sequence.prompt_ids
        assert sequence.log_probs is not None
        versions = set(sequence.weight_versions[sequence.produced_T].tolist())
        for version in versions:
            own_T = sequence.weight_versions == version
            expected_T = replicas.models[version].log_probs(prompt_ids, sequence.response_ids)
            np.testing.assert_allclose(
                sequence.log_probs[own_T], expected_T[own_T], atol=1e-4, rtol=0
            )
        of_versions |= versions
        mixed += len(versions) > 1
    assert of_versions == {0, 1, 2}
    assert mixed > 5
