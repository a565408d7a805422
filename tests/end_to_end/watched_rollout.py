"""WatchedRollout: `hf` that notes what it is asked for, and holds prompts back, leaves or dies as its settings say."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from dovetail.interfaces import Completion, RolloutRequest, WeightManifest
from dovetail_rollout_hf.config import HfRolloutConfig
from dovetail_rollout_hf.rollout import HfRollout


@attrs.frozen(kw_only=True)
class WatchedRolloutConfig(HfRolloutConfig):
    """What each process of the engine does besides generating."""

    folder: str = ""
    """Where it notes what it is asked for, in `asked.jsonl`, and its process ids, in `starts-RANK`."""
    lives: tuple[Mapping[str, Any], ...] = ()
    """What its first process does, its second, and so on; later ones only generate. `holds`: prompts that get their first
    sample and no more; `holds-PROMPT` appears in the folder then.
    `leaves`: a prompt whose request ends the event loop once the file `learning` is there, after it has made the file `left`.
    `dies_at`: a version of weights of which it gets the first tensor, and is killed. `pause`: seconds between two samples."""


class WatchedRollout(HfRollout):
    """See `WatchedRolloutConfig`."""

    name = "watched"
    Config = WatchedRolloutConfig

    def start(self) -> None:
        self._folder = Path(self.config.folder)
        starts = self._folder / f"starts-{self.context.rank}"
        with starts.open("a") as file:
            file.write(f"{os.getpid()}\n")
        life, lives = len(starts.read_text().splitlines()) - 1, self.config.lives
        self._life = dict(lives[life]) if life < len(lives) else {}
        super().start()

    async def submit(self, request: RolloutRequest) -> AsyncIterator[Completion]:
        prompt, life = request.streams[0].prompt, self._life
        line = {"prompt": prompt, "epoch": request.streams[0].epoch, "samples": request.n}
        with (self._folder / "asked.jsonl").open("a") as file:
            file.write(json.dumps({**line, "version": self.version}) + "\n")
        while prompt == life.get("leaves"):
            if (self._folder / "learning").exists():
                (self._folder / "left").touch()
                sys.exit("the engine has left")
            await asyncio.sleep(0.01)
        async for completion in super().submit(request):
            yield completion
            await asyncio.sleep(life.get("pause", 0.0))
            while prompt in life.get("holds", ()):
                (self._folder / f"holds-{prompt}").touch()
                await asyncio.sleep(0.01)

    def receive_weights(self, version: int, manifest: WeightManifest) -> None:
        if version == self._life.get("dies_at"):
            next(iter(self._receiver.receive(manifest)))
            time.sleep(0.2)  # what was generated before has arrived
            os.kill(os.getpid(), signal.SIGKILL)
        super().receive_weights(version, manifest)
