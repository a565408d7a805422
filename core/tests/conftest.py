"""Test doubles of a run: samples, replicas that fail or refuse updates, an actor that sends weights."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dovetail.batch import Batch
from dovetail.dispatch import Future
from dovetail.errors import RolloutError, WeightSyncError
from dovetail.interfaces import (
    Completion,
    Failure,
    FailureKind,
    FinishReason,
    PluginRef,
    Prompt,
    RolloutRequest,
    Sample,
    Score,
    WeightManifest,
)
from dovetail.rollouts.rollout_pool import RolloutPool
from dovetail.rollouts.weight_check import WeightCheck
from dovetail.rollouts.weight_sync import WeightSync
from dovetail.sections import RolloutSection
from dovetail.sections.rollout import WeightCheckSection
from dovetail_sdk.testing.scripted_rollout import ScriptedRollout

MakeSample = Callable[..., Sample]


@pytest.fixture(scope="session")
def make_sample() -> MakeSample:
    """A function that makes a sample of a group; a score of None is a failure to score it."""

    def make(
        group: int, number: int = 0, score: float | None = 0.0, *, length: int = 3, epoch: int = 0
    ) -> Sample:
        name = f"train.e{epoch}.p{group}.a0"
        failure = Failure(kind=FailureKind.TIMEOUT, message="too slow")
        return Sample(
            sample_id=f"{name}.s{number}",
            prompt=Prompt(index=group, prompt_ids=np.arange(2), raw=f"prompt {group}", epoch=epoch),
            group=group,
            completion=Completion(
                request_id=name,
                sample=number,
                response_ids=np.arange(length),
                finish_reason=FinishReason.STOP,
                weight_versions=np.zeros(length, dtype=np.int64),
            ),
            text=f"response {number}",
            outcome=failure if score is None else Score(value=score),
        )

    return make


@pytest.fixture(scope="session")
def mortal() -> Any:
    """The class `Mortal`."""
    return Mortal


@pytest.fixture(scope="session")
def make_world() -> Any:
    """The class `World`."""
    return World


class Mortal(ScriptedRollout):
    """A replica that can die, refuse so many updates, and be off in what it computes."""

    def __init__(self, log: list[str] | None = None, *, refuses: int = 0, off: float = 0.0) -> None:
        super().__init__()
        self.log = log if log is not None else []
        self.refuses, self.off = refuses, off
        self.dead = False
        self.dies_after: int | None = None
        self.manifests: list[WeightManifest] = []

    def alive(self) -> bool:
        return not self.dead

    async def submit(self, request: RolloutRequest) -> Any:
        if self.dead:
            raise RolloutError("it is dead")
        async for completion in super().submit(request):
            if self.dies_after is not None:
                if not self.dies_after:
                    self.dead = True
                    raise RolloutError("it died")
                self.dies_after -= 1
            yield completion

    def receive_weights(self, version: int, manifest: WeightManifest) -> None:
        if self.dead:
            raise RolloutError("it is dead")
        self.log.append(f"take {version}")
        if self.refuses:
            self.refuses -= 1
            raise WeightSyncError("torn")
        self.manifests.append(manifest)
        super().receive_weights(version, manifest)

    async def score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        self.log.append("score")
        return [np.full(len(ids_L) - 1, -1.0 + self.off, np.float32) for ids_L in sequences]

    def sleep(self, tags: frozenset[str], *, keep_weights: bool = True) -> int:
        self.log.append(f"sleep{'' if keep_weights else ' and forget'}")
        return super().sleep(tags, keep_weights=keep_weights)

    def wake(self, tags: frozenset[str]) -> None:
        self.log.append(f"wake {'+'.join(sorted(tags))}")
        super().wake(tags)


class Actor:
    """Sends, or raises what it is told to; finds every token as likely as another."""

    def __init__(self, log: list[str] | None = None) -> None:
        self.log = log if log is not None else []
        self.raises: list[Exception] = []
        self.meets: threading.Barrier | None = None
        self.waits: threading.Event | None = None
        self.asked: list[Batch] = []

    def weight_manifest(self, version: int) -> Future[WeightManifest]:
        return Future.completed(WeightManifest(version=version, tensors=()))

    def send_weights(self, version: int, manifest: WeightManifest) -> Future[None]:
        self.log.append(f"send {version}")
        if self.meets is not None:
            self.meets.wait(120)
        if self.waits is not None:
            assert self.waits.wait(120)
        if self.raises:
            return Future.failed(self.raises.pop(0))
        return Future.completed(None)

    def forward(self, batch: Batch, outputs: frozenset[str]) -> Future[Batch]:
        self.log.append("forward")
        self.asked.append(batch)
        mask = batch["response_mask"]
        values = mask.with_values(np.full(len(mask.values), -1.0, np.float32))
        return Future.completed(Batch(dict.fromkeys(outputs, values)))


PROMPTS = [Prompt(index=i, prompt_ids=np.arange(i, i + 3), raw=str(i)) for i in range(5)]
"""What a World's run trains on."""


class Tokenizer:
    """Two of its tokens are special."""

    all_special_ids = (0, 7)


class World:
    """A WeightSync over doubles.

    Attributes:
        log: what happened, in order; of replicas only where they were given the log.
        metrics: the figures of the step.
        told: what was logged.
        made: replicas that were started again.
    """

    def __init__(
        self,
        replicas: Sequence[ScriptedRollout],
        *,
        log: list[str] | None = None,
        capabilities: frozenset[str] = frozenset(),
        ends_meet: bool = False,
        weight_check: WeightCheckSection | None = None,
        prompts: Sequence[Prompt] = PROMPTS,
        **rollout: Any,
    ) -> None:
        self.log = log if log is not None else []
        self.metrics: dict[str, float] = {}
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.made: list[Mortal] = []
        self.next_off = 0.0
        """How far replicas are off that are started from now on."""
        self.actor = Actor(self.log)
        self.pool = RolloutPool(replicas, restart=self.restart)
        section = RolloutSection(
            weight_check=weight_check or WeightCheckSection(sequences=2, tokens=5), **rollout
        )
        tell = SimpleNamespace(
            info=lambda event, **fields: self.told.append((event, fields)),
            warning=lambda event, **fields: self.told.append((event, fields)),
        )
        config: Any = SimpleNamespace(
            rollout=section,
            seed=3,
            data=SimpleNamespace(max_prompt_length=8, max_response_length=8),
            model=SimpleNamespace(dtype="float32"),
        )
        plan: Any = SimpleNamespace(
            facts=SimpleNamespace(
                plugins={"rollout": SimpleNamespace(cls=SimpleNamespace(capabilities=capabilities))}
            ),
            placement=SimpleNamespace(
                source=SimpleNamespace(ends_meet=ends_meet, on_each_machine=True)
            ),
            refs={
                "rollout.weight_transport": PluginRef(kind="weight_transport", name="in_process")
            },
        )
        offload_manager: Any = SimpleNamespace(
            present=lambda role: nullcontext(), settle=lambda: self.log.append("settle")
        )
        self.phases: list[str] = []
        site: Any = SimpleNamespace(
            config=config,
            plan=plan,
            actor=self.actor,
            offloading=offload_manager,
            path=None,
            logger=tell,
            phase=self.phase,
            metrics=lambda: self.metrics,
        )
        self.sync = WeightSync(
            site,
            pool=self.pool,
            weight_check=WeightCheck.of(config, plan, prompts, Tokenizer(), tell),
            held=nullcontext,
            score=lambda sequences: asyncio.run(self.pool.control.score(sequences)),
        )

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.phases.append(name)
        yield

    def restart(self, replica: Any) -> Mortal:
        replica.close()
        self.log.append("restart")
        self.made.append(Mortal(self.log, off=self.next_off))
        return self.made[-1]


@pytest.fixture(scope="session")
def trl_templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The chat templates in TRL's wheel, by name: 41 of models, and 31 for training."""
    folder = tmp_path_factory.mktemp("trl")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command = [*pip, "--dest", str(folder), "trl==1.16.0"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no package index: pip download trl==1.16.0 failed")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".jinja")]
        found = {Path(name).stem: archive.read(name).decode() for name in names}
    assert len(found) == 41 + 31
    return found
